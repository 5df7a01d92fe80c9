"""What a checkpoint costs those who train, and how fast it is written."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.machine import rss_bytes
from benchmarks.runner import Progress, Result, percentiles, silent, table
from benchmarks.speed import fill
from coordinator.connect import open_store
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.create import by_grpc, checkpoint_cluster
from elasticps.checkpoint.cuts import CutTaker
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.restore import restore_cluster
from elasticps.checkpoint.row_writer import write
from elasticps.checkpoint.rows import RowFile
from elasticps.checkpoint.storage import Storage
from elasticps.client import Client, SparseTable, connect
from elasticps.local import LocalCluster
from elasticps.model.spec import Adagrad, TableSpec
from elasticps.server.core.scan import FILE_BYTES
from elasticps.store import Store
from elasticps.store.layout import RowLayout
from elasticps.system import background

BATCH = 256
CUTS = 20
TIMES = 3  # that a checkpoint without work beside it is made: the median counts
SETTLED_S = 3.0
IDLE_S = 5.0  # memory free for so long a virtual machine gives back; to get it again costs seconds per GB
_AFTER_S = 0.05  # at most, from the end of a hold until it is known whether the cut was consistent


def run(
    *, rows: int = 1_000_000, dim: int = 64, servers: int = 3, seconds: float = 5.0, progress: Progress = silent
) -> Result:
    """Rows of `dim` float32 with Adagrad at two replicas, while a worker pulls and pushes batches of 256: before, and
    while 20 cuts are taken, and while a full checkpoint is written to a temporary folder; then, without work beside,
    some of 1 % changed rows, and full ones. Beside that, one plain process writes as much to the same folder. At last a
    cluster like the first is restored, and one plain process reads the same files and puts the rows into a store; both
    find nothing in the system's cache, and memory that nobody has used for a while."""
    with tempfile.TemporaryDirectory() as folder:
        found = _write(Path(folder).as_uri(), rows, dim, servers, seconds, progress)
        found |= _read(Path(folder).as_uri(), servers, progress)
    return Result(found, [_shown(found)])


def _shown(found: dict[str, Any]) -> Table:
    """Beside what is required."""

    def both(name: str) -> str:
        return f"{found[f'{name}_ms_p50']:.1f} and {found[f'{name}_ms_p99']:.1f} ms"

    lines = [
        ("workers are held by a cut, p50 and p99", both("held"), ""),
        ("a push waits for it, beyond its usual time", both("waited"), "p99 ≤ 50 ms"),
        ("throughput while it is written, of before", f"{found['throughput_while_writing']:.2f}", "≥ 0.85"),
        ("p99 of an operation, of before", f"{found['p99_while_writing']:.2f}", "≤ 2"),
        ("memory of all servers, of before", f"{found['memory_while_writing']:.2f}", "≤ 1.1"),
        ("written, without work beside it", f"{found['bytes_per_s'] / 1e6:,.0f} MB/s", ""),
        ("of what one plain process writes", f"{found['of_plain_process']:.2f}", "≥ 0.6"),
        ("an increment of 1 %: bytes, of all", f"{found['increment_bytes']:.3f}", "≤ 0.02"),
        ("time, of all", f"{found['increment_time']:.3f}", "≤ 0.10"),
        ("restored in", f"{found['restore_s']:.2f} s", ""),
        ("speed, of reading it into a bare store", f"{found['restore_of_bare_store']:.2f}", "≥ 0.5"),
    ]
    title = f"a checkpoint of {found['bytes'] / 1e9:.2f} GB, {found['servers']} servers"
    columns = [("", lambda line: line[0]), ("measured", lambda line: line[1]), ("asked", lambda line: line[2])]
    return table(title, lines, columns)


