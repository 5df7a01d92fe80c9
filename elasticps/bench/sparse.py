"""Sparse pulls and pushes through the whole path: client, wire, server, store and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from elasticps.bench.limits import memcpy_gb_per_s, socket_pair
from elasticps.bench.measure import Result, Setting, measure
from elasticps.client import Client, SparseTable, connect
from elasticps.local import LocalCluster
from elasticps.spec import Adagrad

BATCHES = (64, 1024, 8192, 65536)
FILL_BATCH = 65536
VARIANTS = 32  # different batches of keys, so that rows do not stay in the cache


def run(
    *,
    batches: Sequence[int] = BATCHES,
    rows: int = 1_000_000,
    dim: int = 64,
    servers: int = 1,
    replicas: int = 1,
    window: int = 4,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Result]:
    """Yields a result for pull, push (each waited for) and push-window (up to `window` outstanding) by batch size.

    Starts a local cluster, fills a table of `rows` random int64 keys x `dim` float32 with Adagrad.
    """
    progress("starting a cluster")
    with LocalCluster(servers=servers, replicas=replicas) as cluster, socket_pair() as pair:
        with connect(cluster.url, worker="bench", window=window, timeout=120.0) as ps:
            table = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
            progress(f"filling {rows:,} rows of {dim} floats")
            keys = fill(ps, table, rows)
            setting = Setting(servers, replicas, 1, memcpy_gb_per_s(), seconds)
            for batch in batches:
                progress(f"batch {batch}")
                yield from _batch(ps, table, keys, batch, window, setting, pair)


def fill(ps: Client, table: SparseTable, rows: int) -> np.ndarray:  # type: ignore[type-arg]
    """Pushes one gradient to each of `rows` random keys and returns them: int64 [rows]."""
    keys = np.random.default_rng(1).permutation(rows) * 7_919 - rows
    grads = np.full((FILL_BATCH, table.dim), 0.1, np.float32)
    for at in range(0, rows, FILL_BATCH):
        part = keys[at : at + FILL_BATCH]
        ps.push({table: (part, grads[: len(part)])})
    ps.flush()
    return keys


def _batch(ps, table, keys, batch, window, setting, pair):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(batch)
    chosen = [keys[rng.integers(0, len(keys), batch)] for _ in range(VARIANTS)]
    grads = rng.standard_normal((batch, table.dim)).astype(np.float32)
    turn = iter(range(1 << 62))

    def some() -> np.ndarray:  # type: ignore[type-arg]
        return chosen[next(turn) % VARIANTS]

    def push_window() -> None:
        for _ in range(4 * window):
            ps.push({table: (some(), grads)})
        ps.flush()

    body = batch * (8 + 4 * table.dim)
    common = {"setting": setting, "batch": batch, "dim": table.dim}
    yield measure("pull", lambda: table.pull(some()), pair, request=8 * batch, response=body - 8 * batch, **common)
    yield measure("push", lambda: ps.push({table: (some(), grads)}).result(), pair, request=body, response=0, **common)
    yield measure("push-window", push_window, pair, request=body, response=0, per_run=4 * window, **common)
