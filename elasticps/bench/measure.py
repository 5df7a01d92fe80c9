"""Times an operation and the plain socket pair in turns, so that both see the same noise."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from elasticps.bench.limits import SocketPair

ROUNDS = 10
HEADER = 64


@dataclass(frozen=True)
class Result:
    """One line of a benchmark. `gb_per_s` counts request and answer; `loopback_gb_per_s` is the plain socket pair with
    the same bytes, `loopback_ratio` the first by the second."""

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

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """What all lines of a run share."""

    servers: int
    replicas: int
    workers: int
    memcpy_gb_per_s: float
    seconds: float


def measure(
    op: str,
    run: Callable[[], object],
    pair: SocketPair,
    *,
    setting: Setting,
    batch: int,
    dim: int,
    request: int,
    response: int,
    per_run: int = 1,
) -> Result:
    """Runs `run`, which does `per_run` operations of `batch` rows each, for about `setting.seconds`.

    `request` and `response` are the body bytes of one operation; a header is added to each.
    """
    sizes = request + HEADER, response + HEADER
    for _ in range(3):
        run()
        pair.exchange(*sizes)
    once = _time(run)
    repeats = max(2, int(setting.seconds / ROUNDS / 2 / once))
    ours: list[float] = []
    plain: list[float] = []
    gc.disable()  # a collection of the bench's own garbage is not the system's latency
    try:
        for _ in range(ROUNDS):
            ours += [_time(run) / per_run for _ in range(repeats)]
            plain += [pair.exchange(*sizes) for _ in range(max(2, repeats))]
    finally:
        gc.enable()
    p50, p99 = (float(np.percentile(ours, q)) for q in (50, 99))
    loopback = sum(sizes) / float(np.median(plain)) / 1e9
    speed = sum(sizes) / p50 / 1e9
    return Result(
        op, batch, dim, setting.servers, setting.replicas, setting.workers, batch / p50, speed, p50 * 1e6, p99 * 1e6,
        loopback, speed / loopback, setting.memcpy_gb_per_s,
    )  # fmt: skip


def _time(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
