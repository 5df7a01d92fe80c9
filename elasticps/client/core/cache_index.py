"""Which keys a worker's cache has an entry for, what it knows of the row there, and who gives way: least recently used.

An entry is a number below `rows`; the rows themselves lie elsewhere, by entry. Flat arrays and compiled loops: a batch
has thousands of keys. `tests/client/test_cache_index.py` holds it against a dictionary.

A row is as of a clock: that of the pull which brought it, which all steps of its own worker up to there are in. What
that worker has pushed since was applied to it here. A row on its way is dropped on arrival if its worker has pushed to
its key meanwhile, for nobody knows whether that is in it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import cast

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import njit
from elasticps.kernels.hashing import mix64

Ints = NDArray[np.int64]

kernel = njit(nogil=True, cache=True)

# An entry, int64 [FIELDS].
(
    KEY,
    NEXT,  # of its hash, plus 1; 0: none
    TURN,  # the batch that used it last
    AS_OF,  # the clock of its row, plus 1; 0: there is no row
    FETCHED_BY,  # number of the batch that asks for the row; 0: none does
    CHECKED,  # 1: that asks only whether it is still the same
    SLOTS,  # 1: what the optimizer keeps of the row is here, too
    SLOTS_FETCHED_BY,  # number of the batch that asks for that
    LOOSE,  # 1: the row came from any replica, and may hold what is not committed
    USED_AT,  # at which clock the row was wanted last, plus 1; 0: not yet
    FIELDS,
) = range(11)
# Of all, int64 [ENDS]. Each use is a line in a ring, an entry and a turn: where the entry's newest turn is another one,
# the line is out of date. So a use needs no look at who was used before it, which lies elsewhere in memory.
(FIRST, LINES, USED, GIVEN_UP, ENDS) = range(5)
ENTRY_BITS = 29
LINES_PER_ROW = 2
OFTEN = 3  # wanted so many times while a row may be shown


class State(IntEnum):
    """What a batch finds for one of its keys."""

    HIT = 0  # a row that is young enough
    OLD = 1  # one that is not: this batch asks whether it is still the same
    ABSENT = 2  # none: this batch asks for it
    COMING = 3  # an earlier batch asks for it
    NO_ENTRY = 4  # none, and nowhere to keep it


class CacheIndex:
    """At most `rows` keys. Of slots=False, an optimizer that keeps nothing of a row, slots are always here."""

    def __init__(self, rows: int, *, slots: bool) -> None:
        self.rows = rows
        self._fields = np.zeros((rows, FIELDS), np.int64)
        self._heads = np.zeros(1 << max(1, (rows - 1).bit_length()), np.int64)
        self._ends = np.zeros(ENDS, np.int64)
        self._ring = np.zeros(LINES_PER_ROW * rows + 1, np.int64)
        self._turn = 0
        self._slots = slots

    @property
    def used(self) -> int:
        """Keys that have an entry."""
        return int(self._ends[USED])

    @property
    def given_up(self) -> int:
        """Keys that gave way to others so far."""
        return int(self._ends[GIVEN_UP])

    def find(self, keys: Ints) -> tuple[Ints, bool]:
        """The entry of each of a batch's keys int64 [n], from now on those used last; new keys get that of the key that
        was used least recently, but none of this batch: -1 where there is none. And whether keys repeat."""
        self._turn += 1
        where = np.empty(len(keys), np.int64)
        repeats = _find(keys, self._turn, where, self._heads, self._fields, self._ends, self._ring)
        return where, bool(repeats)

    def look(self, keys: Ints) -> Ints:
        """The entries of keys, -1 for none; who gives way next stays the same."""
        where = np.empty(len(keys), np.int64)
        _look(keys, where, self._heads, self._fields)
        return where

    def judge(
        self, where: Ints, number: int, clock: int, staleness: int, *, loose: bool = False, take: bool = False
    ) -> tuple[Ints, NDArray[np.bool_], int]:
        """The `State` of each entry int64 [n] for a batch that reads at `clock`, where rows may be `staleness` steps
        old, none at all with 0; which of them are wanted that often that what is asked for once will be shown several
        times; and the greatest age of those that are hit. What is OLD or ABSENT is asked for by batch `number` from now
        on. loose: rows that any replica has brought may be shown. take: asks also for what an earlier one asks for."""
        states, often = np.empty(len(where), np.int64), np.zeros(len(where), np.bool_)
        oldest = _judge(where, states, often, number, clock, staleness, loose, take, self._fields)
        return states, often, int(oldest)

    def asker(self, entry: int) -> int:
        """Number of the batch that asks for a row; 0: none does."""
        return int(self._fields[entry, FETCHED_BY])

    def fresh(self, where: Ints, clock: int, staleness: int, *, loose: bool = False) -> NDArray[np.bool_]:
        """Which entries int64 [n], -1 for none, have rows that may be shown at `clock`. With staleness 0: those as of
        that clock. loose: as for `judge`."""
        as_of = np.where((where >= 0) & (loose | (self._fields[where, LOOSE] == 0)), self._fields[where, AS_OF], 0)
        return (as_of > 0) & (clock - as_of + 1 <= staleness)

    def known(self, where: Ints) -> NDArray[np.bool_]:
        """Which entries hold a row, however old."""
        return cast(NDArray[np.bool_], (where >= 0) & (self._fields[where, AS_OF] > 0))

    def slots_known(self, where: Ints) -> NDArray[np.bool_]:
        """Of which entries, -1 for none, the row's slots are here."""
        return cast(NDArray[np.bool_], (where >= 0) & (self._fields[where, SLOTS] > 0))

    def fetched_by(self, where: Ints, number: int) -> NDArray[np.bool_]:
        """Which entries' rows batch `number` asks for, and nobody else."""
        return cast(NDArray[np.bool_], (where >= 0) & (self._fields[where, FETCHED_BY] == number))

    def check(self, where: Ints) -> None:
        """The rows of these entries, which were found OLD, are to be compared only."""
        self._fields[where, CHECKED] = 1

    def arrived(
        self, where: Ints, number: int, clock: int, slots: NDArray[np.bool_], *, loose: bool = False
    ) -> NDArray[np.bool_]:
        """The rows that batch `number` asked for are there, as of `clock`: which of them to keep. slots: of which those
        are known. loose: they come from any replica."""
        keep = self.fetched_by(where, number)
        at = where[keep]
        self._fields[at, AS_OF] = clock + 1
        self._fields[at, FETCHED_BY] = self._fields[at, CHECKED] = self._fields[at, SLOTS_FETCHED_BY] = 0
        self._fields[at, SLOTS], self._fields[at, LOOSE] = slots[keep], loose
        return keep

    def compared(
        self, where: Ints, number: int, clock: int, same: NDArray[np.bool_], *, loose: bool = False
    ) -> NDArray[np.bool_]:
        """Of the rows that batch `number` had checked: those that are the same are as of `clock`; which they are, and
        are still here. All others are asked for by that batch now, those that nobody else asks for. loose: any replica
        has said so."""
        mine = self.fetched_by(where, number)
        current, gone = where[mine & same], where[mine & ~same]
        self._fields[current, AS_OF] = clock + 1
        self._fields[current, FETCHED_BY], self._fields[current, LOOSE] = 0, loose
        self._fields[gone, AS_OF] = self._fields[gone, SLOTS] = self._fields[gone, SLOTS_FETCHED_BY] = 0
        self._fields[where[mine], CHECKED] = 0
        return mine & same

    def ask_slots(self, where: Ints, number: int) -> NDArray[np.bool_]:
        """Batch `number` is to ask for the slots of rows: which of these entries have a row without, that nobody asks
        for."""
        fields = self._fields[where]
        needed = (where >= 0) & (fields[:, AS_OF] > 0) & (fields[:, SLOTS] == 0) & (fields[:, SLOTS_FETCHED_BY] == 0)
        self._fields[where[needed], SLOTS_FETCHED_BY] = number
        return cast(NDArray[np.bool_], needed)

    def slots_arrived(self, where: Ints, number: int) -> NDArray[np.bool_]:
        """They are there: for which entries they are still wanted."""
        needed = (where >= 0) & (self._fields[where, SLOTS_FETCHED_BY] == number)
        self._fields[where[needed], SLOTS] = 1
        self._fields[where[needed], SLOTS_FETCHED_BY] = 0
        return cast(NDArray[np.bool_], needed)

    def pushed(self, keys: Ints, *, applies: bool) -> Ints:
        """This worker pushes to keys int64 [n], each once: entries of the rows that can follow, if it applies what it
        pushes, -1 for all others; their rows are dropped."""
        where = np.empty(len(keys), np.int64)
        _pushed(keys, where, applies, self._slots, self._heads, self._fields)
        return where

    def drop(self, keys: Ints) -> None:
        """There are no rows of keys any more, and none on their way."""
        where = self.look(keys)
        self._drop(where[where >= 0])

    def clear(self) -> None:
        """The same of all."""
        self._drop(np.arange(self.used))

    def _drop(self, where: Ints) -> None:
        self._fields[where, AS_OF : SLOTS_FETCHED_BY + 1] = 0

    def abandon(self, where: Ints, number: int) -> None:
        """Nobody waits for what batch `number` asked for."""
        at = where[where >= 0]
        for field in (FETCHED_BY, SLOTS_FETCHED_BY):
            self._fields[at[self._fields[at, field] == number], field] = 0


