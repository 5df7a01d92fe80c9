"""One process of `elasticps bench allreduce`: `python -m benchmarks.allreduce_worker JOB`, with the job as JSON.

{"rank": 0, "most": 4, "processes": [2, 4], "meeting": FILE}: all meet through the file. A line on standard input asks
the first N of them for something, a line of JSON on standard output answers:

    WAY N MB STEPS NAME [URL]   {"seconds": [of each step]}

WAY is "ring", which adds up MB of float32 by gloo's all-reduce, "servers", where each pushes them and pulls the weights
that come of it in a synchronous round, or "group", where the N are one worker. NAME is that of an application.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import distributed

import elasticps as eps
from benchmarks.workers import answer_all, answers
from elasticps.torch import LocalGroup

TIMEOUT_S = 120.0
LR = 1e-3


class AllReduceProcess:
    """One of them."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._rank = int(job["rank"])
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        distributed.init_process_group(
            "gloo", init_method=f"file://{job['meeting']}", rank=self._rank, world_size=int(job["most"])
        )
        self._groups = {count: distributed.new_group(list(range(count))) for count in job["processes"]}

    def answer(self, line: str) -> dict[str, object]:
        """The answer to a line."""
        way, count, megabytes, steps, name, *url = line.split()
        floats = int(float(megabytes) * 1e6 / 4)
        group = self._groups[int(count)]
        with getattr(self, f"_{way}")(group, floats, name, *url) as step:
            seconds = [self._timed(step, group) for _ in range(int(steps) + 1)]
        return {"seconds": seconds[1:]}  # the first one makes buffers and fills caches

    @staticmethod
    def _timed(step: Callable[[], object], group: Any) -> float:
        distributed.barrier(group)
        began = time.monotonic()
        step()
        return time.monotonic() - began

    @contextmanager
    def _ring(self, group: Any, floats: int, name: str) -> Iterator[Callable[[], object]]:
        gradient = torch.ones(floats)
        yield lambda: distributed.all_reduce(gradient, group=group)

    @contextmanager
    def _servers(self, group: Any, floats: int, name: str, url: str) -> Iterator[Callable[[], object]]:
        gradient, weights = np.ones(floats, np.float32), np.zeros(floats, np.float32)
        with eps.connect(url, worker=f"w{self._rank}", app=name, consistency=eps.BSP(), timeout=TIMEOUT_S) as ps:
            tensor = ps.tensor("weights", init=weights, optimizer=eps.SGD(lr=LR))
            ps.resume()
            distributed.barrier(group)  # whoever comes later is in later rounds only

            def step() -> None:
                ps.push({tensor: gradient}, copy=False)
                tensor.pull(weights)

            yield step
            distributed.barrier(group)
            if self._rank == 0:
                ps.drop_table("weights")
            distributed.barrier(group)

    @contextmanager
    def _group(self, group: Any, floats: int, name: str, url: str) -> Iterator[Callable[[], object]]:
        gradient, weights = np.ones(floats, np.float32), np.zeros(floats, np.float32)
        with LocalGroup(group).connect(url, worker="group", app=name, timeout=TIMEOUT_S) as ps:
            tensor = ps.tensor("weights", init=weights, optimizer=eps.SGD(lr=LR))

            def step() -> None:
                ps.push({tensor: gradient})
                weights[...] = ps.pull_many([tensor])[0].result()

            yield step
            if ps.client is not None:
                ps.client.drop_table("weights")
            ps.flush()


def main() -> None:
    """Runs the process that the command line describes."""
    torch.set_num_threads(1)
    with answers() as out:
        process = AllReduceProcess(json.loads(sys.argv[1]))
        answer_all(out, process.answer)
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
