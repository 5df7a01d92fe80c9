"""Readers beside training: how soon a commit can be read, here and far away, and what it costs training."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.machine import cpu_seconds
from benchmarks.relay import Link
from benchmarks.runner import Progress, Result, percentiles, seconds_of, silent, table
from benchmarks.workers import BusyWorker, Interpreter, Process
from elasticps.client import Client, connect
from elasticps.client.tables import SparseTable
from elasticps.local import LocalCluster
from elasticps.model.optimizers import Accumulate, Adagrad
from elasticps.model.spec import TableSpec, Zeros
from elasticps.readers import Reader, reader, remote_reader
from elasticps.readers.pull_server import PullServer
from elasticps.readers.rows import codec_of
from elasticps.store import Store, Table

DIM = 64
WORKERS = 2
BATCH = 1024
HIDDEN = 256
LOOKED_S = 0.0002  # between two looks of the reader at the mark
PULLED = 8192
DELAY_MS = 50.0  # of the link to the reader behind a relay, in each direction
LEAST_NICE = 19
DRAWN = 1 << 20  # skewed keys that a worker draws before it begins, and goes through again and again
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
class Cost:
    """Processor time of a step without and with a reader, microseconds, of all processes of a kind together."""

    servers_us: tuple[float, float]
    workers_us: tuple[float, float]
    reader_us: float

    @property
    def ratio(self) -> float:
        """A step's processor time in all processes without a reader, by that with one."""
        without, beside = self._training_us()
        return without / (beside + self.reader_us)

    @property
    def training_ratio(self) -> float:
        """The same of servers and workers alone: what is left of training where the reader has a core for itself."""
        without, beside = self._training_us()
        return without / beside

    def _training_us(self) -> list[float]:
        return [servers + workers for servers, workers in zip(self.servers_us, self.workers_us, strict=True)]


@dataclass(frozen=True)
class ReaderRun:
    """What was measured.

    skew           exponent of the Zipf distribution of the workers' keys, 0: uniform; dtype: the reader's
    readable_ms    from a commit to its row being readable in another process; far_ms: in one behind a relay, over a
                   link that takes 50 ms in each direction
    attached, niced, stopped  training beside a reader, beside one at the least priority, and beside one that is stopped
    pull_share     rows a second of a pull of 8,192 rows in the reader's process, by those of the bare store's gather
    remote_share   the same of a pull from the reader's process, by those of a pull from the servers
    bytes_per_row  of windows, by rows that they brought; of these key and weights take `row_bytes`
    """

    every_ms: float
    skew: float
    dtype: str
    readable_ms: dict[str, float]
    far_ms: dict[str, float]
    attached: Share
    niced: Share
    stopped: Share
    cost: Cost
    pull_share: float
    remote_share: float
    bytes_per_row: float
    row_bytes: int

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "every_ms": self.every_ms, "skew": self.skew, "dtype": self.dtype, "readable_ms": self.readable_ms,
            "far_ms": self.far_ms,
            "attached": self.attached.ratio, "niced": self.niced.ratio, "stopped": self.stopped.ratio,
            "samples_per_s": self.attached.without, "cost": asdict(self.cost), "cost_ratio": self.cost.ratio,
            "training_ratio": self.cost.training_ratio,
            "pull_share": self.pull_share, "remote_share": self.remote_share, "bytes_per_row": self.bytes_per_row,
            "row_bytes": self.row_bytes,
        }  # fmt: skip


class Keys:
    """Draws batches of keys below `rows`: uniform, or by Zipf's law with exponent `skew`, over ids that are shuffled,
    for all workers alike."""

    def __init__(self, random: np.random.Generator, rows: int, skew: float) -> None:
        self._random, self._rows, self._at = random, rows, 0
        self._drawn: NDArray[np.int64] | None = None
        if skew > 0:
            up_to = np.cumsum(np.arange(1, rows + 1) ** -skew)
            ranks = np.searchsorted(up_to, random.random(DRAWN) * up_to[-1], side="right")
            self._drawn = np.random.default_rng(rows).permutation(rows)[np.minimum(ranks, rows - 1)]

    def draw(self, count: int) -> NDArray[np.int64]:
        """So many keys; of those drawn in advance the next ones."""
        if self._drawn is None:
            return self._random.integers(0, self._rows, count)
        if self._at + count > len(self._drawn):
            self._at = int(self._random.integers(0, count))  # other batches than the last time
        self._at += count
        return self._drawn[self._at - count : self._at]


