"""The workers that take part, and their clocks at their home ranges. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from replication.progress import PART_BITS, Clocks
from replication.step_records import home_range


class ActiveWorkers:
    """Workers that have joined, in the roster. bases: by id, the clock that each starts above."""

    def __init__(self, ranges: int, clocks: Clocks) -> None:
        self.bases: dict[int, int] = {}
        self._ranges = ranges
        self._clocks = clocks
        self._by_home: dict[int, set[int]] = {}
        self._by_app: dict[str, dict[int, None]] = {}  # in the order in which they came
        self._apps: dict[int, str] = {}

    def add(self, worker: int, base: int, app: str) -> None:
        """Adds a worker, or changes its base."""
        self.bases[worker], self._apps[worker] = base, app
        self._by_app.setdefault(app, {})[worker] = None
        self._by_home.setdefault(home_range(worker, self._ranges), set()).add(worker)

    def remove(self, worker: int) -> None:
        """Removes a worker, if it is there."""
        if self.bases.pop(worker, None) is None:
            return
        app, home = self._apps.pop(worker), home_range(worker, self._ranges)
        del self._by_app[app][worker]
        if not self._by_app[app]:
            del self._by_app[app]
        self._by_home[home].discard(worker)
        if not self._by_home[home]:
            del self._by_home[home]

    def homes(self, app: str, most: int, but: int) -> tuple[int, ...]:
        """The homes of some of an application's workers, those that came first; `but` is left out."""
        some = itertools.islice(self._by_app.get(app, ()), most + 1)
        return tuple(home_range(worker, self._ranges) for worker in some if worker != but)[:most]

    def lowest_at_homes(self, app: str, headed: Iterable[int], but: int) -> int | None:
        """The lowest clock, at their homes, of an application's workers whose homes are among these ranges; `but` is
        left out. None if there are none. What that costs grows with the workers of these homes, not with all."""
        clocks = [
            max(self.bases[worker], self._clocks.at(worker, r) >> PART_BITS)
            for r in headed
            for worker in self._by_home.get(r, ())
            if worker != but and self._apps[worker] == app
        ]
        return min(clocks, default=None)
