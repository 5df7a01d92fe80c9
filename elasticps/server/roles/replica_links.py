"""Links to other replicas: one to each server that shares a range with us in the view, also where it is not beside us
in a chain, for the next view may put it there. The member whose name sorts first dials.

The dialler numbers its links. Only the link with the highest number counts; messages on any other are ignored.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeAlias

import numpy as np

from coordinator.core import fields
from coordinator.core.view import ServerInfo, View
from elasticps.security.channel import Expect
from elasticps.security.identity import Identity, Role
from elasticps.server.core.operations import CreatedTable, CreatedTables
from elasticps.server.core.replica_codec import ReplicaCodec
from elasticps.server.core.requests import Body
from elasticps.server.core.view_exchange import HOLD_TIMEOUT_S
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.store import Table
from elasticps.system import fatal
from elasticps.wire.frames import (
    CREATED_BYTES,
    MAX_CREATED,
    Buffer,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
    portions,
)
from elasticps.wire.headers import GetViewHeader
from replication.chain import Member
from replication.core import NO_RANGES
from replication.effects import Distrust, Send
from replication.messages import Forward, Operation, OperationKind

log = fields.logger(__name__)

RETRY_FIRST_S = 0.005
RETRY_MOST_S = 0.2
CONNECT_TIMEOUT_S = 1.0
BEAT_S = 0.25
MOST_REJECTIONS = 8  # links to one neighbour in one view that end over a message
SILENT_LINK_S = 1.5  # a link on which nothing came for so long is dropped: the peer beats too
MOST_BYTES = 320 << 20  # waiting for a view, or on a link: more than a correct peer's log can hold
MESSAGE_BYTES = 1024  # the least that a waiting message counts

Dial: TypeAlias = Callable[[Connection, str, int, Expect], Awaitable[None]]
"""Connects to a host and port, and proves with `Expect` who is there; OSError if that fails."""


class ReplicaLinks:
    """Keeps a link to each neighbour of the view, gives its messages to the replica, and notes which links are missing.

    make_way: lets snapshots that wait for room on the link to a peer go before waiting pushes; set by the sender of
    snapshots.
    """

    def __init__(self, context: Context, dial: Dial, make_connection: Callable[[], Connection]) -> None:
        self._executor = executor = context.executor  # gets the messages
        self._replica = executor.replica  # says whose messages wait
        self._me = executor.replica.me  # for HELLO, and for who dials
        self._cluster = context.cluster  # for HELLO, and certificates
        self._codec = ReplicaCodec(executor.store.tables, context.serving.ranges)  # messages as frames
        executor.tell_tables = self._tell_tables
        executor.handlers[Send], executor.handlers[Distrust] = self.send, self.distrust
        context.updates.ask_peers = self.ask_for_view
        self.make_way: Callable[[Member], None] = lambda member: None  # see above
        self._loop = loop = context.loop  # for time and dials
        self._connect = dial  # gives a connection its transport
        self._make_connection = make_connection  # for a link that is dialled
        self._neighbours: dict[Member, ServerInfo] = {}  # who gets a link
        self._links: dict[Member, Connection] = {}  # the current link to each
        self._missing: dict[Member, float] = {}  # neighbours without a link, since when
        self._early: dict[Member, tuple[float, int]] = {}  # messages wait for a view: since when, bytes
        self._dials: dict[Member, asyncio.Task[None]] = {}  # in progress
        self._rejections: Counter[Member] = Counter()  # links of this view that ended over a message
        self._number = 0  # of the newest link that was dialled
        self._epoch = 0  # of the view that is followed
        self._ticked_s = self._woke_s = loop.time()  # last tick; end of the last time that this process was stopped
        # What a peer may send on a link.
        self.handlers: dict[int, Handler] = dict.fromkeys(
            (Kind.FORWARD, Kind.ACK, Kind.RESYNC, Kind.SNAPSHOT_CHUNK, Kind.CHUNK_ACK), self.receive
        )
        self.handlers[Kind.ERROR] = self._rejected_there

    def adopt(self, view: View) -> None:
        """Follows a view: dials the servers that share ranges with us, and drops links to all others."""
        self._epoch = view.epoch
        self._rejections.clear()
        members, everyone = view.as_chains.members, np.column_stack((view.chains, view.joining))
        me = view.as_chains.index(self._me)
        indices = np.unique(everyone[(everyone == me).any(axis=1)]).tolist()
        self._neighbours = {members[i]: view.servers[i] for i in indices if i not in (me, -1)}
        now = self._loop.time()
        for member in [m for m in self._links if m not in self._neighbours]:
            self._drop(member)
        for member in [m for m in self._missing if m not in self._neighbours]:
            del self._missing[member]
        for member in [m for m in self._dials if m not in self._neighbours]:
            self._dials.pop(member).cancel()
        for member in self._neighbours:
            if member not in self._links:
                self._missing.setdefault(member, now)
                self._dial(member, 0.0)

    def close(self) -> None:
        """Drops every link."""
        for task in self._dials.values():
            task.cancel()
        links, self._links, self._neighbours = self._links, {}, {}
        for connection in links.values():
            connection.transport.abort()

    def link(self, member: Member) -> Connection | None:
        """The current link to a peer."""
        return self._links.get(member)

    def backlog(self, member: Member) -> int:
        """How many bytes wait on the link to a peer."""
        link = self._links.get(member)
        return 0 if link is None else link.waiting_bytes

    def full(self, member: Member) -> bool:
        """Whether there is a link to a peer on which more waits than its socket takes."""
        link = self._links.get(member)
        return link is not None and link.full

    def send(self, effect: Send) -> None:
        """Queues a message on the current link to a peer."""
        link = self._links.get(effect.peer)
        if link is not None and link.waiting_bytes > MOST_BYTES:  # it asks for more than it reads
            link.transport.abort()
        elif link is not None:
            link.send_all(self._codec.encode(effect.message))

    def receive(self, connection: Connection, header: Header, body: Body) -> None:
        """A message of the replica's protocol; heard if it came on the current link."""
        member = connection.member
        if member is None:
            raise FrameError(f"{Kind(header.kind).name} came from somebody who is no replica")
        if self._links.get(member) is connection:
            message = self._codec.decode(header, body)
            self._executor.perform(self._replica.receive, member, message)
            self._executor.note_change()
            if self._replica.holds(member):
                since, nbytes = self._early.get(member, (self._loop.time(), 0))
                self._early[member] = since, nbytes + len(body) + MESSAGE_BYTES
                if nbytes > MOST_BYTES:
                    self._end(member, "too much waits for a view that it speaks of")

    def _rejected_there(self, connection: Connection, header: Header, body: Body) -> None:
        """The peer ends the link over a message from here. It counts as if we had ended it: either may be wrong."""
        connection.discarding = True
        message = json_body(body.data).get("message")
        log.warning("a peer refuses what was sent to it", peer=connection.member, reason=f"{message!s:.1000}")
        connection.transport.abort()

    def distrust(self, effect: Distrust) -> None:
        """Ends the link to a peer that has sent what no correct one can; until there is another link, it is missing."""
        link = self._links.get(effect.peer)
        log.error("a peer is wrong", peer=effect.peer, reason=effect.why)
        if link is not None:
            link.reject(FrameError(effect.why))

    def suspects(self) -> dict[Member, float]:
        """Neighbours that cannot be reached, and for how many seconds."""
        now = self._loop.time()
        return {member: now - since for member, since in self._missing.items()}

    def ask_for_view(self) -> None:
        """Has every peer send its view, if it is newer."""
        self.broadcast(GetViewHeader(self._epoch).header().pack())

    def broadcast(self, frame: bytes) -> None:
        """Sends a small frame to every peer."""
        for connection in self._links.values():
            connection.send(frame)

    def tell(self, members: Iterable[Member], frame: bytes) -> None:
        """Sends a small frame to those of these peers to which there is a link."""
        for member in members:
            if (connection := self._links.get(member)) is not None:
                connection.send(frame)

    def tick(self) -> None:
        """A few times a second: beats, which also ask for a newer view, and drops links that have gone silent."""
        now = self._loop.time()
        if (
            now - self._ticked_s > SILENT_LINK_S / 2
        ):  # we were stopped: what peers have sent meanwhile is still to be read
            self._woke_s = now
        self._ticked_s = now
        self.ask_for_view()
        for member, connection in list(self._links.items()):
            heard_s = max(connection.heard_s, self._woke_s)
            if not self._replica.holds(member):
                self._early.pop(member, None)
            early_since, _ = self._early.get(member, (now, 0))
            if now - heard_s > SILENT_LINK_S:
                self._end(member, f"silent for {now - heard_s:.1f} s")
                self._missing[member] = heard_s
            elif now - early_since > HOLD_TIMEOUT_S:
                self._end(member, f"no view came that it speaks of, for {HOLD_TIMEOUT_S:g} s")
            elif connection.stale and self._me < member:
                log.info("link dialled again: certificates are renewed", peer=member)
                self._drop(member)
                self._missing[member] = now
                self._dial(member, 0.0)
                break  # one after the other

    # --- links come and go ------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> bool:
        """Takes a numbered link to `connection.member`; False if a later one is there already, or if the peer was given
        up in this view."""
        member = connection.member
        assert member is not None
        if self._given_up(member):
            return False
        old = self._links.get(member)
        if old is not None:
            if old.number >= connection.number:
                return False
            self._drop(member)
        self._links[member] = connection
        self._missing.pop(member, None)
        self._up(member, connection)
        return True

    def lost(self, connection: Connection) -> None:
        """A connection to a peer has ended; nothing happens if it was not the current link."""
        member = connection.member
        if member is None or self._links.get(member) is not connection:
            return
        del self._links[member]
        self._down(member)
        self._rejections[member] += connection.discarding
        if member in self._neighbours:
            self._missing[member] = self._loop.time()
            if self._given_up(member):
                log.error(
                    "no more links in this view: a peer cannot be understood, which the leader is told", peer=member
                )
            self._dial(member, RETRY_FIRST_S)

    def _given_up(self, member: Member) -> bool:
        """Whether links to a peer have ended so often over a message that it counts as unreachable. The next view will
        do without one of the two."""
        return self._rejections[member] >= MOST_REJECTIONS

    def _up(self, member: Member, connection: Connection) -> None:
        log.info("peer up", peer=member)
        connection.is_peer(partial(self._link_full, member, connection))
        self._executor.perform(self._replica.peer_up, member)
        for frame in self._creates(self._executor.store.tables.items()):
            connection.send_all(frame)

    def _link_full(self, member: Member, connection: Connection, full: bool) -> None:
        if self._links.get(member) is not connection:
            return
        if full:
            self._executor.perform(self._replica.peer_full, member, True)
        else:  # not in the middle of what is being sent
            self._loop.call_soon(self._relieve, member, connection)

    def _relieve(self, member: Member, connection: Connection) -> None:
        if self._links.get(member) is connection and not connection.full:
            self.make_way(member)
            self._executor.perform(self._replica.peer_full, member, False)

    def _tell_tables(self, new: Iterable[tuple[int, Table]]) -> None:
        for frame in self._creates(new):
            for connection in self._links.values():
                connection.send_all(frame)

    def _creates(self, tables: Iterable[tuple[int, Table]]) -> list[list[Buffer]]:
        """Frames that create tables at a peer, outside of any range's log."""
        new = [CreatedTable(number, table.spec.to_json(), table.app) for number, table in tables]
        operations = [
            Operation(OperationKind.CREATE, -1, 0, CreatedTables(tuple(some)), 0)
            for some in portions(new, MAX_CREATED, CREATED_BYTES, lambda table: len(table.spec))
        ]
        epoch = self._replica.epoch
        return [self._codec.encode(Forward(epoch, NO_RANGES, NO_RANGES, operation)) for operation in operations]

    def _down(self, member: Member) -> None:
        log.info("peer down", peer=member)
        self._early.pop(member, None)
        self._executor.perform(self._replica.peer_down, member)

    def _end(self, member: Member, why: str) -> None:
        """Drops a link, and dials it again."""
        log.warning("link dropped", peer=member, reason=why)
        self._drop(member)
        self._missing[member] = self._loop.time()
        self._dial(member, 0.0)

    def _drop(self, member: Member) -> None:
        connection = self._links.pop(member)
        self._down(member)
        connection.transport.abort()

    def _dial(self, member: Member, delay_s: float) -> None:
        task = self._dials.get(member)
        if self._me < member and (task is None or task.done()):
            dialling = self._keep_dialling(member, delay_s)
            self._dials[member] = task = self._loop.create_task(dialling, name=f"link to {member}")
            task.add_done_callback(fatal.watch)

    async def _keep_dialling(self, member: Member, delay_s: float) -> None:
        retry_s = RETRY_FIRST_S
        while member in self._neighbours and member not in self._links and not self._given_up(member):
            await asyncio.sleep(delay_s)
            delay_s = retry_s
            retry_s = min(2 * retry_s, RETRY_MOST_S)
            await self._dial_once(member)

    async def _dial_once(self, member: Member) -> None:
        """One attempt: connects, says hello, and waits until the link is up or over."""
        host, _, port = self._neighbours[member].address.rpartition(":")
        connection = self._make_connection()
        self._number += 1
        connection.number = self._number

        def expect(peer: Identity) -> None:
            peer.require(self._cluster, Role.SERVER, member.name)

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(connection, host.strip("[]"), int(port), expect)
        except (OSError, ValueError) as error:  # nobody there in time, or an address that is none
            log.debug("no link", peer=member, reason=error)
            return
        connection.member = member
        document = {
            "cluster": self._cluster,
            "peer": list(self._me),
            "to": list(member),
            "number": connection.number,
        }
        connection.send(json_frame(Kind.HELLO, document, epoch=self._epoch))
        deadline = self._loop.time() + CONNECT_TIMEOUT_S
        while not (connection.known or connection.transport.is_closing()):
            if self._loop.time() > deadline:
                connection.transport.abort()
                return
            await asyncio.sleep(0.002)
