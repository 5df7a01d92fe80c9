"""Chains as replication sees them: who replicates a range, in which order, since which epoch.

A chain is ordered by age: head first, tail last, and a view may only
 - remove members, never the last one (the survivors keep their order),
 - append the joining member, once its tail has reported it level,
 - start, replace or give up a filling: set or clear `joining`,
 - leave one member of several: it goes on, and one that was removed joins with the copy that it retains (`copy_state`),
 - empty a chain whose members cannot come back: the range is recovered (`recovery_epoch`), by a member that restores
   it from a checkpoint,
and then sets `since[r]` to its own epoch. So every survivor's log is a prefix of the logs of the survivors before it,
which is what makes failover need nothing from the dead. `unsafe_transition` states the law as code.

A joiner with a retained copy is level from the beginning: it was in the chain, so its copy has all that was
acknowledged before, and later acknowledgements wait for it, as for every level joiner. If it stood behind the replica
that is left, its log is a prefix of that replica's log, and it may become the tail again. If it stood before it, it may
have logged operations that nobody else has: then it only takes the other's place.

Once the replica that is left acknowledges alone, the copy is late: it lacks what is acknowledged from there on, and no
view may promote it. When its server answers again it catches up: it joins as any other, with the copy that it has.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
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


class CopyState(IntEnum):
    """What copy a joining member has of its range.

    NONE         it is filled from nothing
    SUCCESSOR    it retains its copy from the chain, where it stood behind the one replica left
    PREDECESSOR  the same, but it stood before that replica
    LATE         that replica acknowledges without it, and retains for a while what it lacks
    CATCHING_UP  it is to get what it lacks
    RECOVERING   there is no chain: it restores the range from a checkpoint
    """

    RECOVERING = -1
    NONE = 0
    SUCCESSOR = 1
    PREDECESSOR = 2
    LATE = 3
    CATCHING_UP = 4


COMPLETE = (CopyState.SUCCESSOR, CopyState.PREDECESSOR)
"""Copies that have all that was acknowledged: acknowledgements wait for them."""


@dataclass(frozen=True, eq=False)
class Chains:
    """One view, as replication sees it.

    chains          int32 [P, R]: indices into `members`, head first, -1 behind the tail
    joining         int32 [P]: index of the member being filled, -1 for none
    since           int64 [P]: the epoch in which the range's chain or joining member last changed
    copy_state      int32 [P]: a `CopyState` of the joining member; left out: NONE
    recovery_epoch  int64 [P]: the epoch in which the range was last emptied, as no member had it; left out: never
    """

    epoch: int
    members: tuple[Member, ...]
    chains: NDArray[np.int32]
    joining: NDArray[np.int32]
    since: NDArray[np.int64]
    copy_state: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    recovery_epoch: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    tails: NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        ranges = self.chains.shape[0]
        if not self.copy_state.size:
            object.__setattr__(self, "copy_state", np.zeros(ranges, np.int32))
        if not self.recovery_epoch.size:
            object.__setattr__(self, "recovery_epoch", np.zeros(ranges, np.int64))
        length = np.count_nonzero(self.chains >= 0, axis=1)
        last = self.chains[np.arange(ranges), np.maximum(length, 1) - 1]
        object.__setattr__(self, "tails", last)
        for array in (self.chains, self.joining, self.since, self.copy_state, self.recovery_epoch, self.tails):
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
        return self._indices.get(member, -1)

    @cached_property
    def _indices(self) -> dict[Member, int]:
        return {member: i for i, member in enumerate(self.members)}

    @cached_property
    def complete(self) -> NDArray[np.bool_]:
        """bool [P]: whether the joining member has all that was acknowledged."""
        complete: NDArray[np.bool_] = (self.copy_state == COMPLETE[0]) | (self.copy_state == COMPLETE[1])
        return complete

    def headed_by(self, index: int) -> Ranges:
        """The ranges that a member heads, ordered by chain and then by range.

        This is the order of keys in a push, so that what goes to one successor is one slice of the frame.
        """
        mine = np.flatnonzero(self.chains[:, 0] == index).astype(np.int64)
        if mine.size == 0 or index < 0:
            return np.empty(0, dtype=np.int64)
        columns = [self.chains[mine, i] for i in range(self.chains.shape[1] - 1, 0, -1)]
        return mine[np.lexsort([mine, *columns])]

    @cached_property
    def headed(self) -> dict[int, Ranges]:
        """By each member that heads ranges, in ascending order, what `headed_by` says of it: in one pass for all."""
        columns = tuple(self.chains.T[::-1])  # the last one sorts first: the heads
        order = np.lexsort((np.arange(self.ranges, dtype=np.int32), *columns)).astype(np.int64)
        members, starts = np.unique(self.heads[order], return_index=True)
        return {i: ranges for i, ranges in zip(members.tolist(), np.split(order, starts[1:]), strict=True) if i >= 0}

    @property
    def copies(self) -> NDArray[np.int32]:
        """int32 [P, R + 1]: who has all that was acknowledged: the chain, and behind it a joiner that retains it, -1
        for none."""
        joiners = np.where(self.complete, self.joining, np.int32(-1))
        copies: NDArray[np.int32] = np.column_stack((self.chains, joiners))
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
    """Finds a member's roles and neighbours, all ranges at once. What is computed is of the ranges that it holds: of
    many ranges a server of many holds few."""
    p, replicas = view.chains.shape
    me = view.index(member)
    none = Place(
        np.full(p, Role.OUT, np.int8), np.zeros(p, np.bool_), np.zeros(p, np.bool_),
        np.full(p, -1, np.int64), np.full(p, -1, np.int64),
    )  # fmt: skip
    if me < 0:
        return none
    role, head, tail, up, down = none
    ranges, position = np.nonzero(view.chains == me)
    last = view.tails[ranges] == me
    role[ranges], head[ranges], tail[ranges] = Role.FULL, position == 0, last
    up[ranges] = np.where(position > 0, view.chains[ranges, np.maximum(position - 1, 0)], -1)
    after = view.chains[ranges, np.minimum(position + 1, replicas - 1)]
    down[ranges] = np.where(last, view.joining[ranges], after)
    joins = np.flatnonzero((view.joining == me) & (role == Role.OUT))
    role[joins], up[joins] = Role.JOINING, view.tails[joins]
    return none


_FROM: Mapping[int, tuple[CopyState, ...]] = {
    CopyState.LATE: COMPLETE,
    CopyState.CATCHING_UP: (*COMPLETE, CopyState.LATE),
}
"""What a copy must have been before."""


def unsafe_transition(
    old: Chains, new: Chains, level: Mapping[int, int], ended: Collection[Member] = frozenset()
) -> str:
    """Why `new` must not follow `old`; "" if it may. `level`: range -> fill id that its tail, or who brings it back,
    reported level; `ended`: members that can never come back as they were.

    A chain that was empty may get any members when it is formed; when it is recovered, the one that has restored it.
    """
    if new.epoch != old.epoch + 1:
        return f"epoch {new.epoch} follows {old.epoch}"
    for r in range(old.ranges):
        before, after = old.members_of(r), new.members_of(r)
        joined_before, joined_after = old.joiner_of(r), new.joiner_of(r)
        state_before, state_after = old.copy_state[r], new.copy_state[r]
        if new.recovery_epoch[r] != old.recovery_epoch[r]:
            copies = {old.members[i] for i in old.copies[r] if i >= 0}
            if (
                new.recovery_epoch[r] != new.epoch
                or new.since[r] != new.epoch
                or after
                or joined_after is not None
                or not before
            ):
                return f"range {r}: it does not begin anew in epoch {new.recovery_epoch[r]}"
            if living := copies.difference(ended):
                return f"range {r}: it must not begin anew as long as {_names(tuple(sorted(living)))} may come back"
            continue
        if before == after and joined_before == joined_after and state_before == state_after:
            if new.since[r] != old.since[r]:
                return f"range {r}: since moved to {new.since[r]}, but nothing changed"
            continue
        if new.since[r] != new.epoch:
            return f"range {r}: the chain changed in epoch {new.epoch}, but since says {new.since[r]}"
        if joined_after is not None and joined_after in after:
            return f"range {r}: {joined_after} is joining and full"
        if state_after == CopyState.RECOVERING and (
            before or after or joined_after is None or not new.recovery_epoch[r]
        ):
            return f"range {r}: {joined_after} is to bring back what is not lost"
        level_one = None if state_before in COMPLETE else joined_before
        if state_after in COMPLETE and (
            fault := _wrong_copy_state(before, level_one, after, joined_after, state_after)
        ):
            return f"range {r}: {fault}"
        if state_after in _FROM and (
            state_before not in _FROM[state_after] or (before, joined_before) != (after, joined_after)
        ):
            return f"range {r}: {joined_after} has not kept its copy behind {_names(after)} all the time"
        brought_back = (
            state_before == CopyState.RECOVERING and after == (joined_before,) and level.get(r, -1) == old.since[r]
        )
        if not before and after and old.recovery_epoch[r] and not brought_back:
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
        if state_before == CopyState.PREDECESSOR and left:
            return f"range {r}: {joined_before} cannot stand behind {left[-1]}: it may have what that one lacks"
        if state_before == CopyState.LATE:
            return f"range {r}: {joined_before} lacks what was acknowledged without it"
        if state_before not in COMPLETE and level.get(r, -1) != old.since[r]:
            return f"range {r}: {joined_before} is promoted, but was not reported level"
    return ""


def _wrong_copy_state(
    before: tuple[Member, ...], filled: Member | None, after: tuple[Member, ...], joiner: Member | None, state: int
) -> str:
    """Why the joiner cannot be kept as it is; "" if it can. filled: who stood behind all of `before`."""
    if joiner not in before or len(after) != 1 or after[0] not in (*before, filled):
        return f"{joiner} is kept behind {_names(after)}, but it was not one of two or more replicas, and full"
    stood_before = after[0] not in before or before.index(joiner) < before.index(after[0])
    stood = CopyState.PREDECESSOR if stood_before else CopyState.SUCCESSOR
    return "" if state == stood else f"{joiner} is kept as if it had stood elsewhere in {_names(before)}"


def _names(members: tuple[Member, ...]) -> str:
    return "[" + ", ".join(map(str, members)) + "]"
