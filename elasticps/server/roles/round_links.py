"""Connections from the head of a group range to the heads of all ranges, on which it has synchronous rounds closed.

They are dialled when a round is to be announced, and end when there was nothing to announce for a while. The other side
only answers. `core/round_announcements` says what is sent when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from coordinator.core import fields
from coordinator.core.view import ServerInfo, View
from elasticps.server.core.requests import Body
from elasticps.server.core.round_announcements import RoundAnnouncements
from elasticps.server.network.connection import Connection, PeerKind
from elasticps.server.network.dialling import Dial, dial_peer
from elasticps.server.roles.context import Context
from elasticps.system import fatal
from elasticps.wire.frames import Buffer, Header, Kind, json_body
from elasticps.wire.rounds import RoundClosedHeader
from replication.chain import Member

log = fields.logger(__name__)

RETRY_FIRST_S = 0.005
RETRY_MOST_S = 0.2
SILENT_S = 2.0  # a head that has not closed a round so long after it was told is dialled, and told, again
IDLE_S = 60.0  # a connection on which nothing was said for so long ends


class RoundLinks:
    """Keeps a connection to each head that is told of rounds. make: a connection for a kind of peer."""

    def __init__(self, context: Context, dial: Dial, make: Callable[[PeerKind], Connection]) -> None:
        self.announcements: RoundAnnouncements  # hears of connections and answers; set by the server
        self._context = context
        self._loop = context.loop
        self._connect = dial
        self._make = make
        self._servers: Mapping[Member, ServerInfo] = {}  # of the view
        self._links: dict[Member, Connection] = {}
        self._spoken_s: dict[Member, float] = {}  # when something was sent last
        self._dials: dict[Member, asyncio.Task[None]] = {}
        # What a head may send, before and after its WELCOME.
        self._newcomer = PeerKind({Kind.WELCOME: self._welcomed, Kind.ERROR: self._refused})
        self._head = PeerKind(
            {Kind.ROUND_CLOSED: self._closed, Kind.ERROR: self._refused, **context.updates.handlers}, self._lost
        )

    def adopt(self, view: View) -> None:
        """Follows a view: drops connections to servers that it does not list."""
        self._servers = view.by_member
        for member in [m for m in (*self._links, *self._dials) if m not in self._servers]:
            self._drop(member)

    def close(self) -> None:
        """Drops every connection."""
        self._servers = {}
        for member in [*self._links, *self._dials]:
            self._drop(member)

    def send(self, member: Member, frame: list[Buffer]) -> None:
        """Queues a frame for a head that is connected."""
        self._spoken_s[member] = self._loop.time()
        self._links[member].send_all(frame)

    def need(self, member: Member) -> None:
        """Connects to a head."""
        task = self._dials.get(member)
        if member in self._servers and (task is None or task.done()):
            self._dials[member] = task = self._loop.create_task(self._keep_dialling(member), name=f"rounds to {member}")
            task.add_done_callback(fatal.watch)

    def tick(self) -> None:
        """A few times a second: dials heads again that do not answer, drops connections that have nothing to say."""
        now = self._loop.time()
        for member in self.announcements.owing:
            if member in self._links and now - self._spoken_s[member] > SILENT_S:
                log.warning("a head has not closed a round", peer=member, seconds=SILENT_S)
                self._drop(member)
        for member, connection in list(self._links.items()):
            if connection.stale or now - self._spoken_s[member] > IDLE_S:
                self._drop(member)

    async def _keep_dialling(self, member: Member) -> None:
        context, delay_s = self._context, RETRY_FIRST_S
        while member in self._servers and member not in self._links:
            connection, hello = self._make(self._newcomer), {"rounds": list(context.serving.me)}
            epoch = context.serving.epoch
            await dial_peer(self._connect, connection, self._servers[member], context.cluster, hello, epoch)
            if member not in self._links:
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, RETRY_MOST_S)

    def _welcomed(self, connection: Connection, header: Header, body: Body) -> None:
        member = connection.member
        assert member is not None
        if member not in self._servers or member in self._links:
            connection.transport.abort()
            return
        connection.welcome(self._head)
        if header.epoch > self._context.serving.epoch:
            self._context.updates.need_view()
        self._links[member] = connection
        self._spoken_s[member] = self._loop.time()
        self.announcements.connected(member)

    def _closed(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is not None and self._links.get(connection.member) is connection:
            self.announcements.closed(connection.member, RoundClosedHeader.of(header).request)

    def _refused(self, connection: Connection, header: Header, body: Body) -> None:
        message = json_body(body.data).get("message")
        log.warning("a head refuses a round", peer=connection.member, message=f"{message!s:.1000}")
        connection.transport.abort()

    def _lost(self, connection: Connection) -> None:
        member = connection.member
        if member is not None and self._links.get(member) is connection:
            self._forget(member)

    def _drop(self, member: Member) -> None:
        task, connection = self._dials.pop(member, None), self._links.get(member)
        if task is not None:
            task.cancel()
        if connection is not None:
            self._forget(member)
            connection.transport.abort()

    def _forget(self, member: Member) -> None:
        del self._links[member], self._spoken_s[member]
        self.announcements.disconnected(member)
