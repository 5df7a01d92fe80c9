"""Decides when a pull may be answered: once this replica has what its worker has pushed before.

Progress grows without notice. So the clock seen last is a lower bound, and a question looks again only at the range
that was last (`Reached`).
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.reads import DEFAULT_WAIT_S, MAX_PARKED, PullRequest
from elasticps.server.core.requests import Asker, RequestError, waited_too_long
from elasticps.wire.clocks import ReadAfter
from replication.progress import PART_BITS, Clocks

Ranges = NDArray[np.intp]


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


Numbers = list[tuple[int, int]]  # a heap of (clock waited for, number of the pull)


class OwnSteps:
    """Pulls that wait for their own worker's steps: its progress, and the ranges that may be read here.

    A pull that waits is looked at when its worker has come to the clock that it waits for, or its time is up. A view
    with other ranges has all looked at again.
    """

    def __init__(self, clocks: Clocks, clock: Callable[[], float]) -> None:
        self.tailed: Ranges = np.empty(0, np.intp)  # the ranges whose tail this server is
        self.held: Ranges = np.empty(0, np.intp)  # the ranges of which it is a full replica
        self._clocks = clocks  # progress by worker and range
        self._clock = clock  # the time, in seconds
        self._parked: dict[int, PullRequest] = {}  # by number, as they came
        self._count = 0  # the number of the newest pull that waits
        self._of_asker: dict[int, set[int]] = {}  # the numbers of a connection's pulls, by its id()
        self._own: dict[tuple[int, bool], tuple[Reached, Numbers]] = {}  # by worker and whether `held` is read
        self._after: set[int] = set()  # wait for steps of their own worker in some ranges
        self._since = 0, 0  # the epochs in which the ranges that are tailed, or held, last changed
        self._deadlines: list[tuple[float, int]] = []  # a heap of (when a pull gives up, its number)
        self._released_under: tuple[int, int] | None = None  # epochs at the last `release`; None: it looks at all

    def __len__(self) -> int:
        return len(self._parked)

    def serve(self, tailed: Ranges, held: Ranges, tail_since: int = 0, full_since: int = 0) -> None:
        """Follows a view: which ranges may be read here, and the epochs since when that is so."""
        self._since = tail_since, full_since
        if not np.array_equal(tailed, self.tailed) or not np.array_equal(held, self.held):
            self._released_under = None
        self.tailed, self.held = tailed, held

    def waits(self, read: PullRequest) -> bool:
        """Whether a pull has to wait until it can read its worker's writes."""
        header, connection = read.header, read.connection
        ranges = self.held if header.anywhere else self.tailed
        own = Reached(self._clocks, ranges, connection.worker, connection.base)
        return own.now() < header.clock or not self.reached(connection.worker, read.after, header.anywhere)

    def reached(self, worker: int, after: ReadAfter | None, anywhere: bool) -> bool:
        """Whether all steps that READ_AFTER named are applied here, as far as their ranges are held here."""
        if after is None or after.epoch < self._since[anywhere]:  # pulls of that epoch are not answered any more
            return True
        here = np.isin(after.ranges, self.held)
        return not np.count_nonzero(self._clocks.of(worker, after.ranges[here]) < after.progress[here])

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
            self._release_some(done)
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
        self._own, self._after = {}, set()
        self._deadlines = sorted((read.deadline_s, number) for number, read in self._parked.items())
        for number, read in self._parked.items():
            if read.header.epoch < (full_since if read.header.anywhere else tail_since):
                done[number] = RequestError("stale-view", "the ranges that may be read here have changed")
            elif not self._wait(number, read):
                done[number] = None

    def _release_some(self, done: dict[int, RequestError | None]) -> None:
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

    def _release_deadlines(self, done: dict[int, RequestError | None]) -> None:
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            number = heappop(self._deadlines)[1]
            read = self._parked.get(number)
            if read is not None and number not in done:
                done[number] = _too_long(read)


def _too_long(read: PullRequest) -> RequestError:
    text = f"a pull of table {read.table_names} waited too long for steps of its own worker "
    return waited_too_long(text + read.connection.worker_name, [read.connection.worker_name])