class RowTrainer(BusyWorker):
    """A worker that trains at full speed: pulls a batch of rows, computes, pushes. layers: how much it computes; skew:
    of its keys."""

    def __init__(self, url: str, number: int, rows: int, layers: int, skew: float = 0.0) -> None:
        super().__init__()
        self.client: Client = connect(url, worker=f"w{number}")
        self.table: SparseTable = self.client.table("rows", dim=DIM, optimizer=Adagrad(lr=0.01))
        self._layers = layers
        self._random = np.random.default_rng(number)
        self._keys = Keys(self._random, rows, skew)
        self._steps = 0

    def run(self) -> None:
        inner, outer = (
            self._random.random(shape, np.float32) / np.float32(DIM) for shape in ((DIM, HIDDEN), (HIDDEN, DIM))
        )
        while not self.ended.is_set():
            keys = self._keys.draw(BATCH)
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

    def mark(self, count: int, pause_s: float, before: int = 0) -> list[tuple[int, float]]:
        """Pushes one to a row of its own, again and again; when each was committed. before: so often it was pushed."""
        marks, found = self.client.table("marks", dim=1, optimizer=Accumulate()), []
        for i in range(count):
            self.client.push({marks: (np.zeros(1, np.int64), np.ones((1, 1), np.float32))}).result()
            found.append((before + i + 1, time.monotonic()))
            time.sleep(pause_s)
        return found

    def remote_share(self, reader: str, rows: int, turns: int = 200) -> float:
        """Rows a second of pulls from a reader's process, by those of pulls from the servers, of the same keys."""
        times: tuple[list[float], list[float]] = ([], [])
        with remote_reader(reader) as remote:
            for _ in range(turns):
                keys = self._random.integers(0, rows, PULLED)
                times[0].append(seconds_of(partial(self.table.pull, keys)))
                times[1].append(seconds_of(partial(remote.pull, {"rows": keys})))
        return float(np.median(times[0]) / np.median(times[1]))


def _gather(bare: Table, keys: NDArray[np.int64]) -> None:
    bare.gather(keys, np.empty((len(keys), DIM), np.float32))


