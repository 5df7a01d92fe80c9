"""A worker's session against servers that are no more than lists: the cluster of `test_session_twin`.

A range has a log of what its head has of the worker's parts, of which all replicas have a beginning. A head judges a
frame as `replication.admission` does. When its head changes, a range loses an end of its log that not all replicas
have; when all replicas die, it comes back with what a checkpoint had. Servers follow views when they like. Connections
break, and what was on its way on them may arrive long after.
"""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

import numpy as np

from elasticps.client.core.session import RESEND_BYTES, Ask, Frame
from replication.chain import Chains, Member, Ranges
from replication.effects import Status
from replication.progress import PART_BITS, after_part
from replication.step_records import StepRecord


class Broken(AssertionError):
    """A promise that a story has seen broken."""


class Interrupted(Exception):
    """What a signal handler raises."""


class Rows:
    """The content of a part: it has rows in some ranges. view: by which it was made, if it knows the heads of that;
    vague: it says that it may have rows anywhere; fuse: after so many looks at it an exception comes, -1 for never."""

    def __init__(self, having: set[int], nbytes: int, view: Chains | None, vague: bool, fuse: int) -> None:
        self.having = frozenset(having)
        self._nbytes, self._view, self._vague, self.fuse = nbytes, view, vague, fuse

    def _look(self) -> None:
        self.fuse -= 1
        if self.fuse == -1:
            raise Interrupted
        self.fuse = max(self.fuse, -1)

    @property
    def nbytes(self) -> int:
        self._look()
        return self._nbytes

    def touches(self, ranges: Ranges) -> bool:
        self._look()
        return (self._vague and len(ranges) > 0) or not self.having.isdisjoint(ranges.tolist())

    def heads(self, epoch: int) -> list[Member] | None:
        self._look()
        if self._view is None or self._view.epoch != epoch or self._vague:
            return None
        heads = self._view.heads
        return [self._view.members[heads[r]] for r in sorted(self.having) if heads[r] >= 0]


def random_rows(random: Random, ranges: int, view: Chains) -> Rows:
    """Rows in a few ranges, or in none, or in all."""
    having = set(random.choices(range(ranges), k=random.randint(0, 3)))
    having = set(range(ranges)) if random.random() < 0.1 else having
    fuse = random.randrange(6) if random.random() < 0.02 else -1
    return Rows(
        having, random.choice((0, RESEND_BYTES)), random.choice((None, view)), random.random() < 0.05, fuse
    )  # fmt: skip


class Entry(NamedTuple):
    """A part in the log of a range. jumped: it did not follow what the range had."""

    clock: int
    part: int
    after: int
    content: Rows
    jumped: bool
    record: StepRecord | None


class RangeLog:
    """What a range has of the worker. safe: so many entries are at all replicas; term: how often its head changed;
    recoveries: the epochs in which it was lost; was_safe: for each life of it, the progress that all replicas had;
    ended: by term, the progress (applied, safe) that its head had in the end."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.safe = self.term = 0
        self.recoveries: list[int] = []
        self.was_safe: list[set[int]] = [set()]
        self.ended: dict[int, tuple[int, int]] = {}

    def progress(self, entries: int | None = None) -> int:
        """The worker's progress after so many entries, or all."""
        some = self.entries[:entries]
        return some[-1].after if some else 0

    def replicate(self, entries: int) -> None:
        """All replicas come to have so many entries."""
        self.was_safe[-1] |= {entry.after for entry in self.entries[self.safe : entries]}
        self.safe = max(self.safe, entries)

    def change_head(self, entries: int) -> None:
        """The next head has so many entries, no fewer than are safe."""
        self.ended[self.term] = self.progress(), self.progress(self.safe)
        self.term += 1
        del self.entries[max(entries, self.safe) :]

    def recover(self, epoch: int, entries: int) -> None:
        """All replicas are lost, and a checkpoint has so many entries."""
        self.change_head(len(self.entries))
        del self.entries[entries:]
        self.recoveries.append(epoch)
        self.was_safe.append({entry.after for entry in self.entries})
        self.safe = len(self.entries)


class Piece(NamedTuple):
    """A PUSH of a frame. committed: as it says; ranges: those that it names."""

    frame: Frame
    committed: int
    ranges: tuple[int, ...] | None


class Answered(NamedTuple):
    """A server's answer to a piece."""

    piece: Piece
    status: Status
    epoch: int
    committed: tuple[int, ...]
    moved: tuple[int, ...]


class Clocks(NamedTuple):
    """A server's answer to an Ask."""

    ask: Ask
    status: Status
    epoch: int
    ranges: tuple[int, ...]
    applied: tuple[int, ...]
    committed: tuple[int, ...]


class Link:
    """A connection to a server."""

    def __init__(self) -> None:
        self.there: deque[Piece | Ask] = deque()
        self.back: deque[Answered | Clocks] = deque()


