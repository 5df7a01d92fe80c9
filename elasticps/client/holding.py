"""Holds for cuts: hears of them from any server, and tells servers when this worker has written nothing more."""

from __future__ import annotations

from collections.abc import Callable

from elasticps.client.connections import PeerConnections
from elasticps.client.core.hold import Hold, Written
from elasticps.client.core.session import PushSession
from elasticps.client.runtime import Lock, Runtime
from elasticps.wire.frames import Header
from elasticps.wire.headers import HoldHeader, ReleaseHeader
from replication.chain import Member


class WorkerHold:
    """Of one worker. writing: whether something else than steps is being written; in_round: whether the newest step's
    round is open, None for who takes part in none; settle: closes it, in a thread of its own."""

    def __init__(
        self,
        runtime: Runtime,
        lock: Lock,
        session: PushSession,
        connections: PeerConnections,
        writing: Callable[[], bool],
    ) -> None:
        self.in_round: Callable[[], bool | None] = lambda: None
        self.settle: Callable[[], None] = lambda: None
        self._runtime = runtime
        self._lock = lock
        self._session = session
        self._connections = connections
        self._writing = writing
        self.hold = Hold(session.worker)
        self._entering = False  # the rounds: not apart from them any more, and in none yet
        self._settled = (0, 0)  # the cut, and the step, for which `settle` was called

    def hear(self, server: Member, header: Header) -> None:
        """HOLD."""
        self.hold.hear(server, HoldHeader.of(header), self._runtime.monotonic())

    def release(self, header: Header) -> None:
        """RELEASE."""
        self.hold.release(ReleaseHeader.of(header).cut)

    def gone(self, server: Member) -> None:
        """The connection to a server has ended."""
        self.hold.gone(server)

    def holds(self, clock: int) -> bool:
        """Whether step `clock` (0: whatever else is written) has to wait, as a cut is taken."""
        return bool(self.hold.cut) and self.hold.holds(clock, self._runtime.monotonic())

    def enter(self) -> bool:
        """Is about to take part in rounds, or not as long as a cut is taken: who holds apart from them may have said
        so, and would close rounds, and push to one that others have open. Under the lock."""
        self._entering = not self.holds(0)
        return self._entering

    def entered(self) -> None:
        """Takes part, or it came to nothing."""
        self._entering = False
        self.tell()

    @property
    def left_s(self) -> float:
        """For how long at most."""
        return self.hold.left_s(self._runtime.monotonic())

    def tell(self) -> None:
        """Tells servers how far all is written, if they want to know that. Under the lock, or not."""
        if not self.hold.cut:
            return
        with self._lock:
            session, in_round = self._session, self.in_round()
            done = not (session.outstanding or self._writing() or self._entering)
            settled = done and not in_round
            digest, epoch = (session.digest, session.epoch) if settled else (0, 0)
            written = Written(session.clock, settled, in_round is not None, digest, epoch)
            for member, header in self.hold.answers(written, self._runtime.monotonic()):
                self._connections.send(member, [header.header().pack()])
            if done and in_round and self._settled != (self.hold.cut, session.clock):
                # whoever trains may not come by for long, and others wait for it
                self._settled = (self.hold.cut, session.clock)
                self._runtime.spawn("elasticps-settle", self.settle)
