"""Samples with planted labels, whose ids come by a power law and churn, and logistic regression on a vector of each id.

Pure: all of it follows from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FIELDS, DIM, ALPHA, SEED = 8, 8, 1.05, 1
_SPREAD = 1.6  # of the hidden score, whose sigmoid is the chance of a click
_MIX = np.uint64(0x9E3779B97F4A7C15)
Ids = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Samples:
    """ids: those of all samples, once each, int64 [n]; where: of each sample's fields in them, int64 [batch, fields];
    features: float32 [batch, dim]; labels: bool [batch]."""

    ids: Ids
    where: Ids
    features: Floats
    labels: NDArray[np.bool_]

    def score(self, vectors: Floats) -> Floats:
        """Scores, float32 [batch], with these vectors of `ids`, float32 [n, dim]: the sum of the fields' vectors, times
        the features."""
        scores: Floats = np.einsum("bd,bd->b", vectors[self.where].sum(axis=1), self.features)
        return scores

    def gradients(self, scores: Floats) -> Floats:
        """Of the logistic loss, by `ids`: float32 [n, dim]."""
        slope: Floats = (_sigmoid(scores) - self.labels.astype(np.float32))[:, None] * self.features
        total = np.zeros((len(self.ids), self.features.shape[1]), np.float32)
        for column in self.where.T:
            order = np.argsort(column, kind="stable")
            first = np.flatnonzero(np.diff(column[order], prepend=-1))
            total[column[order][first]] += np.add.reduceat(slope[order], first)
        return total


def _sigmoid(scores: Floats) -> Floats:
    return (1 / (1 + np.exp(-scores))).astype(np.float32)


def hidden(ids: Ids) -> Floats:
    """What there is to learn of each id: float32 [n, DIM], about normal, made of the id's bits."""
    with np.errstate(over="ignore"):
        words: NDArray[np.uint64] = np.multiply(ids.astype(np.uint64)[..., None], np.uint64(2 * DIM + 1))
        words = np.multiply(words + np.arange(DIM, dtype=np.uint64), _MIX)
        words = (words ^ words >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        words ^= words >> np.uint64(32)
    parts = words.view(np.uint16).reshape(*words.shape, 4).astype(np.float64)
    found: Floats = ((parts.sum(axis=-1) / 65536.0 - 2.0) * np.sqrt(3.0)).astype(np.float32)
    return found


class Stream:
    """The stream. ids: alive at any time; churn: the part of them that an hour replaces; batch: samples of a step;
    steps: of an hour."""

    def __init__(self, *, ids: int, churn: float, batch: int, steps: int, seed: int = SEED) -> None:
        self.ids, self.churn, self.batch, self.steps, self.dim = ids, churn, batch, steps, DIM
        self.pushes = 0  # rows of gradients in the steps so far
        self._seed = seed
        self._sums = np.cumsum(np.arange(1, ids + 1, dtype=np.float64) ** -ALPHA)

    def samples(self, hours: int) -> Iterator[Samples]:
        """The samples of each step."""
        random = np.random.default_rng([self._seed, 1])
        self.pushes = 0
        for fields in self._fields(hours):
            ids, where = np.unique(fields, return_inverse=True)
            where = where.reshape(fields.shape)
            features = random.standard_normal((self.batch, DIM), np.float32)
            score = np.einsum("bd,bd->b", hidden(ids)[where].sum(axis=1), features)
            chance = _sigmoid(score * np.float32(_SPREAD / np.sqrt(FIELDS * DIM)) - 1)
            self.pushes += len(ids)
            yield Samples(ids, where, features, random.random(self.batch, np.float32) < chance)

    def distinct(self, hours: int) -> int:
        """How many ids come in so many hours."""
        seen = np.zeros(self.ids + self._new(hours * self.steps) + 1, np.bool_)
        for fields in self._fields(hours):
            seen[fields] = True
        return int(seen.sum())

    def _new(self, steps: int) -> int:
        """Ids that have been replaced after so many steps."""
        return int(self.ids * self.churn * steps / self.steps)

    def _fields(self, hours: int) -> Iterator[Ids]:
        """The ids of each step's samples, int64 [batch, FIELDS]."""
        random = np.random.default_rng([self._seed, 0])
        at_rank = random.permutation(self.ids)
        for step in range(hours * self.steps):
            ranks = np.searchsorted(self._sums, random.random((self.batch, FIELDS)) * self._sums[-1])
            yield at_rank[np.minimum(ranks, self.ids - 1)]
            born = np.arange(self._new(step), self._new(step + 1)) + self.ids
            at_rank[random.choice(self.ids, len(born), replace=False)] = born


def area_under_curve(scores: Floats, labels: NDArray[np.bool_]) -> float:
    """Area under the ROC curve: how often a clicked sample scores above another one, ties counted half; NaN with
    samples of one kind alone."""
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1, ties share their mean
    clicked, others = int(labels.sum()), int((~labels).sum())
    if not clicked or not others:
        return float("nan")
    return float((ranks[labels].sum() - clicked * (clicked + 1) / 2) / (clicked * others))
