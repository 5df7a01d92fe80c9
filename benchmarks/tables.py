"""Many tables as one layer beside as many layers: what a step costs the worker.

Both look up one row of each table for each sample, under a power law, and push its gradient; nothing else is trained.
In turns, in one process, so that both see the same noise.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import elasticps as eps
from benchmarks.runner import Progress, Result, Side, in_turns, silent, table
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


def run(
    *, tables: int = 26, batch: int = 256, dim: int = 16, servers: int = 3, seconds: float = 10.0,
    progress: Progress = silent,
) -> Result:  # fmt: skip
    """Trains both for about `seconds` together."""
    random, threads = np.random.default_rng(SEED), torch.get_num_threads()
    drawn = [random.zipf(EXPONENT, (batch, tables)) % IDS for _ in range(POOL)]
    batches = [torch.from_numpy(ids.astype(np.int64)) for ids in drawn]
    progress(f"starting {servers} servers")
    with LocalCluster(servers=servers) as cluster, ExitStack() as stack:
        torch.set_num_threads(1)
        stack.callback(torch.set_num_threads, threads)
        sides = {}
        for make in (ManyLayers, OneLayer):
            name = make.__name__.lower()
            progress(f"warming up: {name}")
            ps = stack.enter_context(eps.connect(cluster.url, worker=name))
            sides[make] = side = _side(ps, make(ps, tables, dim), batches)
            side.turn()
            side.fit(side.turn(), seconds / 2 / ROUNDS, 5)
        turns = in_turns(sides, ROUNDS, lambda text: progress(text.rpartition(": ")[2]))
    cpu_ms = [_median([turn.cpu_s["worker"] * 1e3 / turn.steps for turn in turns[make]]) for make in sides]
    ms = [_median([turn.seconds * 1e3 / turn.steps for turn in turns[make]]) for make in sides]
    of_separate = round(cpu_ms[1] / cpu_ms[0], 3)
    found = TablesComparison(tables, batch, dim, servers, cpu_ms[0], cpu_ms[1], ms[0], ms[1], of_separate)
    shown = table(
        f"{tables} tables, {batch:,} samples a step, {servers} server(s)",
        zip(("one for each table", "one for all"), cpu_ms, ms, strict=True),
        [("layers", lambda line: line[0]), ("worker CPU ms/step", lambda line: f"{line[1]:.2f}"),
         ("ms/step", lambda line: f"{line[2]:.2f}")],
    )  # fmt: skip
    return Result(found, [shown, f"one for all takes {found.of_separate:.2f} of the worker's CPU time"])


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def _side(ps: eps.Client, model: nn.Module, batches: list[Tensor]) -> Side:
    optimizer = Optimizer(ps, model)

    def train(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            model(batches[step % len(batches)]).sum().backward()
            optimizer.step()
        ps.flush()
        return time.perf_counter() - began

    return Side(train, WARM_STEPS, lambda: {"worker": time.process_time()})
