"""The heads of a view, as a worker's session sees them, and how far the worker has pushed in each range. Pure."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Ranges
from replication.progress import Progress


class Head:
    """A server that heads ranges. last: the worker's progress in all of them, None if it is not the same."""

    __slots__ = ("ask", "last", "member", "order", "ready")

    def __init__(self, member: Member, order: Ranges) -> None:
        self.member = member
        self.order = order
        self.ready = False
        self.ask = 0
        self.last: int | None = None


class Heads:
    """The heads of a view by member; that of the worker's home range: `home`; the ranges that have none: `nowhere`; and
    which ones ever came back from a checkpoint: `recovered`, bool [P]."""

    def __init__(self, ranges: int, home: int) -> None:
        self.by_member: dict[Member, Head] = {}
        self.home: Head | None = None
        self._home = home
        self.nowhere: Ranges = np.arange(ranges)
        self.recovered: NDArray[np.bool_] = np.zeros(ranges, np.bool_)
        self._members: tuple[Member, ...] = ()
        self._at: NDArray[np.int32] = np.full(ranges, -1, np.int32)  # by range, the head among the members
        self._last: Progress = np.zeros(ranges, np.int64)  # progress by range, where a head's `last` does not say it

    def of(self, r: int) -> Head | None:
        """The head of a range, None if it has none now."""
        at = self._at[r]
        return self.by_member[self._members[at]] if at >= 0 else None

    @property
    def progress(self) -> Progress:
        """How far the worker has pushed, by range, int64 [P], a copy."""
        last = self._last.copy()
        for head in self.by_member.values():
            if head.last is not None:
                last[head.order] = head.last
        return last

    def groups(self, head: Head) -> list[tuple[Ranges, int]]:
        """A head's ranges, by the worker's progress there."""
        if head.last is not None:
            return [(head.order, head.last)]
        return by_progress(head.order, self._last[head.order])

    def groups_nowhere(self) -> list[tuple[Ranges, int]]:
        """The ranges without a head, by the worker's progress there."""
        return by_progress(self.nowhere, self._last[self.nowhere])

    def ticked_nowhere(self, progress: int) -> None:
        """Notes the worker's progress in the ranges without a head."""
        self._last[self.nowhere] = progress

    def forget(self, progress: Progress) -> None:
        """Forgets all heads; the worker's progress by range, int64 [P], is this."""
        self.by_member, self.home, self._last = {}, None, progress

    def follow(self, view: Chains, recovered: NDArray[np.bool_]) -> tuple[Collection[Head], bool]:
        """Follows a view: heads of the same ranges stay as they are, but for heads of `recovered` ones, bool [P].
        Returns the heads that are no more, and whether there are new ones."""
        heads: dict[Member, Head] = {}
        again = bool(recovered.any())
        for index, order in view.headed.items():
            member = view.members[index]
            head = self.by_member.get(member)
            if head is not None and _same(head.order, order) and not (again and recovered[order].any()):
                head.order = order
            else:
                head = Head(member, order)
            heads[member] = head
        gone = [head for member, head in self.by_member.items() if heads.get(member) is not head]
        fresh = any(self.by_member.get(member) is not head for member, head in heads.items())
        for head in gone:
            if head.last is not None:
                self._last[head.order] = head.last
        self.by_member, self.nowhere = heads, np.flatnonzero(view.heads < 0)
        self._members, self._at = view.members, view.heads
        self.recovered = view.recovery_epoch > 0
        self.home = self.of(self._home)
        return gone, fresh


def by_progress(ranges: Ranges, progress: Progress) -> list[tuple[Ranges, int]]:
    """Ranges in groups of the same progress, int64 [n], each in the order of `ranges`."""
    if not len(ranges):
        return []
    if not np.count_nonzero(progress != progress[0]):
        return [(ranges, int(progress[0]))]
    return [(ranges[progress == each], each) for each in np.unique(progress).tolist()]


def _same(ranges: Ranges, others: Ranges) -> bool:
    """Whether these are the same ranges, in any order."""
    if len(ranges) != len(others):
        return False
    return bool((ranges == others).all()) or bool((np.sort(ranges) == np.sort(others)).all())