def _write(place: str, rows: int, dim: int, servers: int, seconds: float, progress: Progress) -> dict[str, Any]:
    with (
        LocalCluster(servers=servers, replicas=2) as cluster,
        connect(cluster.url, worker="bench", timeout=120.0) as ps,
    ):
        table = ps.table("bench", dim=dim, optimizer=Adagrad(lr=0.01))
        progress(f"filling {rows:,} rows of {dim} floats")
        keys = fill(ps, table, rows)
        pids = [server.pid for server in cluster.servers]
        _settle(ps)
        progress("training")
        with _training(ps, table, keys) as work:
            before = work.during(lambda: time.sleep(seconds))
            progress(f"taking {CUTS} cuts")
            held = _held_s(cluster.url, place)
            waited = [work.longest_s(span) - 1e-6 * before["p50_us"] for span in held]
            progress("writing a full checkpoint")
            memory = [_rss(pids)]
            with _sampling(pids, memory):
                while_writing = work.during(lambda: checkpoint_cluster(cluster.url, place, full=True))
        checkpoint_cluster(cluster.url, place)  # what was changed meanwhile
        progress(f"writing {TIMES} increments, {TIMES} full ones")
        changed = np.array_split(keys, 100)
        increments = []
        for some in changed[:TIMES]:
            ps.push({table: (some, np.ones((len(some), dim), np.float32))}).result()
            increments.append(_timed(lambda: checkpoint_cluster(cluster.url, place)))
        wholes = [_timed(lambda: checkpoint_cluster(cluster.url, place, full=True)) for _ in range(TIMES)]
        increment_s, full_s = (float(np.median([took for took, _ in some])) for some in (increments, wholes))
        increment, full = increments[-1][1], wholes[-1][1]
        progress("writing as much from one process")
        plain_s = _plain_s(table.spec, full.nbytes, Storage(place))
    return {
        "rows": rows, "dim": dim, "servers": servers, "bytes": full.nbytes,
        **_percentiles("held", [end - begin for begin, end in held]), **_percentiles("waited", waited),
        "throughput_while_writing": while_writing["per_s"] / before["per_s"],
        "p99_while_writing": while_writing["p99_us"] / before["p99_us"],
        "memory_while_writing": max(memory) / memory[0],
        "full_s": full_s, "bytes_per_s": full.nbytes / full_s, "of_plain_process": plain_s / full_s,
        "increment_bytes": increment.nbytes / full.nbytes, "increment_time": increment_s / full_s,
        "before": before, "while_writing": while_writing,
    }  # fmt: skip


def _read(place: str, servers: int, progress: Progress) -> dict[str, Any]:
    """The newest checkpoint."""
    with LocalCluster(servers=servers, replicas=2) as cluster:
        progress("restoring it")
        _leave_alone(place)
        began = time.perf_counter()
        rows = restore_cluster(cluster.url, place).rows
        restore_s = time.perf_counter() - began
    progress("reading it into a store")
    _leave_alone(place)
    began = time.perf_counter()
    contents = Contents(Storage(place), catalog.chain(Storage(place)))
    store = Store(contents.manifest.ranges)
    for number, spec in contents.manifest.tables.values():
        table = store.create(spec, number)
        for unit in contents.units(number):
            for piece in contents.read(unit):
                table.load_range(piece.range, piece.keys, piece.rows)
    bare_s = time.perf_counter() - began
    assert store.rows <= rows, (
        f"{rows} rows were restored, the checkpoint has {store.rows}"
    )  # some twice, if ranges moved
    return {"restore_s": restore_s, "restore_of_bare_store": bare_s / restore_s}


def _leave_alone(place: str) -> None:
    """Has files out of the system's cache, where that can be, and free memory as if it had been free for long."""
    for path in Path(unquote(urlsplit(place).path)).rglob("*.safetensors"):
        with path.open("rb") as file:
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(IDLE_S)


