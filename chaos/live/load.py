"""The audit load: workers whose every push is known by its number, and the exact sums that servers must end up with.

Step n of a worker's life adds small whole numbers, drawn by (seed, worker, life, n), to rows that all share and to a
tensor, and 1 to a row of its own *in every range*. Sums of whole numbers are exact. So afterwards the own rows tell how
many steps of each life every range has applied: all that were acknowledged, none that was not begun. And everything
else in that range must be exactly the sum of just those steps. The same goes to a second table, through filters that
lose nothing of such numbers, of which each worker keeps rows; and to a third through ones that do, of which replicas
must be the same, and no more.

Run as `python -m chaos.live.load` it is one worker. What it begins and what is acknowledged goes to a file, a small
record each, before it goes on: so the story survives kill -9.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from elasticps.client.pull import TablesPull
from elasticps.kernels.hashing import key_ranges, range_shift

DIM = 4
TOUCHED = 40
SHAPE = (30, 5)
BLOCK = 0  # the tensor is one block
OWN_FROM = 1 << 32  # keys from here on belong to one life of one worker each
OWN_SPAN = 1 << 20
READ_EVERY = 8  # steps between two looks at what it has written itself
TIMEOUT_S = 60.0
APP = "chaos"

BEGUN, COMMITTED, FAILED, READ, READ_FAILED, STALE = range(1, 7)
INCARNATIONS_MADE = 64  # of each worker: so many lives get their rows by `make_rows`
_NEWEST = 256  # records that are read to see how far a worker is
RECORD = np.dtype([("kind", "<u4"), ("step", "<u4"), ("time", "<f8")])


@dataclass(frozen=True)
class Job:
    """What one life of one worker is to do: the arguments of its process."""

    url: str
    seed: int
    worker: int
    life: int
    keys: int
    window: int
    pause_s: float
    ranges: int
    ledger: str

    @property
    def name(self) -> str:
        return f"w{self.worker}"


@dataclass(frozen=True)
class Part:
    """What one step adds, apart from the own rows: float32 [TOUCHED, DIM] to `keys`, float32 of SHAPE to the tensor."""

    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


def part(job: Job, step: int) -> Part:
    """Returns what step `step` (from 1) of a life adds. The lower a key, the more often it is touched."""
    random = np.random.default_rng((job.seed, job.worker, job.life, step))
    keys = np.unique((job.keys * random.random(TOUCHED) ** 2).astype(np.int64))
    rows = random.integers(-3, 4, (len(keys), DIM)).astype(np.float32)
    return Part(keys, rows, random.integers(-3, 4, SHAPE).astype(np.float32))


def own_keys(worker: int, life: int, ranges: int, salt: np.uint64) -> NDArray[np.int64]:
    """Returns a key in each range that only this life of this worker touches: int64 [ranges]."""
    start = OWN_FROM + (worker * 4096 + life) * OWN_SPAN
    chosen = np.full(ranges, -1, np.int64)
    for begin in range(start, start + OWN_SPAN, 16 * ranges):
        keys = np.arange(begin, begin + 16 * ranges, dtype=np.int64)
        where = ranges_of(keys, ranges, salt)
        chosen[where[::-1]] = np.where(chosen[where[::-1]] < 0, keys[::-1], chosen[where[::-1]])
        if (chosen >= 0).all():
            return chosen
    raise AssertionError(f"no key was found for each of {ranges} ranges")


def ranges_of(keys: NDArray[np.int64], ranges: int, salt: np.uint64) -> NDArray[np.int32]:
    """Returns the range of each key of the table with that salt."""
    out = np.empty(len(keys), np.int32)
    key_ranges(keys, salt, range_shift(ranges), out)
    return out


FILTERED: dict[str, dict[str, Any]] = {
    "filtered": {
        "push": [eps.BFloat16(), eps.KeysOnce(), eps.KeyDeltas(), eps.Zstd()],
        "pull": [eps.KeysOnce(), eps.KeyDeltas()],
        "cache": eps.Cache(rows=2_000, staleness=4),
    },
    "rounded": {"push": [eps.TopK(0.5), eps.Int8(), eps.KeysOnce()], "pull": [eps.Int8()]},
}
"""Tables that get the same pushes as the table "counted", through filters."""


def open_filtered(ps: eps.Client) -> tuple[eps.SparseTable, eps.SparseTable]:
    """Opens the tables of `FILTERED`."""
    first, second = (ps.table(name, dim=DIM, optimizer=eps.Accumulate(), **kind) for name, kind in FILTERED.items())
    return first, second


def open_tables(ps: eps.Client) -> tuple[eps.SparseTable, eps.DenseTensor]:
    """Opens the table and the tensor of the load."""
    table = ps.table("counted", dim=DIM, optimizer=eps.Accumulate())
    return table, ps.tensor("summed", init=np.zeros(SHAPE, np.float32), optimizer=eps.Accumulate())


# ------------------------------------------------------------------------------------------------------------ ledger


def read_ledger(path: Path) -> NDArray[np.void]:
    """Reads the records of a life so far, without one that is just being written."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        data = b""
    return np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)


