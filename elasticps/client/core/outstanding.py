"""What a worker's session keeps of each outstanding step: its parts, the ranges that they tick, where it is committed.
Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.heads import Head
from replication.chain import Member, Ranges
from replication.progress import Progress
from replication.step_records import StepRecord


class PartContent(Protocol):
    """What a part of a step carries; the shell cuts it per head. It must not change once it is pushed."""

    @property
    def nbytes(self) -> int:
        """About so many are sent for all heads."""

    def touches(self, ranges: Ranges) -> bool:
        """Whether it holds anything for these ranges. It may say yes where it does not, never the reverse."""

    def heads(self, epoch: int) -> Iterable[Member] | None:
        """The heads, in the view of that epoch, of all ranges that it holds anything for; None if it does not know."""


class Ticks:
    """Which ranges a part of a step ticks, in groups, and the worker's progress there before it."""

    __slots__ = ("_prev", "groups")

    def __init__(self, groups: list[tuple[Ranges, int]]) -> None:
        self.groups = groups
        self._prev: Progress | None = None

    def prev(self, ranges: int) -> Progress:
        """The worker's progress before the part by range, int64 [P]; -1 where the part does not tick."""
        if self._prev is None:
            prev = np.full(ranges, -1, np.int64)
            for group, before in self.groups:
                prev[group] = before
            self._prev = prev  # when it is whole: an exception may cut this short
        return self._prev


class OutstandingStep:
    """One step. parts: their contents; heads: those that its parts so far tick ranges of; everywhere: the last part
    ticks all ranges; elsewhere: parts so far tick ranges that have no head now. Where the step is committed is kept as
    the heads that said so for all their ranges; only when somebody speaks for some of them, or heads change, per range
    (bool [P])."""

    __slots__ = ("count", "elsewhere", "everywhere", "heads", "parts", "ranges", "record", "ticks", "whole")

    def __init__(self) -> None:
        self.parts: list[PartContent] = []
        self.ticks: list[Ticks] = []
        self.count = 0  # of parts when the last one is known, else 0
        self.heads: dict[Head, None] = {}
        self.elsewhere = self.everywhere = False
        self.record: StepRecord | None = None
        self.whole: set[Head] = set()
        self.ranges: NDArray[np.bool_] | None = None

    @property
    def closed(self) -> bool:
        """Whether its last part is there."""
        return len(self.parts) == self.count

    def by_range(self, ranges: int) -> NDArray[np.bool_]:
        """Where it is committed, from now on per range."""
        if self.ranges is None:
            done = np.zeros(ranges, dtype=np.bool_)
            for head in self.whole:
                done[head.order] = True
            self.ranges = done
            self.whole.clear()
        return self.ranges

    def ticked(self, ranges: int) -> NDArray[np.bool_]:
        """The ranges that its parts so far tick, bool [P]. The last part ticks those of all others."""
        ticked = np.zeros(ranges, np.bool_)
        for ticks in self.ticks[-1:] if self.closed else self.ticks:
            for group, _ in ticks.groups:
                ticked[group] = True
        return ticked
