"""A range of tables that grow and forget, by the letter of the contract: a dictionary of rows, and one of candidates.

Fed with the operations of the range's log, in their order, it has the rows, counts, times, scores and candidates that
every replica must have. Nothing here is computed by the store: only where a key lies, and its numbers for chance and
ties, are hashes that both use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from chaos.sim.checks.violation import Violation
from elasticps.kernels.hashing import hash_key, mix64, table_salt
from elasticps.model.policies import (
    Admission,
    Eviction,
    IdleFor,
    MinCount,
    MinCountSketch,
    Probability,
    half_life_of,
    word_of,
)
from elasticps.model.spec import TableSpec
from elasticps.server.core.sweeps import SweptInterval
from elasticps.store.eviction import Measure, Predicate, Reason

f32 = np.float32
DIM = 2
MOST_COUNT = f32(1 << 22)
LEAST_SCORE = f32(2.0**-126)  # that a score falls to
BLOCKS, DEPTH = 64, 4  # of a sketch
HASH_BITS = 62
_MASK = (1 << 64) - 1
_TIE_SEED = 0xD6E8FEB86659FD93
_SERIES = [(-math.log(2)) ** k / math.factorial(k) for k in range(11)]


class Content(NamedTuple):
    """Keys of an operation and the rows that come with them, float32 [n, DIM], or [n, DIM + 1] with scores."""

    keys: list[int]
    rows: np.ndarray


@dataclass(frozen=True)
class Logged:
    """An operation in the log of a range. what: its kind, in words; at_s: true cluster time as it was logged."""

    what: str
    worker: int
    after: int
    payload: object
    at_s: float
    content: dict[int, Content] | None = None

    @property
    def name(self) -> tuple[object, ...]:
        """What must be equal at all replicas that have it at the same place of a log."""
        return self.what, self.worker, self.after, self.payload


@dataclass
class Row:
    """A row. last: seconds; used_s: the true time of its last push."""

    weights: np.ndarray
    last: int
    count: np.float32
    score: np.float32
    used_s: float

    @property
    def norm(self) -> np.float32:
        """The sum of squares of its weights."""
        return f32(sum((w * w for w in self.weights), f32(0)))


class Candidate(NamedTuple):
    """A key that waits for a row: how often it was pushed, and when last."""

    pushes: int
    last: int


class Place(NamedTuple):
    """From place `seq` of a range's log on, a key reads as `weights`."""

    seq: int
    weights: tuple[float, ...]


def halves(x: float) -> float:
    """2^-x, by the series up to the tenth power."""
    if x >= 140:
        return 0.0
    whole = int(x)
    part = x - whole
    total = _SERIES[-1]
    for c in reversed(_SERIES[:-1]):
        total = c + part * total
    return float(math.ldexp(total, -whole))


def fallen_score(score: np.float32, share: float) -> np.float32:
    """What is left of a score: never nothing, unless there was none."""
    return max(f32(float(score) * share), LEAST_SCORE) if score > 0 and share < 1 else score


def mixed(z: int) -> int:
    """The mixer of all hashes."""
    return int(mix64(np.uint64(z & _MASK)))


def tie(key: int) -> int:
    """The number that decides among rows of equal rank."""
    return mixed(key ^ _TIE_SEED) & 0xFFFFFFFF


def chance(key: int, worker: int, after: int) -> float:
    """The number below 1 with which `Probability` compares."""
    return (mixed(key ^ mixed(after ^ mixed(worker))) >> 11) * 2.0**-53


def bits(value: np.float32) -> int:
    """The order of floats that are not negative, as a whole number."""
    return int(np.array(value, f32).view(np.uint32))


