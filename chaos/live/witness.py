"""Compares what one reader shows with what workers have pushed: their ledgers say what may be there, and when.

Of the rows that a pull shows, those of a life and those that come and go are judged by their ledgers, shared ones and
the tensor by the sums that they can be (`chaos.live.legal`). What was shown before is shown again, or something newer,
also by the next process of the same reader.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from chaos.live import churn
from chaos.live.legal import Ints, Span, Steps, StepSums, dense_is_legal, row_is_legal
from chaos.live.load import BEGUN, BLOCK, COMMITTED, DIM, RECORD, Job, own_keys, ranges_of
from chaos.live.observer import judge
from chaos.live.verdict import GIVEN_UP_S

SUMMED = ("counted", "filtered")  # tables of which every sum is known
TENSOR = "summed"
REPLACED_S = 2.0
"""A tail that has been replaced may take itself for one until it, or the reader, hears of that: what others have
committed meanwhile is missing, though it says how new its state is. A stopped server that goes on hears of it from the
first peer that speaks to it; a reader does from any server that it follows."""
Rows = NDArray[np.float32]


class RecordFile:
    """A file that grows by whole records, mostly."""

    def __init__(self, path: Path, of: np.dtype[np.void]) -> None:
        self._path = path
        self._of = of
        self._at = 0

    def read(self) -> NDArray[np.void]:
        """The records that have come since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        data = data[: len(data) // self._of.itemsize * self._of.itemsize]
        self._at += len(data)
        return np.frombuffer(data, self._of)


class LifeLog:
    """The ledger of one life, read on and on. begun: its last step begun."""

    def __init__(self, path: Path) -> None:
        self.begun = 0
        self._file = RecordFile(path, RECORD)
        self._times: list[float] = []  # when steps were known to be committed
        self._steps: list[int] = []  # and which, the highest so far

    def read(self) -> None:
        """Reads what has come since."""
        for kind, step, time_s in self._file.read().tolist():
            if kind == BEGUN:
                self.begun = max(self.begun, step)
            elif kind == COMMITTED:
                self._times.append(time_s)
                self._steps.append(max(step, self.newest))

    @property
    def newest(self) -> int:
        """The last step known to be committed."""
        return self._steps[-1] if self._steps else 0

    def committed(self, time_s: float) -> int:
        """The last step that was known to be committed at that time."""
        i = int(np.searchsorted(self._times, time_s, "right"))
        return self._steps[i - 1] if i else 0

    def lag(self, step: int, time_s: float) -> float:
        """For how long it had been known at that time that more than `step` was committed, seconds."""
        i = int(np.searchsorted(self._steps, step, "right"))
        return max(0.0, time_s - self._times[i]) if i < len(self._times) else 0.0

    def was_alive(self, time_s: float) -> bool | None:
        """Whether the cluster had no reason to give the life up at that time; None: it has done nothing since."""
        i = int(np.searchsorted(self._times, time_s, "right"))
        if i == len(self._times):
            return None
        return i > 0 and self._times[i] - self._times[i - 1] < GIVEN_UP_S


class ChurnLog:
    """The ledger of one life whose rows come and go."""

    def __init__(self, path: Path, ranges: int) -> None:
        self._file = RecordFile(path, churn.record_type(ranges))
        self._records = np.empty(0, churn.record_type(ranges))

    def read(self) -> None:
        """Reads what has come since."""
        self._records = np.concatenate([self._records, self._file.read()])

    def forget(self, time_s: float) -> None:
        """Nothing before that time will be pulled for."""
        self._records = self._records[self._first(time_s) :]

    def legal(self, time_s: float) -> NDArray[np.int32]:
        """The values of all keys that may be seen since then, int32 [n, keys]; those of no row without any record."""
        found: NDArray[np.int32] = self._records["values"][self._first(time_s) :]
        return found

    def _first(self, time_s: float) -> int:
        """The last operation that was done at that time: what it left was to be seen then."""
        done = np.flatnonzero((self._records["kind"] == COMMITTED) & (self._records["time"] <= time_s))
        return int(done[-1]) if len(done) else 0


class ShownRows(NamedTuple):
    """What one pull has shown. rows: by table, float32, of the keys that `Witness.keys` said, and the tensor; since_s:
    what was committed then is in it; workers: if it is one moment, those that it counts, by number."""

    rows: Mapping[str, Rows]
    since_s: float
    workers: Collection[int] | None = None

    @property
    def whole(self) -> bool:
        """Whether it is one moment."""
        return self.workers is not None


@dataclass
class Delays:
    """pulled_s: when the last pull began; lag_s: for how long something had been committed that it lacked; late_s: the
    most that any lacked of what was committed before the time as of which it claimed to be."""

    pulled_s: float = 0.0
    lag_s: float = 0.0
    late_s: float = 0.0


class Witness:
    """folder: where ledgers are; salts: of tables by name; path: where what was shown is remembered."""

    def __init__(self, folder: Path, salts: Mapping[str, int], job: Job, path: Path) -> None:
        self.undecided = 0  # rows of which nothing could be said
        self.delays = Delays()  # of what was committed
        self._folder = folder
        self._salts = {name: np.uint64(salt) for name, salt in salts.items()}
        self._job = job  # of any life
        self._path = path
        self._logs: dict[Job, LifeLog] = {}
        self._own: dict[tuple[str, Job], Ints] = {}
        self._churn: dict[int, ChurnLog] = {}
        self._shared = np.arange(job.keys, dtype=np.int64)
        dense_range = int(ranges_of(np.array([BLOCK], np.int64), job.ranges, self._salts[TENSOR])[0])
        steps = Steps()
        self._sums = {
            name: StepSums(steps, ranges_of(self._shared, job.ranges, self._salts[name]), dense_range, job.ranges)
            for name in SUMMED
        }
        self._before: dict[str, dict[str, list[int]]] = _read(path)  # by table and life, steps shown, by range
        self._held: list[tuple[Job, Ints, float]] = []  # held, and when, of lives that may have ended before
        self._noted: list[Job] = []
        self._passing: list[int] = []

    def keys(self, tables: Mapping[str, object]) -> dict[str, Ints | None]:
        """What to pull of these tables."""
        self.delays.pulled_s = time.time()
        self._noted = self._find_incarnations()
        self._passing = self._find_churn()
        pulled: dict[str, Ints | None] = {}
        for name in SUMMED:
            if name in tables and self._noted:
                pulled[name] = np.concatenate([*(self.own_keys(name, life) for life in self._noted), self._shared])
        if TENSOR in tables and SUMMED[0] in pulled:
            pulled[TENSOR] = None
        if churn.TABLE in tables and self._passing:
            salt = self._salts[churn.TABLE]
            pulled[churn.TABLE] = np.concatenate(
                [churn.keys_of(life, self._job.ranges, salt) for life in self._passing]
            )
        return pulled

    def check(self, shown: ShownRows) -> str:
        """Says what is wrong with rows pulled for the last `keys`; "" if nothing is. Called when the pull has ended."""
        logs: list[LifeLog | ChurnLog] = [*self._logs.values(), *self._churn.values()]
        for log in logs:
            log.read()
        since_s, self.delays.lag_s = shown.since_s - REPLACED_S, 0.0
        spans = {life: (self._logs[life].committed(since_s), self._logs[life].begun) for life in self._noted}
        for name in SUMMED:
            if name in shown.rows and (wrong := self._check_sums(name, shown, spans)):
                return f"table {name!r}: {wrong}"
        if churn.TABLE in shown.rows and (wrong := self._check_passing(shown)):
            return f"table {churn.TABLE!r}: {wrong}"
        self._remember()
        return self._check_held()

    def check_rest(self, name: str, counts: Mapping[str, Ints]) -> str:
        """Compares what was ever shown with what servers have in the end: int64 [ranges] by life, as `life_name`."""
        for life, shown in self._before.get(name, {}).items():
            if life in counts and (where := np.flatnonzero(np.array(shown) > counts[life])).size:
                r = int(where[0])
                return f"table {name!r}, {life}: {shown[r]} steps were shown in range {r}, and it has {counts[life][r]}"
        return ""

    @property
    def incarnations(self) -> list[Job]:
        """Of which the last `keys` has rows, in order."""
        return self._noted

    # ----------------------------------------------------------------------------------------------------------- sums

    def _check_sums(self, name: str, shown: ShownRows, spans: Mapping[Job, Span]) -> str:
        sums, ranges = self._sums[name], self._job.ranges
        rows, before = shown.rows[name], self._before.setdefault(name, {})
        own = rows[: len(self._noted) * ranges].reshape(len(self._noted), ranges, DIM)
        for life, mine in zip(self._noted, own, strict=True):
            low, high = spans[life]
            last = np.array(before.get(life_name(life), [0] * ranges), np.float32)
            if text := judge(mine, last, low, high):
                return f"{life_name(life)}, {text}"
            counts = mine[:, 0].astype(np.int64)
            log, least = self._logs[life], int(counts.min())
            self.delays.lag_s = max(self.delays.lag_s, log.lag(least, self.delays.pulled_s))
            self.delays.late_s = max(self.delays.late_s, log.lag(least, shown.since_s))
            sums.advance(life, np.maximum(counts, sums.counts.get(life, counts)))
            before[life_name(life)] = counts.tolist()
            if name == SUMMED[0] and shown.workers is not None and self._worker(life) in shown.workers:
                self._held.append((life, counts, time.time()))
        return self._check_shared(sums, shown, rows[len(self._noted) * ranges :], spans, name == SUMMED[0])

    def _check_shared(
        self, sums: StepSums, shown: ShownRows, rows: Rows, spans: Mapping[Job, Span], with_tensor: bool
    ) -> str:  # fmt: skip
        differing = np.flatnonzero((rows != sums.rows).any(axis=1)).tolist()
        dense = with_tensor and TENSOR in shown.rows and bool((shown.rows[TENSOR] != sums.dense).any())
        if (differing or dense) and not shown.whole and self._find_incarnations() != self._noted:
            self.undecided += len(differing) + dense  # a life has begun since `keys`: its steps may be in there
            return ""
        for key in differing:
            if shown.whole:
                return f"a moment has {rows[key].tolist()} at key {key}, and its steps make {sums.rows[key].tolist()}"
            if (legal := row_is_legal(sums, key, rows[key], spans)) is None:
                self.undecided += 1
            elif not legal:
                return f"key {key} is {rows[key].tolist()}, which no steps make: {_words(spans)}"
        if dense:
            if shown.whole:
                return "the tensor of a moment is not the sum of its steps"
            if (legal := dense_is_legal(sums, shown.rows[TENSOR], spans)) is None:
                self.undecided += 1
            elif not legal:
                return f"the tensor is the sum of no steps: {_words(spans)}"
        return ""

    def _check_held(self) -> str:
        """Steps of a life that was neither dead nor given up are the same in all ranges of a moment."""
        waiting = []
        held, self._held = self._held, []
        for life, counts, at_s in held:
            if (alive := self._logs[life].was_alive(at_s)) is None:
                waiting.append((life, counts, at_s))
            elif alive and (counts != counts[0]).any():
                return f"a moment has {counts.min()} to {counts.max()} steps of {life_name(life)} in its ranges"
        self._held = waiting[-64:]
        return ""

    # ------------------------------------------------------------------------------------------ rows that come and go

    def _check_passing(self, shown: ShownRows) -> str:
        found = churn.values_of(shown.rows[churn.TABLE])
        if found is None:
            return "a row has a part of a push"
        for life, values in zip(self._passing, found.reshape(-1, self._job.ranges), strict=True):
            legal = self._churn[life].legal(shown.since_s - REPLACED_S)
            if (where := np.flatnonzero(~(legal == values).any(axis=0))).size:
                r = int(where[0])
                may_be = sorted(set(legal[:, r].tolist()))
                return f"life {life}: the row in range {r} is {values[r]} (0: none), and can be {may_be}"
            self._churn[life].forget(shown.since_s - REPLACED_S)
        return ""

    # ------------------------------------------------------------------------------------------------------- plumbing

    def _find_incarnations(self) -> list[Job]:
        found = []
        for path in sorted(self._folder.glob("w*.ledger")):
            worker, life = (int(each) for each in path.stem.removeprefix("w").split("."))
            job = replace(self._job, worker=worker, life=life, ledger="")
            self._logs.setdefault(job, LifeLog(path))
            found.append(job)
        return found

    def _find_churn(self) -> list[int]:
        found = sorted(int(path.stem.split(".")[1]) for path in self._folder.glob(f"{churn.NAME}.*.values"))
        for life in found:
            if life not in self._churn:
                self._churn[life] = ChurnLog(churn.ledger_of(self._folder, life), self._job.ranges)
        return found

    def _worker(self, life: Job) -> int:
        """The number by which the cluster knows a life; -1 if that is not known yet."""
        path = self._folder / f"{life_name(life)}.id"
        return int(path.read_text() or -1) if path.exists() else -1

    def own_keys(self, table: str, life: Job) -> Ints:
        """The row of a life in each range, int64 [ranges]."""
        if (table, life) not in self._own:
            found = own_keys(life.worker, life.life, life.ranges, self._salts[table])
            self._own[table, life] = found
        return self._own[table, life]

    def _remember(self) -> None:
        self._path.with_suffix(".new").write_text(json.dumps(self._before))
        os.replace(self._path.with_suffix(".new"), self._path)


def _read(path: Path) -> dict[str, dict[str, list[int]]]:
    try:
        found: dict[str, dict[str, list[int]]] = json.loads(path.read_text())
    except FileNotFoundError:
        found = {}
    return found


def life_name(life: Job) -> str:
    """As the ledger of a life is called."""
    return f"w{life.worker}.{life.life}"


def _words(spans: Mapping[Job, Span]) -> str:
    return ", ".join(f"{low} to {high} of {life_name(life)}" for life, (low, high) in spans.items())