def newest(path: Path, kind: int) -> int:
    """Returns the highest step of a kind among the last records of a life, 0 if there is none. Reads no other
    records."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size // RECORD.itemsize
            first = max(0, size - _NEWEST)
            file.seek(first * RECORD.itemsize)
            records = np.frombuffer(file.read((size - first) * RECORD.itemsize), RECORD)
    except FileNotFoundError:
        return 0
    return int(records["step"][records["kind"] == kind].max(initial=0))


class LedgerFile:
    """Writes the ledger of one life."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(self, kind: int, step: int, text: str = "") -> None:
        """Writes one record; `text`, if any, goes to the log."""
        os.write(self._file, np.array((kind, step, time.time()), RECORD).tobytes())
        if text:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()


@dataclass(frozen=True)
class Ledger:
    """How far a life of a worker came: the last step begun, and the step up to which it knew all to be committed."""

    job: Job
    begun: int
    acknowledged: int

    @classmethod
    def of(cls, job: Job) -> Ledger:
        """Reads the ledger's file."""
        records = read_ledger(Path(job.ledger))
        begun = int((records["kind"] == BEGUN).sum())
        committed = records["step"][records["kind"] == COMMITTED]
        return cls(job, begun, int(committed.max()) if committed.size else 0)

    def __str__(self) -> str:
        return f"{self.job.name}, life {self.job.life}"


# ------------------------------------------------------------------------------------------------------------- oracle


@dataclass(frozen=True)
class ServerContent:
    """The values that servers hold: own float64 [lives, ranges, DIM], rows float64 [keys, DIM], dense float64 [SHAPE];
    and the range of each row of the shared table, and of the tensor."""

    own: NDArray[np.float64]
    rows: NDArray[np.float64]
    dense: NDArray[np.float64]
    row_ranges: NDArray[np.int32]
    dense_range: int


def read_content(ps: eps.Client, ledgers: Sequence[Ledger], table: eps.SparseTable) -> ServerContent:
    """Pulls everything that the load has changed, of one of its tables."""
    _, tensor = open_tables(ps)
    job = ledgers[0].job
    keys = np.arange(job.keys, dtype=np.int64)
    own = np.stack([own_keys(each.job.worker, each.job.life, job.ranges, table.salt) for each in ledgers])
    return ServerContent(
        table.pull(own.ravel(), exact=True).astype(np.float64).reshape(*own.shape, DIM),
        table.pull(keys, exact=True).astype(np.float64),
        tensor.pull().astype(np.float64),
        ranges_of(keys, job.ranges, table.salt),
        int(ranges_of(np.array([BLOCK], dtype=np.int64), job.ranges, tensor.salt)[0]),
    )


def check_content(content: ServerContent, ledgers: Sequence[Ledger]) -> list[str]:
    """Says what is wrong with the content, a sentence each. Nothing is if it is the exact sum of all acknowledged
    pushes and, for each life in each range, of the first few unacknowledged ones."""
    wrong = []
    applied = content.own[:, :, 0]
    for ledger, counts, own in zip(ledgers, applied, content.own, strict=True):
        if (torn := np.flatnonzero((own != own[:, :1]).any(axis=1))).size:
            wrong.append(f"{ledger}: its row in range {torn[0]} is {own[torn[0]].tolist()}: half a push")
        for bad, what in (
            (counts < ledger.acknowledged, "lost"), (counts > ledger.begun, "applied twice"),
            (counts != np.trunc(counts), "applied in part"),
        ):  # fmt: skip
            if (where := np.flatnonzero(bad)).size:
                wrong.append(
                    f"{ledger}: {len(where)} ranges have pushes {what}: range {where[0]} has {counts[where[0]]:g} of "
                    f"its steps, {ledger.acknowledged} are acknowledged and {ledger.begun} were begun"
                )
    rows, dense = _expected(content, ledgers, applied)
    if (where := np.flatnonzero((rows != content.rows).any(axis=1))).size:
        key = int(where[0])
        wrong.append(
            f"{len(where)} of {len(rows)} shared rows are not the sum of the pushes applied, the first is key {key} in "
            f"range {content.row_ranges[key]}: {content.rows[key].tolist()}, not {rows[key].tolist()}"
        )
    if differing := int((dense != content.dense).sum()):
        wrong.append(f"{differing} elements of the tensor are not the sum of the pushes applied")
    return wrong


