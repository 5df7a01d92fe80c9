"""Links to the other replicas: one per neighbour in the view, dialled by the member whose name sorts first.

The dialler numbers its links, and the higher number is the link that counts: what comes on any other is not heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from coordinator import fields
from coordinator.view import ServerInfo, View
from elasticps.server.connection import Connection
from elasticps.wire.frames import Header, Kind, json_frame
from replication.chain import Member, place

log = fields.logger(__name__)

RETRY_FIRST_S = 0.005
RETRY_MOST_S = 0.2
CONNECT_TIMEOUT_S = 1.0
BEAT_S = 0.25
SILENCE_S = 1.5  # a link on which nothing came for so long is dropped: the peer beats too


class Owner(Protocol):
    """The server that these links belong to."""

    def peer_up(self, member: Member) -> None:
        """A new link; whatever came on an older one is over."""

    def peer_down(self, member: Member) -> None:
        """The link is lost."""


class ReplicaLinks:
    """Keeps the links that the view wants, and knows since when one is missing."""

    def __init__(
        self,
        me: Member,
        cluster: str,
        owner: Owner,
        loop: asyncio.AbstractEventLoop,
        make_connection: Callable[[], Connection],
    ) -> None:
        self._me = me
        self._cluster = cluster
        self._owner = owner
        self._loop = loop
        self._make_connection = make_connection
        self._wanted: dict[Member, ServerInfo] = {}
        self._links: dict[Member, Connection] = {}
        self._missing: dict[Member, float] = {}  # wanted and not there, since when
        self._dials: dict[Member, asyncio.Task[None]] = {}
        self._number = 0
        self._epoch = 0

    def adopt(self, view: View) -> None:
        """Follows a view: neighbours get a link, former ones lose theirs."""
        self._epoch = view.epoch
        chains = view.as_chains
        where = place(chains, self._me)
        indices = {*where.up.tolist(), *where.down.tolist()} - {-1}
        self._wanted = {chains.members[i]: view.servers[i] for i in sorted(indices)}
        now = self._loop.time()
        for member in [m for m in self._links if m not in self._wanted]:
            self._drop(member)
        for member in [m for m in self._missing if m not in self._wanted]:
            del self._missing[member]
        for member in [m for m in self._dials if m not in self._wanted]:
            self._dials.pop(member).cancel()
        for member in self._wanted:
            if member not in self._links:
                self._missing.setdefault(member, now)
                self._dial(member, 0.0)

    def close(self) -> None:
        """Drops every link without telling the owner."""
        for task in self._dials.values():
            task.cancel()
        links, self._links, self._wanted = self._links, {}, {}
        for connection in links.values():
            connection.transport.abort()

    def link(self, member: Member) -> Connection | None:
        """The current link to a peer."""
        return self._links.get(member)

    def suspects(self) -> dict[Member, float]:
        """Neighbours that cannot be reached, and for how many seconds."""
        now = self._loop.time()
        return {member: now - since for member, since in self._missing.items()}

    def broadcast(self, frame: bytes) -> None:
        """Sends a small frame to every peer."""
        for connection in self._links.values():
            connection.send(frame)

    def tick(self) -> None:
        """A few times a second: beats, which also ask for a newer view, and drops links that have gone silent."""
        now = self._loop.time()
        self.broadcast(Header(Kind.GET_VIEW, epoch=self._epoch).pack())
        for member, connection in list(self._links.items()):
            if now - connection.heard_s > SILENCE_S:
                log.warning("link dropped", peer=member, silent_s=round(now - connection.heard_s, 1))
                self._drop(member)
                self._missing[member] = connection.heard_s
                self._dial(member, 0.0)

    # --- links come and go ------------------------------------------------------------------------------------------

    def arrived(self, connection: Connection) -> bool:
        """A link to `connection.member` is there, numbered; False if a later one has taken its place already."""
        member = connection.member
        assert member is not None
        old = self._links.get(member)
        if old is not None:
            if old.number >= connection.number:
                return False
            self._drop(member)
        self._links[member] = connection
        self._missing.pop(member, None)
        self._owner.peer_up(member)
        return True

    def lost(self, connection: Connection) -> None:
        """A connection to a peer has ended; nothing happens if it was not the current link."""
        member = connection.member
        if member is None or self._links.get(member) is not connection:
            return
        del self._links[member]
        self._owner.peer_down(member)
        if member in self._wanted:
            self._missing[member] = self._loop.time()
            self._dial(member, RETRY_FIRST_S)

    def _drop(self, member: Member) -> None:
        connection = self._links.pop(member)
        self._owner.peer_down(member)
        connection.transport.abort()

    def _dial(self, member: Member, delay_s: float) -> None:
        task = self._dials.get(member)
        if self._me < member and (task is None or task.done()):
            dialling = self._keep_dialling(member, delay_s)
            self._dials[member] = self._loop.create_task(dialling, name=f"link to {member}")

    async def _keep_dialling(self, member: Member, delay_s: float) -> None:
        retry_s = RETRY_FIRST_S
        while member in self._wanted and member not in self._links:
            await asyncio.sleep(delay_s)
            delay_s = retry_s
            retry_s = min(2 * retry_s, RETRY_MOST_S)
            await self._dial_once(member)

    async def _dial_once(self, member: Member) -> None:
        """One attempt: connects, says hello, and waits until the link is up or over."""
        host, _, port = self._wanted[member].address.rpartition(":")
        connection = self._make_connection()
        self._number += 1
        connection.number = self._number
        connecting = self._loop.create_connection(lambda: connection, host.strip("[]"), int(port))
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await connecting
        except OSError:  # TimeoutError is one
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
