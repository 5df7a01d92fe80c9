"""One worker of `elasticps bench train`: `python -m benchmarks.trainer JOB`, with the job as JSON.

{"model": "deepfm", "batch": 256, "rank": 0, "workers": 4, "groups": [2, 4], "meeting": FILE, "urls": {"2": …}}

`rank` is below `workers`. `groups` has how many processes take part in an all-reduce; all meet through the file. `urls`
has the cluster for each number of replicas. A line on standard input asks for something, a line of JSON on standard
output answers:

    build WAY           makes the model ready
    train STEPS WAY     trains so many steps: {"began", "ended"} in monotonic seconds; ended: when all is committed

WAY is "alone" (torch and nothing else), "all-reduce N" (with the first N workers), or "servers R".
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import elasticps as eps
from benchmarks.core.criteo import CATEGORIES, Source
from benchmarks.dlrm import DIM, DLRM
from benchmarks.workers import answer_all, answers
from elasticps.torch import EmbeddingBagCollection, Jagged, Optimizer, TableConfig
from examples.demo import data
from examples.demo.model import tensors
from examples.demo.training import local, remote

SEED = 1
POOL = 64  # batches made before anything is measured, and used again and again
ROWS_LR, DENSE_LR, ROWS_STD = 0.02, 0.001, 0.05

Inputs = tuple[Tensor, Tensor]


@dataclass
class Trainable:
    """A model with what steps it. expect: says, before a step, which batch comes next; finish: waits until all is
    done."""

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    expect: Callable[[Inputs], None] = lambda inputs: None
    finish: Callable[[], None] = lambda: None


class DeepFMTraining:
    """The demo's model and its ratings."""

    def __init__(self, batch: int, rank: int, workers: int) -> None:
        self._ratings, _ = data.split(data.load(data.find()), SEED)
        mine = np.arange(len(self._ratings))[rank::workers]  # the split has put them in random order
        starts = range(0, min(len(mine) - batch + 1, POOL * batch), batch)
        self.batches = [tensors(self._ratings, mine[start : start + batch]) for start in starts]

    def local(self) -> Trainable:
        """All of it in this process."""
        made = local(self._ratings, SEED)
        return Trainable(made.model, made.optimizers)

    def remote(self, ps: eps.Client) -> Trainable:
        """Every weight at the servers."""
        made = remote(ps, self._ratings, SEED)
        return Trainable(made.model, made.optimizers, lambda inputs: made.expect(inputs[0], inputs[1]), ps.flush)


class CategoryRows(nn.Module):
    """A table for each category of a click, in one layer: as `DLRM` takes them."""

    names = tuple(f"category{i}" for i in range(CATEGORIES))

    def __init__(self, ps: eps.Client, init: eps.Normal) -> None:
        super().__init__()
        tables = [TableConfig(name, DIM, init=init) for name in self.names]
        self.tables = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=ROWS_LR))

    def forward(self, ids: Tensor) -> Tensor:
        """ids [n, categories] -> [n, categories, DIM]."""
        rows: Tensor = self.tables(Jagged.columns(self.names, ids)).values()
        return rows.view(*ids.shape, DIM)

    def expect(self, ids: Tensor) -> None:
        """Says which batch comes next: its rows are asked for as the step ends."""
        self.tables.expect(Jagged.columns(self.names, ids))


