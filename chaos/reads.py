"""Pulls at a simulated server: the real parking decides who waits, and epochs are judged as the real server does. Pure.

What a tail shows is told when it is acknowledged. That is at once, but for a tail whose joining replica is level: what
that one lacks may still be undone by a view that makes it the tail, or the last that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from chaos.frames import PullFrame, PullReply, Shown, ViewFrame
from chaos.network import Link
from coordinator.view import View
from elasticps.server.parking import Parking
from elasticps.server.reads import Read
from elasticps.wire.frames import ANY, Header, Kind

if TYPE_CHECKING:
    from chaos.servers import Server

KEYS_PER_ID = 1000
"""Key k belongs to range k // 1000; the rest stands for its hash."""


class Asker(NamedTuple):
    """A worker's connection, as far as parking looks at it."""

    link: Link
    frame: PullFrame
    worker: int
    worker_name: str
    base: int
    app: str = "sim"


class Unsaid(NamedTuple):
    """An answer that waits until what it shows is acknowledged."""

    link: Link
    frame: PullFrame
    shown: tuple[Shown, ...]


class Reads:
    """The pulls of one server, and the epochs in which the ranges that it tails, or holds, last changed."""

    def __init__(self, server: Server, ranges: int) -> None:
        self.server = server
        self.parking = Parking(ranges, server.replica.clocks, lambda: server.loop.now)
        self._tail_since = self._full_since = 1 << 62
        self._early: list[tuple[Link, PullFrame]] = []
        self._unsaid: list[Unsaid] = []

    @property
    def waiting(self) -> int:
        """Pulls that wait here, for whatever."""
        return len(self.parking) + len(self._early) + len(self._unsaid)

    def follow(self, before: View | None, view: View) -> None:
        """A view comes: notes whether the ranges that may be read here are other ones than before.

        Frames of epochs that were skipped are not trusted: the ranges may have been others then, and the same again.
        """
        me = view.as_chains.index(self.server.member)
        tailed = np.flatnonzero((view.tails == me) & (me >= 0))
        held = np.flatnonzero((view.chains == me).any(axis=1) & (me >= 0))
        skipped = before is None or view.epoch > before.epoch + 1
        if skipped or not np.array_equal(tailed, self.parking.tailed):
            self._tail_since = view.epoch
        if skipped or not np.array_equal(held, self.parking.held):
            self._full_since = view.epoch
        self.parking.serve(tailed, held)

    def pull(self, link: Link, frame: PullFrame) -> None:
        """A worker's pull comes."""
        server = self.server
        if frame.epoch > server.replica.epoch:
            self._early.append((link, frame))
            server.world.fetch_view(server, frame.epoch)
            return
        if frame.epoch < (self._full_since if frame.anywhere else self._tail_since):
            self._refuse(link, frame)
            return
        asker = Asker(link, frame, frame.worker, str(frame.worker), frame.base)
        header = Header(Kind.PULL, ANY if frame.anywhere else 0, epoch=frame.epoch, clock=frame.clock)
        read = Read(cast(Any, asker), header, cast(Any, None), np.array(frame.keys), 0.0)
        if frame.clock and self.parking.behind(read):
            self.parking.park(read)
        else:
            self._answer(asker)

    def judge(self) -> None:
        """Something has changed: whoever need not wait any more goes on."""
        if self._early:
            early, self._early = self._early, []
            for link, frame in early:
                self.pull(link, frame)
        for read, refusal in self.parking.judge(self._tail_since, self._full_since):
            asker = cast(Asker, read.connection)
            if refusal is not None:
                self._refuse(asker.link, asker.frame)
            else:
                self._answer(asker)
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for answer in unsaid:
                self._say(answer)

    def forget(self, link: Link) -> None:
        """Nobody waits for these answers any more."""
        for asker in {read.connection for read in self.parking._parked}:
            if cast(Asker, asker).link is link:
                self.parking.forget(asker)
        self._early = [(k, frame) for k, frame in self._early if k is not link]
        self._unsaid = [answer for answer in self._unsaid if answer.link is not link]

    def _answer(self, asker: Asker) -> None:
        """Gathers what is there now."""
        server, by_range = self.server, dict[int, dict[int, int]]()
        for key in asker.frame.keys:
            r = key // KEYS_PER_ID
            by_range.setdefault(r, {})[key] = server.values[r].get(key, 0)
        shown = tuple(Shown(r, len(server.hashes[r]) - 1, server.hashes[r][-1], v) for r, v in by_range.items())
        server.world.checks.reads.on_gather(server, asker.worker, asker.frame, shown)
        self._say(Unsaid(asker.link, asker.frame, shown))

    def _say(self, answer: Unsaid) -> None:
        frame = answer.frame
        if not frame.anywhere:
            if frame.epoch < self._tail_since:
                self._refuse(answer.link, frame)
                return
            if not self.acknowledged(answer.shown):
                self._unsaid.append(answer)
                return
        answer.link.send(self.server, PullReply(frame.pull, self.server.replica.epoch, answer.shown))

    def acknowledged(self, shown: tuple[Shown, ...]) -> bool:
        """Whether every full and level replica has what is shown."""
        acked = self.server.replica.acked
        return all(acked[part.range] >= part.seq for part in shown)

    def _refuse(self, link: Link, frame: PullFrame) -> None:
        if self.server.view is not None:
            link.send(self.server, ViewFrame(self.server.view))
        link.send(self.server, PullReply(frame.pull, self.server.replica.epoch, None))
