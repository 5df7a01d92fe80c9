"""One worker of `elasticps bench traffic`: `python -m benchmarks.traffic_worker JOB`, with the job as JSON.

{"url": …, "ports": {"HOST:PORT": 4711, …}, "app": …, "seed": 1, "batch": 256, "model": "dlrm", "filters": "int8"}:
servers are reached through `ports` of this machine. "rows", of DLRM: "pulled" as they are wanted (if nothing is said),
"ahead": `ahead` batches before, or "local": kept and trained in this process, without servers. A line on standard input
asks for something, a line of JSON on standard output answers:

    train STEPS    trains so many steps: {"seconds"} until all is committed
    score          on what is not trained: {"score", "keys": [bytes sent, bytes without filters], "rows": [bytes of rows
                   received, bytes without a cache], "oldest": steps}, without what that takes
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import elasticps as eps
from benchmarks import digits
from benchmarks.core.criteo import Source
from benchmarks.dlrm import DIM, DLRM
from benchmarks.trainer import DENSE_LR, ROWS_LR, ROWS_STD
from benchmarks.workers import answer_all, answers
from elasticps.client.cache_batches import NOT_USED, CacheUse
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime, Stream
from elasticps.client.short_keys import Saved
from elasticps.client.tables import SparseTable
from elasticps.client.warm import warm
from elasticps.model.spec import Filter
from elasticps.torch import Embedding, Optimizer, prefetch
from examples.demo.data import auc
from examples.digits_cnn import network

TIMEOUT_S = 120.0
HELD_OUT = 1 << 20  # the number of the first batch that is only scored
SCORED = 40  # batches
Inputs = tuple[torch.Tensor, ...]
KEYS: list[Filter] = [eps.KeysOnce(), eps.KeyDeltas()]
FILTERS: dict[str, tuple[Sequence[Filter], Sequence[Filter]]] = {
    "none": ((), ()),
    "bfloat16": ([eps.BFloat16()], [eps.BFloat16()]),
    "float16": ([eps.Float16()], [eps.Float16()]),
    "int8": ([eps.Int8()], [eps.Int8()]),
    "int8+keys": ([eps.Int8(), *KEYS], [eps.Int8(), *KEYS]),
    "int8+keys+top_k": ([eps.Int8(), *KEYS], [eps.Int8(), *KEYS]),
    "int8+once": ([eps.Int8(), eps.KeysOnce()], [eps.Int8(), eps.KeysOnce()]),
    "top_k": ([eps.TopK(0.01)], ()),
    "top_k+int8": ([eps.TopK(0.01), eps.Int8()], ()),
    "random_k+int8": ([eps.RandomK(0.01), eps.Int8()], ()),
    "threshold+zstd": ([eps.Threshold(2e-3), eps.BFloat16(), eps.Zstd()], ()),
    "threshold+top_k": ([eps.Threshold(1e-3), eps.TopK(0.01)], ()),
    "cache": ((), ()),
    "cache+int8+keys": ([eps.Int8(), *KEYS], ()),
}
"""For pushes and for pulls, by name."""
DENSE: dict[str, Sequence[Filter]] = {"int8+keys+top_k": [eps.TopK(0.1), eps.Int8()]}
"""For pushes of DLRM's dense weights, where those have filters of their own."""
CACHE = eps.Cache(rows=1 << 20, staleness=8)  # where the name says so


