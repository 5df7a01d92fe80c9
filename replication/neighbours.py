"""The neighbours of one member in every range, and the links to them. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Place, Ranges, Role
from replication.messages import Seqs


class Neighbours:
    """Members have slots: numbers that stay the same from view to view.

    up, down      int64 [P]: slots of the predecessor and the successor, -1 for none; the joiner stands behind the tail
    head, tail    bool [P]: I am that in the chain
    since         int64 [P]: the epoch in which the range's chain or joiner last changed
    newest_since  the newest of these, of the ranges in which I have a part
    members       every member that ever was a neighbour, or to which there was a link, by slot
    linked        whether there is a link to it, by slot
    full          slots of links that have more waiting than their sockets take
    """

    def __init__(self, ranges: int) -> None:
        self.up: Seqs = np.full(ranges, -1, dtype=np.int64)
        self.down: Seqs = np.full(ranges, -1, dtype=np.int64)
        self.head: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self.tail: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self.since: Seqs = np.zeros(ranges, dtype=np.int64)
        self.newest_since = 0
        self.members: list[Member] = []
        self.linked: list[bool] = []
        self.full: set[int] = set()
        self._slots: dict[Member, int] = {}

    def slot(self, member: Member) -> int:
        """The slot of a member, which gets one if it has none."""
        slot = self._slots.get(member)
        if slot is None:
            slot = self._slots[member] = len(self.members)
            self.members.append(member)
            self.linked.append(False)
        return slot

    def follow(self, view: Chains, where: Place) -> None:
        """Takes over my neighbours in a new view."""
        near = np.zeros(len(view.members) + 1, dtype=np.bool_)
        near[where.up] = near[where.down] = True
        slots = np.full(len(near), -1, dtype=np.int64)  # index -1 stays -1
        for i in np.flatnonzero(near[:-1]).tolist():
            slots[i] = self.slot(view.members[i])
        self.up, self.down = slots[where.up], slots[where.down]
        self.head, self.tail = where.head, where.tail
        self.since = view.since
        self.newest_since = int(view.since[where.role != Role.OUT].max(initial=0))

    def heard(self, slot: int, epoch: int, ranges: Ranges, neighbour: Seqs) -> NDArray[np.bool_]:
        """Which ranges of a message are heard: its sender is the neighbour now, and was when it spoke."""
        ok: NDArray[np.bool_] = neighbour[ranges] == slot
        if epoch < self.newest_since:
            ok &= self.since[ranges] <= epoch
        return ok
