"""The barrier of synchronous rounds: which workers are in a round, and when it closes. `barrier_state` explains rounds.

BARRIER_JOIN, LEAVE and ARRIVE go to the head of the application's group range, BARRIER_CLOSE to the heads of all
ranges. Answers are sent once the operation is committed. Waiting requests are in memory only: after a failover the
workers ask again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from coordinator.core.view import WORKERS_MAX
from elasticps.kernels.hashing import group_range
from elasticps.server.core.barrier_state import BarrierGroup, RoundStep
from elasticps.server.core.group_log import GroupLog, NoTicket
from elasticps.server.core.reads import DEFAULT_WAIT_S
from elasticps.server.core.requests import Asker, Body, RequestError, RequestTicket, waited_too_long
from elasticps.server.core.sweeps import SweptInterval
from elasticps.wire.frames import HEADER_BYTES, FrameError, Header, Kind, json_body, json_frame, whole, wholes
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader, OkHeader
from replication.chain import Ranges
from replication.effects import Push, Reply, Status
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK, MAX_WORKER


@dataclass(frozen=True)
class _Waiting:
    """An arrived worker, and until when it waits for the others."""

    clock: int
    ticket: RequestTicket
    deadline_s: float


class _Arrivals(dict[int, _Waiting]):
    """Workers of an application that have arrived at a round.

    An arrival must not cost a look at all members: of many workers only the last one completes the round. So members
    are looked at one after another, and an arrival goes on where the one before stopped: at a member that is missing.
    As long as that member is missing, the round is not complete. Behind the last member, all are looked at again.
    """

    def __init__(self) -> None:
        self._left: Iterator[int] = iter(())  # members that are still to be looked at
        self._missing = 0  # the member at which the last look stopped

    def lacks_some(self, clock: int, state: BarrierGroup, present: Mapping[int, object]) -> bool:
        """Whether a member that is still there has not arrived for round `clock`. False: look at all of them."""

        def missing(worker: int) -> bool:
            if state.members.get(worker, clock) >= clock or worker not in present:
                return False
            one = self.get(worker)
            return one is None or one.clock != clock

        if missing(self._missing):
            return True
        for worker in self._left:
            if missing(worker):
                self._missing = worker
                return True
        return False

    def count_again(self, members: Iterable[int]) -> None:
        """Goes through the members from the first one again."""
        self._left, self._missing = iter(list(members)), 0


class _SharedTicket(NoTicket):
    """The ticket of an operation that several requests wait for. `headed`: the ranges that it was logged for; `body`:
    of the first of these requests."""

    def __init__(self, headed: Ranges, tickets: list[RequestTicket], body: bytes = b"") -> None:
        self.headed = headed
        self.body = body
        self.tickets = tickets
        self.done = False  # committed, in all of them

    def reply(self, reply: Reply) -> None:
        """Answers all requests."""
        self.done = reply.status is Status.COMMITTED and not len(reply.moved)
        for ticket in self.tickets:
            ticket.reply(reply)
        self.tickets = []


class BarrierCoordinator:
    """Handles the four requests; `recheck` looks at all barriers again when something has changed."""

    def __init__(self, log: GroupLog, clock: Callable[[], float]) -> None:
        self._group = log
        self._serving, self._rounds = log.serving, log.rounds
        self._clock = clock
        self._waiting: dict[str, _Arrivals] = {}  # by application
        self._joining: dict[str, list[RequestTicket]] = {}  # app -> those that wait for room in the log
        self._closing: dict[str, tuple[int, _SharedTicket]] = {}  # app -> the newest round closed here
        self._answer: tuple[int, tuple[int, ...], bytes] = 0, (), b""  # the newest decision, and its frame's body
        self.take_sweeps: Callable[[str], tuple[SweptInterval, ...]] = lambda app: ()  # that wait for a round to close
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

        ticket = self._group.ticket(connection, header.kind, header.request, answer)
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
        ticket = RequestTicket(connection, header.kind, header.request)
        self._group.log(ticket, OperationKind.BARRIER_LEAVE, RoundStep(app, 0, (worker,)), group)
        self._decide(app)  # the others need not wait for it any more

    def _arrive(self, connection: Asker, header: Header, body: Body) -> None:
        app, worker = connection.app, connection.worker
        group = self._group.group_range(connection, header, body)
        if group is None:
            return
        state, arrival = self._rounds.groups.get(app, BarrierGroup()), BarrierArriveHeader.of(header)
        if arrival.clock <= state.decided:
            self._repeat(app, arrival.clock, worker, RequestTicket(connection, header.kind, header.request))
            return
        if worker not in state.members or arrival.clock != state.decided + 1:
            raise RequestError(
                "left-out", f"worker {connection.worker_name!r} is not in round {arrival.clock} of {app!r}"
            )
        ticket = self._decided(connection, header, app)
        deadline_s = self._clock() + (arrival.wait_ms / 1e3 or DEFAULT_WAIT_S)
        self._waiting.setdefault(app, _Arrivals())[worker] = _Waiting(arrival.clock, ticket, deadline_s)
        self._decide(app)

    def _decided(self, connection: Asker, header: Header, app: str) -> RequestTicket:
        def answer() -> bytes:
            state = self._rounds.groups[app]
            return self._decision(header.request, state.decided, state.workers)

        return self._group.ticket(connection, header.kind, header.request, answer)

    def _decision(self, request: int, clock: int, workers: tuple[int, ...]) -> bytes:
        """A BARRIER_DECISION. Its body is the same for all workers of a round, and made once."""
        if self._answer[0] != clock or self._answer[1] is not workers:
            document = {"round": clock, "workers": list(workers)}
            self._answer = clock, workers, json_frame(Kind.BARRIER_DECISION, document)[HEADER_BYTES:]
        body = self._answer[2]
        return Header(Kind.BARRIER_DECISION, 0, len(body), request, self._serving.epoch).pack() + body

    def _repeat(self, app: str, clock: int, worker: int, ticket: RequestTicket) -> None:
        """Answers with a decision that may not be committed yet, once an operation logged after it is. By then the next
        round may be decided, so the answer is fixed here."""
        state = self._rounds.groups.get(app, BarrierGroup())
        at = bisect_left(state.workers, worker)  # they are sorted
        if clock < state.decided or state.workers[at : at + 1] != (worker,):
            self._group.refuse(ticket, _left_out(clock, app))
            return
        workers, request = state.workers, ticket.request
        group = np.array([group_range(app, self._serving.ranges)], np.int64)
        arrival = self._group.ticket(
            ticket.connection, ticket.kind, request, lambda: self._decision(request, clock, workers)
        )
        self._group.log(arrival, OperationKind.BARRIER_DECISION, RoundStep(app, clock, workers), group)

    def _decide(self, app: str) -> None:
        """Decides the next round's workers, if all members that are still there have arrived."""
        waiting, state = self._waiting.get(app), self._rounds.groups.get(app)
        if state is None or not waiting or not self._group.knows_the_lost(app):
            return
        clock, present = state.decided + 1, self._serving.workers
        if waiting.lacks_some(clock, state, present):
            return
        if app in self._joining:  # what we decide now would be logged behind members that we do not see yet
            still = [ticket for ticket in self._joining.pop(app) if self._group.replica.waits(ticket)]
            if still:
                self._joining[app] = still
                return
        required = {w for w, above in state.members.items() if above < clock and w in present}
        if not required or not all(worker in waiting and waiting[worker].clock == clock for worker in required):
            waiting.count_again(required)
            return
        tickets = [waiting.pop(worker).ticket for worker in sorted(required)]
        group = np.array([group_range(app, self._serving.ranges)], np.int64)
        step = RoundStep(app, clock, tuple(sorted(required)))
        self._group.log(_SharedTicket(group, tickets), OperationKind.BARRIER_DECISION, step, group)
        for worker in [w for w, one in waiting.items() if one.clock <= clock]:  # it was away: what it waits for is over
            one = waiting.pop(worker)
            self._group.refuse(one.ticket, _left_out(one.clock, app))

    def recheck(self) -> None:
        """Looks at all barriers again: the roster or the view has changed, or time has passed."""
        headed = set(self._serving.headed.tolist())
        for app in list(self._waiting):
            if group_range(app, self._serving.ranges) in headed:
                self._answer_decided(app)
                self._decide(app)
                self._end_waits(app)
            else:
                for waiting in self._waiting.pop(app).values():
                    self._group.refuse(waiting.ticket, self._group.stale())

    def _answer_decided(self, app: str) -> None:
        """Answers workers that asked again, on a new connection, while the decision waited for room in the log."""
        state, waiting = self._rounds.groups.get(app, BarrierGroup()), self._waiting[app]
        for worker in [w for w, one in waiting.items() if one.clock <= state.decided]:
            one = waiting.pop(worker)
            self._repeat(app, one.clock, worker, one.ticket)

    def _end_waits(self, app: str) -> None:
        """On timeout, tells each worker whom it waited for."""
        state, waiting = self._rounds.groups.get(app, BarrierGroup()), self._waiting[app]
        now = self._clock()
        ended = [worker for worker, one in waiting.items() if now >= one.deadline_s]
        if not ended:
            return
        late = [w for w in state.members if w in self._serving.workers and w not in waiting]
        names = sorted(self._serving.workers[w].name for w in late)
        for worker in ended:
            one = waiting.pop(worker)
            text = f"round {one.clock} of {app!r} waited too long for worker {', '.join(names)}"
            self._group.refuse(one.ticket, waited_too_long(text, names))

    # --- all ranges ---------------------------------------------------------------------------------------------------

    def _close(self, connection: Asker, header: Header, body: Body) -> None:
        if self._group.held.wait_for_view(connection, header, body):
            return
        newest, shared = self._closing.get(connection.app, (0, None))
        headed = self._serving.headed
        ticket = RequestTicket(connection, header.kind, header.request)
        if shared is not None and (shared.headed is not headed or header.epoch != self._serving.epoch):
            shared = None
        if shared is not None and shared.body == body.tobytes() and self._joins(shared, ticket):
            return  # all workers of a round say the same of it, and a list of them takes time to read
        document = json_body(body.data)
        clock, workers = whole(document.get("round"), MAX_CLOCK - 1, 1), wholes(document.get("workers"), MAX_WORKER, 1)
        if len(workers) > WORKERS_MAX or len(set(workers)) != len(workers):
            raise FrameError(f"a close names at most {WORKERS_MAX} workers, each of them once")
        if shared is not None and newest == clock and self._joins(shared, ticket):
            return
        step = RoundStep(connection.app, clock, workers, self.take_sweeps(connection.app))
        shared = _SharedTicket(headed, [ticket], body.tobytes())
        self._closing[step.app] = clock, shared
        nbytes = 64 + sum(sweep.nbytes for sweep in step.sweeps)
        push = Push(shared, -1, header.epoch, 0, 0, True, None, step, nbytes, kind=OperationKind.BARRIER_CLOSE)
        self._group.perform(self._group.replica.push, push)

    def _joins(self, shared: _SharedTicket, ticket: RequestTicket) -> bool:
        """Answers a close together with an earlier one of the same round; False if that one was not committed."""
        if shared.done:
            ticket.connection.send(OkHeader(ticket.request, self._serving.epoch).header().pack())
        elif shared.tickets:
            shared.tickets.append(ticket)
        return shared.done or bool(shared.tickets)


def _left_out(clock: int, app: str) -> RequestError:
    return RequestError("left-out", f"round {clock} of {app!r} was closed without this worker")
