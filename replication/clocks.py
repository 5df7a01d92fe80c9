"""Vector clocks: how far each worker's pushes have been applied to each range.

Progress is one int64 per (worker, range): `clock << 16 | part`. A step of clock c comes in parts 0, 1, … and its last
part moves the progress to `c << 16`. A frame that covers parts `first`..`part` of step c is *next* for a range exactly
when the range's progress is `(c - 1) << 16 | first`; beyond that it was applied before, below it something is missing.
Invariant: progress never falls.
"""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

PART_BITS = 16
MAX_PART = (1 << PART_BITS) - 1


class Verdict(Enum):
    """What a frame is to the ranges that it names, when all agree."""

    NEXT = "next"
    DUPLICATE = "duplicate"
    GAP = "gap"
    MIXED = "mixed"  # applied in some, next in the others: the usual sight after a failover


def before(clock: int, first: int) -> int:
    """The progress that a range must have for part `first` of step `clock` to be next."""
    return ((clock - 1) << PART_BITS) | first


def after(clock: int, part: int, last: bool) -> int:
    """The progress of a range once parts up to `part` of step `clock` are applied."""
    return clock << PART_BITS if last else ((clock - 1) << PART_BITS) | (part + 1)


class Clocks:
    """The progress of every worker in every range of one server: int64 [worker, range]."""

    def __init__(self, ranges: int) -> None:
        self.ranges = ranges
        self._slots: dict[int, int] = {}
        self._progress = np.zeros((4, ranges), np.int64)

    def __contains__(self, worker: int) -> bool:
        return worker in self._slots

    @property
    def workers(self) -> tuple[int, ...]:
        return tuple(self._slots)

    def admit(self, worker: int, base: int = 0) -> None:
        """Gives a worker a row that starts at clock `base`; does nothing if it has one."""
        if worker in self._slots:
            return
        slot = len(self._slots)
        if slot == len(self._progress):
            self._progress = np.concatenate([self._progress, np.zeros_like(self._progress)])
        self._slots[worker] = slot
        self._progress[slot] = base << PART_BITS

    def row(self, worker: int) -> NDArray[np.int64]:
        """Progress of one worker, int64 [ranges]; a view."""
        return self._progress[self._slots[worker]]

    def check(self, worker: int, clock: int, first: int, ranges: NDArray[np.intp]) -> Verdict:
        """Judges a frame against the ranges that it ticks. One vectorised comparison in the usual case."""
        have = self.row(worker)[ranges]
        need = before(clock, first)
        if (have == need).all():
            return Verdict.NEXT
        if (have < need).any():
            return Verdict.GAP
        return Verdict.DUPLICATE if (have > need).all() else Verdict.MIXED

    def pending(self, worker: int, clock: int, first: int, ranges: NDArray[np.intp]) -> NDArray[np.intp]:
        """Of `ranges`, those for which the frame is next."""
        return ranges[self.row(worker)[ranges] == before(clock, first)]

    def advance(self, worker: int, clock: int, part: int, last: bool, ranges: NDArray[np.intp]) -> None:
        """Notes that parts up to `part` of step `clock` are applied to `ranges`."""
        self.row(worker)[ranges] = after(clock, part, last)

    def minimum(self, workers: list[int], ranges: NDArray[np.intp]) -> NDArray[np.int64]:
        """Per worker, the lowest clock over `ranges`: int64 [len(workers)]. `ranges` must not be empty."""
        rows = self._progress[[self._slots[w] for w in workers]]
        return np.asarray(rows[:, ranges].min(axis=1) >> PART_BITS)