class _Work:
    """How long each operation of a thread took that pulls and pushes all the time."""

    def __init__(self) -> None:
        self.took_s: list[float] = []
        self.ended_s: list[float] = []

    def longest_s(self, span: tuple[float, float]) -> float:
        """The longest operation of those that had something to do with a time."""
        took, ended = np.array(self.took_s), np.array(self.ended_s)
        n = min(len(took), len(ended))  # the thread goes on
        took, ended = took[:n], ended[:n]
        return float(took[(ended > span[0]) & (ended - took < span[1])].max(initial=0.0))

    def during(self, call: Callable[[], object]) -> dict[str, float]:
        """How it went while something was done."""
        first, began = len(self.took_s), time.perf_counter()
        call()
        took = time.perf_counter() - began
        some = np.array(self.took_s[first:])
        return {
            "seconds": took, "per_s": len(some) / took, "p50_us": 1e6 * float(np.percentile(some, 50)),
            "p99_us": 1e6 * float(np.percentile(some, 99)), "max_ms": 1e3 * float(some.max()),
        }  # fmt: skip


@contextmanager
def _training(ps: Client, table: SparseTable, keys: NDArray[np.int64]) -> Iterator[_Work]:
    work, stop = _Work(), threading.Event()
    grads = np.ones((BATCH, table.dim), np.float32)

    def train() -> None:
        random = np.random.default_rng(0)
        while not stop.is_set():
            some = random.choice(keys, BATCH)
            began = time.perf_counter()
            table.pull(some)
            ps.push({table: (some, grads)}).result()
            ended = time.perf_counter()
            work.took_s.append(ended - began)
            work.ended_s.append(ended)

    thread = threading.Thread(target=train, name="bench")
    thread.start()
    try:
        yield work
    finally:
        stop.set()
        thread.join()


def _settle(ps: Client) -> None:
    """Waits until no view has come for a while: a checkpoint of ranges that move is given up."""
    epoch, since_s = ps.view.epoch, time.monotonic()
    while time.monotonic() - since_s < SETTLED_S:
        time.sleep(0.05)
        if ps.view.epoch != epoch:
            epoch, since_s = ps.view.epoch, time.monotonic()


def _timed(make: Callable[[], Manifest]) -> tuple[float, Manifest]:
    began = time.perf_counter()
    made = make()
    return time.perf_counter() - began, made


def _percentiles(name: str, some_s: list[float]) -> dict[str, float]:
    return {f"{name}_ms_{q}": 1e3 * value for q, value in percentiles(some_s, 50, 99).items()}


def _held_s(url: str, place: str) -> list[tuple[float, float]]:
    """From when to when workers are held at most, of some cuts."""

    async def take() -> list[tuple[float, float]]:
        store = await open_store(url)
        try:
            async with by_grpc(None) as connect:
                driver = CutTaker(store, connect)
                found = []
                for _ in range(CUTS):
                    held_s = (await driver.take(place)).held_s
                    found.append((time.perf_counter() - held_s - _AFTER_S, time.perf_counter()))
                return found
        finally:
            await store.close()

    return background.run(take())


def _rss(pids: list[int]) -> int:
    return sum(map(rss_bytes, pids))


@contextmanager
def _sampling(pids: list[int], into: list[int]) -> Iterator[None]:
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            into.append(_rss(pids))

    thread = threading.Thread(target=sample, name="memory")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _plain_s(spec: TableSpec, nbytes: int, storage: Storage) -> float:
    """Seconds in which one process that does nothing else writes such files, of rows that it has as a block."""
    stride = RowLayout.of(spec).stride
    memory = np.ones(FILE_BYTES, np.uint8)
    n = RowFile(spec, memory).room
    rows, keys, stamps = np.ones((n, stride), np.uint8), np.arange(n), np.zeros(n, np.int32)
    began = time.perf_counter()
    for number in range(-(-nbytes // FILE_BYTES)):
        file = RowFile(spec, memory)
        file.add(0, keys, rows, stamps, full=True)
        write(storage, "plain", f"{number:03d}.safetensors", 1, file)
    return time.perf_counter() - began
