"""Times an operation and the plain socket pair in turns, so that both see the same noise."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from benchmarks.limits import SocketPair

ROUNDS = 10
HEADER = 64


@dataclass(frozen=True)
class SpeedLine:
    """One line of a benchmark. `gb_per_s` counts request and answer; `loopback_gb_per_s` is the plain socket pair with
    the same bytes, `loopback_ratio` the first by the second.

    server_cpu_us_per_row  CPU time that all servers together used for each row
    of_first               speed as a part of what the first number of replicas gave, if several were measured
    """

    op: str
    batch: int
    dim: int
    servers: int
    replicas: int
    workers: int
    rows_per_s: float
    gb_per_s: float
    p50_us: float
    p99_us: float
    loopback_gb_per_s: float
    loopback_ratio: float
    memcpy_gb_per_s: float
    server_cpu_us_per_row: float | None = None
    of_first: float | None = None


@dataclass(frozen=True)
class Bench:
    """What all lines of a run share: the cluster's shape, the machine's limits, the time spent on each line."""

    pair: SocketPair
    servers: int
    replicas: int
    workers: int
    memcpy_gb_per_s: float
    seconds: float
    server_cpu_s: Callable[[], float] | None = None

    def measure(
        self,
        op: str,
        run: Callable[[], object],
        *,
        batch: int,
        dim: int,
        request: int,
        response: int,
        per_run: int = 1,
    ) -> SpeedLine:
        """Runs `run`, which does `per_run` operations of `batch` rows each, for about `self.seconds`.

        `request` and `response` are the body bytes of one operation; a header is added to each.
        """
        sizes = request + HEADER, response + HEADER
        for _ in range(3):
            run()
            self.pair.exchange(*sizes)
        once = _time(run)
        repeats = max(2, int(self.seconds / ROUNDS / 2 / once))
        used = self.server_cpu_s() if self.server_cpu_s else 0.0
        ours: list[float] = []
        plain: list[float] = []
        gc.disable()  # a collection of the bench's own garbage is not the system's latency
        try:
            for _ in range(ROUNDS):
                ours += [_time(run) / per_run for _ in range(repeats)]
                plain += [self.pair.exchange(*sizes) for _ in range(max(2, repeats))]
        finally:
            gc.enable()
        cpu_us = None
        if self.server_cpu_s:
            cpu_us = (self.server_cpu_s() - used) * 1e6 / (ROUNDS * repeats * per_run * batch)
        p50, p99 = (float(np.percentile(ours, q)) for q in (50, 99))
        loopback = sum(sizes) / float(np.median(plain)) / 1e9
        speed = sum(sizes) / p50 / 1e9
        return SpeedLine(
            op, batch, dim, self.servers, self.replicas, self.workers, batch / p50, speed, p50 * 1e6, p99 * 1e6,
            loopback, speed / loopback, self.memcpy_gb_per_s, cpu_us,
        )  # fmt: skip


def _time(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
