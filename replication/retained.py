"""Operations that were acknowledged without a late copy of their range, retained for it: bounded, dropped as a whole.

A copy whose history ends at `p` lacks exactly the operations above `p`. All of them are here if `p` is not below the
position from which on everything is retained. And its history is a prefix of ours if it does not reach beyond the
position where the two parted: a replica that stood before us may have logged operations there that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges
from replication.log import Entry
from replication.messages import Operation, OperationKind, Seqs

_NEVER = np.iinfo(np.int64).max


class RetainedOperation(NamedTuple):
    """An operation in some ranges."""

    operation: Operation
    ranges: Ranges
    seqs: Seqs


class Retained:
    """By range. `budget_bytes`: of these operations and the log together; beyond it all of them are dropped.

    _floor: everything above it is retained, _NEVER where nothing is; _parted: the last place that the copy's history is
    known to share. spent: ranges whose copy cannot get from here what it lacks.
    """

    def __init__(self, ranges: int) -> None:
        self.budget_bytes = 0
        self.nbytes = 0
        self.spent: NDArray[np.bool_] = np.zeros(ranges, np.bool_)
        self._floor: Seqs = np.full(ranges, _NEVER, np.int64)
        self._parted: Seqs = np.full(ranges, -1, np.int64)
        self._parts: list[RetainedOperation] = []
        self.active = False

    def keeps(self, ranges: Ranges) -> NDArray[np.bool_]:
        """Whether operations of these ranges are retained."""
        active: NDArray[np.bool_] = self._floor[ranges] != _NEVER
        return active

    def begin(self, ranges: Ranges, floor: Seqs, parted: Seqs, logged: list[Entry]) -> None:
        """Retains all above `floor` from now on: of `logged`, and of what is added. If a table ends in what is logged,
        nothing: see `add`."""
        if ranges.size:
            self._floor[ranges], self._parted[ranges] = floor, parted
            self.active = True
            fresh = np.zeros(self._floor.shape[0], np.bool_)
            fresh[ranges] = True
            for entry in logged:
                chosen = fresh[entry.ranges]
                self._add(entry.frame.operation, entry.ranges[chosen], entry.seqs[chosen])
            if any(part.operation.kind == OperationKind.DROP for part in self._parts):
                self.give_up_all()

    def add(self, operation: Operation, ranges: Ranges, seqs: Seqs, log_bytes: int) -> None:
        """An operation is applied here. What comes before the end of a table cannot be sent any more after it."""
        chosen = self.keeps(ranges)
        self._add(operation, ranges[chosen], seqs[chosen])
        if self.nbytes + log_bytes > self.budget_bytes or operation.kind == OperationKind.DROP:
            self.give_up_all()

    def _add(self, operation: Operation, ranges: Ranges, seqs: Seqs) -> None:
        if ranges.size:
            self._parts.append(RetainedOperation(operation, ranges, seqs))
            self.nbytes += operation.nbytes

    def covers(self, ranges: Ranges, seqs: Seqs) -> NDArray[np.bool_]:
        """Whether copies at these positions can get from here what they lack."""
        covered: NDArray[np.bool_] = (self._floor[ranges] <= seqs) & (seqs <= self._parted[ranges])
        return covered

    def after(self, ranges: Ranges, seqs: Seqs) -> Iterator[RetainedOperation]:
        """What copies at these positions lack, oldest first."""
        position = np.full(self._floor.shape[0], _NEVER, np.int64)
        position[ranges] = seqs
        for operation, its, theirs in self._parts:
            missing = theirs > position[its]
            if missing.any():
                yield RetainedOperation(operation, its[missing], theirs[missing])

    def share(self, ranges: Ranges) -> None:
        """Copies of these ranges are ours as far as they go, and get everything from here on."""
        self._parted[ranges] = _NEVER

    def end(self, ranges: Ranges) -> None:
        """Stops retaining operations of these ranges."""
        self._floor[ranges] = _NEVER
        if self.active and not (self._floor != _NEVER).any():
            self.active, self.nbytes, self._parts = False, 0, []

    def give_up_all(self) -> None:
        """Drops everything: no late copy can catch up any more."""
        self.give_up(np.flatnonzero(self._floor != _NEVER))

    def give_up(self, ranges: Ranges) -> None:
        """Drops what is retained of these ranges: their late copies cannot catch up any more."""
        self.spent[ranges] = True
        self.end(ranges)