class ThroughPorts(Runtime):
    """Reaches servers through ports of this machine."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        return super().connect("127.0.0.1", self._ports[f"{host}:{port}"], attempt)


class LocalRows:
    """Rows of this process, trained by torch. No module, so that nobody takes them for dense weights."""

    def __init__(self, values: int) -> None:
        self._rows = torch.nn.Embedding(values, DIM, sparse=True)
        torch.nn.init.normal_(self._rows.weight, std=ROWS_STD)
        self._optimizer = torch.optim.Adagrad(self._rows.parameters(), lr=ROWS_LR)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._rows(ids)
        return rows

    def step(self) -> None:
        """Trains them."""
        self._optimizer.step()
        self._optimizer.zero_grad()


class ClickTraining:
    """DLRM on clicks that are made up. rows: "pulled", "ahead" or "local"."""

    def __init__(self, ps: Client, seed: int, batch: int, name: str, rows: str, depth: int) -> None:
        (push, pull), cache = FILTERS[name], CACHE if name.startswith("cache") else None
        self._source, self._batch, self._next = Source(seed), batch, 0
        self._depth = depth if rows == "ahead" else 0
        self._local = LocalRows(self._source.values) if rows == "local" else None
        if self._local is None:
            init = eps.Normal(std=ROWS_STD, seed=seed)
            layer = Embedding(
                ps, "categories", DIM, optimizer=eps.Adagrad(lr=ROWS_LR), init=init, push=push, pull=pull, cache=cache
            )
            assert isinstance(layer.table, SparseTable)
            self._table = layer.table
        self.model = DLRM(self._local or layer)
        self.optimizer = Optimizer(ps, self.model, eps.Adam(lr=DENSE_LR), push=DENSE.get(name, push), pull=pull)

    @property
    def keys(self) -> Saved:
        return Saved(0, 0) if self._local else self._table.key_bytes

    @property
    def cached(self) -> CacheUse:
        return NOT_USED if self._local else self._table.cached

    def in_order(self, batches: list[Inputs]) -> Iterable[Inputs]:
        """As they are trained."""
        return prefetch(batches, self.model, self._depth) if self._depth else batches

    def step(self) -> None:
        """Ends one."""
        self.optimizer.step()
        if self._local:
            self._local.step()

    def inputs(self) -> Inputs:
        self._next += 1
        return self._made(self._next)

    def loss(self, numbers: torch.Tensor, categories: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(self.model(numbers, categories), clicked)

    def score(self) -> float:
        """The area under the curve."""
        scores, labels = [], []
        for number in range(SCORED):
            numbers, categories, clicked = self._made(HELD_OUT + number)
            scores.append(self.model(numbers, categories).numpy())
            labels.append(clicked.numpy())
        return auc(np.concatenate(scores), np.concatenate(labels))

    def _made(self, number: int) -> Inputs:
        made = self._source.batch(number, self._batch)
        return torch.from_numpy(made.numbers), torch.from_numpy(made.categories), torch.from_numpy(made.clicked)


class ImageTraining:
    """Handwritten digits, whose weights are all dense."""

    keys, cached = Saved(0, 0), NOT_USED

    def __init__(self, ps: Client, seed: int, batch: int, name: str, rows: str, depth: int) -> None:
        push, pull = FILTERS[name]
        self.model = network()
        self.optimizer = Optimizer(ps, self.model, eps.SGD(lr=digits.LR), push=push, pull=pull)
        self._digits, self._batch = digits.Digits(seed), batch

    def in_order(self, batches: list[Inputs]) -> Iterable[Inputs]:
        """As they are trained."""
        return batches

    def step(self) -> None:
        """Ends one."""
        self.optimizer.step()

    def inputs(self) -> Inputs:
        return self._digits.batch(self._batch)

    def loss(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(images), labels)

    def score(self) -> float:
        """The part that is recognised."""
        found = self.model(self._digits.held_out).argmax(dim=1)
        return float((found == self._digits.answers).float().mean())


MODELS: dict[str, type[ClickTraining | ImageTraining]] = {"dlrm": ClickTraining, "digits": ImageTraining}


class Training:
    """One of the models, every weight at the servers."""

    def __init__(self, job: dict[str, Any]) -> None:
        warm()
        seed, runtime = int(job["seed"]), ThroughPorts(job["ports"])
        registry = Registry.open(job["url"], TIMEOUT_S, runtime)
        self.ps = Client(registry, job["app"], eps.ASP(), 4, TIMEOUT_S, job["app"])
        torch.manual_seed(seed)
        rows, depth = job.get("rows", "pulled"), int(job.get("ahead", 0))
        self._trained = MODELS[job["model"]](self.ps, seed, int(job["batch"]), job["filters"], rows, depth)

    def train(self, steps: int) -> dict[str, object]:
        """Trains, and tells how long that took."""
        trained = self._trained
        batches = [trained.inputs() for _ in range(steps)]
        trained.model.train()
        began = time.monotonic()
        for inputs in trained.in_order(batches):
            trained.optimizer.zero_grad()
            trained.loss(*inputs).backward()
            trained.step()
        self.ps.flush()
        return {"seconds": time.monotonic() - began}

    def score(self, _: int) -> dict[str, object]:
        """How good the model is on what was not trained, and what keys have taken."""
        trained = self._trained
        trained.optimizer.refresh()
        trained.model.eval()
        keys, use = trained.keys, trained.cached
        with torch.no_grad():
            return {
                "score": trained.score(), "keys": [keys.sent, keys.whole], "rows": [use.nbytes, use.whole_bytes],
                "oldest": trained.cached.oldest,
            }  # fmt: skip


def main() -> None:
    """Runs the worker that the command line describes."""
    torch.set_num_threads(1)
    with answers() as out:
        training = Training(json.loads(sys.argv[1]))
        does: dict[str, Callable[[int], object]] = {"train": training.train, "score": training.score}

        def answer(line: str) -> object:
            word, _, count = line.strip().partition(" ")
            return does[word](int(count or 0))

        answer_all(out, answer)
        training.ps.close()


if __name__ == "__main__":
    main()