class ReaderProcess:
    """A process that reads, and notes when it could read each mark."""

    def __init__(self, url: str, every: float, dtype: str | None) -> None:
        self._url, self._every, self._dtype = url, every, dtype
        self._reader: Reader | None = None
        self._relay: PullServer | None = None
        self._seen: list[tuple[int, float]] = []
        self._ended = threading.Event()

    def listen(self) -> str:
        """Answers pulls, and feeds other readers; where."""
        assert self._reader is not None
        self._relay = self._relay or PullServer(self._reader, "127.0.0.1", 0)
        return self._relay.address

    def nice(self) -> None:
        """Has this process's threads run when no other wants to."""
        for thread in os.listdir("/proc/self/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), LEAST_NICE)

    def attach(self) -> None:
        """Connects."""
        self._reader = reader(self._url, every=self._every, dtype=self._dtype)

    def detach(self) -> None:
        """Leaves."""
        assert self._reader is not None
        if self._relay is not None:
            self._relay.close()
            self._relay = None
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
    servers: int = 2, dtype: str | None = None, layers: int = 6, skew: float = 0.0, progress: Progress = silent,
) -> Result:  # fmt: skip
    """Two workers at full speed, and a reader beside. layers: how much they compute in a step, 0: nothing; skew: the
    exponent of Zipf's law for their keys, 0: uniform; dtype: in which the reader has rows, None for the table's."""
    with LocalCluster(servers=servers, replicas=1) as cluster:
        progress("filling the table")
        with connect(cluster.url, worker="filler") as ps:
            rows_table = ps.table("rows", dim=DIM, optimizer=Adagrad(lr=0.01))
            ps.table("marks", dim=1, optimizer=Accumulate())
            for start in range(0, rows, 1 << 14):
                keys = np.arange(start, min(rows, start + (1 << 14)))
                ps.push({rows_table: (keys, np.ones((len(keys), DIM), np.float32))}).result()
        one = Interpreter(environment={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"})
        job = {"url": cluster.url, "rows": rows, "layers": layers, "skew": skew}
        trainers = [Process("readers:RowTrainer", one, number=i, **job) for i in range(WORKERS)]
        marker = Process("readers:RowTrainer", one, number=9, **job)
        beside = Process("readers:ReaderProcess", url=cluster.url, every=every_ms / 1e3, dtype=dtype)
        idle = Process("readers:ReaderProcess", url=cluster.url, every=every_ms / 1e3, dtype=dtype)
        servers_ids = [server.pid for server in cluster.servers]
        try:
            idle.ask("nice")
            beside.ask("attach")
            remote_share = marker.ask("remote_share", reader=beside.ask("listen"), rows=rows)
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
            progress("the same over a slow link")
            far_ms = _far(beside, marker, every_ms, dtype, marks)
            beside.ask("detach")
            attached, niced, stopped, cost = _in_turns(trainers, beside, idle, servers_ids, turns, seconds, progress)
        finally:
            for process in (*trainers, marker, beside, idle):
                process.close()
    brought = max(after[1] - before[1], 1)
    found = ReaderRun(
        every_ms, skew, dtype or "float32", percentiles(late_ms, 50, 99, 100, digits=2),
        percentiles(far_ms, 50, 99, 100, digits=2), attached, niced, stopped, cost, round(pull_share, 3),
        round(remote_share, 3), round((after[0] - before[0]) / brought, 1),
        8 + 4 * codec_of(rows_table.spec, dtype).words,
    )  # fmt: skip
    lines = [
        ("commit to readable, p50", f"{found.readable_ms['p50']:.1f} ms"),
        ("commit to readable, p99", f"{found.readable_ms['p99']:.1f} ms"),
        (f"through a relay, {DELAY_MS:g} ms away, p50", f"{found.far_ms['p50']:.1f} ms"),
        (f"through a relay, {DELAY_MS:g} ms away, p99", f"{found.far_ms['p99']:.1f} ms"),
        ("training with a reader", f"{attached.ratio:.2f} of without"),
        ("training with a reader at nice 19", f"{niced.ratio:.2f} of without"),
        ("training with a stopped reader", f"{stopped.ratio:.2f} of without"),
        ("processor time of servers in a step", "{:.0f} us, with a reader {:.0f}".format(*cost.servers_us)),
        ("processor time of workers in a step", "{:.0f} us, with a reader {:.0f}".format(*cost.workers_us)),
        ("processor time of the reader in a step", f"{cost.reader_us:.0f} us"),
        ("a step's processor time without a reader", f"{cost.ratio:.3f} of that with one"),
        ("the same of servers and workers alone", f"{cost.training_ratio:.3f}"),
        (f"pull of {PULLED:,} rows", f"{found.pull_share:.2f} of the bare store"),
        ("the same from the reader's process", f"{found.remote_share:.2f} of a pull from servers"),
        ("bytes for each changed row", f"{found.bytes_per_row:.0f}, key and weights {found.row_bytes}"),
    ]
    keys_are = f"keys by Zipf's law, exponent {skew:g}" if skew else "uniform keys"
    title = f"A {found.dtype} reader beside {WORKERS} workers, a window every {every_ms:g} ms, {keys_are}"
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


def _far(beside: Process, marker: Process, every_ms: float, dtype: str | None, marks: int) -> list[float]:
    """How long after its commit each mark could be read behind a relay, over a slow link, ms."""
    address = beside.ask("listen")
    with Link([address]) as link:
        url = f"reader://127.0.0.1:{link.ports[address]}"
        far = Process("readers:ReaderProcess", url=url, every=every_ms / 1e3, dtype=dtype)
        try:
            far.ask("attach")
            link.delay(DELAY_MS)
            time.sleep(SETTLE_S)
            far.ask("look")
            committed = dict(marker.ask("mark", count=marks, pause_s=0.01, before=marks))
            time.sleep(SETTLE_S)
            seen = far.ask("seen")
        finally:
            far.close()
    return _readable(committed, seen)


class _Turn(NamedTuple):
    """Of one turn: samples a second, steps, processor time of servers, workers and the reader."""

    rate: float
    used: NDArray[np.float64]


def _in_turns(
    trainers: Sequence[Process],
    beside: Process,
    idle: Process,
    servers: Sequence[int],
    turns: int,
    seconds: float,
    progress: Progress,
) -> tuple[Share, Share, Share, Cost]:
    """Samples a second of turns without a reader, with one, with one of least priority, and with one that is stopped,
    in pairs; and what a step costs whom."""
    kinds = servers, [trainer.pid for trainer in trainers], [beside.pid]

    def count() -> NDArray[np.float64]:
        return np.array([sum(trainer.ask("steps") for trainer in trainers), *map(cpu_seconds, kinds)])

    def turn() -> _Turn:
        before, began = count(), time.monotonic()
        time.sleep(seconds)
        used = count() - before
        return _Turn(float(BATCH * used[0] / (time.monotonic() - began)), used)

    found: tuple[list[_Turn], ...] = ([], [], [], [])
    for number in range(turns):
        progress(f"turn {number + 1} of {turns}")
        found[0].append(turn())
        beside.ask("attach")
        time.sleep(SETTLE_S)
        found[1].append(turn())
        os.kill(beside.pid, signal.SIGSTOP)
        time.sleep(SETTLE_S)
        found[3].append(turn())
        os.kill(beside.pid, signal.SIGCONT)
        beside.ask("detach")
        idle.ask("attach")
        time.sleep(SETTLE_S)
        found[2].append(turn())
        idle.ask("detach")
        time.sleep(SETTLE_S / 2)
    without = tuple(each.rate for each in found[0])
    attached, niced, stopped = (Share(without, tuple(each.rate for each in one)) for one in found[1:])
    plain, more = (np.sum([each.used for each in one], axis=0) for one in found[:2])
    (_, *plain_us), (_, *more_us) = ((1e6 * total / max(total[0], 1)).tolist() for total in (plain, more))
    return attached, niced, stopped, Cost((plain_us[0], more_us[0]), (plain_us[1], more_us[1]), more_us[2])
