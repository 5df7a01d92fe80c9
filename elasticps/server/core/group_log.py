"""Requests to the head of an application's group range: checked, logged there, and answered once committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from elasticps.kernels.hashing import group_range
from elasticps.server.core.barrier_state import Rounds
from elasticps.server.core.requests import Asker, Body, RequestError, RequestTicket
from elasticps.server.core.round_announcements import DecidedRound
from elasticps.server.core.serving import Serving
from elasticps.server.core.view_exchange import HeldFrames, ViewNotifier
from elasticps.wire.frames import Header
from replication.chain import Member, Ranges
from replication.effects import Push, Reply, Status
from replication.messages import OperationKind
from replication.replica import Replica


class AnswerTicket(RequestTicket):
    """Answers with a frame of its own once the operation is committed, made from the state at which it was applied.

    Operations logged after it may yet be lost, and a worker that learned of them would act on them. By then the round
    that was decided last is closed everywhere, too: a worker acts on that.
    """

    __slots__ = ("_answer", "_answered", "_log", "_made", "_open", "_round")

    def __init__(self, log: GroupLog, connection: Asker, kind: int, request: int, answer: Callable[[], bytes]) -> None:
        super().__init__(connection, kind, request)
        self._log = log
        self._answer = answer
        self._made: bytes | RequestError | None = None
        self._round = DecidedRound(connection.app, 0, ())
        self._open = True  # nothing is settled yet: neither answered, nor does it wait for admission
        self._answered = False

    def applied(self) -> None:
        """The operation has been logged and applied just now, unless it waits for room in the log or was refused."""
        if self._open:
            self._made = self._make()

    def _make(self) -> bytes | RequestError:
        self._round = self._log.decided(self._round.app)
        try:
            return self._answer()
        except RequestError as refusal:
            return refusal.with_traceback(None)  # which would keep this, in a cycle

    def hold(self) -> None:
        self._open = False
        super().hold()

    def release(self) -> None:
        """What waited for admission has been logged and applied just now, unless it was refused."""
        if not self._answered:
            self._made = self._make()
        super().release()

    def reply(self, reply: Reply) -> None:
        self._open, self._answered = False, True
        if reply.status is not Status.COMMITTED or len(reply.moved):
            super().reply(reply)
            return
        self._made = self._made or self._make()
        self._log.when_closed(self._round, [self])

    def answer(self) -> None:
        """Sends the answer."""
        made = self._made or self._make()
        if isinstance(made, RequestError):
            self._log.refuse(self, made)
        else:
            self.connection.send(made)


def _answer_now(round: DecidedRound, tickets: list[AnswerTicket]) -> None:
    for ticket in tickets:
        ticket.answer()


class NoTicket:
    """The ticket of an operation that no request waits for."""

    def reply(self, reply: Reply) -> None:
        """Answers nothing."""

    def clocks(self, reply: object) -> None:
        raise AssertionError("an operation was answered with clocks")

    def hold(self) -> None:
        """Pauses nothing."""

    def release(self) -> None:
        """Resumes nothing."""


class CommitTicket(NoTicket):
    """The ticket of an operation after which something is to happen here: `done()` once it is committed in all its
    ranges, else `failed(reply)`."""

    def __init__(
        self, done: Callable[[], object], failed: Callable[[Reply], None] = lambda reply: None,
        connection: Asker | None = None,
    ) -> None:  # fmt: skip
        self._done = done
        self._failed = failed
        self._connection = connection  # that waits if the log is full

    def reply(self, reply: Reply) -> None:
        if reply.status is Status.COMMITTED and not len(reply.moved):
            self._done()
        else:
            self._failed(reply)

    def hold(self) -> None:
        if self._connection is not None:
            self._connection.wait_for(self)

    def release(self) -> None:
        if self._connection is not None:
            self._connection.admitted(self)


class GroupLog:
    """Checks requests against the view and the roster, and logs them in group ranges headed here.

    `perform(event, …)` gives the replica an event and carries out its effects. when_closed: answers requests once a
    round, whose decision is committed, is closed everywhere."""

    def __init__(
        self,
        serving: Serving,
        held: HeldFrames,
        notifier: ViewNotifier,
        replica: Replica,
        rounds: Rounds,
        perform: Callable[..., None],
    ) -> None:
        self.serving = serving
        self.held = held
        self.notifier = notifier
        self.replica = replica
        self.rounds = rounds
        self.perform = perform
        self._headed: Ranges | None = None  # those headed here
        self._groups: dict[str, Ranges] = {}  # the group ranges among them of applications that have asked
        self.when_closed: Callable[[DecidedRound, list[AnswerTicket]], None] = _answer_now

    def group_range(self, connection: Asker, header: Header, body: Body) -> Ranges | None:
        """The group range of the asker's application; None if the request waits for a view. Raises `RequestError` if
        it has another head."""
        if self.held.wait_for_view(connection, header, body):
            return None
        if connection.worker not in self.serving.workers:
            raise RequestError("unlisted", f"worker {connection.worker_name!r} is not in the roster now")
        headed = self.serving.headed
        if headed is not self._headed:  # of many requests most are of the same application, under the same view
            self._headed, self._groups = headed, {}
        group = self._groups.get(connection.app)
        if group is None:
            group = self.ranges_of(connection.app)
            if not np.count_nonzero(headed == group[0]):
                raise self.stale()
            self._groups[connection.app] = group
        return group

    def ranges_of(self, app: str) -> Ranges:
        """An application's group range, as the ranges of an operation."""
        return np.array([group_range(app, self.serving.ranges)], np.int64)

    def head_of(self, app: str) -> Member | None:
        """The server that heads an application's group range, None while there is none."""
        view = self.serving.view
        index = -1 if view is None else int(view.heads[group_range(app, self.serving.ranges)])
        return None if view is None or index < 0 else view.as_chains.members[index]

    def knows_the_lost(self, app: str) -> bool:
        """Whether workers missing from our roster are gone. They may be new if an earlier head knew a newer roster."""
        group = self.rounds.groups.get(app)
        if group is None or group.roster <= self.serving.roster_version:
            return True
        self.held.need_roster()
        return False

    def decided(self, app: str) -> DecidedRound:
        """The round that an application has decided last, 0 if there is none."""
        group = self.rounds.groups.get(app)
        return DecidedRound(app, 0, ()) if group is None else DecidedRound(app, group.decided, group.workers)

    def stale(self) -> RequestError:
        """The refusal of a request whose group range is headed by another server."""
        text = "the application's group range has another head"
        return RequestError("stale-view", text, epoch=self.serving.epoch)

    def refuse(self, ticket: RequestTicket, error: RequestError) -> None:
        """Refuses a request that has waited."""
        self.notifier.refuse(ticket.connection, ticket.kind, ticket.request, error)

    def ticket(self, connection: Asker, kind: int, request: int, answer: Callable[[], bytes]) -> AnswerTicket:
        """The ticket of a request of this kind that is answered with `answer()`."""
        return AnswerTicket(self, connection, kind, request, answer)

    def log(self, ticket: object, kind: OperationKind, payload: Any, ranges: Ranges) -> None:
        """Logs an operation of a group range."""
        push = Push(ticket, -1, self.serving.epoch, 0, 0, True, ranges, payload, 64, kind=kind)
        self.perform(self.replica.push, push)
        if isinstance(ticket, AnswerTicket):
            ticket.applied()
