"""Clicks as in Criteo's data sets, made up: 13 numbers, 26 categories and a label each, drawn by a seed. Pure.

The shape is that of the display advertising challenge (Criteo Labs, 2014), which DLRM was measured with; its data may
not be shipped. The values of a category follow a truncated power law, P(k-th most frequent) ~ k^-ALPHA. The labels are
planted: every value of a category has a hidden weight, each number too, and a click is a coin thrown with the logistic
function of their sum. So a model can learn, and `best_scores` says how well at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

ALPHA = 1.05
NUMBERS, CATEGORIES = 13, 26
# Distinct values of each category in the challenge's training data, before anything is cut off.
CARDINALITIES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
MOST_VALUES = 100_000  # of a category; the rarer ones are hardly ever drawn
CLICKS = 0.256  # share of clicks in the challenge
_SPREAD = 0.25  # standard deviation of a hidden weight: the best model gets an AUC of about 0.8, as in the challenge
_INTERCEPT = -1.43  # makes about CLICKS of all samples clicks


@dataclass(frozen=True)
class Clicks:
    """Samples: numbers float32 [n, NUMBERS]; categories int64 [n, CATEGORIES], with ids of their own for each category
    in 0..values-1; clicked float32 [n], 0 or 1."""

    numbers: NDArray[np.float32]
    categories: NDArray[np.int64]
    clicked: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.clicked)


@dataclass(frozen=True)
class Source:
    """An endless set of samples. The same seed gives the same hidden weights, and with the same batch number the same
    batch, whoever asks and in which order."""

    seed: int
    most_values: int = MOST_VALUES

    @property
    def values(self) -> int:
        """How many ids there are, of all categories together."""
        return int(self.starts[-1])

    def batch(self, number: int, size: int) -> Clicks:
        """Batch `number` of `size` samples."""
        random = np.random.default_rng([self.seed, 1, number])
        numbers = random.standard_normal((size, NUMBERS), np.float32)
        categories = np.empty((size, CATEGORIES), np.int64)
        for c, shares in enumerate(self._shares):
            rank = np.searchsorted(shares, random.random(size), side="right")
            categories[:, c] = self._ids[c][rank]
        chances = self.best_scores(numbers, categories)
        return Clicks(numbers, categories, (random.random(size) < chances).astype(np.float32))

    def best_scores(self, numbers: NDArray[np.float32], categories: NDArray[np.int64]) -> NDArray[np.float64]:
        """The chance of a click of each sample, float64 [n]: no model can do better than these scores."""
        of_values, of_numbers = self._weights
        logits = of_values[categories].sum(axis=1) + numbers @ of_numbers + _INTERCEPT
        chances: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
        return chances

    @cached_property
    def sizes(self) -> list[int]:
        """How many ids each category has."""
        return [min(count, self.most_values) for count in CARDINALITIES]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The first id of each category, then one more than the last of all."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    @cached_property
    def _shares(self) -> list[NDArray[np.float64]]:
        """For each category, the share of its k most frequent values, for every k from 1."""
        shares = [np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -ALPHA) for size in self.sizes]
        return [share / share[-1] for share in shares]

    @cached_property
    def _ids(self) -> list[NDArray[np.int64]]:
        """For each category, the ids of its values from the most frequent one on: rows that are asked for often do not
        lie side by side."""
        random = np.random.default_rng([self.seed, 2])
        return [start + random.permutation(size) for start, size in zip(self.starts, self.sizes, strict=False)]

    @cached_property
    def _weights(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The hidden weights: of each id [values], of each number [NUMBERS]. Each category's mean over its samples is
        0, so that seeds differ little in how many clicks there are."""
        random = np.random.default_rng([self.seed, 3])
        of_values, of_numbers = random.normal(0, _SPREAD, self.values), random.normal(0, _SPREAD, NUMBERS)
        for ids, shares in zip(self._ids, self._shares, strict=True):
            of_values[ids] -= np.diff(shares, prepend=0.0) @ of_values[ids]
        return of_values, of_numbers
