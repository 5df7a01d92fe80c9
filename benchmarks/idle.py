"""What workers cost that do nothing: processor time of their processes, and of etcd, for each of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import elasticps as eps
from benchmarks.machine import cpu_seconds
from benchmarks.runner import Progress, Result, silent, table
from benchmarks.workers import Team, worker_jobs
from elasticps.local import LocalCluster, state

SERVERS, REPLICAS = 3, 2
SETTLE_S = 3.0  # from then on they are idle, in a run that is longer


@dataclass(frozen=True)
class IdleCost:
    """Percent of a core for each worker: of their processes, and of etcd beyond what it takes without workers."""

    workers: int
    processes: int
    worker_percent: float
    etcd_percent: float


class IdleWorkers:
    """Workers of one process. Each has made a table and pushed to it once."""

    def __init__(self, *, url: str, first: int, count: int) -> None:
        self._clients = [eps.connect(url, worker=f"worker{first + i}", timeout=120.0) for i in range(count)]
        for ps in self._clients:
            rows = ps.table("rows", dim=8, optimizer=eps.SGD(lr=0.1))
            ps.push({rows: ([1], [[1.0] * 8])}).result()

    def connected(self) -> int:
        """How many there are."""
        return len(self._clients)

    def close(self) -> None:
        """They leave."""
        for ps in self._clients:
            ps.close()


def run(*, workers: int, processes: int, seconds: float, progress: Progress = silent) -> Result:
    """Measures so many workers, in as many processes, for so long."""
    with LocalCluster(servers=SERVERS, replicas=REPLICAS, log_level="warning") as cluster:
        record = state.read(cluster.directory)
        assert record is not None
        etcd = [entry.pid for entry in record.processes if entry.role == "etcd"]
        progress("a cluster without workers")
        without = _used(seconds, etcd)[0]
        with Team("idle:IdleWorkers", worker_jobs(cluster.url, workers, processes)) as team:
            team.ask(processes, "connected")
            progress(f"{workers} workers that do nothing")
            used = _used(seconds, etcd, [worker.pid for worker in team.workers])
    found = IdleCost(
        workers, processes, round(100 * used[1] / workers, 4), round(100 * (used[0] - without) / workers, 4)
    )
    lines = [
        ("a worker", f"{found.worker_percent:.3f} %"),
        ("etcd, for each worker", f"{found.etcd_percent:.3f} %"),
    ]
    title = f"{workers} idle workers in {processes} processes, {SERVERS} servers: of a core"
    return Result(found, [table(title, lines, [("", lambda line: line[0]), ("found", lambda line: line[1])])])


def _used(seconds: float, *groups: Sequence[int]) -> list[float]:
    """Cores that processes use, by group, over so many seconds from when they are idle."""
    time.sleep(min(SETTLE_S, seconds))
    before, began = [cpu_seconds(pids) for pids in groups], time.monotonic()
    time.sleep(seconds)
    passed = time.monotonic() - began
    return [(cpu_seconds(pids) - used) / passed for pids, used in zip(groups, before, strict=True)]
