"""The workers that take part, and their clocks at their home ranges. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from coordinator.core.view import WorkerInfo
from replication.progress import PART_BITS, Clocks
from replication.step_records import home_range


class ActiveWorkers:
    """Workers that have joined, in the roster. bases: by id, the clock that each starts above."""

    def __init__(self, ranges: int, clocks: Clocks) -> None:
        self.bases: dict[int, int] = {}
        self._ranges = ranges
        self._clocks = clocks
        self._by_home: dict[int, set[int]] = {}

    def add(self, worker: int, base: int) -> None:
        """Adds a worker, or changes its base."""
        self.bases[worker] = base
        self._by_home.setdefault(home_range(worker, self._ranges), set()).add(worker)

    def remove(self, worker: int) -> None:
        """Removes a worker, if it is there."""
        if self.bases.pop(worker, None) is None:
            return
        home = home_range(worker, self._ranges)
        self._by_home[home].discard(worker)
        if not self._by_home[home]:
            del self._by_home[home]

    def lowest_at_homes(
        self, app: str, headed: Iterable[int], but: int, workers: Mapping[int, WorkerInfo]
    ) -> int | None:
        """The lowest clock, at their homes, of an application's workers whose homes are among these ranges; `but` is
        left out. None if there are none. What that costs grows with the workers of these homes, not with all.
        workers: the roster."""
        clocks = [
            max(self.bases[worker], self._clocks.at(worker, r) >> PART_BITS)
            for r in headed
            for worker in self._by_home.get(r, ())
            if worker != but and workers[worker].app == app
        ]
        return min(clocks, default=None)