@dataclass
class TableModel:
    """A table in one range. lag_s: by so much the time in the log may be behind the true one; now: the range's time;
    swept: sweeps of rows since the first cut: (cut, predicate, low, high)."""

    spec: TableSpec
    salt: int
    ranges: int
    admission: Admission | None
    evictions: tuple[Eviction, ...]
    lag_s: float
    now: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: dict[int, Candidate] = field(default_factory=dict)
    sketch: dict[tuple[int, int], int] = field(default_factory=dict)
    swept: list[tuple[int, Predicate, int, int]] = field(default_factory=list)

    def hashed(self, key: int) -> int:
        """The hash that says where a key lies."""
        return int(hash_key(np.int64(key), np.uint64(self.salt)))

    def set_policies(self, admission: Admission | None, evictions: Iterable[Eviction]) -> None:
        """From now on it is under these; a sketch of another size, or none, begins again."""
        width = self.width
        self.admission, self.evictions = admission, tuple(evictions)
        if self.width != width:
            self.sketch.clear()

    @property
    def width(self) -> int:
        """Bytes of a block of its sketch, 0 without one."""
        if not isinstance(self.admission, MinCountSketch):
            return 0
        return max(DEPTH, self.admission.nbytes // (self.ranges * BLOCKS) // DEPTH * DEPTH)

    # --- operations ---------------------------------------------------------------------------------------------------

    def push(self, content: Content, worker: int, after: int, at_s: float) -> None:
        """A worker's step."""
        for key, grads in zip(content.keys, content.rows, strict=True):
            score = grads[DIM] if len(grads) > DIM else f32(0)
            row = self.rows.get(key)
            if row is None:
                before = self._admit(key, worker, after)
                if before is None:
                    continue
                self.waiting.pop(key, None)
                row = self.rows[key] = Row(np.zeros(DIM, f32), self.now, f32(before), f32(0), at_s)
            share = self._share(row, self.now)
            row.weights = row.weights + grads[:DIM]
            row.count = min(f32(float(row.count) * share) + f32(1), MOST_COUNT)
            row.score = min(fallen_score(row.score, share) + score, MOST_COUNT)
            row.last, row.used_s = self.now, at_s

    def _admit(self, key: int, worker: int, after: int) -> int | None:
        """How often a key was pushed before it gets its row with this push; None if it waits on."""
        policy, known = self.admission, self.waiting.get(key, Candidate(0, 0))
        if isinstance(policy, MinCountSketch) and policy.count > 1:
            return policy.count - 1 if self._sketched(key, policy.count) else None
        if isinstance(policy, Probability):
            return 0 if chance(key, worker, after) < policy.p else None
        if isinstance(policy, MinCount) and known.pushes + 1 < policy.count:
            self.waiting[key] = Candidate(known.pushes + 1, self.now)
            return None
        return known.pushes

    def _sketched(self, key: int, most: int) -> bool:
        hashed = self.hashed(key)
        inside = (hashed << (self.ranges.bit_length() - 1)) & _MASK
        block, part, cells, z = inside >> 58, self.width // DEPTH, [], hashed
        for d in range(DEPTH):
            z = mixed(z + d + 1)
            cells.append((block, d * part + z % part))
        least = min(self.sketch.get(place, 0) for place in cells)
        if least + 1 >= most:
            return True
        for place in cells:
            if self.sketch.get(place, 0) == least:
                self.sketch[place] = least + 1
        return False

    def _share(self, row: Row, now: int) -> float:
        """What is left of a row's count."""
        half_life = half_life_of(self.evictions)
        return halves((now - row.last) * (1.0 / half_life)) if half_life and now > row.last else 1.0

    def load(self, content: Content, at_s: float) -> None:
        """Rows that were trained elsewhere: used now, never pushed to."""
        for key, values in zip(content.keys, content.rows, strict=True):
            self.waiting.pop(key, None)
            self.rows[key] = Row(values[:DIM].copy(), self.now, f32(0), f32(0), at_s)

    def delete(self, keys: Iterable[int]) -> None:
        """Forgets rows and candidates."""
        for key in keys:
            self.rows.pop(key, None)
            self.waiting.pop(key, None)

    def clear(self) -> None:
        """Forgets everything."""
        self.rows.clear()
        self.waiting.clear()
        self.sketch.clear()

    def advance(self, before: int, now: int) -> None:
        """Time has gone on, from `before` to `now`."""
        self.now = now
        policy = self.admission
        if isinstance(policy, MinCountSketch) and policy.halve_after is not None and before:
            every = float(policy.halve_after)  # type: ignore[arg-type]
            for _ in range(min(int(now // every) - int(before // every), 8)):
                self.sketch = {place: count >> 1 for place, count in self.sketch.items() if count > 1}

    def evict(self, swept: SweptInterval, cut: int, op: Logged) -> None:
        """A sweep."""
        by = swept.predicate
        self.check_time(by, op)
        for key, rank in [*self._ranks(by)]:
            if not swept.low <= self.hashed(key) >> (64 - HASH_BITS) < swept.high:
                continue
            if rank < by.below or (rank == by.below and tie(key) < by.tie):
                if by.of_candidates:
                    del self.waiting[key]
                else:
                    self._may_go(key, by, op)
                    del self.rows[key]
        if not by.of_candidates and cut:
            self.swept.append((cut, by, swept.low, swept.high))

    def _ranks(self, by: Predicate) -> Iterator[tuple[int, int]]:
        for key, one in self.waiting.items() if by.of_candidates else ():
            yield key, one.last if by.measure == Measure.CANDIDATE_AGE else one.pushes << 32 | one.last
        for key, row in () if by.of_candidates else self.rows.items():
            if by.measure == Measure.LAST_USE:
                yield key, row.last
            elif by.measure == Measure.NORM:
                yield key, bits(row.norm)
            elif not (by.decay and row.last > by.now):  # else it was used after the sweep was planned
                share = halves(max(by.now - row.last, 0) * by.decay)
                counted = by.measure == Measure.COUNT
                yield key, bits(f32(float(row.count) * share) if counted else fallen_score(row.score, share))

    def _may_go(self, key: int, by: Predicate, op: Logged) -> None:
        """A row goes: the policies have to allow that, by the true time."""
        age_s, idle = op.at_s - self.rows[key].used_s, _least(p.idle for p in self.evictions if isinstance(p, IdleFor))
        if by.reason == Reason.IDLE and age_s < idle - self.lag_s:
            raise Violation(
                "only what is idle goes", f"key {key} was pushed to {age_s:.1f} s ago, and goes as idle for {idle:g} s"
            )

    def check_time(self, by: Predicate, op: Logged) -> None:
        """A sweep's own time may be no later than the true one, whatever clocks say."""
        if by.reason == Reason.IDLE:
            ages = [policy.idle for policy in self.evictions if isinstance(policy, IdleFor)]
        elif by.measure == Measure.CANDIDATE_AGE:
            ages = [self.admission.forget_after or 0] if isinstance(self.admission, MinCount) else []
        else:
            return
        if (age := _least(ages)) and by.below > math.ceil(op.at_s - age):
            late = by.below - (op.at_s - age)
            raise Violation("a wrong clock evicts none", f"a sweep forgets what would be {age:g} s old in {late:.0f} s")


def _least(ages: Iterable[object]) -> float:
    """The least of some times, 0 if there is none."""
    return min((float(age) for age in ages if age is not None), default=0.0)  # type: ignore[arg-type]


class RangeModel:
    """All tables with policies in one range. specs: of each, as it was made, by id; read: what each key has read as, by
    table and key."""

    def __init__(self, ranges: int, specs: dict[int, TableSpec], lag_s: float) -> None:
        self.tables: dict[int, TableModel] = {}
        self.dropped: set[int] = set()
        self.decided: set[int] = set()  # tables whose policies the log has said
        self.time = 0
        self.cut = 0
        self.seq = 0
        self.read: dict[tuple[int, int], list[Place]] = {}
        self.step_positions: dict[tuple[int, int], int] = {}  # of steps, by worker and progress
        self._ranges, self._specs, self._lag_s = ranges, specs, lag_s

    def table(self, number: int) -> TableModel | None:
        """A table that has not been dropped here."""
        if number in self.dropped or number not in self._specs:
            return None
        if number not in self.tables:
            spec = self._specs[number]
            self.tables[number] = TableModel(
                spec,
                int(table_salt(number)),
                self._ranges,
                spec.admission,
                tuple(spec.eviction),
                self._lag_s,
                self.time,
            )
        return self.tables[number]

    def apply(self, op: Logged, contents: dict[int, Content]) -> None:
        """The next operation of the log. contents: its rows in this range, by table."""
        self.seq += 1
        payload = op.payload
        if op.what == "TIME":
            before, self.time = self.time, max(self.time, payload.seconds)  # type: ignore[attr-defined]
            for each in self.tables.values():
                each.advance(before, self.time)
        elif op.what == "CUT":
            self.cut = max(self.cut, payload.number)  # type: ignore[attr-defined]
        elif op.what == "CREATE":
            for new in payload.tables:  # type: ignore[attr-defined]
                if new.table not in self.decided and (table := self.table(new.table)) is not None:
                    self._decide(table, new.table, new.spec)
        elif op.what == "DROP":
            self.dropped.add(payload.table)  # type: ignore[attr-defined]
            self._note(self.tables.pop(payload.table, None), payload.table)  # type: ignore[attr-defined]
        elif op.what in ("CLEAR", "EVICT", "POLICY"):
            self._change(op, payload.table)  # type: ignore[attr-defined]
        else:
            self.step_positions[op.worker, op.after] = self.seq
            for number, content in contents.items():
                self._rows(op, number, content)

    def _change(self, op: Logged, number: int) -> None:
        table = self.table(number)
        if table is None:
            return
        if op.what == "CLEAR":
            table.clear()
        elif op.what == "POLICY":
            self._decide(table, number, op.payload.spec)  # type: ignore[attr-defined]
        else:
            assert isinstance(op.payload, SweptInterval)
            word = word_of(table.admission, table.evictions) if number in self.decided else 0
            if op.payload.policies in (0, word):  # else it was chosen under others
                table.evict(op.payload, self.cut, op)
        self._note(table, number)

    def _decide(self, table: TableModel, number: int, text: str) -> None:
        spec = TableSpec.from_json(text)
        self.decided.add(number)
        table.set_policies(spec.admission, spec.eviction)

    def _rows(self, op: Logged, number: int, content: Content) -> None:
        table = self.table(number)
        if table is None:
            return
        if op.what == "PUSH":
            table.push(content, op.worker, op.after, op.at_s)
        elif op.what == "LOAD":
            table.load(content, op.at_s)
        elif op.what == "DELETE":
            table.delete(content.keys)
        self._note(table, number, content.keys)

    def _note(self, table: TableModel | None, number: int, keys: Iterable[int] | None = None) -> None:
        """Notes what keys read as now; by default all that have ever had a row."""
        if keys is None:
            keys = [key for of, key in self.read if of == number]
        for key in keys:
            row = None if table is None else table.rows.get(key)
            weights = (0.0,) * DIM if row is None else tuple(row.weights.tolist())
            known = self.read.setdefault((number, key), [Place(0, (0.0,) * DIM)])
            if known[-1].weights != weights:
                known.append(Place(self.seq, weights))
