"""Decides when a pull may be answered: once this replica has what its worker, and the bounded delay, ask for.

Progress grows without notice. So the clocks seen last are lower bounds, and a question looks again only at the workers
who could change its answer: it costs what has changed, not what there is (`Reached`, `Slowest`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import WorkerInfo
from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.reads import DEFAULT_WAIT_S, MAX_PARKED, PullRequest
from elasticps.server.core.requests import Asker, RequestError, waited_too_long
from elasticps.wire.clocks import ReadAfter
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
        """The clock as of now."""
        if not self._clocks.known(self.worker) or not self._ranges.shape[0]:
            return self.clock
        if self._last < 0 or self._clocks.at(self.worker, self._last) >> PART_BITS > self.clock:
            progress = self._clocks.of(self.worker, self._ranges)
            at = int(progress.argmin())
            self._last = int(self._ranges[at])
            self.clock = max(self.clock, int(progress[at]) >> PART_BITS)
        return self.clock


class Slowest:
    """Which of some workers is furthest back in some ranges: a heap of the clocks seen last."""

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
        """(clock, worker) of one that is furthest back, None if there is nobody."""
        return self.before(1 << 62)

    def before(self, floor: int) -> tuple[int, int] | None:
        """(clock, worker) of one that is furthest back, if that clock is below `floor`; else None."""
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


Numbers = list[tuple[int, int]]  # a heap of (clock waited for, number of the pull)
CONNECT_WAIT_S = 1.0  # workers connect to a server that gets ranges within milliseconds of the view that says so


class Cohort:
    """An application's workers that may hold pulls back, in some ranges.

    heard: workers that have joined here, or whose steps are seen and that are not awaited; awaited: workers of
    `BoundedDelay._awaited` whose steps are seen; unseen: workers that have not joined here and have no steps.
    """

    __slots__ = ("awaited", "heard", "unseen")

    def __init__(self, clocks: Clocks, ranges: Ranges) -> None:
        self.heard = Slowest(clocks, ranges)
        self.awaited = Slowest(clocks, ranges)
        self.unseen: set[int] = set()

    def remove(self, worker: int) -> None:
        """Ends a worker's holding back of pulls."""
        self.heard.remove(worker)
        self.awaited.remove(worker)
        self.unseen.discard(worker)


