"""What one server takes: memory for each row, time to start, and time of its store alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import rss_bytes
from benchmarks.runner import Progress, Result, seconds_of, silent, table
from benchmarks.speed import fill
from elasticps.client import connect
from elasticps.local import LocalCluster
from elasticps.model.spec import Adagrad, TableSpec, Uniform
from elasticps.store import Table, index, warm

_BATCHES, _ROUNDS = 60, 5


def memory(*, rows: int = 5_000_000, dim: int = 64, progress: Progress = silent) -> Result:
    """Growth of a server's resident memory per row of `dim` float32 with Adagrad, beside what the rows alone need."""
    progress("starting a cluster")
    with LocalCluster(servers=1, replicas=1) as cluster, connect(cluster.url, worker="bench", timeout=120.0) as ps:
        stored = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
        (server,) = cluster.servers
        fill(ps, stored, 1000)
        before = rss_bytes(server.pid)
        progress(f"filling {rows:,} rows of {dim} floats")
        fill(ps, stored, rows)
        each = (rss_bytes(server.pid) - before) / rows
    data = 2 * 4 * dim
    allowed = 1.3 * data + 32
    found = {
        "rows": rows, "dim": dim, "row_and_slots_bytes": data, "bytes_per_row": each, "allowed_bytes_per_row": allowed,
    }  # fmt: skip
    text = f"{each:.0f} bytes per row of {dim} floats and as many slots ({data:.0f} bytes); allowed {allowed:.0f}"
    return Result(found, [text])


def startup(*, times: int = 5, progress: Progress = silent) -> Result:
    """Seconds from starting a server process to its being registered, kernels warm."""
    seconds = []
    with LocalCluster(servers=1, replicas=1) as cluster:
        for number in range(times):
            progress(f"start {number + 1} of {times}")
            seconds.append(seconds_of(partial(cluster.start_server, f"extra{number}")))
    ready_s = sorted(seconds)[times // 2]
    return Result({"ready_s": ready_s, "all_s": seconds}, [f"ready in {ready_s:.2f} s"])


def store(
    *, rows: int = 1_000_000, dim: int = 64, batches: tuple[int, ...] = (64, 8192), progress: Progress = silent
) -> Result:
    """Median speed of lookup, gather and lookup + Adagrad on random keys of a float32 table, for each batch size, on
    one core and without sockets."""
    progress(f"filling {rows:,} rows")
    warm()
    optimizer = Adagrad(0.01)
    stored = Table(TableSpec("bench", dim, optimizer, Uniform(-0.1, 0.1)), 0, 256)
    random = np.random.default_rng(0)
    values = optimizer.step_values(1)
    for start in range(0, rows, 8192):
        keys = np.arange(start, min(start + 8192, rows))
        stored.apply(keys, np.ones((len(keys), dim), np.float32), values)
    lines: list[dict[str, Any]] = []
    for n in batches:
        samples = [random.choice(rows, n, replace=False) for _ in range(_BATCHES)]
        grads = random.standard_normal((n, dim), np.float32)
        out, found = np.empty((n, dim), np.float32), np.empty(n, np.int64)
        operations: dict[str, Callable[[NDArray[np.int64]], object]] = {
            "lookup": partial(index.find, stored._header, rows=found),
            "gather": partial(stored.gather, out=out),
            "adagrad": partial(stored.apply, grads=grads, step_values=values),
        }
        for op, call in operations.items():
            seconds = _median_seconds(call, samples)
            lines.append({"op": op, "batch": n, "dim": dim, "rows_per_s": n / seconds, "p50_us": seconds * 1e6})
    stored.close()
    shown = table(f"store: {rows:,} rows x {dim} float32", lines, [
        ("op", lambda line: line["op"]), ("batch", lambda line: f"{line['batch']:,}"),
        ("M rows/s", lambda line: f"{line['rows_per_s'] / 1e6:.1f}"), ("p50 µs", lambda line: f"{line['p50_us']:.1f}"),
    ])  # fmt: skip
    return Result(lines, [shown])


def _median_seconds(call: Callable[[NDArray[np.int64]], object], samples: list[NDArray[np.int64]]) -> float:
    times = []
    for _ in range(_ROUNDS):
        for keys in samples:
            start = time.perf_counter()
            call(keys)
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
