"""The barrier of synchronous rounds: which workers are in a round, and when it closes. `barrier_state` explains rounds.

BARRIER_JOIN, LEAVE and ARRIVE go to the head of the application's group range. When a decision is committed there, that
head announces it to the heads of all ranges (ROUND_CLOSE, `round_announcements`), and answers workers once they have
closed the round. Waiting requests and what is announced are in memory only: after a failover the workers ask again, and
the new head announces the last round again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

from coordinator.core.view import WORKERS_MAX, View
from elasticps.kernels.hashing import group_range
from elasticps.server.core.barrier_state import BarrierGroup, RoundStep
from elasticps.server.core.group_log import AnswerTicket, CommitTicket, GroupLog
from elasticps.server.core.reads import DEFAULT_WAIT_S
from elasticps.server.core.requests import Asker, Body, RequestError, RequestTicket, waited_too_long
from elasticps.server.core.round_announcements import DecidedRound, RoundAnnouncements
from elasticps.server.core.sweeps import SweptInterval
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_frame
from elasticps.wire.headers import BarrierArriveHeader, BarrierJoinHeader
from elasticps.wire.rounds import LastWorkers, RoundClose, RoundClosedHeader
from replication.chain import Member
from replication.effects import Push, Reply
from replication.messages import OperationKind

MOST_WAITING = 4 * WORKERS_MAX  # requests, until a round is closed everywhere


class _Waiting(NamedTuple):
    """An arrived worker, and until when it waits for the others."""

    clock: int
    ticket: AnswerTicket
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


class BarrierCoordinator:
    """Handles the three requests, and what heads say to each other; `recheck` looks at all barriers again when
    something has changed.

    soon(f): calls f when the replica's effects so far are carried out. send, need: frames for other heads, as
    `RoundAnnouncements` has them.
    """

    def __init__(
        self, log: GroupLog, clock: Callable[[], float], soon: Callable[[Callable[[], None]], object],
        send: Callable[[Member, list[Buffer]], None], need: Callable[[Member], None],
    ) -> None:  # fmt: skip
        self._group = log
        self._serving, self._rounds = log.serving, log.rounds
        self._clock = clock
        self._soon = soon
        self._waiting: dict[str, _Arrivals] = {}  # by application
        self._joining: dict[str, list[RequestTicket]] = {}  # app -> those that wait for room in the log
        self._everywhere: dict[str, int] = {}  # app -> the newest round that is known to be closed everywhere
        self._announced: dict[str, int] = {}  # app -> the newest round that is announced, or about to be
        self._closing: dict[str, list[tuple[int, AnswerTicket]]] = {}  # app -> those that wait for a round to close
        self._body = 0, b""  # of the newest answer to an arrival, and its round
        self._last: dict[Asker, LastWorkers] = {}  # what heads of group ranges have said on their connections
        self.announcements = RoundAnnouncements(log.serving.me, send, need, self._close_here, self._closed_everywhere)
        self.take_sweeps: Callable[[str], tuple[SweptInterval, ...]] = lambda app: ()  # that wait for a round to close
        log.when_closed = self._when_closed
        self.handlers: dict[int, Callable[[Asker, Header, Body], None]] = {
            Kind.BARRIER_JOIN: self._join, Kind.BARRIER_LEAVE: self._leave, Kind.BARRIER_ARRIVE: self._arrive,
        }  # fmt: skip

    # --- the group range ----------------------------------------------------------------------------------------------

    def _join(self, connection: Asker, header: Header, body: Body) -> None:
        app, worker = connection.app, connection.worker
        predecessor = BarrierJoinHeader.of(header).predecessor
        group = self._group.group_range(connection, header, body)
        if group is None:
            return

        def answer() -> bytes:
            state = self._rounds.groups[app]
            document = {"base": state.members.get(worker, 0), "last": state.last.get(predecessor, 0)}
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
            self._repeat(app, arrival.clock, worker, self._decision(connection, header, arrival.clock))
            return
        if worker not in state.members or arrival.clock != state.decided + 1:
            raise RequestError(
                "left-out", f"worker {connection.worker_name!r} is not in round {arrival.clock} of {app!r}"
            )
        ticket = self._decision(connection, header, arrival.clock)
        deadline_s = self._clock() + (arrival.wait_ms / 1e3 or DEFAULT_WAIT_S)
        self._waiting.setdefault(app, _Arrivals())[worker] = _Waiting(arrival.clock, ticket, deadline_s)
        self._decide(app)

    def _decision(self, connection: Asker, header: Header, clock: int) -> AnswerTicket:
        """The ticket of an arrival, which is answered with BARRIER_DECISION."""

        def answer() -> bytes:
            if self._body[0] != clock:
                self._body = clock, json_frame(Kind.BARRIER_DECISION, {"round": clock})[HEADER_BYTES:]
            body = self._body[1]  # the same for all workers of a round
            return Header(Kind.BARRIER_DECISION, 0, len(body), header.request, self._serving.epoch).pack() + body

        return self._group.ticket(connection, header.kind, header.request, answer)

    def _repeat(self, app: str, clock: int, worker: int, ticket: AnswerTicket) -> None:
        """Answers with a decision that may not be committed yet, once an operation logged after it is."""
        decided = self._group.decided(app)
        at = bisect_left(decided.workers, worker)  # they are sorted
        if clock < decided.clock or decided.workers[at : at + 1] != (worker,):
            self._group.refuse(ticket, _left_out(clock, app))
            return
        self._log(ticket, decided)

    def _log(self, ticket: object, round: DecidedRound) -> None:
        """Logs a decision; nothing changes by one that is logged already."""
        self._group.log(ticket, OperationKind.BARRIER_DECISION, RoundStep(*round), self._group.ranges_of(round.app))

    def _decide(self, app: str) -> None:
        """Decides the next round's workers, if all members that are still there have arrived."""
        waiting, state = self._waiting.get(app), self._rounds.groups.get(app)
        if state is None or not waiting:
            return
        clock, present = state.decided + 1, self._serving.workers
        if state.decided > self._everywhere.get(app, 0):
            self._announce_again(app)
            return
        if waiting.lacks_some(clock, state, present) or not self._group.knows_the_lost(app):
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
        decided = DecidedRound(app, clock, tuple(sorted(required)))

        def failed(reply: Reply) -> None:
            for ticket in tickets:
                ticket.reply(reply)

        self._log(CommitTicket(partial(self._when_closed, decided, tickets), failed), decided)
        for worker in [w for w, one in waiting.items() if one.clock <= clock]:  # it was away: what it waits for is over
            one = waiting.pop(worker)
            self._group.refuse(one.ticket, _left_out(one.clock, app))

    def adopt(self, view: View) -> None:
        """Follows a view."""
        self._leave_moved()
        self.announcements.adopt(view)

    def recheck(self) -> None:
        """Looks at all barriers again: the roster or the view has changed, or time has passed."""
        self._leave_moved()
        for app in list(self._waiting):
            self._answer_decided(app)
            self._decide(app)
            self._end_waits(app)

    def _leave_moved(self) -> None:
        """Refuses what waits for barriers that another head has now, which will announce their last round again."""
        headed = set(self._serving.headed.tolist())
        for app in {**self._waiting, **self._announced, **self._everywhere, **self._closing}:
            if group_range(app, self._serving.ranges) not in headed:
                tickets = [waiting.ticket for waiting in self._waiting.pop(app, {}).values()]
                tickets += [ticket for _, ticket in self._closing.pop(app, ())]
                self._everywhere.pop(app, None)
                self._announced.pop(app, None)
                self.announcements.forget(app)
                for ticket in tickets:
                    self._group.refuse(ticket, self._group.stale())

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

    # --- rounds that are decided here -------------------------------------------------------------------------------

    def _when_closed(self, round: DecidedRound, tickets: list[AnswerTicket]) -> None:
        """Answers these requests when a round, whose decision is committed, is closed everywhere."""
        app = round.app
        if round.clock <= self._everywhere.get(app, 0):
            for ticket in tickets:
                ticket.answer()
            return
        closing = self._closing.setdefault(app, [])
        if len(closing) + len(tickets) > MOST_WAITING:
            for ticket in tickets:
                self._group.refuse(ticket, RequestError("busy", f"too many requests wait for a round of {app!r}"))
            return
        closing += [(round.clock, ticket) for ticket in tickets]
        if self._announced.get(app, 0) < round.clock:
            self._announced[app] = round.clock
            self._soon(partial(self._announce, round))

    def _announce(self, round: DecidedRound) -> None:
        if self._announced.get(round.app) == round.clock:
            self.announcements.begin(round)

    def _announce_again(self, app: str) -> None:
        """Announces the last round, of which it is not known here whether it is closed everywhere: an earlier head has
        decided it."""
        round = self._group.decided(app)
        if self._announced.get(app, 0) < round.clock:
            self._announced[app] = round.clock

            def failed(reply: Reply) -> None:
                if self._announced.get(app) == round.clock:
                    del self._announced[app]

            self._log(CommitTicket(partial(self._soon, partial(self._announce, round)), failed), round)

    def _closed_everywhere(self, round: DecidedRound) -> None:
        app = round.app
        self._everywhere[app] = max(round.clock, self._everywhere.get(app, 0))
        waited = self._closing.pop(app, [])
        later = [(clock, ticket) for clock, ticket in waited if clock > round.clock]
        if later:
            self._closing[app] = later
        for clock, ticket in waited:
            if clock <= round.clock:
                ticket.answer()
        self._decide(app)

    # --- all ranges ---------------------------------------------------------------------------------------------------

    def close(self, connection: Asker, header: Header, body: Body) -> None:
        """ROUND_CLOSE: the head of a group range has a round closed. It is answered once that is committed in all
        ranges headed here. If these have changed since the frame's epoch, the newer view is sent, and it comes again.
        Raises `RequestError` if under the same view the sender does not head the application's group range."""
        if self._group.held.wait_for_view(connection, header, body):
            return
        close = RoundClose.of(header, body)
        if close.epoch == self._serving.epoch and connection.member != (head := self._group.head_of(close.app)):
            text = f"{connection.member} closes a round of {close.app!r}, whose group range is headed by {head}"
            raise RequestError("not-head", text, epoch=close.epoch)
        workers = self._last.setdefault(connection, LastWorkers()).follow(close)
        answer = RoundClosedHeader(close.request).header().pack()
        outdated = partial(self._group.notifier.tell, connection)
        ticket = CommitTicket(partial(connection.send, answer), lambda reply: outdated(), connection)
        self._close(DecidedRound(close.app, close.clock, workers), close.epoch, ticket)

    def forget(self, connection: Asker) -> None:
        """A connection to another head has ended."""
        self._last.pop(connection, None)

    def _close_here(self, round: DecidedRound, request: int, epoch: int) -> None:
        done = partial(self.announcements.closed, self._serving.me, request)
        self._close(round, epoch, CommitTicket(partial(self._soon, done)))

    def _close(self, round: DecidedRound, epoch: int, ticket: CommitTicket) -> None:
        """Closes a round in all ranges headed here; nothing changes in those where it is closed already."""
        app, clock = round.app, round.clock
        still_open = bool((self._rounds.closed(app)[self._serving.headed] < clock).any())
        sweeps = self.take_sweeps(app) if still_open else ()
        sharing = self._rounds.sharing(app, clock)
        workers = tuple(worker for worker in round.workers if worker in sharing)
        step = RoundStep(app, clock, workers, sweeps, len(round.workers))
        nbytes = 64 + 8 * len(workers) + sum(sweep.nbytes for sweep in sweeps)
        push = Push(ticket, -1, epoch, 0, 0, True, None, step, nbytes, kind=OperationKind.BARRIER_CLOSE)
        self._group.perform(self._group.replica.push, push)


def _left_out(clock: int, app: str) -> RequestError:
    return RequestError("left-out", f"round {clock} of {app!r} was closed without this worker")
