"""Readers beside training: how soon a commit can be read, and what it costs training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.runner import Progress, Result, percentiles, seconds_of, silent, table
from benchmarks.workers import BusyWorker, Interpreter, Process
from elasticps.client import Client, connect
from elasticps.client.tables import SparseTable
from elasticps.local import LocalCluster
from elasticps.model.optimizers import Accumulate, Adagrad
from elasticps.model.spec import TableSpec, Zeros
from elasticps.readers import Reader, reader
from elasticps.store import Store, Table

DIM = 64
WORKERS = 2
BATCH = 1024
HIDDEN = 256
LOOKED_S = 0.0002  # between two looks of the reader at the mark
PULLED = 8192
SETTLE_S = 1.0  # a reader that is attached has read its ranges, and is as new as it will be


@dataclass(frozen=True)
class Share:
    """Samples a second of the turns without and with a reader, in pairs; their ratio's median."""

    without: tuple[float, ...]
    beside: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the turns' ratios."""
        return float(np.median([b / w for b, w in zip(self.beside, self.without, strict=True)]))


@dataclass(frozen=True)
class ReaderRun:
    """What was measured.

    readable_ms    from a commit to its row being readable in another process
    attached, stopped  training beside a reader, and beside one that is stopped
    pull_share     rows a second of a pull of 8,192 rows in the reader's process, by those of the bare store's gather
    bytes_per_row  of windows, by rows that they brought; of these key and weights take `row_bytes`
    """

    every_ms: float
    readable_ms: dict[str, float]
    attached: Share
    stopped: Share
    pull_share: float
    bytes_per_row: float
    row_bytes: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "every_ms": self.every_ms, "readable_ms": self.readable_ms, "attached": self.attached.ratio,
            "stopped": self.stopped.ratio, "samples_per_s": self.attached.without, "pull_share": self.pull_share,
            "bytes_per_row": self.bytes_per_row, "row_bytes": self.row_bytes,
        }  # fmt: skip


class RowTrainer(BusyWorker):
    """A worker that trains at full speed: pulls a batch of rows, computes, pushes. layers: how much it computes."""

    def __init__(self, url: str, number: int, rows: int, layers: int) -> None:
        super().__init__()
        self.client: Client = connect(url, worker=f"w{number}")
        self.table: SparseTable = self.client.table("rows", dim=DIM, optimizer=Adagrad(lr=0.01))
        self._rows, self._layers = rows, layers
        self._random = np.random.default_rng(number)
        self._steps = 0

    def run(self) -> None:
        inner, outer = (
            self._random.random(shape, np.float32) / np.float32(DIM) for shape in ((DIM, HIDDEN), (HIDDEN, DIM))
        )
        while not self.ended.is_set():
            keys = self._random.integers(0, self._rows, BATCH)
            rows = self.table.pull(keys)
            grads = rows
            for _ in range(self._layers):  # forward and backward, about as a small model does
                grads = np.maximum(grads @ inner, 0) @ outer
            self.client.push({self.table: (keys, np.clip(grads, -1, 1))})
            self._steps += 1

    def steps(self) -> int:
        """Steps so far."""
        self.check()
        return self._steps

    def mark(self, count: int, pause_s: float) -> list[tuple[int, float]]:
        """Pushes one to a row of its own, again and again; when each was committed."""
        marks, found = self.client.table("marks", dim=1, optimizer=Accumulate()), []
        for i in range(count):
            self.client.push({marks: (np.zeros(1, np.int64), np.ones((1, 1), np.float32))}).result()
            found.append((i + 1, time.monotonic()))
            time.sleep(pause_s)
        return found


def _gather(bare: Table, keys: NDArray[np.int64]) -> None:
    bare.gather(keys, np.empty((len(keys), DIM), np.float32))


class ReaderProcess:
    """A process that reads, and notes when it could read each mark."""

    def __init__(self, url: str, every: float, dtype: str | None) -> None:
        self._url, self._every, self._dtype = url, every, dtype
        self._reader: Reader | None = None
        self._seen: list[tuple[int, float]] = []
        self._ended = threading.Event()

    def attach(self) -> None:
        """Connects."""
        self._reader = reader(self._url, every=self._every, dtype=self._dtype)

    def detach(self) -> None:
        """Leaves."""
        assert self._reader is not None
        self._reader.close()
        self._reader = None

    def look(self) -> None:
        """Begins to look at the mark."""
        self._seen, self._ended = [], threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        newest, key = 0, {"marks": np.zeros(1, np.int64)}
        while not self._ended.is_set() and self._reader is not None:
            if "marks" in self._reader.tables:
                value = int(self._reader.pull(key)["marks"][0, 0])
                if value > newest:
                    newest = value
                    self._seen.append((value, time.monotonic()))
            time.sleep(LOOKED_S)

    def seen(self) -> list[tuple[int, float]]:
        """When each value of the mark could be read first."""
        self._ended.set()
        return self._seen

    def pull_share(self, rows: int, turns: int = 200) -> float:
        """Rows a second of pulls by those of the bare store."""
        assert self._reader is not None
        store = Store(256)
        bare = store.create(TableSpec("rows", DIM, Adagrad(lr=0.01), Zeros()), 1)
        every = np.arange(rows)
        for start in range(0, rows, 1 << 16):
            some = every[start : start + (1 << 16)]
            bare.put(some, np.zeros((len(some), DIM), np.float32))
        random = np.random.default_rng(1)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(turns):
            keys = random.integers(0, rows, PULLED)
            times[0].append(seconds_of(partial(_gather, bare, keys)))
            times[1].append(seconds_of(partial(self._reader.pull, {"rows": keys})))
        return float(np.median(times[0]) / np.median(times[1]))

    def stats(self) -> tuple[int, int]:
        """Bytes of windows, and rows that they brought."""
        assert self._reader is not None
        found = self._reader.stats()
        return found.window_bytes, found.changed

    def close(self) -> None:
        """Ends."""
        if self._reader is not None:
            self.detach()


