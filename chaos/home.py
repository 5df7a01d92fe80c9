"""What the head of the group range decides, at a simulated server: the real decider and hand-out between links instead
of sockets. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from chaos.control import CLUSTER
from chaos.frames import AnswerFrame, ViewFrame
from chaos.network import Link
from coordinator.view import WorkerInfo
from elasticps.server.protocol.asker import Body
from elasticps.server.protocol.barrier import BarrierCoordinator
from elasticps.server.protocol.data_shards import ShardDispenser
from elasticps.server.protocol.group_log import GroupLog
from elasticps.server.protocol.replies import RequestTicket
from elasticps.server.protocol.request_error import RequestError
from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, Kind, json_frame, unpack_header
from replication.chain import Ranges
from replication.core import NO_RANGES
from replication.effects import Ask, Effects

if TYPE_CHECKING:
    from chaos.servers import Server
    from chaos.workers import Trainer


class Caller:
    """A worker's connection, as far as requests look at it."""

    app = CLUSTER

    def __init__(self, server: Server, link: Link, trainer: Trainer) -> None:
        self.worker = trainer.worker
        self.worker_name = trainer.name
        self.roster = trainer.roster
        self.tickets: set[object] = set()
        self._server = server
        self._link = link

    def send(self, frame: Buffer) -> None:
        """Queues an answer."""
        self._link.send(self._server, AnswerFrame(bytes(frame)))

    def tell_view(self) -> None:
        """Sends the view."""
        if self._server.view is not None:
            self._link.send(self._server, ViewFrame(self._server.view))

    def wait_for(self, ticket: object) -> None:
        """Reads nothing more until this request has been admitted."""
        self.tickets.add(ticket)
        self._link.pause(self._server, True)

    def admitted(self, ticket: object) -> None:
        """It has been."""
        self.tickets.discard(ticket)
        self._link.pause(self._server, bool(self.tickets))


class Home:
    """The requests of one server's workers that are no pushes and no pulls. Host and log of the real handlers."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ranges = server.world.plan.ranges
        self.replica, self.rounds, self.shards = server.replica, server.rounds, server.shards
        self.workers: dict[int, WorkerInfo] = {}
        self._callers: dict[Link, Caller] = {}
        self._early: list[tuple[Caller, Header, Body]] = []
        all_of_it = cast(Any, self)
        log = GroupLog(all_of_it, all_of_it, all_of_it, self.replica, self.rounds, self.shards, self.perform)
        self._decider = BarrierCoordinator(log, lambda: server.loop.now)
        self._handlers: dict[int, Callable[[Any, Header, Body], None]] = {
            **self._decider.handlers,
            **ShardDispenser(log).handlers,
            Kind.GET_CLOCKS: self._ask,
            Kind.JOIN: self._join,
        }

    # -- what the handlers see ----------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Of the view that is followed."""
        return self.replica.epoch

    @property
    def headed(self) -> Ranges:
        """The ranges headed here; the same array as long as they are the same."""
        ranges = self.replica.headed(self.replica.epoch)
        return NO_RANGES if ranges is None else ranges

    def wait_for_view(self, connection: Caller, header: Header, body: Body) -> bool:
        """Holds a request that speaks of a view to come."""
        if header.epoch <= self.epoch:
            return False
        self._early.append((connection, header, body))
        self.server.world.fetch_view(self.server, header.epoch)
        return True

    @property
    def roster_version(self) -> int:
        """Of the roster that is followed."""
        return self.server.roster

    def need_roster(self) -> None:
        """Gets a newer roster."""
        self.server.world.fetch_roster(self.server)

    def refuse(self, connection: Caller, request: int, refusal: RequestError) -> None:
        """Tells why a request was not done."""
        if refusal.document["code"] == "stale-view":
            connection.tell_view()
        connection.send(json_frame(Kind.ERROR, refusal.document, request=request, epoch=self.epoch))

    def perform(self, event: Callable[..., Effects], *arguments: Any) -> None:
        """Gives the replica an event and carries out its effects."""
        self.server.perform(event.__name__, event(*arguments))

    # -- events -------------------------------------------------------------------------------------------------------

    def request(self, link: Link, trainer: Trainer, frame: bytes) -> None:
        """A worker's request comes."""
        caller = self._callers.get(link)
        if caller is None:
            caller = self._callers[link] = Caller(self.server, link, trainer)
        self._handle(caller, unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8))

    def _handle(self, caller: Caller, header: Header, body: Body) -> None:
        server = self.server
        if caller.roster > server.roster:  # as a server that does not know who says hello
            self._early.append((caller, header, body))
            server.world.fetch_roster(server)
            return
        try:
            self._handlers[header.kind](caller, header, body)
        except RequestError as refusal:
            self.refuse(caller, header.request, refusal)

    def roster(self, workers: frozenset[int]) -> None:
        """A roster came."""
        self.workers = {w: WorkerInfo(w, str(w), 1, CLUSTER) for w in sorted(workers)}

    def judge(self) -> None:
        """The roster or the view has changed, or time has passed."""
        early, self._early = self._early, []
        for caller, header, body in early:
            self._handle(caller, header, body)
        self._decider.judge()

    def forget(self, link: Link) -> None:
        """A connection is lost."""
        caller = self._callers.pop(link, None)
        if caller is not None:
            self._early = [early for early in self._early if early[0] is not caller]
            for ticket in caller.tickets:
                self.perform(self.replica.forget, ticket)

    def _ask(self, caller: Caller, header: Header, body: Body) -> None:
        ticket = RequestTicket(cast(Any, caller), header.request)
        self.perform(self.replica.ask, Ask(ticket, header.worker, header.epoch))

    def _join(self, caller: Caller, header: Header, body: Body) -> None:
        minimum = self.server.reads.delay.minimum(CLUSTER)
        caller.send(Header(Kind.OK, request=header.request, epoch=self.epoch, clock=minimum).pack())
