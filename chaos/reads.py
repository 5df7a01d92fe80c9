"""Pulls at a simulated server: the real parking decides who waits, and epochs are judged as the real server does. Pure.

What a tail shows is told when it is acknowledged. That is at once, but for a tail whose joining replica is level: what
that one lacks may still be undone by a view that makes it the tail, or the last that is left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from chaos.contents import KEYS_PER_ID
from chaos.control import CLUSTER
from chaos.frames import JoinFrame, JoinReply, PullFrame, PullReply, Shown, ViewFrame
from chaos.network import Link
from coordinator.view import View, WorkerInfo
from elasticps.server.protocol.bounded_delay import BoundedDelay
from elasticps.server.protocol.reads import Read
from elasticps.wire.headers import PullHeader

if TYPE_CHECKING:
    from chaos.servers import Server


class Asker:
    """A worker's connection, as far as parking looks at it."""

    app = CLUSTER

    def __init__(self, link: Link, worker: int, base: int) -> None:
        self.link = link
        self.worker = worker
        self.worker_name = str(worker)
        self.base = base


class Unsaid(NamedTuple):
    """An answer that waits until what it shows is acknowledged."""

    read: Read
    shown: tuple[Shown, ...]


class Reads:
    """The pulls of one server, and the epochs in which the ranges that it tails, or holds, last changed."""

    def __init__(self, server: Server, ranges: int) -> None:
        self.server = server
        self.delay = BoundedDelay(ranges, server.replica.clocks, lambda: server.loop.now)
        self._tail_since = self._full_since = 1 << 62
        self._early: list[tuple[Link, PullFrame]] = []
        self._unsaid: list[Unsaid] = []
        self._askers: dict[Link, Asker] = {}
        self._joining: dict[Link, JoinFrame] = {}

    @property
    def waiting(self) -> int:
        """Pulls that wait here, for whatever."""
        return len(self.delay) + len(self._early) + len(self._unsaid)

    def follow(self, before: View | None, view: View) -> None:
        """A view comes: notes whether the ranges that may be read here are other ones than before.

        Frames of epochs that were skipped are not trusted: the ranges may have been others then, and the same again.
        """
        me = view.as_chains.index(self.server.member)
        tailed = np.flatnonzero((view.tails == me) & (me >= 0))
        held = np.flatnonzero((view.chains == me).any(axis=1) & (me >= 0))
        skipped = self.skipped(before, view)
        if skipped or not np.array_equal(tailed, self.delay.tailed):
            self._tail_since = view.epoch
        if skipped or not np.array_equal(held, self.delay.held):
            self._full_since = view.epoch
        self.delay.serve(tailed, held)

    def skipped(self, before: View | None, view: View) -> bool:
        """Whether there was a view in between, in which this server may have been asked for other ranges."""
        return before is None or view.epoch > before.epoch + 1

    def roster(self, workers: frozenset[int]) -> None:
        """Who takes part, or may."""
        self.delay.follow({w: WorkerInfo(w, str(w), 1, CLUSTER) for w in sorted(workers)})
        for link, frame in list(self._joining.items()):
            if frame.worker in workers:
                self.join(link, frame)

    def join(self, link: Link, frame: JoinFrame) -> None:
        """A worker takes part, or pauses; it is let in only when the roster has it."""
        server = self.server
        if frame.worker not in server.workers:
            self._joining[link] = frame
            server.world.fetch_roster(server)
            return
        self._joining.pop(link, None)
        if frame.pause:
            self.delay.pause(frame.worker)
            self.judge()
        else:
            self.delay.join(frame.worker, frame.base)
        link.send(server, JoinReply(frame.serial))

    def pull(self, link: Link, frame: PullFrame) -> None:
        """A worker's pull comes."""
        server = self.server
        if frame.epoch > server.replica.epoch:
            self._early.append((link, frame))
            server.world.fetch_view(server, frame.epoch)
            return
        asker = self._askers.get(link)
        if asker is None:
            asker = self._askers[link] = Asker(link, frame.worker, frame.base)
        asker.base = frame.base  # which its worker has told before
        bound = frame.bound - 1 if frame.bound else None
        header = PullHeader(frame.pull, frame.epoch, frame.clock, frame.worker, 0, 0, bound, 0, frame.anywhere)
        read = Read(cast(Any, asker), header, cast(Any, None), np.array(frame.keys), 0.0)
        if not self._serves(header):
            self._refuse(read)
        elif (frame.bound or frame.clock) and self.delay.behind(read):
            self.delay.park(read)
        else:
            self._answer(read)

    def judge(self) -> None:
        """Something has changed: whoever need not wait any more goes on."""
        if self._early:
            early, self._early = self._early, []
            for link, frame in early:
                self.pull(link, frame)
        for read, refusal in self.delay.judge(self._tail_since, self._full_since):
            if refusal is not None:
                self._refuse(read)
            else:
                self._answer(read)
        if self._unsaid:
            unsaid, self._unsaid = self._unsaid, []
            for answer in unsaid:
                self._say(answer)

    def forget(self, link: Link) -> None:
        """Nobody waits for these answers any more."""
        self._joining.pop(link, None)
        asker = self._askers.pop(link, None)
        if asker is not None:
            self.delay.forget(cast(Any, asker))
        self._early = [(k, frame) for k, frame in self._early if k is not link]
        self._unsaid = [answer for answer in self._unsaid if _link(answer.read) is not link]

    def _serves(self, header: PullHeader) -> bool:
        """Whether the ranges that may be read here are the same as in the pull's epoch."""
        return header.epoch >= (self._full_since if header.anywhere else self._tail_since)

    def _answer(self, read: Read) -> None:
        """Gathers what is there now."""
        server, by_range = self.server, dict[int, dict[int, int]]()
        for key in read.keys.tolist():
            r = key // KEYS_PER_ID
            by_range.setdefault(r, {})[key] = server.values[r].get(key, 0)
        shown = tuple(Shown(r, len(server.hashes[r]) - 1, server.hashes[r][-1], v) for r, v in by_range.items())
        server.world.checks.reads.on_gather(server, read.connection.worker, read.header, shown)
        self._say(Unsaid(read, shown))

    def _say(self, answer: Unsaid) -> None:
        read, header = answer.read, answer.read.header
        if not self._serves(header):
            self._refuse(read)
        elif header.anywhere or self.acknowledged(answer.shown):
            _link(read).send(self.server, PullReply(header.request, self.server.replica.epoch, answer.shown))
        else:
            self._unsaid.append(answer)

    def acknowledged(self, shown: tuple[Shown, ...]) -> bool:
        """Whether every full and level replica has what is shown."""
        acked = self.server.replica.acked
        return all(acked[part.range] >= part.seq for part in shown)

    def _refuse(self, read: Read) -> None:
        link = _link(read)
        if self.server.view is not None:
            link.send(self.server, ViewFrame(self.server.view))
        link.send(self.server, PullReply(read.header.request, self.server.replica.epoch, None))


def _link(read: Read) -> Link:
    return cast(Asker, read.connection).link
