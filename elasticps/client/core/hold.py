"""A worker's part in a consistent cut (`elasticps.server.core.cut` has the other side). Pure.

Told to hold, it begins no step and writes nothing else until it is released, or until its time is over: whoever takes
the cut may have died. To every server that has told it so it says when all that it has written is committed; and, if it
trains in rounds, that a round of its own is open, or that it was told to push its share of one: others have to come as
far before anybody can hold, and not every server has heard of it from somebody else.
"""

from __future__ import annotations

from typing import NamedTuple

from elasticps.wire.headers import HeldHeader, HoldHeader
from replication.chain import Member


class Written(NamedTuple):
    """What a worker has written: steps up to `clock`. settled: all of it is committed, and its newest round closed;
    rounds: it takes part in synchronous rounds now; digest, epoch: as in HELD, once all is settled."""

    clock: int
    settled: bool
    rounds: bool
    digest: int = 0
    epoch: int = 0


class Hold:
    """For which cut a worker holds; `cut` is 0 while it does not, or has not noticed yet that its time is over."""

    def __init__(self, worker: int) -> None:
        self.cut = 0
        self._worker = worker
        self._newest = 0  # of all that it was told of
        self._until_s = 0.0
        self._rounds = 0  # up to there others wait for us
        self._reports: dict[Member, HeldHeader | None] = {}  # to those who have told us, what they heard last

    def hear(self, server: Member, request: HoldHeader, now: float) -> None:
        """A server says to hold. One that is late, for a cut that we were released from, is not heard."""
        if request.cut < self._newest or (request.cut == self._newest and not self.cut):
            return
        if request.cut > self._newest:
            self.cut = self._newest = request.cut
            self._until_s, self._rounds = 0.0, 0
            self._reports.clear()
        self._until_s = max(self._until_s, now + request.left_ms / 1000)
        self._rounds = max(self._rounds, request.clock)
        self._reports[server] = None

    @property
    def servers(self) -> set[Member]:
        """Who has said so, and will say when to go on."""
        return set(self._reports) if self.cut else set()

    def gone(self, server: Member) -> None:
        """The connection on which it said so has ended; it says so again on the next one."""
        self._reports.pop(server, None)

    def release(self, cut: int) -> None:
        """A server says to go on."""
        if cut >= self._newest:
            self._newest, self.cut = cut, 0

    def left_s(self, now: float) -> float:
        """For how long it holds at most; 0 if it does not."""
        if self.cut and now >= self._until_s:
            self.cut = 0
        return self._until_s - now if self.cut else 0.0

    def holds(self, clock: int, now: float) -> bool:
        """Whether step `clock` must not begin now; 0: whatever else is written."""
        return self.left_s(now) > 0 and not 0 < clock <= self._rounds

    def answers(self, written: Written, now: float) -> list[tuple[Member, HeldHeader]]:
        """What servers are to be told now."""
        if self.left_s(now) <= 0 or not (written.settled or written.rounds):
            return []
        waited_for = written.rounds and written.clock < self._rounds  # only some servers may know
        report = HeldHeader(
            self.cut, self._worker, max(written.clock, self._rounds * waited_for), not written.settled or waited_for,
            not written.rounds, written.digest, written.epoch,
        )  # fmt: skip
        others = [server for server, last in self._reports.items() if last != report]
        self._reports.update(dict.fromkeys(others, report))
        return [(server, report) for server in others]
