"""One worker of `elasticps bench traffic`: `python -m elasticps.bench.traffic_worker JOB`, with the job as JSON.

{"url": …, "ports": {"HOST:PORT": 4711, …}, "app": …, "seed": 1, "batch": 256, "filters": "int8"}: servers are reached
through `ports` of this machine. A line on standard input asks for something, a line of JSON on standard output answers:

    train STEPS    trains so many steps: {"seconds"} until all is committed
    score BATCHES  on batches that are not trained: {"auc"}
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import elasticps as eps
from elasticps.bench.criteo import Source
from elasticps.bench.dlrm import DIM, DLRM
from elasticps.bench.trainer import DENSE_LR, ROWS_LR, ROWS_STD, answers
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime, Stream
from elasticps.client.warm import warm
from elasticps.demo.data import auc
from elasticps.spec import Filter
from elasticps.torch import Embedding, Optimizer

TIMEOUT_S = 120.0
HELD_OUT = 1 << 20  # the number of the first batch that is only scored
FILTERS: dict[str, tuple[Sequence[Filter], Sequence[Filter]]] = {
    "none": ((), ()),
    "bfloat16": ([eps.BFloat16()], [eps.BFloat16()]),
    "float16": ([eps.Float16()], [eps.Float16()]),
    "int8": ([eps.Int8()], [eps.Int8()]),
}
"""For pushes and for pulls, by name."""


class ThroughPorts(Runtime):
    """Reaches servers through ports of this machine."""

    def __init__(self, ports: dict[str, int]) -> None:
        self._ports = ports

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        return super().connect("127.0.0.1", self._ports[f"{host}:{port}"], attempt)


class Training:
    """DLRM on clicks that are made up, every weight at the servers."""

    def __init__(self, job: dict[str, Any]) -> None:
        warm()
        seed, runtime = int(job["seed"]), ThroughPorts(job["ports"])
        registry = Registry.open(job["url"], TIMEOUT_S, runtime)
        self.ps = Client(registry, job["app"], eps.ASP(), 4, TIMEOUT_S, job["app"])
        push, pull = FILTERS[job["filters"]]
        torch.manual_seed(seed)
        init = eps.Normal(std=ROWS_STD, seed=seed)
        rows = Embedding(self.ps, "categories", DIM, optimizer=eps.Adagrad(lr=ROWS_LR), init=init, push=push, pull=pull)
        self._model = DLRM(rows)
        self._optimizer = Optimizer(self.ps, self._model, eps.Adam(lr=DENSE_LR), push=push, pull=pull)
        self._source, self._batch, self._next = Source(seed), int(job["batch"]), 0

    def train(self, steps: int) -> dict[str, object]:
        """Trains, and tells how long that took."""
        batches = [self._inputs(self._next + number) for number in range(steps)]
        self._next += steps
        self._model.train()
        began = time.monotonic()
        for numbers, categories, clicked in batches:
            self._optimizer.zero_grad()
            functional.binary_cross_entropy_with_logits(self._model(numbers, categories), clicked).backward()
            self._optimizer.step()
        self.ps.flush()
        return {"seconds": time.monotonic() - began}

    def score(self, batches: int) -> dict[str, object]:
        """How well the model tells clicks from others."""
        self._optimizer.refresh()
        self._model.eval()
        scores, labels = [], []
        with torch.no_grad():
            for number in range(batches):
                numbers, categories, clicked = self._inputs(HELD_OUT + number)
                scores.append(self._model(numbers, categories).numpy())
                labels.append(clicked.numpy())
        return {"auc": auc(np.concatenate(scores), np.concatenate(labels))}

    def _inputs(self, number: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        made = self._source.batch(number, self._batch)
        return torch.from_numpy(made.numbers), torch.from_numpy(made.categories), torch.from_numpy(made.clicked)


def main() -> None:
    """Runs the worker that the command line describes."""
    torch.set_num_threads(1)
    with answers() as out:
        training = Training(json.loads(sys.argv[1]))
        for line in sys.stdin:
            word, _, count = line.strip().partition(" ")
            does = {"train": training.train, "score": training.score}[word]
            print(json.dumps(does(int(count))), file=out, flush=True)
        training.ps.close()


if __name__ == "__main__":
    main()
