"""Sparse pulls and pushes through the whole path: client, wire, server, store and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.limits import cpu_seconds, memcpy_gb_per_s, socket_pair
from benchmarks.measure import Bench, SpeedLine
from elasticps.client import Client, SparseTable, connect
from elasticps.local import LocalCluster
from elasticps.model.spec import Adagrad

BATCHES = (64, 1024, 8192, 65536)
FILL_BATCH = 65536
VARIANTS = 32  # different batches of keys, so that rows do not stay in the cache


def run(
    *,
    batches: Sequence[int] = BATCHES,
    rows: int = 1_000_000,
    dim: int = 64,
    servers: int = 1,
    replicas: Sequence[int] = (1,),
    window: int = 4,
    tls: bool = False,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[SpeedLine]:
    """Yields a result for pull, push (each waited for) and push-window (up to `window` outstanding) by batch size.

    Starts a local cluster for each number of replicas, fills a table of `rows` random int64 keys x `dim` float32 with
    Adagrad. The clusters are measured in turns, so that they see the same noise; `of_first` compares with the first.
    """
    with socket_pair() as pair, ExitStack() as stack:
        memcpy = memcpy_gb_per_s()
        clusters = []
        for count in replicas:
            progress(f"starting a cluster with {count} replica{'s' if count > 1 else ''}")
            cluster = stack.enter_context(LocalCluster(servers=servers, replicas=count, tls=tls))
            ps = stack.enter_context(connect(cluster.url, worker="bench", window=window, timeout=120.0))
            table = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
            progress(f"filling {rows:,} rows of {dim} floats")
            keys = fill(ps, table, rows)
            cpu = partial(cpu_seconds, [server.pid for server in cluster.servers])
            clusters.append((Bench(pair, servers, count, 1, memcpy, seconds, cpu), ps, table, keys))
        for batch in batches:
            progress(f"batch {batch}")
            for lines in zip(*(_batch(*cluster, batch, window) for cluster in clusters), strict=True):
                yield lines[0]
                for line in lines[1:]:
                    yield replace(line, of_first=line.rows_per_s / lines[0].rows_per_s)


def fill(ps: Client, table: SparseTable, rows: int) -> NDArray[np.int64]:
    """Pushes one gradient to each of `rows` random keys and returns them: int64 [rows]."""
    keys = keys_of(rows)
    grads = np.full((FILL_BATCH, table.dim), 0.1, np.float32)
    for at in range(0, rows, FILL_BATCH):
        part = keys[at : at + FILL_BATCH]
        ps.push({table: (part, grads[: len(part)])})
    ps.flush()
    return keys


def keys_of(rows: int) -> NDArray[np.int64]:
    """The keys that `fill` pushes, int64 [rows], in random order."""
    keys: NDArray[np.int64] = np.random.default_rng(1).permutation(rows) * 7_919 - rows
    return keys


def _batch(
    bench: Bench, ps: Client, table: SparseTable, keys: NDArray[np.int64], batch: int, window: int
) -> Iterator[SpeedLine]:
    rng = np.random.default_rng(batch)
    chosen = itertools.cycle([keys[rng.integers(0, len(keys), batch)] for _ in range(VARIANTS)])
    grads = rng.standard_normal((batch, table.dim)).astype(np.float32)

    def push_window() -> None:
        for _ in range(4 * window):
            ps.push({table: (next(chosen), grads)})
        ps.flush()

    def push() -> None:
        ps.push({table: (next(chosen), grads)}).result()

    key_bytes, rows, dim = 8 * batch, 4 * batch * table.dim, table.dim
    yield bench.measure(
        "pull", lambda: table.pull(next(chosen)), batch=batch, dim=dim, request=key_bytes, response=rows
    )
    yield bench.measure("push", push, batch=batch, dim=dim, request=key_bytes + rows, response=0)
    yield bench.measure(
        "push-window", push_window, batch=batch, dim=dim, request=key_bytes + rows, response=0, per_run=4 * window
    )