@kernel
def _bucket(key, heads):  # type: ignore[no-untyped-def]
    return np.int64(mix64(np.uint64(key)) & np.uint64(heads.shape[0] - 1))


@kernel
def _entry_of(key, heads, fields):  # type: ignore[no-untyped-def]
    """The entry of a key, -1 for none."""
    p = heads[_bucket(key, heads)] - 1
    while p >= 0 and fields[p, KEY] != key:
        p = fields[p, NEXT] - 1
    return p


@kernel
def _find(keys, turn, where, heads, fields, ends, ring):  # type: ignore[no-untyped-def]
    """In passes, whose steps do not wait for each other: a batch's entries lie all over memory."""
    repeats = 0
    _look(keys, where, heads, fields)
    for i in range(keys.shape[0]):
        p = where[i]
        if p >= 0:
            if fields[p, TURN] == turn:
                repeats += 1
            else:
                _use(p, turn, fields, ends, ring)
    for i in range(keys.shape[0]):
        if where[i] < 0:
            p = _entry_of(keys[i], heads, fields)
            if p >= 0:
                repeats += 1
            else:
                p = _take(keys[i], turn, heads, fields, ends, ring)
                if p >= 0:
                    _use(p, turn, fields, ends, ring)
            where[i] = p
    return repeats


