"""Chains as replication sees them: who replicates a range, in which order, since which epoch.

A chain is ordered by age: head first, tail last, and a view may only
 - remove members, never the last one (the survivors keep their order),
 - append the joining member, once its tail has reported it level,
 - start, replace or give up a filling: set or clear `joining`,
 - leave one member of several: it goes on, and one that was removed joins with the copy that it has (`kept`),
 - empty a chain of which nobody can come back: the range begins anew (`anew`), with a member that has brought it back
   from a checkpoint,
and then sets `since[r]` to its own epoch. So every survivor's log is a prefix of the logs of the survivors before it,
which is what makes failover need nothing from the dead. `unsafe_transition` states the law as code.

A kept joiner is level from the beginning: all that was acknowledged before is in its copy, since it was in the chain,
and what comes after waits for it, as for every level joiner. If it stood behind the one that is left, its log is a
prefix of that one's and it may become the tail again. If it stood before it, it may have logged what nobody else has:
then it only takes the other's place.

When the one that is left acknowledges alone the copy is late: it lacks what is acknowledged from there on, and stands
in for nobody. When its server is there again it is asked back: then it joins as any other, with the copy that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ranges = NDArray[np.int64]
"""Range numbers, int64 [n]: numpy indexes with this type fastest."""


class Member(NamedTuple):
    """A server process: the same name under a new incarnation is another member."""

    name: str
    incarnation: int

    def __str__(self) -> str:
        return f"{self.name}#{self.incarnation}"


class Role(IntEnum):
    """What a member is to a range. JOINING: being filled, a copy of some of it. FULL: in the chain."""

    OUT = 0
    JOINING = 1
    FULL = 2


class Kept(IntEnum):
    """Whether a joining member has the copy that it had in the chain: and if it stood before or behind the one left.
    LATE: that one acknowledges without it, and keeps for a while what it lacks. BACK: it is to get that. ANEW: there is
    no chain, and it brings the range back from a checkpoint."""

    ANEW = -1
    NOT = 0
    BEHIND = 1
    BEFORE = 2
    LATE = 3
    BACK = 4


COMPLETE = (Kept.BEHIND, Kept.BEFORE)
"""Copies that have all that was acknowledged: acknowledgements wait for them."""


@dataclass(frozen=True, eq=False)
class Chains:
    """One view: chains int32 [P, R], indices into `members`, head first, -1 behind the tail; joining int32 [P];
    since int64 [P], the epoch in which the chain or the joining member of a range last changed; kept int32 [P], a
    `Kept` of the joining member, left out: NOT; anew int64 [P], the epoch in which the last chain of which nobody was
    left was emptied, left out: never."""

    epoch: int
    members: tuple[Member, ...]
    chains: NDArray[np.int32]
    joining: NDArray[np.int32]
    since: NDArray[np.int64]
    kept: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    anew: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    tails: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        ranges = self.chains.shape[0]
        if not self.kept.size:
            object.__setattr__(self, "kept", np.zeros(ranges, np.int32))
        if not self.anew.size:
            object.__setattr__(self, "anew", np.zeros(ranges, np.int64))
        length = np.count_nonzero(self.chains >= 0, axis=1)
        last = self.chains[np.arange(ranges), np.maximum(length, 1) - 1]
        object.__setattr__(self, "tails", last)
        for array in (self.chains, self.joining, self.since, self.kept, self.anew, self.tails):
            array.setflags(write=False)

    @property
    def ranges(self) -> int:
        """P."""
        return int(self.chains.shape[0])

    @property
    def heads(self) -> NDArray[np.int32]:
        """Index of each range's head, -1 where the chain is empty."""
        return self.chains[:, 0]

    def index(self, member: Member) -> int:
        """Index of a member, -1 if it is not in this view."""
        return self.members.index(member) if member in self.members else -1

    def headed_by(self, index: int) -> Ranges:
        """The ranges that a member heads, ordered by chain and then by range.

        This is the order of keys in a push, so that what goes to one successor is one slice of the frame.
        """
        mine = np.flatnonzero(self.chains[:, 0] == index).astype(np.int64)
        if mine.size == 0 or index < 0:
            return np.empty(0, dtype=np.int64)
        columns = [self.chains[mine, i] for i in range(self.chains.shape[1] - 1, 0, -1)]
        return mine[np.lexsort([mine, *columns])]

    @property
    def copies(self) -> NDArray[np.int32]:
        """int32 [P, R + 1]: who has all that was acknowledged: the chain, and behind it a joiner that has kept it, -1
        for none."""
        kept = np.where(np.isin(self.kept, COMPLETE), self.joining, np.int32(-1))
        copies: NDArray[np.int32] = np.column_stack((self.chains, kept))
        return copies

    def members_of(self, r: int) -> tuple[Member, ...]:
        """The full replicas of a range, head first."""
        return tuple(self.members[i] for i in self.chains[r] if i >= 0)

    def joiner_of(self, r: int) -> Member | None:
        """The member being filled with a range."""
        return self.members[self.joining[r]] if self.joining[r] >= 0 else None


class Place(NamedTuple):
    """Where one member stands in every range: arrays over P; `up` and `down` are indices into `members`, -1 for none.

    The joining member stands behind the tail: the tail's `down` is the joiner, the joiner's `up` is the tail.
    """

    role: NDArray[np.int8]
    head: NDArray[np.bool_]
    tail: NDArray[np.bool_]
    up: NDArray[np.int64]
    down: NDArray[np.int64]


