"""Checks the content of every pull, and the rows that are left at the end. Knows what workers pushed, and nothing else.

Each incarnation of a worker has a column of its own in the rows of an application's table, and adds a key's unit to it
with each step. So a value says how many steps of which worker it holds, and a row that belongs to another key shows.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.violation import Violation

Keys = NDArray[np.int64]
Rows = NDArray[np.float32]
Counts = NDArray[np.int64]

COLUMNS = 24
KEYS = 96  # of an application's table
MARKS = 16
SLACK_S = 1.0  # a view reaches everybody within this while nothing is wrong with links


def units(keys: Keys, most: int = 1 << 30) -> Counts:
    """Returns the amount that each key's steps add; no two keys below KEYS have the same, nor small multiples."""
    return (2 * keys + 1) % most


@dataclass
class Absence:
    """Of a worker whose lease has run out. away: it is not in the roster again; back_s: when it came back last;
    released: clocks up to here may have been released without it, and nobody waits for it there."""

    away: bool = False
    back_s: float = -1e9
    released: int = 0


@dataclass
class Column:
    """The steps of one worker incarnation. counts: how often each key was pushed, by step; pushed: the newest step that
    was sent as a whole; ended: the worker was killed or fenced."""

    index: int
    name: str
    joined_s: float = float("inf")
    clocks: list[int] = field(default_factory=lambda: [-(1 << 62)])
    counts: list[Counts] = field(default_factory=lambda: [np.zeros(KEYS, np.int64)])
    marks: list[tuple[int, Counts]] = field(default_factory=list)  # by step: what others had to be shown with then
    acknowledged: list[tuple[float, int]] = field(
        default_factory=lambda: [(-1e9, 0)]
    )  # when it knew which clock committed
    every: Counts = field(default_factory=lambda: np.zeros(KEYS, np.int64))  # that it has begun, counted or not
    pushed: int = 0
    worker: int = -1
    ended: bool = False
    free: bool = False  # its pulls wait for nobody, though others of its application wait for it
    absence: Absence = field(default_factory=Absence)
    sealed: bool = False  # its successor has learned how far it had come

    @property
    def begun(self) -> int:
        """The newest step that any server may have seen something of."""
        return max(self.pushed, self.clocks[-1])

    def begin(self, clock: int, keys: Keys) -> None:
        """A step, or one more part of it, is about to be pushed."""
        np.add.at(self.every, keys, 1)
        if self.sealed:  # by a ghost: none of it may count
            return
        total = self.counts[-1].copy()
        np.add.at(total, keys, 1)
        self.clocks.append(clock)
        self.counts.append(total)

    def commit(self, now: float, clock: int) -> None:
        """The worker knows that its steps up to `clock` are committed."""
        if clock > self.acknowledged[-1][1]:
            self.acknowledged.append((now, clock))

    def forget(self, clock: int) -> None:
        """Forgets the steps after `clock`: no server has seen anything of them, or will."""
        while self.clocks[-1] > clock and len(self.clocks) > 1:
            self.clocks.pop()
            self.counts.pop()
        self.pushed = min(self.pushed, clock)
        self.sealed = True

    def step_upto(self, clock: int) -> int:
        """Returns the newest step up to a clock, which may have ticked without a step."""
        return self.clocks[self._at(clock)]

    def upto(self, clock: int) -> Counts:
        """Returns the pushes of the steps up to a clock."""
        return self.counts[self._at(clock)]

    def _at(self, clock: int) -> int:
        at = len(self.clocks) - 1
        while self.clocks[at] > clock:
            at -= 1
        return at

    def committed(self, before_s: float) -> Counts:
        """Returns the pushes that the worker knew to be committed at a time."""
        clock = next(clock for when, clock in reversed(self.acknowledged) if when <= before_s)
        return self.upto(clock)


@dataclass
class Pulled:
    """A pull under way, at its worker's step `clock`.

    least    what it must show at least, [columns, keys of the table]
    company  the workers for which it may have to wait, and what it must show of each unless that worker ends
    max_age  it may show steps of its own worker that are not committed
    """

    column: Column
    keys: Keys
    least: Counts
    tail: bool
    max_age: bool
    clock: int = 0
    company: tuple[tuple[Column, Counts], ...] = ()


