"""Records of sparse steps: which ranges a step ticks, kept where its worker's restart can find them.

A step ticks only ranges of the heads that it has rows for, and one range more: its worker's *home*. With the tick home
gets a record of all ranges that the step ticks, and of the clock up to which the worker knew its steps to be
committed. So whoever goes on for a worker that is gone can tell which steps are whole: those whose ranges all have
them. A step that ticks every range needs no record. Records are logged with the tick, and go wherever the home range's
clocks go; a later record drops those of steps that it says are committed, so a worker's window bounds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges
from replication.progress import PART_BITS, Progress

MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads worker ids, which are consecutive, over the ranges
MOST_RECORDS = 1024  # of a worker: its window is no larger


def home_range(worker: int, ranges: int) -> int:
    """The home of a worker among so many ranges, a power of two."""
    return (worker * MIX & (1 << 64) - 1) * ranges >> 64


def record_bytes(ranges: int) -> int:
    """The size of a record of a step: its bits are padded to whole words."""
    return 8 * (1 + (ranges + 63 >> 6))


class StepRecord(NamedTuple):
    """A step that does not tick all ranges. committed: the clock up to which its worker knew all to be committed;
    bits: one for each range that it ticks, lowest first, padded to whole words."""

    clock: int
    committed: int
    bits: bytes

    @property
    def ranges(self) -> Ranges:
        """The ranges that the step ticks."""
        found: Ranges = np.flatnonzero(np.unpackbits(np.frombuffer(self.bits, np.uint8), bitorder="little"))
        return found


def record_of(clock: int, committed: int, ticked: NDArray[np.bool_]) -> StepRecord:
    """The record of a step that ticks these ranges, bool [P]."""
    bits = np.packbits(ticked, bitorder="little").tobytes()
    return StepRecord(clock, committed, bits + b"\0" * (-len(bits) % 8))


class StepRecords:
    """Records of each worker, in the order of their clocks. `ranges` is P."""

    __slots__ = ("_of", "_ranges")

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._of: dict[int, dict[int, dict[int, StepRecord]]] = {}  # by home range, worker and clock

    def note(self, worker: int, record: StepRecord) -> None:
        """Adds the record of a worker's newest step, and drops those that the worker needs no more."""
        mine = self._of.setdefault(home_range(worker, self._ranges), {}).setdefault(worker, {})
        for clock in list(mine):
            if clock > record.committed:
                break
            del mine[clock]
        mine[record.clock] = record
        if len(mine) > MOST_RECORDS:  # it does not say what is committed: only its own restart knows less by that
            del mine[next(iter(mine))]

    def of(self, worker: int) -> list[StepRecord]:
        """A worker's records, by clock."""
        return list(self._of.get(home_range(worker, self._ranges), {}).get(worker, {}).values())

    def column(self, r: int) -> list[tuple[int, StepRecord]]:
        """(worker, record) of all workers whose home is range r, sorted: what a snapshot of the range carries. The cost
        grows with the workers of this home, not with all."""
        return [(worker, record) for worker, mine in sorted(self._of.get(r, {}).items()) for record in mine.values()]

    def set_column(self, r: int, records: Iterable[tuple[int, StepRecord]]) -> None:
        """Replaces the records of one home range by those of a snapshot."""
        self._of.pop(r, None)
        for worker, record in records:
            self._of.setdefault(r, {}).setdefault(worker, {})[record.clock] = record

    def clear(self, ranges: Ranges) -> None:
        """Forgets all workers whose home is one of these ranges."""
        for r in ranges.tolist():
            self._of.pop(r, None)

    def forget(self, worker: int) -> None:
        """Forgets a worker."""
        self._of.get(home_range(worker, self._ranges), {}).pop(worker, None)


def last_whole_step(base: int, home: int, committed: Progress, records: Iterable[StepRecord]) -> int:
    """The last clock up to which every step of a worker is committed in all ranges that it ticks, at least `base`.

    home: the worker's home range; committed: its progress per range that all replicas have, int64 [P]; records: those
    that home has of it, also of steps that are not committed there: they say which older ones are.
    """
    sparse = {record.clock: record for record in records}
    whole = max(base, max((record.committed for record in sparse.values()), default=0))
    newest, everywhere = int(committed[home]) >> PART_BITS, int(committed.min()) >> PART_BITS
    while whole < newest:
        record = sparse.get(whole + 1)
        if record is not None:
            if not bool((committed[record.ranges] >> PART_BITS > whole).all()):
                break
            whole += 1
            continue
        dense = min([everywhere, newest, *(clock - 1 for clock in sparse if clock > whole)])
        if dense <= whole:
            break
        whole = dense
    return whole


def step_is_whole(
    clock: int, home: int, applied: Progress, committed: Progress, records: Sequence[StepRecord]
) -> bool | None:
    """Whether step `clock` of a worker that is gone is committed in all ranges that it ticks; None: it is on its way
    down the chains still. applied: the worker's progress per range at the heads, int64 [P]; the others: as for
    `last_whole_step`."""
    if any(record.committed >= clock for record in records):
        return True
    if committed[home] >> PART_BITS < clock:
        return None if applied[home] >> PART_BITS >= clock else False
    ticked = next((record.ranges for record in records if record.clock == clock), slice(None))
    if bool((committed[ticked] >> PART_BITS >= clock).all()):
        return True
    return None if bool((applied[ticked] >> PART_BITS >= clock).all()) else False
