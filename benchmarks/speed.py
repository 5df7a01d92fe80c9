"""Speed of pulls and pushes through the whole path, from client to store and back, beside a plain socket pair."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import SocketPair, cpu_seconds, memcpy_gb_per_s, socket_pair
from benchmarks.runner import Progress, Result, seconds_of, silent, table
from elasticps.client import Client, SparseTable, connect
from elasticps.local import LocalCluster
from elasticps.model.spec import SGD, Adagrad

BATCHES = (64, 1024, 8192, 65536)
SIZES_MB = (1, 16, 64)
FILL_BATCH = 65536
VARIANTS = 32  # different batches of keys, so that rows do not stay in the cache
ROUNDS = 10
HEADER = 64


@dataclass(frozen=True)
class SpeedLine:
    """One operation and size. `gb_per_s` counts request and answer; `loopback_gb_per_s` is the plain socket pair with
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


def sparse(
    *,
    batches: Sequence[int] = BATCHES,
    rows: int = 1_000_000,
    dim: int = 64,
    servers: int = 1,
    replicas: Sequence[int] = (1,),
    window: int = 4,
    tls: bool = False,
    seconds: float = 4.0,
    progress: Progress = silent,
) -> Result:
    """Measures pull, push (each waited for) and push-window (up to `window` outstanding) by batch size.

    Starts a local cluster for each number of replicas, fills a table of `rows` random int64 keys x `dim` float32 with
    Adagrad. The clusters are measured in turns, so that they see the same noise; `of_first` compares with the first.
    """
    found = []
    with socket_pair() as pair, ExitStack() as stack:
        memcpy = memcpy_gb_per_s()
        clusters = []
        for count in replicas:
            progress(f"starting a cluster with {count} replica{'s' if count > 1 else ''}")
            cluster = stack.enter_context(LocalCluster(servers=servers, replicas=count, tls=tls))
            ps = stack.enter_context(connect(cluster.url, worker="bench", window=window, timeout=120.0))
            rows_table = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
            progress(f"filling {rows:,} rows of {dim} floats")
            keys = fill(ps, rows_table, rows)
            cpu = partial(cpu_seconds, [server.pid for server in cluster.servers])
            clusters.append((_Stopwatch(pair, servers, count, memcpy, seconds, cpu), ps, rows_table, keys))
        for batch in batches:
            progress(f"batch {batch}")
            for first, *others in zip(*(_batch(*cluster, batch, window) for cluster in clusters), strict=True):
                found += [first, *(replace(each, of_first=each.rows_per_s / first.rows_per_s) for each in others)]
    title = f"sparse: {rows:,} rows x {dim} float32, {servers} server(s), one worker{', TLS' * tls}"
    several = len(set(replicas)) > 1
    columns: list[tuple[str, Callable[[SpeedLine], object]]] = [("batch", lambda line: f"{line.batch:,}")]
    if several:
        columns.append(("replicas", lambda line: line.replicas))
        columns.append((f"of {replicas[0]}", lambda line: f"{line.of_first:.0%}" if line.of_first else ""))
    columns.append(("M rows/s", lambda line: f"{line.rows_per_s / 1e6:.2f}"))
    columns.append(("CPU µs/row", lambda line: f"{line.server_cpu_us_per_row or 0:.2f}"))
    return _result(found, title, columns)


def dense(
    *,
    sizes_mb: Sequence[int] = SIZES_MB,
    servers: int = 1,
    replicas: int = 1,
    seconds: float = 4.0,
    progress: Progress = silent,
) -> Result:
    """Measures pull (into the caller's array), push, and push-lent (`copy=False`), with SGD, by size of the tensor."""
    found: list[SpeedLine] = []
    progress("starting a cluster")
    with (
        LocalCluster(servers=servers, replicas=replicas) as cluster,
        socket_pair() as pair,
        connect(cluster.url, worker="bench", timeout=120.0) as ps,
    ):
        stopwatch = _Stopwatch(pair, servers, replicas, memcpy_gb_per_s(), seconds)
        for size in sizes_mb:
            progress(f"{size} MB")
            found += _size(stopwatch, ps, size)
    columns = [("MB", lambda line: f"{line.dim * 4 / 1e6:g}")]
    return _result(found, f"dense: {servers} server(s), one worker", columns)