class Waiting:
    """A piece that is answered when all replicas have it. left: by range, the term and the entries that it takes."""

    def __init__(self, piece: Piece, link: Link, left: dict[int, tuple[int, int]]) -> None:
        self.piece, self.link, self.left = piece, link, left
        self.committed: list[int] = []
        self.moved: list[int] = []


class Server:
    """A server that follows views. links: all that may still bring something, the newest last."""

    def __init__(self, member: Member, logs: list[RangeLog]) -> None:
        self.member, self.logs = member, logs
        self.epoch = 0
        self.terms: dict[int, int] = {}  # of each range that it heads, as it knows
        self.orders: dict[int, tuple[int, ...]] = {}  # by epoch, since these have not changed
        self.links: list[Link] = []
        self.waiting: list[Waiting] = []

    def adopt(self, view: Chains) -> None:
        """Follows a view: what ranges that are headed here no more had not committed has moved."""
        order = tuple(view.headed_by(view.index(self.member)).tolist())
        terms = {r: self.logs[r].term for r in order}
        if terms.keys() != self.terms.keys():
            self.orders.clear()
        self.epoch, self.terms = view.epoch, terms
        self.orders[view.epoch] = order
        for each in self.waiting:
            gone = [r for r, (term, _) in each.left.items() if terms.get(r) != term]
            each.moved += gone
            each.left = {r: need for r, need in each.left.items() if r not in gone}
        self.settle()

    def settle(self) -> None:
        """Answers what all replicas have."""
        for each in list(self.waiting):
            for r, (term, entries) in list(each.left.items()):
                if self.logs[r].term == term and self.logs[r].safe >= entries:
                    each.committed.append(r)
                    del each.left[r]
            if not each.left:
                self.waiting.remove(each)
                self._answer(each.link, each.piece, Status.COMMITTED, each.committed, each.moved)

    def _answer(
        self, link: Link, piece: Piece, status: Status, committed: list[int] | None = None,
        moved: list[int] | None = None,
    ) -> None:  # fmt: skip
        link.back.append(Answered(piece, status, self.epoch, tuple(committed or ()), tuple(moved or ())))

    def take(self, link: Link) -> bool:
        """Takes what comes next on a connection; False if it has to wait for a view."""
        message = link.there[0]
        if (message if isinstance(message, Ask) else message.frame).epoch > self.epoch:
            return False
        link.there.popleft()
        if isinstance(message, Ask):
            link.back.append(self._clocks(message))
        else:
            self._judge(link, message)
        return True

    def _clocks(self, ask: Ask) -> Clocks:
        ranges = self.orders.get(ask.epoch)
        if ranges is None:
            return Clocks(ask, Status.STALE_VIEW, self.epoch, (), (), ())
        found = []
        for r in ranges:
            log, term = self.logs[r], self.terms[r]
            found.append((log.progress(), log.progress(log.safe)) if term == log.term else log.ended[term])
        return Clocks(
            ask, Status.COMMITTED, self.epoch, ranges, tuple(a for a, _ in found), tuple(c for _, c in found)
        )  # fmt: skip

    def _judge(self, link: Link, piece: Piece) -> None:
        frame = piece.frame
        ranges = self.orders.get(frame.epoch) if piece.ranges is None else piece.ranges
        if ranges is None or not self.terms.keys() >= set(ranges):
            self._answer(link, piece, Status.STALE_VIEW)
            return
        after, known = after_part(frame.clock, frame.part, frame.last), piece.committed << PART_BITS
        fresh, left = [], {}
        for r in ranges:
            log, have = self.logs[r], self.logs[r].progress()
            left[r] = self.terms[r], len(log.entries)
            if log.term != self.terms[r]:
                continue  # another has become its head: what is written here is of no use to anybody
            if have == frame.prev or (have <= known and frame.prev <= known):
                fresh.append(r)
                left[r] = self.terms[r], len(log.entries) + 1
            elif have < after:
                self._answer(link, piece, Status.GAP)
                return
        if fresh and frame.content is None:
            self._answer(link, piece, Status.GAP)
            return
        for r in fresh:
            log = self.logs[r]
            assert isinstance(frame.content, Rows)
            jumped = log.progress() != frame.prev
            log.entries.append(Entry(frame.clock, frame.part, after, frame.content, jumped, frame.record))
        self.waiting.append(Waiting(piece, link, left))
        self.settle()


def view_of(epoch: int, members: list[Member], heads: list[int], recoveries: list[int], random: Random) -> Chains:
    """A view in which these members, by number, head the ranges, -1 for none."""
    seconds = [random.randrange(len(members)) if head >= 0 else -1 for head in heads]
    chains = np.array([heads, seconds], np.int32).T.copy()
    nobody, since = np.full(len(heads), -1, np.int32), np.full(len(heads), epoch, np.int64)
    return Chains(
        epoch, tuple(members), chains, nobody, since, recovery_epoch=np.array(recoveries, np.int64)
    )  # fmt: skip
