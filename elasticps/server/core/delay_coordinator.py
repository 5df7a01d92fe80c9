"""Bounded delay at the head of an application's group range: gathers its workers' committed clocks, and releases pulls.

A pull under bounded delay waits at its worker until the clock that it needs is released. So servers answer it like any
other. The worker asks here (REPORT_CLOCK); this head asks workers that it knows to be further back (ASK_CLOCK), and
answers when all have committed as much (RELEASED). Nobody is asked as long as nobody waits.

What is released must be true whichever server heads the range next, and for workers that it knows and this one does
not. So each rise is proved: an operation of the range that changes nothing, logged after the minimum was taken, has to
be committed. Then no later head began before that, and each later head hears of all workers that were in the roster by
then. A worker that joins is counted first, and learns by the next proof from which clock on it may start. The operation
has the version of the roster, so that a later head does not begin with an older one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from heapq import heappop, heappush
from typing import NamedTuple

from coordinator.core.view import WORKERS_MAX, RosterChange, View
from elasticps.kernels.hashing import group_range
from elasticps.server.core.active_workers import ActiveWorkers
from elasticps.server.core.application_clocks import ApplicationClocks
from elasticps.server.core.barrier_state import RoundStep
from elasticps.server.core.group_log import CommitTicket, GroupLog
from elasticps.server.core.reads import DEFAULT_WAIT_S
from elasticps.server.core.requests import Asker, Body, RequestError, RequestTicket, waited_too_long
from elasticps.wire.delay import AskClockHeader, ReleasedHeader, ReportClock
from elasticps.wire.frames import FrameError, Header, Kind
from replication.effects import Reply
from replication.messages import OperationKind

MOST_WAITING = 4 * WORKERS_MAX  # requests of one application


class _ClockRequest(NamedTuple):
    """A request for a clock; floor 0: of a worker that joins."""

    floor: int
    connection: Asker
    request: int
    deadline_s: float


class _Application:
    """Requests that wait, by number, and the clocks, None until a new head may begin to gather them."""

    def __init__(self) -> None:
        self.clocks: ApplicationClocks | None = None
        self.waiting: dict[int, _ClockRequest] = {}
        self.joining: set[int] = set()  # numbers of those with floor 0
        self.by_floor: list[tuple[int, int]] = []  # a heap of (floor, number) of the others
        self.highest: list[tuple[int, int]] = []  # the same of (-floor, number)
        self.proving = False

    def next_floor(self) -> int:
        """The lowest floor that is waited for, 0 for none."""
        while self.by_floor and self.by_floor[0][1] not in self.waiting:
            heappop(self.by_floor)
        return self.by_floor[0][0] if self.by_floor else 0

    def highest_floor(self) -> int:
        """The highest one, 0 for none."""
        while self.highest and self.highest[0][1] not in self.waiting:
            heappop(self.highest)
        return -self.highest[0][0] if self.highest else 0


class DelayCoordinator:
    """Handles REPORT_CLOCK, and hears who takes part. `recheck` looks at all that waits again when the view, the roster
    or the time has changed. active: workers that have joined; soon(f): as for `BarrierCoordinator`."""

    def __init__(
        self, log: GroupLog, active: ActiveWorkers, clock: Callable[[], float],
        soon: Callable[[Callable[[], None]], object],
    ) -> None:  # fmt: skip
        self._group = log
        self._serving = log.serving
        self._active = active
        self._clock = clock
        self._soon = soon
        self._epoch = 0
        self._apps: dict[str, _Application] = {}
        self._connections: dict[int, Asker] = {}  # by worker, those on which it has said whether it takes part
        self._number = 0
        self._of_asker: dict[Asker, set[int]] = {}  # the numbers of a connection's requests
        self._deadlines: list[tuple[float, int, str]] = []  # a heap of (when a request gives up, its number, its app)
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {Kind.REPORT_CLOCK: self._report}

    def __len__(self) -> int:
        return sum(len(state.waiting) for state in self._apps.values())

    # --- who takes part ---------------------------------------------------------------------------------------------

    def heard(self, connection: Asker) -> None:
        """A worker has said on a connection whether it takes part, or is in the roster again (`ActiveWorkers`)."""
        self._connections[connection.worker] = connection
        state = self._apps.get(connection.app)
        if state is None or state.clocks is None:
            return
        base = self._active.bases.get(connection.worker)
        if base is None:
            state.clocks.pause(connection.worker)
        else:
            state.clocks.join(connection.worker, base)
        self._look(connection.app)

    def follow(self, change: RosterChange) -> None:
        """Follows the roster: workers that are not in it hold nobody back."""
        for worker in change.left:
            state = self._apps.get(worker.app)
            if state is not None and state.clocks is not None:
                state.clocks.leave(worker.id)
        for app in {worker.app for worker in change.left} & self._apps.keys():
            if not any(worker.app == app for worker in self._serving.workers.values()):
                self._drop(app)

    def adopt(self, view: View) -> None:
        """Follows a view. A head that has missed a view may have been none meanwhile: it begins again."""
        missed, self._epoch = view.epoch > self._epoch + 1, view.epoch
        for app in list(self._apps):
            if not (self._serving.headed == group_range(app, self._serving.ranges)).any():
                self._drop(app)
            elif missed:
                self._apps[app].clocks = None

    def forget(self, connection: Asker) -> None:
        """A connection has ended."""
        if self._connections.get(connection.worker) is connection:
            del self._connections[connection.worker]
        state = self._apps.get(connection.app)
        for number in self._of_asker.pop(connection, ()):
            if state is not None:
                state.waiting.pop(number, None)
                state.joining.discard(number)

    # --- requests ---------------------------------------------------------------------------------------------------

    def _report(self, connection: Asker, header: Header, body: Body) -> None:
        report = ReportClock.of(header, body)
        if report.worker != connection.worker:
            raise FrameError(f"worker {connection.worker} reports the clock of worker {report.worker}")
        if self._group.group_range(connection, header, body) is None:
            return
        app = connection.app
        state = self._apps.get(app)
        if state is None:
            if not report.request:
                return
            state = self._apps[app] = _Application()
        if state.clocks is None:
            self._begin(app, state)
        if state.clocks is not None:
            state.clocks.report(report.worker, report.clock, report.released, report.epoch)
        if report.request:
            self._wait(state, connection, report)
        self._look(app)

    def _wait(self, state: _Application, connection: Asker, report: ReportClock) -> None:
        if len(state.waiting) >= MOST_WAITING:
            raise RequestError("busy", f"{MOST_WAITING} requests already wait for clocks of {connection.app!r}")
        self._number = number = self._number + 1
        deadline_s = self._clock() + (report.wait_ms / 1e3 or DEFAULT_WAIT_S)
        state.waiting[number] = _ClockRequest(report.floor, connection, report.request, deadline_s)
        if report.floor:
            heappush(state.by_floor, (report.floor, number))
            heappush(state.highest, (-report.floor, number))
        else:
            state.joining.add(number)
        self._of_asker.setdefault(connection, set()).add(number)
        heappush(self._deadlines, (deadline_s, number, connection.app))

    def _leave(self, state: _Application, number: int) -> _ClockRequest | None:
        one = state.waiting.pop(number, None)
        state.joining.discard(number)
        if one is not None and (numbers := self._of_asker.get(one.connection)) is not None:
            numbers.discard(number)
            if not numbers:
                del self._of_asker[one.connection]
        return one

    def _begin(self, app: str, state: _Application) -> None:
        """Begins to gather clocks, if the roster is as new as earlier heads knew it."""
        if not self._group.knows_the_lost(app):
            return
        workers = [worker.id for worker in self._serving.workers.values() if worker.app == app]
        state.clocks = ApplicationClocks(workers)
        for worker in workers:
            if worker in self._active.bases:
                state.clocks.join(worker, self._active.bases[worker])

    def recheck(self) -> None:
        """Looks at all that waits again: the roster or the view has changed, or time has passed."""
        for app, state in list(self._apps.items()):
            if state.waiting:
                self._look(app)
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number, app = heappop(self._deadlines)
            if (late := self._apps.get(app)) is not None and (one := self._leave(late, number)) is not None:
                self._refuse(one, self._too_long(app, late, one.floor))

    def _look(self, app: str) -> None:
        """Asks whom somebody waits for, answers what can be answered, and has a rise of the minimum proved."""
        state = self._apps.get(app)
        if state is None or not state.waiting:
            return
        if state.clocks is None:
            self._begin(app, state)
            if state.clocks is None:
                return
        clocks = state.clocks
        self._answer(state, clocks)
        floor, bounded = state.next_floor(), self._is_bounded(app)
        for worker, clock in clocks.to_ask(state.highest_floor()) if floor or bounded else ():
            connection = self._connections.get(worker)
            if connection is not None:
                connection.send(AskClockHeader(clock).header().pack())
        if state.proving or (bounded and clocks.unheard):
            return
        minimum = clocks.minimum()
        if clocks.released < floor <= minimum or (bounded and state.joining):
            self._prove(app, state, clocks, minimum)
        elif state.joining:
            self._prove(app, state, clocks, 0)

    def _is_bounded(self, app: str) -> bool:
        """Whether some head may have released a clock: an operation that comes before the first one is in the log. A
        range that came back from a checkpoint may lack it."""
        group, view = self._group.rounds.groups.get(app), self._serving.view
        restored = view is not None and view.recovery_epoch[group_range(app, self._serving.ranges)] > 0
        return restored or (group is not None and group.bounded)

    def _prove(self, app: str, state: _Application, clocks: ApplicationClocks, minimum: int) -> None:
        """Proves by an operation that this server heads the group range now, then releases `minimum` and answers those
        who join. 0: releases nothing, as nothing ever was."""
        joining = list(state.joining)
        state.proving = True

        def proved() -> None:
            state.proving = False
            if self._apps.get(app) is not state or state.clocks is not clocks:
                return
            clocks.released = max(clocks.released, minimum)
            for number in joining:
                self._release(state, clocks, number)
            self._answer(state, clocks)
            if state.waiting:
                self._soon(partial(self._look, app))

        def failed(reply: Reply) -> None:
            state.proving = False

        step = RoundStep(app, self._serving.roster_version, (), total=int(minimum > 0))
        self._group.log(CommitTicket(proved, failed), OperationKind.BARRIER_JOIN, step, self._group.ranges_of(app))

    def _answer(self, state: _Application, clocks: ApplicationClocks) -> None:
        """Answers all that wait for no more than what is released."""
        while 0 < (floor := state.next_floor()) <= clocks.released:
            assert floor
            self._release(state, clocks, heappop(state.by_floor)[1])

    def _release(self, state: _Application, clocks: ApplicationClocks, number: int) -> None:
        if (one := self._leave(state, number)) is not None:
            one.connection.send(ReleasedHeader(one.request, clocks.epoch, clocks.released).header().pack())

    def _too_long(self, app: str, state: _Application, floor: int) -> RequestError:
        workers: Iterable[int] = () if state.clocks is None else state.clocks.holding_back(floor)
        names = [self._serving.workers[worker].name for worker in workers if worker in self._serving.workers]
        whom = f"worker {', '.join(sorted(names))}" if names else "the head of the application's group range"
        what = f"a pull that needs step {floor} of all workers of {app!r}" if floor else f"joining {app!r}"
        return waited_too_long(f"{what} waited too long for {whom}", sorted(names))

    def _drop(self, app: str) -> None:
        """Refuses what waits: another server heads the range now, or the application has no workers."""
        state = self._apps.pop(app)
        for number in list(state.waiting):
            if (one := self._leave(state, number)) is not None:
                self._refuse(one, self._group.stale())

    def _refuse(self, one: _ClockRequest, error: RequestError) -> None:
        self._group.refuse(RequestTicket(one.connection, Kind.REPORT_CLOCK, one.request), error)