class BoundedDelay:
    """Pulls that wait, and what decides about them: vector clocks, the roster, the ranges that may be read here.

    Who holds others back? Each worker says on each of its connections whether it takes part (JOIN, with the clock that
    it starts above, or JOIN with PAUSE). But a server may get ranges, and pulls of others, a moment before a worker has
    connected to it. So a worker of the roster that has said nothing here yet counts as well: with its progress, which
    came with the ranges; without any it may have joined elsewhere and not pushed, so it counts as clock 0, but only if
    it was in the roster when the ranges came, and for CONNECT_WAIT_S: one that never speaks must not hold others back.

    What it costs does not grow with the workers. In the ranges that are read progress only grows, so of each
    application only the slowest worker is looked at; and a pull that waits is looked at when that one has come to where
    the pull waits for it, or its own worker has, or its time is up. A view with other ranges has all looked at again.
    """

    def __init__(self, ranges: int, clocks: Clocks, clock: Callable[[], float]) -> None:
        self.tailed: Ranges = np.empty(0, np.intp)  # the ranges whose tail this server is
        self.held: Ranges = np.empty(0, np.intp)  # the ranges of which it is a full replica
        self._clocks = clocks  # progress by worker and range
        self._clock = clock  # the time, in seconds
        self._workers: Mapping[int, WorkerInfo] = {}  # the roster
        self._active = ActiveWorkers(ranges, clocks)  # hold pulls back
        self._least: dict[str, int] = {}  # by application, the clock that all others had reached when a worker joined
        self._paused: set[int] = set()  # workers that take no part now
        self._awaited: set[int] = set()  # workers that have neither joined nor paused here yet
        self._awaited_until_s = 0.0  # until when these hold pulls back without any progress
        self._cohorts: dict[tuple[str, bool], Cohort] = {}  # by application and whether `held` is read
        self._parked: dict[int, PullRequest] = {}  # by number, as they came
        self._count = 0  # the number of the newest pull that waits
        self._of_asker: dict[int, set[int]] = {}  # the numbers of a connection's pulls, by its id()
        self._own: dict[tuple[int, bool], tuple[Reached, Numbers]] = {}  # wait for their worker's own steps
        self._since = 0, 0  # the epochs in which the ranges that are tailed, or held, last changed
        self._after: set[int] = set()  # wait for steps of their own worker in some ranges
        self._bound: dict[tuple[str, bool], Numbers] = {}  # wait for the slowest of their application
        self._deadlines: list[tuple[float, int]] = []  # a heap of (when a pull gives up, its number)
        self._released_under: tuple[int, int] | None = None  # epochs at the last `release`; None: it looks at all

    def __len__(self) -> int:
        return len(self._parked)

    def serve(self, tailed: Ranges, held: Ranges, tail_since: int = 0, full_since: int = 0) -> None:
        """Follows a view: which ranges may be read here, and the epochs since when that is so."""
        self._since = tail_since, full_since
        if len(np.setdiff1d(held, self.held)) or len(np.setdiff1d(tailed, self.tailed)):
            self._awaited_until_s = self._clock() + CONNECT_WAIT_S
            self._awaited = {w for w in self._workers if w not in self._active.bases and w not in self._paused}
        if not np.array_equal(tailed, self.tailed) or not np.array_equal(held, self.held):
            self._cohorts.clear()
            self._released_under = None
        self.tailed, self.held = tailed, held

    # --- who holds others back --------------------------------------------------------------------------------------

    def follow(self, workers: Mapping[int, WorkerInfo]) -> None:
        """Follows the roster: workers that are not in it hold no pull back."""
        before, self._workers = self._workers, workers
        for worker in self._active.bases.keys() - workers.keys():
            self._active.remove(worker)
        self._paused &= workers.keys()
        for worker in before.keys() - workers.keys():
            for cohort in self._cohorts_of(before[worker].app):
                cohort.remove(worker)
        for worker in workers.keys() - before.keys():
            for cohort in self._cohorts_of(workers[worker].app):
                cohort.unseen.add(worker)

    def pause(self, worker: int) -> None:
        """Pauses a worker: it holds no pull back until it joins again."""
        self._active.remove(worker)
        self._awaited.discard(worker)
        if worker in self._workers:
            self._paused.add(worker)
            for cohort in self._cohorts_of(self._workers[worker].app):
                cohort.remove(worker)

    def join(self, worker: int, base: int, app: str) -> int:
        """Makes a worker active; its clock counts as at least `base`. Returns the lowest clock of the others.

        Workers join again on each new connection, also to servers that are new. One that was active all the time has
        not fallen back by that: the next worker that joins has to wait for it, too."""
        known = self._active.bases.get(worker) == base or self._got_past(worker, base)
        self.pause(worker)
        others = self.minimum(app)
        self._paused.discard(worker)
        if worker in self._workers:
            if not known:
                self._least[app] = others
            self._active.add(worker, base)
            for cohort in self._cohorts_of(app):
                cohort.heard.add(worker, base)
        return others

    def lowest_at_homes(self, app: str, headed: Iterable[int], but: int) -> int | None:
        """As `ActiveWorkers.lowest_at_homes`."""
        return self._active.lowest_at_homes(app, headed, but, self._workers)

    def _got_past(self, worker: int, base: int) -> bool:
        """Whether some range has applied a step of a worker after `base`."""
        return self._clocks.known(worker) and bool((self._clocks.of(worker, self.held) >> PART_BITS > base).any())

    def minimum(self, app: str) -> int:
        """The lowest clock of an application's active workers, 0 if there is none. A worker that joins below what the
        others have reached lowers it for pulls from now on, but not for the next worker that joins: earlier pulls may
        be shown for a while (`eps.Cache`)."""
        firsts = [self._cohort(app, anywhere).heard.first() for anywhere in (False, True)]
        clocks = [first[0] for first in firsts if first is not None]
        if not clocks:
            self._least.pop(app, None)
        return max(*clocks, self._least.get(app, 0)) if clocks else 0

    def _cohorts_of(self, app: str) -> list[Cohort]:
        return [cohort for key in ((app, False), (app, True)) if (cohort := self._cohorts.get(key)) is not None]

    def _cohort(self, app: str, anywhere: bool) -> Cohort:
        """An application's workers as they are now. anywhere: in the ranges held, not only in those tailed."""
        cohort = self._cohorts.get((app, anywhere))
        ranges = self.held if anywhere else self.tailed
        if cohort is None:
            cohort = self._cohorts[app, anywhere] = Cohort(self._clocks, ranges)
            for worker, info in self._workers.items():
                if info.app == app and worker in self._active.bases:
                    cohort.heard.add(worker, self._active.bases[worker])
                elif info.app == app and worker not in self._paused:
                    cohort.unseen.add(worker)
        for worker in [w for w in cohort.unseen if self._started(w, ranges)]:
            cohort.unseen.remove(worker)
            (cohort.awaited if worker in self._awaited else cohort.heard).add(worker, 0)
        return cohort

    def _started(self, worker: int, ranges: Ranges) -> bool:
        return self._clocks.known(worker) and bool(self._clocks.of(worker, ranges).any())

    # --- whom a pull waits for --------------------------------------------------------------------------------------

    def blockers(self, read: PullRequest) -> list[str]:
        """A worker that a pull has to wait for: its own, until it can read its writes, else one that the bounded delay
        waits for. Empty if it can be answered."""
        header, connection = read.header, read.connection
        anywhere = header.anywhere
        own = Reached(self._clocks, self.held if anywhere else self.tailed, connection.worker, connection.base)
        if own.now() < header.clock or not self.reached(connection.worker, read.after, anywhere):
            return [connection.worker_name]
        worker = self._before(connection.app, anywhere, _floor(read)) if header.bound is not None else None
        return [] if worker is None else [self._workers[worker].name]

    def reached(self, worker: int, after: ReadAfter | None, anywhere: bool) -> bool:
        """Whether all steps that READ_AFTER named are applied here, as far as their ranges are held here."""
        if after is None or after.epoch < self._since[anywhere]:  # pulls of that epoch are not answered any more
            return True
        here = np.isin(after.ranges, self.held)
        return not np.count_nonzero(self._clocks.of(worker, after.ranges[here]) < after.progress[here])

    def _before(self, app: str, anywhere: bool, floor: int) -> int | None:
        """A worker that has not reached `floor`, if there is one."""
        cohort = self._cohort(app, anywhere)
        first = cohort.heard.before(floor) or cohort.awaited.before(floor)
        if first is not None:
            return first[1]
        if floor > 0 and cohort.unseen and self._clock() < self._awaited_until_s:
            return next(iter(cohort.unseen & self._awaited), None)
        return None

    def _late(self, app: str, anywhere: bool, floor: int) -> list[str]:
        """All workers that have not reached `floor`, sorted by name."""
        cohort, ranges = self._cohort(app, anywhere), self.held if anywhere else self.tailed
        silent = cohort.unseen & self._awaited if floor > 0 and self._clock() < self._awaited_until_s else ()
        return sorted(
            info.name
            for worker, info in self._workers.items()
            if info.app == app and worker not in self._paused
            and (worker in silent if worker in cohort.unseen
                 else Reached(self._clocks, ranges, worker, self._active.bases.get(worker, 0)).now() < floor)
        )  # fmt: skip

    # --- pulls that wait --------------------------------------------------------------------------------------------

    def park(self, read: PullRequest) -> None:
        """Has a pull wait until `release` releases it. Raises `RequestError` if too many wait."""
        if len(self._parked) >= MAX_PARKED:
            raise RequestError("busy", f"this server already has {MAX_PARKED} pulls waiting; try again later")
        wait_s = read.header.wait_ms / 1e3 or DEFAULT_WAIT_S
        read = read.detached()._replace(deadline_s=self._clock() + wait_s)
        self._count += 1
        self._parked[self._count] = read
        self._of_asker.setdefault(id(read.connection), set()).add(self._count)
        heappush(self._deadlines, (read.deadline_s, self._count))
        if len(self._deadlines) > 2 * MAX_PARKED:
            self._released_under = None  # most of these were forgotten
        if not self._wait(self._count, read):
            self._released_under = None  # time has passed

    def _wait(self, number: int, read: PullRequest) -> bool:
        """Registers what a pull waits for first; False if it need not wait."""
        header, connection = read.header, read.connection
        anywhere = header.anywhere
        key = connection.worker, anywhere
        if key not in self._own:
            ranges = self.held if anywhere else self.tailed
            self._own[key] = Reached(self._clocks, ranges, connection.worker, 0), []
        reached, numbers = self._own[key]
        if max(reached.now(), connection.base) < header.clock:
            heappush(numbers, (header.clock, number))
            return True
        if not numbers:
            del self._own[key]
        if not self.reached(connection.worker, read.after, anywhere):
            self._after.add(number)
            return True
        if header.bound is not None and self._before(connection.app, anywhere, _floor(read)) is not None:
            heappush(self._bound.setdefault((connection.app, anywhere), []), (_floor(read), number))
            return True
        return False

    def forget(self, connection: Asker) -> None:
        """Drops the pulls of a connection that is gone."""
        for number in self._of_asker.pop(id(connection), ()):
            del self._parked[number]

    def release(self, tail_since: int, full_since: int) -> list[tuple[PullRequest, RequestError | None]]:
        """Releases pulls that need not wait any more, in the order in which they came; with an error if they fail.

        tail_since, full_since: the epochs in which the ranges that are tailed, or held, last changed.
        """
        if not self._parked:
            return []
        done: dict[int, RequestError | None] = {}
        if self._released_under != (tail_since, full_since):
            self._released_under = tail_since, full_since
            self._release_all(done)
        else:
            self._release_own(done)
            self._release_bounds(done)
        self._release_deadlines(done)
        return [(self._leave(number), done[number]) for number in sorted(done)]

    def _leave(self, number: int) -> PullRequest:
        read = self._parked.pop(number)
        numbers = self._of_asker[id(read.connection)]
        numbers.remove(number)
        if not numbers:
            del self._of_asker[id(read.connection)]
        return read

    def _release_all(self, done: dict[int, RequestError | None]) -> None:
        assert self._released_under is not None
        tail_since, full_since = self._released_under
        self._own, self._bound, self._after = {}, {}, set()
        self._deadlines = sorted((read.deadline_s, number) for number, read in self._parked.items())
        for number, read in self._parked.items():
            if read.header.epoch < (full_since if read.header.anywhere else tail_since):
                done[number] = RequestError("stale-view", "the ranges that may be read here have changed")
            elif not self._wait(number, read):
                done[number] = None

    def _release_own(self, done: dict[int, RequestError | None]) -> None:
        """Releases pulls that waited for their own worker's steps; they may have to wait for others' then."""
        for key, (reached, numbers) in list(self._own.items()):
            clock = reached.now()
            while numbers:
                want, number = numbers[0]
                read = self._parked.get(number)
                if read is not None and max(clock, read.connection.base) < want:
                    break
                heappop(numbers)
                if read is not None and not self._wait(number, read):
                    done[number] = None
            if not numbers:
                self._own.pop(key, None)
        waiting, self._after = self._after, set()
        for number in waiting & self._parked.keys():
            if not self._wait(number, self._parked[number]):
                done[number] = None

    def _release_bounds(self, done: dict[int, RequestError | None]) -> None:
        """Releases pulls that waited for the slowest worker of their application."""
        for (app, anywhere), numbers in list(self._bound.items()):
            while numbers:
                floor, number = numbers[0]
                if number in self._parked and self._before(app, anywhere, floor) is not None:
                    break
                heappop(numbers)
                if number in self._parked:
                    done[number] = None
            if not numbers:
                del self._bound[app, anywhere]

    def _release_deadlines(self, done: dict[int, RequestError | None]) -> None:
        now = self._clock()
        late: dict[tuple[str, bool, int], list[str]] = {}  # many end at once that wait for the same workers
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heappop(self._deadlines)[1]
            read = self._parked.get(number)
            if read is None or number in done:
                continue
            connection, anywhere, floor = read.connection, read.header.anywhere, _floor(read)
            ranges = self.held if anywhere else self.tailed
            own = Reached(self._clocks, ranges, connection.worker, connection.base).now()
            if own < read.header.clock or not self.reached(connection.worker, read.after, anywhere):
                done[number] = _too_long(read, [connection.worker_name])
                continue
            if (connection.app, anywhere, floor) not in late:
                late[connection.app, anywhere, floor] = self._late(connection.app, anywhere, floor)
            done[number] = _too_long(read, late[connection.app, anywhere, floor])


def _floor(read: PullRequest) -> int:
    """The clock that the slowest worker must have reached."""
    return read.header.clock - (read.header.bound or 0)


def _too_long(read: PullRequest, workers: list[str]) -> RequestError:
    text = f"a pull of table {read.table_names} at clock {read.header.clock} waited too long for worker "
    return waited_too_long(text + ", ".join(workers), workers)