class DLRMTraining:
    """DLRM and clicks that are made up."""

    def __init__(self, batch: int, rank: int, workers: int) -> None:
        self._source = Source(SEED)
        made = [self._source.batch(number, batch) for number in range(rank, POOL * workers, workers)]
        self.batches = [
            (torch.from_numpy(m.numbers), torch.from_numpy(m.categories), torch.from_numpy(m.clicked)) for m in made
        ]

    def local(self) -> Trainable:
        """All of it in this process. Gradients of rows are sparse: dense ones of 54 MB a step would be no match."""
        torch.sparse.check_sparse_tensor_invariants.disable()  # as it is anyway; torch warns unless it is told
        torch.manual_seed(SEED)
        rows = nn.Embedding(self._source.values, DIM, sparse=True)
        nn.init.normal_(rows.weight, std=ROWS_STD)
        model = DLRM(rows)
        dense = [p for p in model.parameters() if p is not rows.weight]
        return Trainable(model, [torch.optim.Adagrad([rows.weight], lr=ROWS_LR), torch.optim.Adam(dense, lr=DENSE_LR)])

    def remote(self, ps: eps.Client) -> Trainable:
        """Every weight at the servers."""
        torch.manual_seed(SEED)
        rows = CategoryRows(ps, eps.Normal(std=ROWS_STD, seed=SEED))
        model = DLRM(rows)
        optimizer = Optimizer(ps, model, optimizer=eps.Adam(lr=DENSE_LR), prefix="dlrm", pipeline=True)
        return Trainable(model, [optimizer], lambda inputs: rows.expect(inputs[1]), ps.flush)


class Trainer:
    """Trains one model in every way, each in its turn."""

    def __init__(self, job: dict[str, Any], stack: ExitStack) -> None:
        self._job, self._stack = job, stack
        self._rank, most = int(job["rank"]), int(job["workers"])
        models: dict[str, type[DeepFMTraining | DLRMTraining]] = {"deepfm": DeepFMTraining, "dlrm": DLRMTraining}
        self._model = models[job["model"]](job["batch"], self._rank, most)
        if not self._model.batches:
            raise eps.ConfigError(f"{most} workers have no batch of {job['batch']} samples each")
        self._batches = cycle(self._model.batches)
        self._next = next(self._batches)
        self._groups: dict[int, Any] = {}
        if job["groups"]:
            self._meet(most)
        self._ready: dict[str, Trainable] = {}

    def _meet(self, most: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo", init_method=f"file://{self._job['meeting']}", rank=self._rank, world_size=most
        )
        self._stack.callback(distributed.destroy_process_group)
        for count in self._job["groups"]:  # everybody has to make every group
            self._groups[count] = distributed.new_group(list(range(count)))

    def build(self, way: str) -> dict[str, object]:
        """Makes a way ready."""
        kind, _, count = way.partition(" ")
        if kind == "servers":
            url = self._job["urls"][count]
            ps = self._stack.enter_context(eps.connect(url, worker=f"trainer{self._rank}", timeout=120.0))
            self._ready[way] = self._model.remote(ps)
        else:
            self._ready[way] = made = self._model.local()
            if kind == "all-reduce":
                made.model = DistributedDataParallel(made.model, process_group=self._groups[int(count)])
        self._ready[way].model.train()
        return {}

    def train(self, way: str, steps: int) -> dict[str, object]:
        """Trains, and tells when."""
        what = self._ready[way]
        began = time.monotonic()
        for number in range(steps):
            *inputs, label = self._next
            for optimizer in what.optimizers:
                optimizer.zero_grad()
            error = functional.binary_cross_entropy_with_logits(what.model(*inputs), label)
            error.backward()
            self._next = next(self._batches)
            if number + 1 < steps:
                what.expect((self._next[0], self._next[1]))
            for optimizer in what.optimizers:
                optimizer.step()
            error.item()  # whoever trains looks at it
        what.finish()
        return {"began": began, "ended": time.monotonic()}

    def answer(self, line: str) -> dict[str, object]:
        """The answer to a line."""
        word, _, rest = line.strip().partition(" ")
        if word == "build":
            return self.build(rest)
        steps, _, way = rest.partition(" ")
        return self.train(way, int(steps))


def main() -> None:
    """Runs the worker that the command line describes."""
    torch.set_num_threads(1)  # as many processes as workers: each has one thread that computes, in every way
    torch.set_num_interop_threads(1)
    with answers() as out, ExitStack() as stack:
        trainer = Trainer(json.loads(sys.argv[1]), stack)
        answer_all(out, trainer.answer)


if __name__ == "__main__":
    main()