@kernel
def _take(key, turn, heads, fields, ends, ring):  # type: ignore[no-untyped-def]
    """An entry for a new key: a free one, else that of the key used least recently; -1 if this batch has all."""
    if ends[USED] < fields.shape[0]:
        p = ends[USED]
        ends[USED] += 1
    else:
        while True:
            line = ring[ends[FIRST]]
            p = line & ((1 << ENTRY_BITS) - 1)
            if line >> ENTRY_BITS == fields[p, TURN]:
                break
            _pass_line(ends, ring)
        if fields[p, TURN] == turn:
            return -1
        _pass_line(ends, ring)
        bucket = _bucket(fields[p, KEY], heads)
        if heads[bucket] == p + 1:
            heads[bucket] = fields[p, NEXT]
        else:
            q = heads[bucket] - 1
            while fields[q, NEXT] != p + 1:
                q = fields[q, NEXT] - 1
            fields[q, NEXT] = fields[p, NEXT]
        fields[p] = 0
        ends[GIVEN_UP] += 1
    bucket = _bucket(key, heads)
    fields[p, KEY], fields[p, NEXT] = key, heads[bucket]
    heads[bucket] = p + 1
    return p


@kernel
def _pass_line(ends, ring):  # type: ignore[no-untyped-def]
    ends[FIRST] = (ends[FIRST] + 1) % ring.shape[0]
    ends[LINES] -= 1


@kernel
def _use(p, turn, fields, ends, ring):  # type: ignore[no-untyped-def]
    """An entry is the one used last. When the ring is full, lines that are out of date leave it: more than half."""
    if ends[LINES] == ring.shape[0]:
        size, current, at = ring.shape[0], 0, ends[FIRST]
        for i in range(size):
            line = ring[(at + i) % size]
            if line >> ENTRY_BITS == fields[line & ((1 << ENTRY_BITS) - 1), TURN]:
                ring[(at + current) % size] = line
                current += 1
        ends[LINES] = current
    fields[p, TURN] = turn
    ring[(ends[FIRST] + ends[LINES]) % ring.shape[0]] = turn << ENTRY_BITS | p
    ends[LINES] += 1


@kernel
def _look(keys, where, heads, fields):  # type: ignore[no-untyped-def]
    n = keys.shape[0]
    for i in range(n):
        where[i] = _bucket(keys[i], heads)
    for i in range(n):
        where[i] = heads[where[i]] - 1
    for i in range(n):
        p = where[i]
        while p >= 0 and fields[p, KEY] != keys[i]:
            p = fields[p, NEXT] - 1
        where[i] = p


@kernel
def _judge(where, states, often, number, clock, staleness, loose, take, fields):  # type: ignore[no-untyped-def]
    oldest = 0
    for i in range(where.shape[0]):
        p = where[i]
        if p < 0:
            states[i] = 4
            continue
        often[i] = fields[p, USED_AT] and clock - fields[p, USED_AT] + 1 <= max(1, staleness // OFTEN)
        fields[p, USED_AT] = clock + 1
        age = clock - fields[p, AS_OF] + 1
        if fields[p, AS_OF] and staleness > 0 and age <= staleness and (loose or not fields[p, LOOSE]):
            states[i] = 0
            oldest = max(oldest, age)
        elif fields[p, FETCHED_BY] and not take:
            states[i] = 3
        else:
            states[i] = 1 if fields[p, AS_OF] else 2
            fields[p, FETCHED_BY] = number
            fields[p, CHECKED] = 0
    return oldest


@kernel
def _pushed(keys, where, applies, has_slots, heads, fields):  # type: ignore[no-untyped-def]
    _look(keys, where, heads, fields)
    for i in range(keys.shape[0]):
        p = where[i]
        if p < 0:
            continue
        where[i] = -1
        if applies and fields[p, AS_OF] and (fields[p, SLOTS] or not has_slots):
            where[i] = p
        else:
            fields[p, AS_OF] = fields[p, SLOTS] = fields[p, SLOTS_FETCHED_BY] = 0
            fields[p, CHECKED] = 0
        if not fields[p, CHECKED]:
            fields[p, FETCHED_BY] = 0
