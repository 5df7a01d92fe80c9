"""The store alone, without sockets: what one core looks up, reads and updates."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import Adagrad, TableSpec, Uniform
from elasticps.store import Table, index, warm

_BATCHES = 60


def bench_store(*, rows: int = 1_000_000, dim: int = 64, batches: tuple[int, ...] = (64, 8192)) -> list[dict[str, Any]]:
    """Median speed of lookup, gather and lookup + Adagrad on random keys of a float32 table, for each batch size."""
    warm()
    optimizer = Adagrad(0.01)
    table = Table(TableSpec("bench", dim, optimizer, Uniform(-0.1, 0.1)), 0, 256)
    random = np.random.default_rng(0)
    values = optimizer.step_values(1)
    for start in range(0, rows, 8192):
        keys = np.arange(start, min(start + 8192, rows))
        table.apply(keys, np.ones((len(keys), dim), np.float32), values)
    results: list[dict[str, Any]] = []
    for n in batches:
        samples = [random.choice(rows, n, replace=False) for _ in range(_BATCHES)]
        grads = random.standard_normal((n, dim), np.float32)
        out, found = np.empty((n, dim), np.float32), np.empty(n, np.int64)
        operations: dict[str, Callable[[NDArray[np.int64]], object]] = {
            "lookup": partial(index.find, table._header, rows=found),
            "gather": partial(table.gather, out=out),
            "adagrad": partial(table.apply, grads=grads, step_values=values),
        }
        for op, call in operations.items():
            seconds = _median_seconds(call, samples)
            results.append({"op": op, "batch": n, "dim": dim, "rows_per_s": n / seconds, "p50_us": seconds * 1e6})
    table.close()
    return results


def _median_seconds(call: Callable[[NDArray[np.int64]], object], samples: list[NDArray[np.int64]]) -> float:
    times = []
    for _ in range(5):
        for keys in samples:
            start = time.perf_counter()
            call(keys)
            times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