def place(view: Chains, member: Member) -> Place:
    """Finds a member's roles and neighbours, all ranges at once."""
    p, replicas = view.chains.shape
    me = view.index(member)
    at = (view.chains == me) & (me >= 0)
    full = at.any(axis=1)
    joining = (view.joining == me) & (me >= 0) & ~full
    position = np.argmax(at, axis=1)
    rows = np.arange(p)
    role = np.where(full, Role.FULL, np.where(joining, Role.JOINING, Role.OUT)).astype(np.int8)
    tail = full & (view.tails == me)
    before = view.chains[rows, np.maximum(position - 1, 0)]
    after = view.chains[rows, np.minimum(position + 1, replicas - 1)]
    up = np.where(full & (position > 0), before, np.where(joining, view.tails, -1)).astype(np.int64)
    down = np.where(tail, view.joining, np.where(full, after, -1)).astype(np.int64)
    return Place(role, full & (position == 0), tail, up, down)


_FROM: Mapping[int, tuple[Kept, ...]] = {Kept.LATE: COMPLETE, Kept.BACK: (*COMPLETE, Kept.LATE)}
"""What a copy must have been before."""


def unsafe_transition(
    old: Chains, new: Chains, level: Mapping[int, int], ended: Collection[Member] = frozenset()
) -> str:
    """Why `new` must not follow `old`; "" if it may. `level`: range -> fill id that its tail, or who brings it back,
    reported level; `ended`: members that can never come back as they were.

    A chain that was empty may get any members when it is formed; when it begins anew, the one that has brought it back.
    """
    if new.epoch != old.epoch + 1:
        return f"epoch {new.epoch} follows {old.epoch}"
    for r in range(old.ranges):
        before, after = old.members_of(r), new.members_of(r)
        joined_before, joined_after = old.joiner_of(r), new.joiner_of(r)
        kept_before, kept_after = old.kept[r], new.kept[r]
        if new.anew[r] != old.anew[r]:
            copies = {old.members[i] for i in old.copies[r] if i >= 0}
            if new.anew[r] != new.epoch or new.since[r] != new.epoch or after or joined_after is not None or not before:
                return f"range {r}: it does not begin anew in epoch {new.anew[r]}"
            if living := copies.difference(ended):
                return f"range {r}: it must not begin anew as long as {_names(tuple(sorted(living)))} may come back"
            continue
        if before == after and joined_before == joined_after and kept_before == kept_after:
            if new.since[r] != old.since[r]:
                return f"range {r}: since moved to {new.since[r]}, but nothing changed"
            continue
        if new.since[r] != new.epoch:
            return f"range {r}: the chain changed in epoch {new.epoch}, but since says {new.since[r]}"
        if joined_after is not None and joined_after in after:
            return f"range {r}: {joined_after} is joining and full"
        if kept_after == Kept.ANEW and (before or after or joined_after is None or not new.anew[r]):
            return f"range {r}: {joined_after} is to bring back what is not lost"
        level_one = None if kept_before in COMPLETE else joined_before
        if kept_after in COMPLETE and (fault := _unkept(before, level_one, after, joined_after, kept_after)):
            return f"range {r}: {fault}"
        if kept_after in _FROM and (
            kept_before not in _FROM[kept_after] or (before, joined_before) != (after, joined_after)
        ):
            return f"range {r}: {joined_after} has not kept its copy behind {_names(after)} all the time"
        brought_back = kept_before == Kept.ANEW and after == (joined_before,) and level.get(r, -1) == old.since[r]
        if not before and after and old.anew[r] and not brought_back:
            return f"range {r}: nobody has brought back what {_names(after)} is to have"
        if not before:
            continue
        if not after:
            return f"range {r}: its last full replica is given up"
        left = tuple(m for m in before if m in after)
        if after == left:
            continue
        if joined_before is None or after != (*left, joined_before):
            return f"range {r}: {_names(before)} cannot become {_names(after)}"
        if kept_before == Kept.BEFORE and left:
            return f"range {r}: {joined_before} cannot stand behind {left[-1]}: it may have what that one lacks"
        if kept_before == Kept.LATE:
            return f"range {r}: {joined_before} lacks what was acknowledged without it"
        if kept_before not in COMPLETE and level.get(r, -1) != old.since[r]:
            return f"range {r}: {joined_before} is promoted, but was not reported level"
    return ""


def _unkept(
    before: tuple[Member, ...], filled: Member | None, after: tuple[Member, ...], joiner: Member | None, kept: int
) -> str:
    """Why the joiner cannot be kept as it is; "" if it can. filled: who stood behind all of `before`."""
    if joiner not in before or len(after) != 1 or after[0] not in (*before, filled):
        return f"{joiner} is kept behind {_names(after)}, but it was not one of two or more replicas, and full"
    ahead = after[0] not in before or before.index(joiner) < before.index(after[0])
    stood = Kept.BEFORE if ahead else Kept.BEHIND
    return "" if kept == stood else f"{joiner} is kept as if it had stood elsewhere in {_names(before)}"


def _names(members: tuple[Member, ...]) -> str:
    return "[" + ", ".join(map(str, members)) + "]"