class Sums:
    """The table of an application whose workers push freely."""

    def __init__(self, app: str, bound: int | None) -> None:
        self.app = app
        self.bound = bound
        self.columns: list[Column] = []
        self.calm = False  # no link and no process is slow: what was committed a while ago is seen by everybody
        self.pausing: Column | None = None  # the worker that waits until others have gone on without it
        self._predecessor: dict[str, Column | None] = {}
        self._shown = np.zeros((COLUMNS, KEYS), np.int64)  # by any tail
        self._counted: set[int] = set()  # the roster
        self._seen: dict[int, Counts] = {}  # by each incarnation, at tails

    def start(self, name: str) -> Column:
        """Adds an incarnation of a worker; the one before it of that name has ended."""
        self._predecessor[name] = next((c for c in reversed(self.columns) if c.name == name and c.pushed), None)
        for column in self.columns:
            column.ended |= column.name == name
        if self.pausing is not None and self.pausing.ended:
            self.pausing = None
        column = Column(len(self.columns), name)
        self.columns.append(column)
        self._seen[column.index] = np.zeros((COLUMNS, KEYS), np.int64)
        return column

    def resume(self, column: Column, now: float, begun: int, trained: int) -> None:
        """A worker learns what has become of its predecessor: steps up to `trained` count, steps above `begun` never
        will."""
        before = self._predecessor[column.name]
        if before is None:
            return
        known = before.step_upto(before.acknowledged[-1][1])
        if known > trained:
            text = f"{column.name} is to train again what follows step {trained}; {known} was committed"
            raise Violation("resume", f"{self.app}: {text}")
        before.commit(now, trained)
        before.forget(begun)

    def follow(self, counted: set[int], now: float) -> None:
        """Follows the roster: what is released while a worker is not in it stays released when it is back."""
        for column in self.columns:
            if column.worker in self._counted - counted:
                column.absence.away = True
            elif column.worker in counted and column.absence.away:
                column.absence.away, column.absence.back_s = False, now
                self._release(column)
        self._counted = counted

    def _release(self, column: Column) -> None:
        column.absence.released = max(column.absence.released, *(other.begun for other in self.columns))

    def _waits_for(self, other: Column, clock: int, now: float) -> bool:
        """Whether a pull that needs `clock` of all workers waits for one. Servers hear of the roster a little later."""
        if now - other.absence.back_s < (0.0 if self.calm else SLACK_S):
            self._release(other)
        return not other.absence.away and clock > other.absence.released

    def grads(self, column: Column, keys: Keys) -> Rows:
        """Returns the gradients of a step: float32 [n, COLUMNS]."""
        grads = np.zeros((len(keys), COLUMNS), np.float32)
        grads[:, column.index] = units(keys)
        return grads

    def mark(self, column: Column, now: float) -> None:
        """Notes that a worker that caches rows has made a step, and what its pulls must show at least from now on."""
        least = np.zeros((COLUMNS, KEYS), np.int64)
        for other in self.columns if self.calm else ():
            least[other.index] = other.committed(now - SLACK_S)
        column.marks = [*column.marks[-MARKS:], (column.pushed, least)]

    def ask(self, column: Column, keys: Keys, now: float, *, tail: bool, max_age: int | None = None) -> Pulled:
        """Notes that a pull begins. max_age: of a worker that caches rows, by how many of its steps they may be old."""
        clock = column.pushed
        least = np.zeros((COLUMNS, KEYS), np.int64)
        if max_age is not None and max_age > 0:
            old = [counts for at, counts in column.marks if at <= clock - max_age]
            least = old[-1].copy() if tail and old else least
        elif tail:
            least = np.maximum(least, self._seen[column.index])
            for other in self.columns if self.calm else ():
                least[other.index] = np.maximum(least[other.index], other.committed(now - SLACK_S))
        least[column.index] = np.maximum(least[column.index], column.upto(clock))
        if self.bound is None or column.free:
            return Pulled(column, keys, least, tail, max_age is not None)
        slack_s = 0.0 if self.calm else SLACK_S  # a worker that has joined has told all servers of that time
        heard = (c for c in self.columns if not c.ended and c.joined_s < now - slack_s)
        company = tuple((other, other.upto(clock - self.bound)) for other in heard)
        return Pulled(column, keys, least, tail, max_age is not None, clock, company)

    def check_bound(self, pulled: Pulled, counted: Collection[int], now: float) -> None:
        """The pull has come back: nobody was further behind than is allowed. counted: the ids of the workers that the
        cluster knows now. A server that somebody has not reached yet may know nothing of one that has not pushed."""
        if self.bound is None:
            return
        floor = pulled.clock - self.bound
        pulled.company = tuple(one for one in pulled.company if self._waits_for(one[0], floor, now))
        for other, _ in pulled.company:
            known = (self.calm or len(other.clocks) > 1) and other is not self.pausing
            late = known and other.begun < floor
            if late and other.worker in counted and other.joined_s < float("inf") and not other.ended:
                text = f"{pulled.column.name} reads at step {pulled.clock}, {other.name} has begun {other.begun}"
                raise Violation("bounded delay", f"{self.app}: {text}; bound: {self.bound}")

    def check(self, pulled: Pulled, rows: Rows) -> None:
        """The pull has come back."""
        keys = pulled.keys
        where = f"{self.app}: {pulled.column.name} (column {pulled.column.index})"
        if rows.shape != (len(keys), COLUMNS):
            raise Violation("pulls", f"{where} got rows of shape {rows.shape} for {len(keys)} keys")
        counts = rows.astype(np.int64).T // units(keys)
        if not np.array_equal((counts * units(keys)).T, rows):
            at = int(np.flatnonzero((rows != (counts * units(keys)).T).any(axis=1))[0])
            raise Violation("pulls", f"{where} pulled key {keys[at]} and got {rows[at].tolist()}, no sum of its pushes")
        most = np.zeros((COLUMNS, KEYS), np.int64)
        for column in self.columns:
            most[column.index] = column.counts[-1]
        if pulled.max_age:  # a ghost's own rows may have steps that no server will ever see
            most[pulled.column.index] = pulled.column.every
        for other, upto in pulled.company:
            if not other.ended:
                pulled.least[other.index] = np.maximum(pulled.least[other.index], upto)
        least = pulled.least[:, keys]
        for wrong, what in ((counts < least, "at least"), (counts > most[:, keys], "at most")):
            if wrong.any():
                column, at = np.argwhere(wrong)[0].tolist()
                limit = (least if what == "at least" else most[:, keys])[column, at]
                name = self.columns[column].name if column < len(self.columns) else "nobody"
                text = f"{where} pulled key {keys[at]} with {counts[column, at]} pushes of {name} (column {column}), "
                raise Violation("pulls", f"{text}{what} {limit} must be there; tail: {pulled.tail}")
        if pulled.tail:
            seen = self._seen[pulled.column.index]
            seen[:, keys] = np.maximum(seen[:, keys], counts)
            if pulled.max_age:
                counts[pulled.column.index] = 0
            self._shown[:, keys] = np.maximum(self._shown[:, keys], counts)

    def check_end(self, rows: Rows, ranges: NDArray[np.int64]) -> None:
        """Checks all keys when everything has come to rest. ranges: of the keys."""
        keys = np.arange(KEYS)
        whole = Column(COLUMNS - 1, "the auditor")
        self._seen[whole.index] = self._shown  # what a tail has shown stays
        pulled = Pulled(whole, keys, self._shown.copy(), False, False)
        for column in self.columns:
            least = column.committed(float("inf")) if column.ended else column.counts[-1]
            pulled.least[column.index] = np.maximum(pulled.least[column.index], least)
        self.check(pulled, rows)
        counts = rows.astype(np.int64).T // units(keys)
        for column in self.columns:
            for r in np.unique(ranges).tolist():
                mine = ranges == r
                if not any(np.array_equal(counts[column.index][mine], some[mine]) for some in column.counts):
                    found = counts[column.index][mine].tolist()
                    text = f"{self.app}: range {r} holds no prefix of the steps of {column.name}: {found}"
                    raise Violation("exactly once", text)


def check_same(name: str, keys: Keys, rows: Rows, expected: Rows) -> None:
    """Rows that nobody has pushed to, to the bit."""
    if not np.array_equal(rows, expected):
        at = int(np.flatnonzero((rows != expected).any(axis=1))[0])
        raise Violation("pulls", f"{name} pulled key {keys[at]} of a table never pushed to and got {rows[at][:4]}…, "
                                 f"not {expected[at][:4]}…")  # fmt: skip
