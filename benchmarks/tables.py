"""Many tables as one layer beside as many layers: what a step costs the worker.

Both look up one row of each table for each sample, under a power law, and push its gradient; nothing else is trained.
In turns, in one process, so that both see the same noise.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.local import LocalCluster
from elasticps.torch import EmbeddingBag, EmbeddingBagCollection, Jagged, Optimizer, TableConfig

IDS, EXPONENT, SEED = 1_000_000, 1.2, 1
POOL, WARM_STEPS, ROUNDS = 32, 30, 5


@dataclass(frozen=True)
class TablesComparison:
    """CPU time of the worker's process, all threads, and time, for each step; medians of the rounds.

    of_separate  the collection's CPU time by that of the layers
    """

    tables: int
    batch: int
    dim: int
    servers: int
    separate_cpu_ms: float
    collection_cpu_ms: float
    separate_ms: float
    collection_ms: float
    of_separate: float


class ManyLayers(nn.Module):
    """A layer for each table."""

    def __init__(self, ps: eps.Client, tables: int, dim: int) -> None:
        super().__init__()
        rate = eps.Adagrad(lr=0.1)
        self.bags = nn.ModuleList([EmbeddingBag(ps, f"separate{i}", dim, "sum", optimizer=rate) for i in range(tables)])

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n, tables] -> [n, tables * dim]."""
        return torch.cat([bag(ids[:, i : i + 1]) for i, bag in enumerate(self.bags)], dim=1)


class OneLayer(nn.Module):
    """One for all of them."""

    def __init__(self, ps: eps.Client, tables: int, dim: int) -> None:
        super().__init__()
        self.names = [f"collected{i}" for i in range(tables)]
        configs = [TableConfig(name, dim) for name in self.names]
        self.rows = EmbeddingBagCollection(ps, configs, optimizer=eps.Adagrad(lr=0.1))

    def forward(self, ids: Tensor) -> Tensor:
        """The same."""
        rows: Tensor = self.rows(Jagged.columns(self.names, ids)).values()
        return rows


class _Side:
    """One of both, and what its rounds took."""

    def __init__(self, url: str, make: Callable[[eps.Client, int, int], nn.Module], tables: int, dim: int) -> None:
        self._ps = eps.connect(url, worker=make.__name__.lower())
        self._model = make(self._ps, tables, dim)
        self._optimizer = Optimizer(self._ps, self._model)
        self.cpu_ms: list[float] = []
        self.ms: list[float] = []

    def train(self, batches: list[Tensor], steps: int) -> float:
        """Some steps; seconds that each took."""
        cpu, began = time.process_time(), time.perf_counter()
        for step in range(steps):
            self._model(batches[step % len(batches)]).sum().backward()
            self._optimizer.step()
        self._ps.flush()
        took = (time.perf_counter() - began) / steps
        self.cpu_ms.append((time.process_time() - cpu) / steps * 1e3)
        self.ms.append(took * 1e3)
        return took

    def forget(self) -> None:
        """What came so far was to warm up."""
        self.cpu_ms, self.ms = [], []

    def close(self) -> None:
        """Leaves the cluster."""
        self._ps.close()


def run(
    *, tables: int = 26, batch: int = 256, dim: int = 16, servers: int = 3, seconds: float = 10.0,
    progress: Callable[[str], None] = lambda text: None,
) -> TablesComparison:  # fmt: skip
    """Trains both for about `seconds` together."""
    random, threads = np.random.default_rng(SEED), torch.get_num_threads()
    drawn = [random.zipf(EXPONENT, (batch, tables)) % IDS for _ in range(POOL)]
    batches = [torch.from_numpy(ids.astype(np.int64)) for ids in drawn]
    progress(f"starting {servers} servers")
    sides: list[_Side] = []
    with LocalCluster(servers=servers) as cluster:
        torch.set_num_threads(1)
        try:
            for make in (ManyLayers, OneLayer):
                progress(f"warming up: {make.__name__.lower()}")
                sides.append(_Side(cluster.url, make, tables, dim))
                sides[-1].train(batches, WARM_STEPS)
            steps = [max(5, int(seconds / 2 / ROUNDS / side.train(batches, WARM_STEPS))) for side in sides]
            for side in sides:
                side.forget()
            for number in range(ROUNDS):
                progress(f"round {number + 1} of {ROUNDS}")
                for side, count in zip(sides, steps, strict=True):
                    side.train(batches, count)
        finally:
            torch.set_num_threads(threads)
            for side in sides:
                side.close()
    separate, collected = sides
    before, after = (round(statistics.median(side.cpu_ms), 3) for side in sides)
    return TablesComparison(
        tables, batch, dim, servers, before, after, round(statistics.median(separate.ms), 3),
        round(statistics.median(collected.ms), 3), round(after / before, 3),
    )  # fmt: skip
