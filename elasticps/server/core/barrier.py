"""Synchronous rounds at the servers: who is in a round, and when it closes. `barrier_state` has the whole story.

BARRIER_JOIN, LEAVE and ARRIVE go to the head of the application's group range, BARRIER_CLOSE to the heads of all.
Whatever is answered has been logged and committed. What waits here is in memory only: after a failover the workers ask
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from coordinator.core.view import WORKERS_MAX
from elasticps.kernels.hashing import group_range
from elasticps.server.core.barrier_state import BarrierGroup, RoundStep
from elasticps.server.core.group_log import GroupLog, Nobody
from elasticps.server.core.reads import DEFAULT_WAIT_S
from elasticps.server.core.requests import Asker, Body, RequestError, RequestTicket
from elasticps.wire.frames import FrameError, Header, Kind, json_body, json_frame, whole, wholes
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader, OkHeader
from replication.chain import Ranges
from replication.effects import Push, Reply, Status
from replication.messages import MAX_WORKER, OperationKind
from replication.progress import MAX_CLOCK


@dataclass(frozen=True)
class _Waiting:
    """A worker that is done with a round, and until when it waits for the others."""

    clock: int
    ticket: RequestTicket
    deadline_s: float


class _Several(Nobody):
    """One operation that several requests wait for. `headed`: the ranges it was logged for."""

    def __init__(self, headed: Ranges, tickets: list[RequestTicket]) -> None:
        self.headed = headed
        self.tickets = tickets
        self.done = False  # committed, in all of them

    def reply(self, reply: Reply) -> None:
        """Answers them all."""
        self.done = reply.status is Status.COMMITTED and not len(reply.moved)
        for ticket in self.tickets:
            ticket.reply(reply)
        self.tickets = []


class BarrierCoordinator:
    """The handlers of these four; judges a barrier again when something has changed."""

    def __init__(self, log: GroupLog, clock: Callable[[], float]) -> None:
        self._group = log
        self._serving, self._rounds = log.serving, log.rounds
        self._clock = clock
        self._waiting: dict[str, dict[int, _Waiting]] = {}  # app -> worker
        self._joining: dict[str, list[RequestTicket]] = {}  # app -> those that wait for room in the log
        self._closing: dict[str, tuple[int, _Several]] = {}  # app -> the newest round closed here
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {
            Kind.BARRIER_JOIN: self._join,
            Kind.BARRIER_LEAVE: self._leave,
            Kind.BARRIER_ARRIVE: self._arrive,
            Kind.BARRIER_CLOSE: self._close,
        }

    # --- the group range ----------------------------------------------------------------------------------------------

    def _join(self, connection: Asker, header: Header, body: Body) -> None:
        app, worker = connection.app, connection.worker
        predecessor = BarrierJoinHeader.of(header).predecessor
        group = self._group.group_range(connection, header, body)
        if group is None:
            return

        def answer() -> bytes:
            state = self._rounds.groups[app]
            document = {
                "round": state.decided, "workers": list(state.workers), "base": state.members.get(worker, 0),
                "last": state.last.get(predecessor, 0),
            }  # fmt: skip
            return json_frame(Kind.BARRIER_DECISION, document, request=header.request, epoch=self._serving.epoch)

        ticket = self._group.once(connection, header.request, answer)
        self._group.log(
            ticket, OperationKind.BARRIER_JOIN, RoundStep(app, self._serving.roster_version, (worker,)), group
        )
        if self._group.replica.waits(ticket):
            self._joining.setdefault(app, []).append(ticket)

    def _leave(self, connection: Asker, header: Header, body: Body) -> None:
        app, worker = connection.app, connection.worker
        group = self._group.group_range(connection, header, body)
        if group is None:
            return
        ticket = RequestTicket(connection, header.request)
        self._group.log(ticket, OperationKind.BARRIER_LEAVE, RoundStep(app, 0, (worker,)), group)
        self._decide(app)  # the others need not wait for it any more

    def _arrive(self, connection: Asker, header: Header, body: Body) -> None:
        app, worker = connection.app, connection.worker
        group = self._group.group_range(connection, header, body)
        if group is None:
            return
        state, said = self._rounds.groups.get(app, BarrierGroup()), BarrierArriveHeader.of(header)
        if said.clock <= state.decided:
            self._repeat(app, said.clock, worker, RequestTicket(connection, header.request))
            return
        if worker not in state.members or said.clock != state.decided + 1:
            raise RequestError("left-out", f"worker {connection.worker_name!r} is not in round {said.clock} of {app!r}")
        ticket = self._decided(connection, header, app)
        deadline_s = self._clock() + (said.wait_ms / 1e3 or DEFAULT_WAIT_S)
        self._waiting.setdefault(app, {})[worker] = _Waiting(said.clock, ticket, deadline_s)
        self._decide(app)

    def _decided(self, connection: Asker, header: Header, app: str) -> RequestTicket:
        def answer() -> bytes:
            state = self._rounds.groups[app]
            return self._decision(header.request, state.decided, state.workers)

        return self._group.once(connection, header.request, answer)

    def _decision(self, request: int, clock: int, workers: tuple[int, ...]) -> bytes:
        document = {"round": clock, "workers": list(workers)}
        return json_frame(Kind.BARRIER_DECISION, document, request=request, epoch=self._serving.epoch)

    def _repeat(self, app: str, clock: int, worker: int, ticket: RequestTicket) -> None:
        """Answers who asks for a round that is decided, but maybe not committed yet: behind an operation of its own. By
        the time that this is committed the next round may be decided, which is not what was asked for."""
        state = self._rounds.groups.get(app, BarrierGroup())
        if clock < state.decided or worker not in state.workers:
            self._group.notifier.refuse(ticket.connection, ticket.request, _left_out(clock, app))
            return
        workers, request = state.workers, ticket.request
        group = np.array([group_range(app, self._serving.ranges)], np.int64)
        said = self._group.once(ticket.connection, request, lambda: self._decision(request, clock, workers))
        self._group.log(said, OperationKind.BARRIER_DECISION, RoundStep(app, clock, workers), group)

    def _decide(self, app: str) -> None:
        """Closes the list of the next round's workers, if all that are still there are done."""
        waiting, state = self._waiting.get(app, {}), self._rounds.groups.get(app)
        if state is None or not waiting or not self._group.knows_the_lost(app):
            return
        if app in self._joining:  # what we decide now would be logged behind members that we do not see yet
            still = [ticket for ticket in self._joining.pop(app) if self._group.replica.waits(ticket)]
            if still:
                self._joining[app] = still
                return
        clock = state.decided + 1
        required = {w for w, above in state.members.items() if above < clock and w in self._serving.workers}
        if not required or not all(worker in waiting and waiting[worker].clock == clock for worker in required):
            return
        tickets = [waiting.pop(worker).ticket for worker in sorted(required)]
        group = np.array([group_range(app, self._serving.ranges)], np.int64)
        step = RoundStep(app, clock, tuple(sorted(required)))
        self._group.log(_Several(group, tickets), OperationKind.BARRIER_DECISION, step, group)
        for worker in [w for w, one in waiting.items() if one.clock <= clock]:  # it was away: what it waits for is over
            one = waiting.pop(worker)
            self._group.notifier.refuse(one.ticket.connection, one.ticket.request, _left_out(one.clock, app))

    def judge(self) -> None:
        """The roster or the view has changed, or time has passed."""
        headed = set(self._serving.headed.tolist())
        for app in list(self._waiting):
            if group_range(app, self._serving.ranges) in headed:
                self._answer_decided(app)
                self._decide(app)
                self._end_waits(app)
            else:
                for waiting in self._waiting.pop(app).values():
                    self._group.stale(waiting.ticket.connection, waiting.ticket.request)

    def _answer_decided(self, app: str) -> None:
        """Those that asked again, on a new connection, while the decision waited for room in the log."""
        state, waiting = self._rounds.groups.get(app, BarrierGroup()), self._waiting[app]
        for worker in [w for w, one in waiting.items() if one.clock <= state.decided]:
            one = waiting.pop(worker)
            self._repeat(app, one.clock, worker, one.ticket)

    def _end_waits(self, app: str) -> None:
        """Tells those that have waited too long for whom they did."""
        state, waiting = self._rounds.groups.get(app, BarrierGroup()), self._waiting[app]
        late = [w for w in state.members if w in self._serving.workers and w not in waiting]
        names = sorted(self._serving.workers[w].name for w in late)
        now = self._clock()
        for worker, one in list(waiting.items()):
            if now >= one.deadline_s:
                del waiting[worker]
                text = f"round {one.clock} of {app!r} waited too long for worker {', '.join(names)}"
                self._group.notifier.refuse(
                    one.ticket.connection, one.ticket.request, RequestError("behind", text, behind=names)
                )

    # --- all ranges ---------------------------------------------------------------------------------------------------

    def _close(self, connection: Asker, header: Header, body: Body) -> None:
        if self._group.held.wait_for_view(connection, header, body):
            return
        document = json_body(body.data)
        clock, workers = whole(document.get("round"), MAX_CLOCK - 1, 1), wholes(document.get("workers"), MAX_WORKER, 1)
        if len(workers) > WORKERS_MAX or len(set(workers)) != len(workers):
            raise FrameError(f"a close names at most {WORKERS_MAX} workers, each of them once")
        step = RoundStep(connection.app, clock, workers)
        ticket = RequestTicket(connection, header.request)
        newest, several = self._closing.get(step.app, (0, None))
        headed = self._serving.headed
        if several is not None and newest == clock and several.headed is headed and header.epoch == self._serving.epoch:
            if several.done:
                connection.send(OkHeader(header.request, self._serving.epoch).header().pack())
                return
            if several.tickets:
                several.tickets.append(ticket)
                return
        several = _Several(headed, [ticket])
        self._closing[step.app] = clock, several
        push = Push(several, -1, header.epoch, 0, 0, True, None, step, 64, kind=OperationKind.BARRIER_CLOSE)
        self._group.perform(self._group.replica.push, push)


def _left_out(clock: int, app: str) -> RequestError:
    return RequestError("left-out", f"round {clock} of {app!r} was closed without this worker")