def _expected(
    content: ServerContent, ledgers: Sequence[Ledger], applied: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the shared rows and the tensor after the steps that each range has applied."""
    rows, dense = np.zeros_like(content.rows), np.zeros_like(content.dense)
    for ledger, counts in zip(ledgers, applied, strict=True):
        for step in range(1, ledger.begun + 1):
            added = part(ledger.job, step)
            there = counts[content.row_ranges[added.keys]] >= step
            rows[added.keys[there]] += added.rows[there]
            if counts[content.dense_range] >= step:
                dense += added.dense
    return rows, dense


# ------------------------------------------------------------------------------------------------------------- worker


class LoadWorker:
    """One life of a worker: pushes until it is asked to end, and checks now and then that it reads what it wrote."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._ps = eps.connect(job.url, worker=job.name, app=APP, window=job.window, timeout=TIMEOUT_S)
        self._table, self._tensor = open_tables(self._ps)
        self._filtered, self._rounded = open_filtered(self._ps)
        self._own = {
            table: own_keys(job.worker, job.life, job.ranges, table.salt) for table in (self._table, self._filtered)
        }
        self._ones = np.ones((job.ranges, DIM), np.float32)
        self._waiting: deque[tuple[int, eps.Step]] = deque()
        self._begun = 0
        self._ledger = LedgerFile(Path(job.ledger))
        Path(job.ledger).with_suffix(".id").write_text(str(self._ps._dispatcher.worker.id))

    def step(self) -> None:
        """Pushes one step; waits for the oldest step first if the window is full."""
        self._begun += 1
        now = part(self.job, self._begun)
        self._note(BEGUN, self._begun)
        rows = np.concatenate([now.rows, self._ones])
        values: dict[eps.SparseTable | eps.DenseTensor, Any] = {
            table: (np.concatenate([now.keys, own]), rows) for table, own in self._own.items()
        }
        values |= {self._rounded: (now.keys, now.rows), self._tensor: now.dense}
        if self._begun % READ_EVERY:
            self._waiting.append((self._begun, self._ps.push(values)))
        else:
            step, pull = self._ps.push_pull(values, self._own)
            self._waiting.append((self._begun, step))
            self._read(pull)
        while len(self._waiting) >= self.job.window:
            self._confirm()

    def finish(self) -> None:
        """Waits for the outstanding steps, and leaves the cluster."""
        while self._waiting:
            self._confirm()
        self._read(self._ps.pull_async(self._own))
        self._ps.close()

    def _confirm(self) -> None:
        number, step = self._waiting.popleft()
        try:
            step.result()
        except eps.Closed:  # this life is over, and the runner judges why
            raise
        except eps.Error as error:
            self._note(FAILED, number, f"step {number} failed: {error}")
        else:
            self._note(COMMITTED, number)

    def _read(self, pull: TablesPull[eps.SparseTable]) -> None:
        try:
            found = pull.result()
        except eps.Closed:
            raise
        except eps.Error as error:
            self._note(READ_FAILED, self._begun, f"a pull failed: {error}")
            return
        wrong = {table.name: np.unique(rows).tolist() for table, rows in found.items() if (rows != self._begun).any()}
        if not wrong:
            self._note(READ, self._begun)
        else:
            self._note(STALE, self._begun, f"read {wrong} after {self._begun} steps: not what it had written")

    def _note(self, kind: int, step: int, text: str = "") -> None:
        self._ledger.note(kind, step, text and f"{self.job.name} life={self.job.life} {text}")


def command_of(job: Job) -> list[str]:
    """Returns the command that runs a worker."""
    return [sys.executable, "-m", "chaos.live.load", json.dumps(asdict(job))]


def open_filled(ps: eps.Client) -> eps.SparseTable:
    """Opens the table that `fill` fills. It belongs to the same application, to which `cluster adopt` gives all
    tables."""
    return ps.table("heavy", dim=16, optimizer=eps.Accumulate())


def _pieces(rows: int) -> list[NDArray[np.int64]]:
    """Splits the keys of so many rows into batches to push or pull."""
    return np.array_split(np.arange(rows), max(1, rows // 25_000))


def fill(url: str, rows: int) -> None:
    """Stores rows that nobody touches again, so that filling a replica takes a moment."""
    with eps.connect(url, worker="filler", app=APP, timeout=TIMEOUT_S) as ps:
        table = open_filled(ps)
        for keys in _pieces(rows):
            ps.push({table: (keys, np.ones((len(keys), 16), np.float32))})
        ps.flush()


def make_rows(url: str, workers: int, keys: int, ranges: int) -> None:
    """Makes all rows that the load will touch, as zeros, so that a server without room for new rows refuses none."""
    with eps.connect(url, worker="filler", app=APP, timeout=TIMEOUT_S) as ps:
        table, _ = open_tables(ps)
        filtered, rounded = open_filtered(ps)
        incarnations = [(worker, life) for worker in range(workers) for life in range(1, INCARNATIONS_MADE + 1)]
        shared = np.arange(keys, dtype=np.int64)
        for each in (table, filtered):
            own = [own_keys(worker, life, ranges, each.salt) for worker, life in incarnations]
            every = np.concatenate([shared, *own])
            ps.push({each: (every, np.zeros((len(every), DIM), np.float32))})
        ps.push({rounded: (shared, np.zeros((len(shared), DIM), np.float32))})
        ps.flush()


def check_run(url: str, ledgers: Sequence[Ledger], filling: int) -> list[str]:
    """Compares the content of the servers with the ledgers of all workers and with the rows that `fill` stored."""
    return _check_tables(url, ledgers) + _check_filled(url, filling)


def _check_tables(url: str, ledgers: Sequence[Ledger]) -> list[str]:
    if not ledgers:
        return []
    with eps.connect(url, worker="reader", app=APP, timeout=TIMEOUT_S) as ps:
        tables = open_tables(ps)[0], open_filtered(ps)[0]
        return [
            f"table {table.name!r}: {wrong}"
            for table in tables
            for wrong in check_content(read_content(ps, ledgers, table), ledgers)
        ]


def _check_filled(url: str, filling: int) -> list[str]:
    with eps.connect(url, worker="reader", app=APP, timeout=TIMEOUT_S) as ps:
        table = open_filled(ps)
        pieces = _pieces(filling)
        wrong = [text for keys in pieces if keys.size for text in check_filling(table.pull(keys), int(keys[0]))]
        return [f"table {table.name!r}: {text}" for text in wrong]


def check_filling(rows: NDArray[np.float32], first: int) -> list[str]:
    """Says what is wrong with rows that `fill` stored, from key `first` on; nobody has touched them since."""
    if not (where := np.flatnonzero((rows != 1).any(axis=1))).size:
        return []
    return [
        f"{len(where)} of the {len(rows)} rows from key {first} on that nobody touched are not 1, the first is key "
        f"{first + int(where[0])}: {rows[where[0]].tolist()}"
    ]


def heat(url: str, keys: int, ranges: int) -> NDArray[np.float64]:
    """Returns how often the load touches each range, up to a factor: float64 [ranges]."""
    with eps.connect(url, worker="measure", app=APP, timeout=TIMEOUT_S) as ps:
        table, _ = open_tables(ps)
        every = np.arange(keys, dtype=np.int64)
        weights = np.diff(np.sqrt(np.arange(keys + 1) / keys))
        return np.bincount(ranges_of(every, ranges, table.salt), weights, ranges).astype(np.float64)


def say_ready() -> None:
    """Prints the line that tells the parent process that this one is ready."""
    sys.stdout.write(json.dumps({"ready": True}) + "\n")
    sys.stdout.flush()


def signals_to_end() -> list[int]:
    """Notes SIGTERM and SIGINT from now on instead of ending at once; those that have come."""
    ended: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: ended.append(number))
    return ended


def main(arguments: Mapping[int, str] | Sequence[str] = sys.argv) -> None:
    """Runs one life; SIGTERM ends it when all is acknowledged."""
    job = Job(**json.loads(arguments[1]))
    ended = signals_to_end()
    worker = LoadWorker(job)
    say_ready()
    while not ended:
        worker.step()
        if job.pause_s:
            time.sleep(job.pause_s)
    worker.finish()


if __name__ == "__main__":
    main()
