"""Servers' CPU time for a push by how many servers there are: many workers, whose pushes each touch a few heads.

A step costs what it touches: with more servers, a worker's push of rows that a few of them head goes to these, and to
the worker's home. Workers are few processes with several connections each; each connection has one push under way.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from benchmarks.machine import cpu_seconds
from benchmarks.runner import Progress, Result, silent, table
from benchmarks.workers import BusyWorker, Team, worker_jobs
from elasticps.kernels.hashing import key_ranges, range_shift
from elasticps.local import LocalCluster

RANGES, REPLICAS, DIM, KEYS = 256, 2, 16, 1 << 17
ROWS, BATCHES = 64, 200
PROCESSES = 2
WARM_PUSHES = 60  # of each worker: from then on its pushes are usual ones
SETTLE_S = 1.0
POLL_S = 0.1


@dataclass(frozen=True)
class PushCost:
    """CPU time of all servers for a push, the median of the rounds; idle_us: of that what they use in as much time
    while the same workers push nothing."""

    servers: int
    heads: int
    workers: int
    pushes_per_s: float
    servers_us: float
    idle_us: float


class Pushers(BusyWorker):
    """Workers of one process. Each has a push of ROWS rows under way, whose ranges `heads` servers head."""

    def __init__(self, *, url: str, first: int, count: int, heads: int) -> None:
        super().__init__()
        self._clients = [eps.connect(url, worker=f"worker{first + i}", timeout=120.0) for i in range(count)]
        self._tables = [ps.table("rows", dim=DIM, optimizer=eps.SGD(lr=0.1)) for ps in self._clients]
        self._batches = _batches(self._clients[0], self._tables[0], heads, first)
        self._pushed = 0

    def run(self) -> None:
        batches, grads = itertools.cycle(self._batches), np.ones((ROWS, DIM), np.float32)
        steps: deque[eps.Step] = deque()
        for ps, rows in itertools.cycle(list(zip(self._clients, self._tables, strict=True))):
            if len(steps) == len(self._clients):
                steps.popleft().result()
                self._pushed += 1
            if self.ended.is_set():
                break
            steps.append(ps.push({rows: (next(batches), grads)}))
        for step in steps:
            step.result()

    def pushed(self) -> int:
        """Pushes committed so far."""
        self.check()
        return self._pushed

    def close(self) -> None:
        super().close()
        for ps in self._clients:
            ps.close()


def run(
    *, servers: Sequence[int], heads: int, workers: int, seconds: float, rounds: int, progress: Progress = silent
) -> Result:
    """Measures clusters of so many servers in turns."""
    found: dict[int, list[PushCost]] = {count: [] for count in servers}
    for number in range(rounds):
        for count in servers:
            progress(f"{count} servers: round {number + 1} of {rounds}")
            found[count].append(_measure(count, min(heads, count), workers, seconds))
    lines = [_median(costs) for costs in found.values()]
    columns = [
        ("servers", lambda line: line.servers),
        ("heads touched", lambda line: line.heads),
        ("pushes/s", lambda line: f"{line.pushes_per_s:,.0f}"),
        ("servers' CPU", lambda line: f"{line.servers_us:,.0f} µs"),
        ("of that idle", lambda line: f"{line.idle_us:,.0f} µs"),
        ("of the first", lambda line: f"{line.servers_us / lines[0].servers_us:.2f}"),
    ]
    title = f"a push of {ROWS} rows by {workers} workers, {REPLICAS} replicas, {RANGES} ranges"
    return Result(lines, [table(title, lines, columns)])


def _measure(servers: int, heads: int, workers: int, seconds: float) -> PushCost:
    with LocalCluster(servers=servers, ranges=RANGES, replicas=REPLICAS, log_level="warning") as cluster:
        servers_ids = [server.pid for server in cluster.servers]
        jobs = worker_jobs(cluster.url, workers, PROCESSES, heads=heads)
        with Team("many_servers:Pushers", jobs) as team:
            team.ask(len(jobs), "pushed")  # they are connected
            time.sleep(SETTLE_S)
            before, began = cpu_seconds(servers_ids), time.monotonic()
            time.sleep(seconds / 2)
            idle = (cpu_seconds(servers_ids) - before) / (time.monotonic() - began)
            team.ask(len(jobs), "begin")
            while sum(team.ask(len(jobs), "pushed")) < WARM_PUSHES * workers:
                time.sleep(POLL_S)
            pushed, before, began = sum(team.ask(len(jobs), "pushed")), cpu_seconds(servers_ids), time.monotonic()
            time.sleep(seconds)
            pushed, used = sum(team.ask(len(jobs), "pushed")) - pushed, cpu_seconds(servers_ids) - before
            rate = pushed / (time.monotonic() - began)
    return PushCost(
        servers, heads, workers, round(rate, 1), round(1e6 * used / pushed, 1), round(1e6 * idle / rate, 1)
    )  # fmt: skip


def _median(costs: Sequence[PushCost]) -> PushCost:
    """The round in the middle."""
    return sorted(costs, key=lambda cost: cost.servers_us)[len(costs) // 2]


def _batches(ps: eps.Client, rows: eps.SparseTable, heads: int, seed: int) -> list[NDArray[np.int64]]:
    """Batches of ROWS keys, each spread evenly over `heads` servers that head their ranges."""
    keys, ranges, random = np.arange(KEYS), np.empty(KEYS, np.int32), np.random.default_rng(seed)
    key_ranges(keys, rows.salt, range_shift(RANGES), ranges)
    head_of = ps.view.heads[ranges]
    by_head = {head: keys[head_of == head] for head in np.unique(head_of).tolist()}
    shares = [len(part) for part in np.array_split(np.arange(ROWS), heads)]
    return [
        np.concatenate(
            [
                random.choice(by_head[head], share, replace=False)
                for head, share in zip(random.choice(list(by_head), heads, replace=False).tolist(), shares, strict=True)
            ]
        )
        for _ in range(BATCHES)
    ]
