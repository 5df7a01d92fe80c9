"""One process of `elasticps bench groups`: `python -m benchmarks.groups_worker JOB`, with the job as JSON.

{"rank": 0, "processes": 4, "meeting": FILE, "url": …, "ports": {"HOST:PORT": 4711, …}, "batch": 256, "dim": 16}: all
meet through the file, and reach servers through `ports` of this machine. A line on standard input asks for something, a
line of JSON on standard output answers:

    build MODEL WAY    "dlrm" or "dense"; "separate", where each process is a worker, or "group"
    train STEPS        trains so many steps: {"began", "ended"} in monotonic seconds; ended: when all is committed
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import distributed, nn
from torch.nn import functional

import elasticps as eps
from benchmarks.core.criteo import Source
from benchmarks.dlrm import DLRM
from benchmarks.traffic_worker import TIMEOUT_S, ThroughPorts
from benchmarks.trainer import DENSE_LR, ROWS_LR, ROWS_STD
from benchmarks.workers import answer_all, answers
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.warm import warm
from elasticps.torch import Embedding, GroupClient, LocalGroup, Optimizer

SEED = 1
POOL = 32  # batches of each process, used again and again
WIDE = 512  # of the dense model's layers


class Rank:
    """One process, and what it trains now."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._job, self._rank, self._size = job, int(job["rank"]), int(job["processes"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo", init_method=f"file://{job['meeting']}", rank=self._rank, world_size=self._size
        )
        self._built = ExitStack()
        source, batch = Source(SEED), int(job["batch"])
        made = [source.batch(number * self._size + self._rank, batch) for number in range(POOL)]
        self._clicks = [
            (torch.from_numpy(m.numbers), torch.from_numpy(m.categories), torch.from_numpy(m.clicked)) for m in made
        ]
        self._numbers = [(torch.randn(batch, WIDE), torch.rand(batch)) for _ in range(4)]

    def build(self, model: str, way: str) -> dict[str, object]:
        """Makes a model ready, every weight at the servers."""
        self._built.close()
        self._built = ExitStack()
        warm()
        app = f"{model}-{way}"
        if way == "group":
            ps: Client | GroupClient = LocalGroup().with_client(lambda: self._client(app, "group"))
        else:
            ps = self._client(app, f"w{self._rank}")
        self._built.enter_context(ps)
        self._ps = ps
        torch.manual_seed(SEED)
        if model == "dlrm":
            dim = int(self._job["dim"])
            init = eps.Normal(std=ROWS_STD, seed=SEED)
            self._rows = Embedding(ps, "categories", dim, optimizer=eps.Adagrad(lr=ROWS_LR), init=init)
            self._model: nn.Module = DLRM(self._rows, dim)
            self._batches: list[Any] = self._clicks
        else:
            layers = [layer for _ in range(3) for layer in (nn.Linear(WIDE, WIDE), nn.ReLU())]
            self._model = nn.Sequential(*layers, nn.Linear(WIDE, 1), nn.Flatten(0))
            self._batches = self._numbers
        self._optimizer = Optimizer(ps, self._model, eps.Adam(lr=DENSE_LR), pipeline=True)
        return {}

    def train(self, steps: int) -> dict[str, object]:
        """Trains, and tells when."""
        distributed.barrier()
        began = time.monotonic()
        for number in range(steps):
            *inputs, labels = self._batches[number % len(self._batches)]
            self._optimizer.zero_grad()
            loss = functional.binary_cross_entropy_with_logits(self._model(*inputs), labels)
            if self._batches is self._clicks and number + 1 < steps:  # rows come while gradients go
                self._rows.prefetch(self._batches[(number + 1) % len(self._batches)][1])
            loss.backward()
            self._optimizer.step()
        self._ps.flush()
        return {"began": began, "ended": time.monotonic()}

    def _client(self, app: str, worker: str) -> Client:
        registry = Registry.open(self._job["url"], TIMEOUT_S, ThroughPorts(self._job["ports"]))
        return Client(registry, worker, eps.ASP(), 4, TIMEOUT_S, app)

    def answer(self, line: str) -> dict[str, object]:
        """The answer to a line."""
        word, *rest = line.split()
        return self.build(*rest) if word == "build" else self.train(int(rest[0]))

    def close(self) -> None:
        """Leaves everything."""
        self._built.close()
        distributed.destroy_process_group()


def main() -> None:
    """Runs the process that the command line describes."""
    torch.set_num_threads(1)
    with answers() as out:
        rank = Rank(json.loads(sys.argv[1]))
        answer_all(out, rank.answer)
        rank.close()


if __name__ == "__main__":
    main()
