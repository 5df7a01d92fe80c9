"""What a worker says of its part on each connection."""

from __future__ import annotations

from elasticps.client.connections import PeerConnections
from elasticps.wire.joining import JoinHeader
from replication.chain import Member


class Participation:
    """A worker that has not joined yet is as one that pauses: nobody waits for it. Called under the client's lock."""

    def __init__(self, connections: PeerConnections) -> None:
        self.header = JoinHeader(pause=True).header()
        self._connections = connections

    def join(self, base: int) -> None:
        """Tells all that are connected that this worker takes part from now on, above that clock."""
        self._tell_all(JoinHeader(base))

    def go_on(self, committed: int) -> None:
        """Ranges begin anew, and lack steps that are committed: a worker that takes part goes on above these there."""
        if not JoinHeader.of(self.header).pause:
            self.join(committed)

    def pause(self) -> None:
        """Tells all that are connected that it holds nobody back, until it joins again."""
        self._tell_all(JoinHeader(pause=True))

    def tell(self, member: Member) -> None:
        """Tells one that has just welcomed us."""
        self._connections.send(member, [self.header.pack()])

    def _tell_all(self, header: JoinHeader) -> None:
        self.header = header.header()
        for member in self._connections.peers:
            self.tell(member)
