"""BoundedDelay as a list of pulls and a loop over all workers: slow, and easy to believe."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import WorkerInfo
from elasticps.server.core.bounded_delay import CONNECT_WAIT_S
from elasticps.server.core.reads import DEFAULT_WAIT_S, MAX_PARKED, PullRequest
from elasticps.server.core.requests import Asker, RequestError, waited_too_long
from replication.progress import PART_BITS, Clocks

Ranges = NDArray[np.intp]


class BoundedDelayTwin:
    """Pulls that wait, and what they are judged by: vector clocks, the roster, the ranges that are read here."""

    def __init__(self, ranges: int, clocks: Clocks, clock: Callable[[], float]) -> None:
        self.tailed: Ranges = np.empty(0, np.intp)
        self.held: Ranges = np.empty(0, np.intp)
        self._clocks = clocks
        self._clock = clock
        self._parked: list[PullRequest] = []
        self._workers: Mapping[int, WorkerInfo] = {}
        self._bases: dict[int, int] = {}  # of the active workers: those that have joined and are in the roster
        self._paused: set[int] = set()  # those that said they take no part now
        self._least: dict[str, int] = {}  # what an application's others had all reached when one joined, at most
        self._awaited: dict[int, float] = {}  # those that have said nothing yet, and until when it may be news

    def __len__(self) -> int:
        return len(self._parked)

    def serve(self, tailed: Ranges, held: Ranges) -> None:
        """A view says what is read here."""
        if len(np.setdiff1d(held, self.held)) or len(np.setdiff1d(tailed, self.tailed)):
            until_s = self._clock() + CONNECT_WAIT_S
            self._awaited = {w: until_s for w in self._workers if w not in self._bases and w not in self._paused}
        self.tailed, self.held = tailed, held

    def follow(self, workers: Mapping[int, WorkerInfo]) -> None:
        """Follows a roster: workers that are not in it hold back no pull."""
        self._workers = workers
        self._bases = {worker: base for worker, base in self._bases.items() if worker in workers}
        self._paused &= workers.keys()

    def pause(self, worker: int) -> None:
        """A worker holds back no pull until it joins again."""
        self._bases.pop(worker, None)
        self._awaited.pop(worker, None)
        if worker in self._workers:
            self._paused.add(worker)

    def join(self, worker: int, base: int, app: str) -> int:
        """A worker is active from now on; its clock counts as at least `base`. Returns the lowest clock of the others,
        which is kept for whoever joins next unless this one only says again what it said, or was seen beyond it."""
        seen = max((int(p) >> PART_BITS for p in self._clocks.read(worker)[self.held]), default=0)
        again = worker in self._bases and self._bases[worker] == base
        self.pause(worker)
        others = self.minimum(app)
        self._paused.discard(worker)
        if worker in self._workers:
            if not again and seen <= base:
                self._least[app] = others
            self._bases[worker] = base
        return others

    def minimum(self, app: str) -> int:
        """The lowest clock of an application's active workers, 0 if there is none: that of what any read shows here."""
        clocks = [
            min(there)
            for ranges in (self.tailed, self.held)
            if (there := [clock for w, clock in self._minimums(app, ranges).items() if w not in self._awaited])
        ]
        if not clocks:
            self._least[app] = 0
        return max([*clocks, self._least.get(app, 0)])

    def blockers(self, read: PullRequest) -> list[str]:
        """The workers that a pull has to wait for: its own pushes (read your writes), then the bounded delay's."""
        header, own = read.header, read.connection.worker
        ranges = self.held if header.anywhere else self.tailed
        if self._reached(own, read.connection.base, ranges) < header.clock:
            return [read.connection.worker_name]
        if header.bound is None:
            return []
        floor = header.clock - header.bound
        minimums = self._minimums(read.connection.app, ranges)
        return [self._workers[w].name for w, clock in minimums.items() if clock < floor]

    def _reached(self, worker: int, base: int, ranges: Ranges) -> int:
        """The clock up to which all steps of a worker are applied here, in all of `ranges`."""
        if not len(ranges) or not self._clocks.known(worker):
            return base
        return max(base, int(self._clocks.of(worker, ranges).min()) >> PART_BITS)

    def _minimums(self, app: str, ranges: Ranges) -> dict[int, int]:
        found = {}
        for worker, info in self._workers.items():
            if info.app != app or worker in self._paused:
                continue
            if worker in self._bases:
                found[worker] = self._reached(worker, self._bases[worker], ranges)
            elif self._started(worker, ranges) or self._clock() < self._awaited.get(worker, 0.0):
                found[worker] = self._reached(worker, 0, ranges)
        return found

    def _started(self, worker: int, ranges: Ranges) -> bool:
        return self._clocks.known(worker) and bool(self._clocks.of(worker, ranges).any())

    def park(self, read: PullRequest) -> None:
        """Keeps a pull until `release` lets it go. Raises `RequestError` when too many wait."""
        if len(self._parked) >= MAX_PARKED:
            raise RequestError("busy", f"this server already has {MAX_PARKED} pulls waiting; try again later")
        wait_s = read.header.wait_ms / 1e3 or DEFAULT_WAIT_S
        self._parked.append(read._replace(deadline_s=self._clock() + wait_s))

    def forget(self, connection: Asker) -> None:
        """Nobody waits for these answers any more."""
        if self._parked:
            self._parked = [read for read in self._parked if read.connection is not connection]

    def release(self, tail_since: int, full_since: int) -> list[tuple[PullRequest, RequestError | None]]:
        """The pulls that need not wait any more, with the reason why if they cannot be answered."""
        if not self._parked:
            return []
        parked, self._parked = self._parked, []
        now = self._clock()
        done: list[tuple[PullRequest, RequestError | None]] = []
        for read in parked:
            if read.header.epoch < (full_since if read.header.anywhere else tail_since):
                done.append((read, RequestError("stale-view", "the ranges that may be read here have changed")))
            elif not (blockers := self.blockers(read)):
                done.append((read, None))
            elif now >= read.deadline_s:
                done.append((read, _too_long(read, blockers)))
            else:
                self._parked.append(read)
        return done


def _too_long(read: PullRequest, blockers: list[str]) -> RequestError:
    text = f"a pull of table {read.table_names} at clock {read.header.clock} waited too long for worker "
    return waited_too_long(text + ", ".join(sorted(blockers)), sorted(blockers))