def run(
    every_ms: float = 5.0, rows: int = 200_000, turns: int = 5, seconds: float = 3.0, marks: int = 300,
    servers: int = 2, dtype: str | None = None, layers: int = 6, progress: Progress = silent,
) -> Result:  # fmt: skip
    """Two workers at full speed, and a reader beside. layers: how much they compute in a step, 0: nothing."""
    with LocalCluster(servers=servers, replicas=1) as cluster:
        progress("filling the table")
        with connect(cluster.url, worker="filler") as ps:
            rows_table = ps.table("rows", dim=DIM, optimizer=Adagrad(lr=0.01))
            ps.table("marks", dim=1, optimizer=Accumulate())
            for start in range(0, rows, 1 << 14):
                keys = np.arange(start, min(rows, start + (1 << 14)))
                ps.push({rows_table: (keys, np.ones((len(keys), DIM), np.float32))}).result()
        one = Interpreter(environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        job = {"url": cluster.url, "rows": rows, "layers": layers}
        trainers = [Process("readers:RowTrainer", one, number=i, **job) for i in range(WORKERS)]
        marker = Process("readers:RowTrainer", one, number=9, **job)
        beside = Process("readers:ReaderProcess", url=cluster.url, every=every_ms / 1e3, dtype=dtype)
        try:
            beside.ask("attach")
            pull_share = beside.ask("pull_share", rows=rows)
            for trainer in trainers:
                trainer.ask("begin")
            time.sleep(SETTLE_S)
            progress("from commits to reads")
            beside.ask("look")
            before = beside.ask("stats")
            committed = dict(marker.ask("mark", count=marks, pause_s=0.01))
            time.sleep(SETTLE_S)
            seen = beside.ask("seen")
            after = beside.ask("stats")
            late_ms = _readable(committed, seen)
            beside.ask("detach")
            attached, stopped = _in_turns(trainers, beside, turns, seconds, progress)
        finally:
            for process in (*trainers, marker, beside):
                process.close()
    brought = max(after[1] - before[1], 1)
    found = ReaderRun(
        every_ms, percentiles(late_ms, 50, 99, 100, digits=2), attached, stopped, round(pull_share, 3),
        round((after[0] - before[0]) / brought, 1), 8 + 4 * DIM,
    )  # fmt: skip
    lines = [
        ("commit to readable, p50", f"{found.readable_ms['p50']:.1f} ms"),
        ("commit to readable, p99", f"{found.readable_ms['p99']:.1f} ms"),
        ("training with a reader", f"{attached.ratio:.2f} of without"),
        ("training with a stopped reader", f"{stopped.ratio:.2f} of without"),
        (f"pull of {PULLED:,} rows", f"{found.pull_share:.2f} of the bare store"),
        ("bytes for each changed row", f"{found.bytes_per_row:.0f}, key and weights {found.row_bytes}"),
    ]
    title = f"A reader beside {WORKERS} workers, a window every {every_ms:g} ms"
    return Result(found, [table(title, lines, [("", lambda line: line[0]), ("found", lambda line: line[1])])])


def _readable(committed: dict[int, float], seen: Sequence[Sequence[float]]) -> list[float]:
    """How long after its commit each mark could be read, ms; a later one shows an earlier one, too."""
    found, at = [], 0
    for mark in sorted(committed):
        while at < len(seen) and seen[at][0] < mark:
            at += 1
        if at < len(seen):
            found.append(max(0.0, 1e3 * (seen[at][1] - committed[mark])))
    return found


def _in_turns(
    trainers: Sequence[Process], beside: Process, turns: int, seconds: float, progress: Progress
) -> tuple[Share, Share]:
    """Samples a second of turns without a reader, with one, and with one that is stopped, in pairs."""

    def rate() -> float:
        before = sum(trainer.ask("steps") for trainer in trainers)
        began = time.monotonic()
        time.sleep(seconds)
        return float(BATCH * (sum(trainer.ask("steps") for trainer in trainers) - before) / (time.monotonic() - began))

    rates: tuple[list[float], ...] = ([], [], [])
    for turn in range(turns):
        progress(f"turn {turn + 1} of {turns}")
        rates[0].append(rate())
        beside.ask("attach")
        time.sleep(SETTLE_S)
        rates[1].append(rate())
        os.kill(beside.pid, signal.SIGSTOP)
        time.sleep(SETTLE_S)
        rates[2].append(rate())
        os.kill(beside.pid, signal.SIGCONT)
        beside.ask("detach")
        time.sleep(SETTLE_S / 2)
    without = tuple(rates[0])
    return Share(without, tuple(rates[1])), Share(without, tuple(rates[2]))
