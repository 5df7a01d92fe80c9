"""The training loop that the workers and the reference share: only where gradients go differs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import elasticps as eps
from elasticps.torch import EmbeddingBagCollection, Jagged, Optimizer, TableConfig
from examples.demo.data import FIELDS, NO_GENRE, Ratings, batches
from examples.demo.model import DENSE_LR, EMBEDDING_LR, EMBEDDING_STD, ROW, DeepFM, deep, tensors

REPORT_S = 0.1  # between two progress reports
REPORTED = 20  # batches whose mean loss a report gives


class RemoteDeepFM(DeepFM):
    """The model with both tables in one layer, at the servers."""

    def __init__(self, ps: eps.Client, seed: int) -> None:
        nn.Module.__init__(self)
        first, second = (eps.Normal(std=EMBEDDING_STD, seed=2 * seed + i) for i in range(2))
        tables = [
            TableConfig("features", ROW, FIELDS, "mean", init=first),
            TableConfig("genres", ROW, ["genre"], "mean", init=second),
        ]
        self.tables = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=EMBEDDING_LR))
        self.deep = deep()
        self._next: tuple[Tensor, Tensor, Jagged] | None = None

    def rows(self, features: Tensor, genres: Tensor) -> Tensor:
        announced = self._next
        same = announced is not None and announced[0] is features and announced[1] is genres
        lists = announced[2] if announced is not None and same else _lists(features, genres)
        rows: Tensor = self.tables(lists).values()
        return rows.view(len(features), len(FIELDS) + 1, ROW)

    def expect(self, features: Tensor, genres: Tensor) -> None:
        """Says which batch comes next: its rows are asked for as the step ends."""
        self._next = features, genres, _lists(features, genres)
        self.tables.expect(self._next[2])


def _lists(features: Tensor, genres: Tensor) -> Jagged:
    """One id of each field, and the film's genres."""
    ids, known = genres.numpy(), genres.numpy() != NO_GENRE  # numpy: torch takes three times as long for so few
    values = np.concatenate([features.numpy().T.reshape(-1), ids[known]])
    lengths = np.ones((len(FIELDS) + 1, len(ids)), np.int64)
    lengths[-1] = known.sum(axis=1)
    return Jagged([*FIELDS, "genre"], torch.from_numpy(values), torch.from_numpy(lengths.reshape(-1)))


@dataclass
class Trainable:
    """A model with what steps it; `expect` says which batch comes next, before a step, for rows that are far away."""

    model: DeepFM
    optimizers: Sequence[torch.optim.Optimizer]
    expect: Callable[[Tensor, Tensor], None] = lambda features, genres: None


@dataclass(frozen=True)
class Plan:
    """What one process trains: its batches of each epoch, without the first `skip`, which a predecessor trained."""

    epochs: int
    seed: int
    worker: int = 0
    workers: int = 1
    skip: int = 0


def remote(ps: eps.Client, ratings: Ratings, seed: int, *, overlap: bool = True) -> Trainable:
    """The model with every weight at the servers."""
    torch.manual_seed(seed)
    model = RemoteDeepFM(ps, seed)
    optimizer = Optimizer(
        ps, model, optimizer=eps.Adam(lr=DENSE_LR), prefix="deepfm", overlap=overlap, pipeline=overlap
    )
    return Trainable(model, [optimizer], model.expect)


def local(ratings: Ratings, seed: int) -> Trainable:
    """The same model in this process, with torch's own embeddings and optimizers."""
    torch.manual_seed(seed)
    features = nn.Embedding(ratings.feature_count, ROW)
    genres = nn.EmbeddingBag(ratings.genre_count, ROW, mode="mean", padding_idx=NO_GENRE)
    for table in (features, genres):
        nn.init.normal_(table.weight, std=EMBEDDING_STD)
    model = DeepFM(features, genres)
    tables = [features.weight, genres.weight]
    return Trainable(
        model,
        [torch.optim.Adagrad(tables, lr=EMBEDDING_LR), torch.optim.Adam(model.deep.parameters(), lr=DENSE_LR)],
    )


def train(
    what: Trainable, ratings: Ratings, plan: Plan, tell: Callable[..., None], after: Callable[[int], None]
) -> None:
    """Runs the plan. `tell` gets progress several times a second, `after` each finished epoch (from 1).

    Progress has the times of day at which batches ended since the last.
    """
    torch.manual_seed(plan.seed + 1000 * plan.worker)  # dropout differs between workers
    samples, last, ends, skip = 0, time.monotonic(), list[float](), plan.skip
    losses: deque[float] = deque(maxlen=REPORTED)
    what.model.train()
    for epoch in range(plan.epochs):
        todo: list[np.ndarray] = batches(len(ratings), plan.seed, epoch, plan.worker, plan.workers)
        skipped, skip = todo[:skip], max(0, skip - len(todo))
        todo = todo[len(skipped) :]
        samples += sum(len(batch) for batch in skipped)
        following = tensors(ratings, todo[0]) if todo else None
        for i in range(len(todo)):
            assert following is not None
            features, genres, liked = following
            for optimizer in what.optimizers:
                optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(what.model(features, genres), liked)
            loss.backward()
            if i + 1 < len(todo):
                following = tensors(ratings, todo[i + 1])
                what.expect(following[0], following[1])
            for optimizer in what.optimizers:
                optimizer.step()
            samples += len(liked)
            losses.append(loss.item())
            ends.append(round(time.time(), 4))
            if time.monotonic() - last >= REPORT_S or (epoch + 1 == plan.epochs and i + 1 == len(todo)):
                tell("progress", epoch=epoch + 1, samples=samples, loss=float(np.mean(losses)), ends=ends)
                last, ends = time.monotonic(), []
        after(epoch + 1)
