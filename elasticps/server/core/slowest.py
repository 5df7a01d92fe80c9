"""How far workers have come in some ranges, asked often: an answer costs what has changed, not what there is. Pure.

Progress grows without telling anybody. So what was seen last is a lower bound, and whoever asks looks again, but only
at those who could change the answer.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from replication.progress import PART_BITS, Clocks

Ranges = NDArray[np.intp]
_SPARE = 64  # entries of a heap that may be void


class Reached:
    """The clock up to which all steps of a worker are applied, in all of `ranges`: at least `base`, never less than it
    was.

    Remembers the range that was last: as long as that one has not moved, the answer is the same.
    """

    __slots__ = ("_clocks", "_last", "_ranges", "clock", "worker")

    def __init__(self, clocks: Clocks, ranges: Ranges, worker: int, base: int) -> None:
        self.worker = worker
        self.clock = base
        self._clocks = clocks
        self._ranges = ranges
        self._last = -1

    def now(self) -> int:
        """Looks, and says it."""
        if not self._clocks.known(self.worker) or not self._ranges.shape[0]:
            return self.clock
        row = self._clocks.read(self.worker)
        if self._last < 0 or row[self._last] >> PART_BITS > self.clock:
            progress = row[self._ranges]
            at = int(progress.argmin())
            self._last = int(self._ranges[at])
            self.clock = max(self.clock, int(progress[at]) >> PART_BITS)
        return self.clock


class Slowest:
    """Which of some workers is furthest behind in some ranges: a heap of the clocks seen last."""

    __slots__ = ("_clocks", "_heap", "_ranges", "_reached")

    def __init__(self, clocks: Clocks, ranges: Ranges) -> None:
        self._clocks = clocks
        self._ranges = ranges
        self._heap: list[tuple[int, int]] = []  # (clock, worker); void unless the worker's clock is still that one
        self._reached: dict[int, Reached] = {}

    def add(self, worker: int, base: int) -> None:
        """A worker counts from now on, with at least `base`; also one that counted with another base."""
        self._reached[worker] = Reached(self._clocks, self._ranges, worker, base)
        heappush(self._heap, (base, worker))
        if len(self._heap) > 2 * len(self._reached) + _SPARE:
            self._heap = [(reached.clock, w) for w, reached in self._reached.items()]
            heapify(self._heap)

    def remove(self, worker: int) -> None:
        """A worker does not count any more."""
        self._reached.pop(worker, None)

    def first(self) -> tuple[int, int] | None:
        """(clock, worker) of one that is furthest behind, None if there is nobody."""
        return self.before(1 << 62)

    def before(self, floor: int) -> tuple[int, int] | None:
        """The same if that clock is below `floor`, else None."""
        heap = self._heap
        while heap and heap[0][0] < floor:
            clock, worker = heap[0]
            reached = self._reached.get(worker)
            if reached is None or reached.clock != clock:
                heappop(heap)
            elif reached.now() == clock:
                return heap[0]
            else:
                heapreplace(heap, (reached.clock, worker))
        return None