def _result(lines: list[SpeedLine], title: str, columns: Sequence[tuple[str, Callable[[SpeedLine], object]]]) -> Result:
    shown = table(title, lines, [
        ("op", lambda line: line.op), *columns, ("GB/s", lambda line: f"{line.gb_per_s:.2f}"),
        ("p50 µs", lambda line: f"{line.p50_us:,.0f}"), ("p99 µs", lambda line: f"{line.p99_us:,.0f}"),
        ("socket pair GB/s", lambda line: f"{line.loopback_gb_per_s:.2f}"),
        ("ratio", lambda line: f"{line.loopback_ratio:.0%}"),
    ])  # fmt: skip
    return Result(lines, [shown, *(f"memcpy on this machine: {each.memcpy_gb_per_s:.1f} GB/s" for each in lines[:1])])


def fill(ps: Client, rows_table: SparseTable, rows: int) -> NDArray[np.int64]:
    """Pushes one gradient to each of `rows` random keys and returns them: int64 [rows]."""
    keys = keys_of(rows)
    grads = np.full((FILL_BATCH, rows_table.dim), 0.1, np.float32)
    for at in range(0, rows, FILL_BATCH):
        part = keys[at : at + FILL_BATCH]
        ps.push({rows_table: (part, grads[: len(part)])})
    ps.flush()
    return keys


def keys_of(rows: int) -> NDArray[np.int64]:
    """The keys that `fill` pushes, int64 [rows], in random order."""
    keys: NDArray[np.int64] = np.random.default_rng(1).permutation(rows) * 7_919 - rows
    return keys


@dataclass(frozen=True)
class _Stopwatch:
    """Times operations on one cluster and the plain socket pair in turns, so that both see the same noise.

    seconds       spent on each operation
    server_cpu_s  CPU time that all servers have used so far
    """

    pair: SocketPair
    servers: int
    replicas: int
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
        repeats = max(2, int(self.seconds / ROUNDS / 2 / seconds_of(run)))
        used = self.server_cpu_s() if self.server_cpu_s else 0.0
        ours: list[float] = []
        plain: list[float] = []
        gc.disable()  # a collection of the benchmark's own garbage is not the system's latency
        try:
            for _ in range(ROUNDS):
                ours += [seconds_of(run) / per_run for _ in range(repeats)]
                plain += [self.pair.exchange(*sizes) for _ in range(repeats)]
        finally:
            gc.enable()
        cpu_us = None
        if self.server_cpu_s:
            cpu_us = (self.server_cpu_s() - used) * 1e6 / (ROUNDS * repeats * per_run * batch)
        p50, p99 = (float(np.percentile(ours, q)) for q in (50, 99))
        loopback = sum(sizes) / float(np.median(plain)) / 1e9
        speed = sum(sizes) / p50 / 1e9
        return SpeedLine(
            op, batch, dim, self.servers, self.replicas, 1, batch / p50, speed, p50 * 1e6, p99 * 1e6,
            loopback, speed / loopback, self.memcpy_gb_per_s, cpu_us,
        )  # fmt: skip


def _batch(
    stopwatch: _Stopwatch, ps: Client, rows_table: SparseTable, keys: NDArray[np.int64], batch: int, window: int
) -> Iterator[SpeedLine]:
    rng = np.random.default_rng(batch)
    chosen = itertools.cycle([keys[rng.integers(0, len(keys), batch)] for _ in range(VARIANTS)])
    grads = rng.standard_normal((batch, rows_table.dim)).astype(np.float32)

    def pull() -> None:
        rows_table.pull(next(chosen))

    def push() -> None:
        ps.push({rows_table: (next(chosen), grads)}).result()

    def push_window() -> None:
        for _ in range(4 * window):
            ps.push({rows_table: (next(chosen), grads)})
        ps.flush()

    measure = partial(stopwatch.measure, batch=batch, dim=rows_table.dim)
    key_bytes, row_bytes = 8 * batch, 4 * batch * rows_table.dim
    yield measure("pull", pull, request=key_bytes, response=row_bytes)
    yield measure("push", push, request=key_bytes + row_bytes, response=0)
    yield measure("push-window", push_window, request=key_bytes + row_bytes, response=0, per_run=4 * window)


def _size(stopwatch: _Stopwatch, ps: Client, size_mb: int) -> Iterator[SpeedLine]:
    values = np.full(size_mb * 250_000, 0.5, np.float32)
    tensor = ps.tensor(f"dense-{size_mb}", init=values, optimizer=SGD(lr=0.01))
    out = np.empty_like(values)
    measure = partial(stopwatch.measure, batch=1, dim=values.size)
    yield measure("pull", lambda: tensor.pull(out=out), request=0, response=values.nbytes)
    push = partial(measure, request=values.nbytes, response=0)
    yield push("push", lambda: ps.push({tensor: values}).result())
    yield push("push-lent", lambda: ps.push({tensor: values}, copy=False).result())
