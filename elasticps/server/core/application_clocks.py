"""The committed clocks of one application's workers, as the head of its group range knows them. Pure.

`released` is the highest clock of which it is proved that every active worker has committed its steps up to there, and
that each worker which joins later starts there or above. It only grows. What `minimum` says becomes `released` when the
server has shown that it still heads the group range (`delay_coordinator`).

A head that is new knows no clock. It releases nothing more before it has heard of each worker that was in the roster as
it began (`unheard`): what that worker has committed, and the highest clock that the worker knows to be released. So
what an earlier head has released is known here as long as anybody relies on it, and nothing needs to be logged.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush

_SPARE = 64  # entries of a heap that may be void


class ApplicationClocks:
    """clocks: by id, of active workers, at least what they have committed; epoch: the newest at which servers have told
    workers that steps are committed; highest: the highest clock that anybody waits for. workers: the roster as it
    begins."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.unheard = set(workers)
        self.clocks: dict[int, int] = {}
        self.released = 0
        self.epoch = 0
        self._heap: list[tuple[int, int]] = []  # (clock, worker); void unless it is still the worker's clock
        self._idle: list[tuple[int, int]] = []  # the same, of workers that owe no report
        self._owing: set[int] = set()  # workers that owe a report
        self._unasked = set(self.unheard)  # those unheard that owe none

    def join(self, worker: int, base: int) -> None:
        """A worker is active from now on, or still, at `base` or above. It may be on a new connection, which has lost
        what it was asked, or on its first, so that it can be asked."""
        self._owes_nothing(worker)
        self._set(worker, max(base, self.clocks.get(worker, 0)))

    def pause(self, worker: int) -> None:
        """A worker holds nobody back until it joins again. What it knows to be released still counts."""
        self._owes_nothing(worker)
        self.clocks.pop(worker, None)

    def leave(self, worker: int) -> None:
        """A worker is not in the roster any more."""
        self.unheard.discard(worker)
        self.pause(worker)

    def report(self, worker: int, clock: int, released: int, epoch: int) -> None:
        """A worker has committed all up to `clock`, as servers have said at most at `epoch`, and knows what is
        released."""
        self.unheard.discard(worker)
        self._owes_nothing(worker)
        self.epoch = max(self.epoch, epoch)
        self.released = max(self.released, released)
        if worker in self.clocks:
            self._set(worker, max(clock, self.clocks[worker]))

    def _owes_nothing(self, worker: int) -> None:
        self._owing.discard(worker)
        if worker in self.unheard:
            self._unasked.add(worker)
        elif self._unasked:
            self._unasked.discard(worker)

    def _set(self, worker: int, clock: int) -> None:
        self.clocks[worker] = clock
        for heap in (self._heap, self._idle):
            heappush(heap, (clock, worker))
            if len(heap) > 2 * len(self.clocks) + _SPARE:
                known = self._owing if heap is self._idle else ()
                heap[:] = {(c, w) for w, c in self.clocks.items() if w not in known}
                heapify(heap)

    def minimum(self) -> int:
        """The clock up to which all active workers have committed their steps, as far as is known here; at least what
        is released."""
        heap = self._heap
        while heap and self.clocks.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return self.released if self.unheard or not heap else max(self.released, heap[0][0])

    def to_ask(self, floor: int) -> list[tuple[int, int]]:
        """(worker, clock) of workers that must be asked for their clocks as somebody waits for `floor`: each to report
        when it has committed that clock. Each owes one report from now on, so nobody is asked twice for the same. One
        that is not connected is found again when it has connected, and joined or paused, not before: each of thousands
        that come to a new head has it look for whom to ask."""
        found, heap = list[tuple[int, int]](), self._idle
        if self._unasked:
            found += ((worker, 0) for worker in self._unasked)
            self._owing |= self._unasked
            self._unasked = set()
        while heap and heap[0][0] < floor:
            clock, worker = heappop(heap)
            if self.clocks.get(worker) == clock and worker not in self._owing:
                self._owing.add(worker)
                found.append((worker, clock + 1))
        return found

    def holding_back(self, floor: int) -> list[int]:
        """All workers that hold back whoever waits for `floor`."""
        return sorted({worker for worker, clock in self.clocks.items() if clock < floor} | self.unheard)
