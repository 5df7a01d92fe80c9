"""Whether a worker takes part, and above which clock it started: what servers hear first on each connection."""

from __future__ import annotations

from elasticps.client.connections import Connections
from elasticps.wire.headers import JoinHeader
from replication.chain import Member


class Presence:
    """A worker that has not joined yet is as one that pauses: nobody waits for it. Called under the client's lock."""

    def __init__(self, connections: Connections) -> None:
        self.header = JoinHeader(pause=True).header()
        self._connections = connections

    def join(self, base: int) -> None:
        """Tells all servers that this worker takes part from now on, above that clock."""
        self._tell_all(JoinHeader(base))

    def go_on(self, committed: int) -> None:
        """Ranges begin anew, and lack steps that are committed: a worker that takes part goes on above these there."""
        if not JoinHeader.of(self.header).pause:
            self.join(committed)

    def pause(self) -> None:
        """Tells all servers that it holds nobody back, until it joins again."""
        self._tell_all(JoinHeader(pause=True))

    def tell(self, member: Member) -> None:
        """Tells one that has just welcomed us."""
        self._connections.send(member, [self.header.pack()])

    def _tell_all(self, said: JoinHeader) -> None:
        self.header = said.header()
        for member in self._connections.peers:
            self.tell(member)
