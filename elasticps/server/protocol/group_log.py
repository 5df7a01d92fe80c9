"""Requests that the head of an application's group range answers, after it has logged them there. Connections, the log
and the server around are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.view import WorkerInfo
from elasticps.hashing import group_range
from elasticps.server.protocol.barrier_state import Rounds
from elasticps.server.protocol.data_shards_state import Shards
from elasticps.server.protocol.replies import R, Requester, RequestTicket
from elasticps.server.protocol.request_error import RequestError
from elasticps.wire.frames import Header
from replication.chain import Ranges
from replication.effects import Effects, Push, Reply, Status
from replication.messages import OperationKind
from replication.replica import Replica

Body = NDArray[np.uint8]
Asker = TypeVar("Asker", bound=Requester, contravariant=True)


class Log(Protocol):
    """What logs and applies operations: the server's executor."""

    replica: Replica
    rounds: Rounds
    shards: Shards

    def perform(self, event: Callable[..., Effects], *arguments: Any) -> None:
        """Gives the replica an event and carries out its effects."""


class Host(Protocol[Asker]):
    """The server around this."""

    ranges: int

    @property
    def epoch(self) -> int:
        """Of the view that is followed."""

    @property
    def roster_version(self) -> int:
        """Of the roster that is followed."""

    @property
    def headed(self) -> Ranges:
        """The ranges headed here; the same array as long as they are the same."""

    @property
    def workers(self) -> dict[int, WorkerInfo]:
        """The roster."""

    def wait_for_view(self, connection: Asker, header: Header, body: Body) -> bool:
        """Holds a frame that speaks of a view to come."""

    def need_roster(self, version: int) -> None:
        """Somebody has judged by a newer roster: get it."""

    def tell_view(self, connection: Asker) -> None:
        """Sends the view, once per connection and epoch."""

    def refuse(self, connection: Asker, request: int, refusal: RequestError) -> None:
        """Tells why a request was not done."""


class Once(RequestTicket[R]):
    """Answers in its own way when the operation is committed, with what there was when it was applied: what was logged
    behind it may yet be lost, and whoever is told of it would act on it."""

    __slots__ = ("_answer", "_host", "_made", "_open")

    def __init__(self, host: Host[R], connection: R, request: int, answer: Callable[[], bytes]) -> None:
        super().__init__(connection, request)
        self._host = host
        self._answer = answer
        self._made: bytes | RequestError | None = None
        self._open = True  # nothing is settled yet: neither answered, nor does it wait for admission

    def applied(self) -> None:
        """The operation has been logged and applied just now, unless it waits for room in the log or was refused."""
        if self._open:
            self._made = self._make()

    def _make(self) -> bytes | RequestError:
        try:
            return self._answer()
        except RequestError as refusal:
            return refusal

    def hold(self) -> None:
        self._open = False
        super().hold()

    def reply(self, reply: Reply) -> None:
        self._open = False
        if reply.status is not Status.COMMITTED or len(reply.moved):
            super().reply(reply)
            return
        made = self._made or self._make()
        if isinstance(made, RequestError):
            self._host.refuse(self.connection, self.request, made)
        else:
            self.connection.send(made)


class Nobody:
    """Who waits for an operation that was logged for no request."""

    def reply(self, reply: Reply) -> None:
        """Nobody hears it."""

    def clocks(self, reply: object) -> None:
        raise AssertionError("an operation was answered with clocks")

    def hold(self) -> None:
        """Nothing is read for it alone."""

    def release(self) -> None:
        """Nothing was held."""


class GroupRequests(Generic[R]):
    """What handlers of such requests share."""

    def __init__(self, host: Host[R], executor: Log) -> None:
        self._host = host
        self._executor = executor

    def _group(self, connection: R, header: Header, body: Body) -> Ranges | None:
        """The group range of the asker's application; None if the answer must wait, or is somebody else's to give."""
        if self._host.wait_for_view(connection, header, body):
            return None
        if connection.worker not in self._host.workers:
            raise RequestError("unlisted", f"worker {connection.worker_name!r} is not in the roster now")
        group = group_range(connection.app, self._host.ranges)
        if not np.count_nonzero(self._host.headed == group):
            self._stale(connection, header.request)
            return None
        return np.array([group], np.int64)

    def _knows_the_lost(self, app: str) -> bool:
        """Whether whoever is not in our roster is gone. It may only be new, as long as the last head knew more."""
        group = self._executor.rounds.groups.get(app)
        if group is None or group.roster <= self._host.roster_version:
            return True
        self._host.need_roster(group.roster)
        return False

    def _stale(self, connection: R, request: int) -> None:
        self._host.tell_view(connection)
        text = "the application's group range has another head"
        self._host.refuse(connection, request, RequestError("stale-view", text, epoch=self._host.epoch))

    def _once(self, connection: R, request: int, answer: Callable[[], bytes]) -> Once[R]:
        return Once(self._host, connection, request, answer)

    def _log(self, ticket: object, kind: OperationKind, payload: Any, ranges: Ranges) -> None:
        push = Push(ticket, -1, self._host.epoch, 0, 0, True, ranges, payload, 64, kind=kind)
        self._executor.perform(self._executor.replica.push, push)
        if isinstance(ticket, Once):
            ticket.applied()
