"""The chains of the next view while they are decided: the rules of `replication.chain` as steps over all ranges. Pure.

Each step is one that `replication.chain.unsafe_transition` allows: members leave, a level joiner becomes the tail, a
filling starts or is given up. The last full replica of a range is never taken away here: a range whose replicas are
all gone keeps its chain, and waits for one of them to come back (or for a restore, which is another decision).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Ranges

Flags: TypeAlias = NDArray[np.bool_]
Pair: TypeAlias = tuple[Member, Member]


class Loss(NamedTuple):
    """What taking members out has done.

    removed    those that are in fewer chains than before, or joining in fewer
    heads      ranges with a new head; promoted: with a level joiner that became a replica at once
    restarted  ranges whose filling begins again, because their chain is another; ended: that lost their joiner
    parted     ranges that lost a replica, or their joiner, because two neighbours cannot reach each other
    stuck      ranges [n] whose replicas are all gone; they are left as they are
    """

    removed: tuple[Member, ...]
    heads: int
    promoted: int
    restarted: int
    ended: int
    parted: int
    stuck: Ranges


class Draft:
    """Chains in the making, as indices into `members`: those of the view it starts from, then `others`.

    chains int32 [P, R], joining int32 [P]: as in `Chains`.
    """

    def __init__(self, view: Chains, others: Iterable[Member] = ()) -> None:
        known = set(view.members)
        self.view = view
        self.members: tuple[Member, ...] = (*view.members, *(m for m in others if m not in known))
        self.chains = view.chains.copy()
        self.joining = view.joining.copy()

    @property
    def replicas(self) -> int:
        """R: the longest that a chain can be."""
        return int(self.chains.shape[1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [P]: full replicas of each range."""
        lengths: NDArray[np.int64] = np.count_nonzero(self.chains >= 0, axis=1)
        return lengths

    @property
    def tails(self) -> NDArray[np.int32]:
        """int32 [P]: the last full replica of each range, -1 where there is none."""
        tails: NDArray[np.int32] = self.chains[np.arange(len(self.chains)), np.maximum(self.lengths, 1) - 1]
        return tails

    @property
    def owners(self) -> set[Member]:
        """The members that are in some chain, or joining one."""
        used = set(np.unique(self.chains).tolist()) | set(np.unique(self.joining).tolist())
        return {self.members[i] for i in used - {-1}}

    def flags(self, members: Collection[Member]) -> Flags:
        """bool [members + 1]: who is among them. Its last element is False, so that index -1 never is."""
        return np.array([*(m in members for m in self.members), False])

    def pairs(self, pairs: Collection[Pair]) -> Flags:
        """bool [members + 1, members + 1]: which two are a pair, either way round; index -1 is in none."""
        at = {m: i for i, m in enumerate(self.members)}
        table = np.zeros((len(at) + 1, len(at) + 1), dtype=np.bool_)
        for a, b in pairs:
            if a in at and b in at:
                table[at[a], at[b]] = table[at[b], at[a]] = True
        return table

    def lose(self, gone: Collection[Member], level: Mapping[int, int], cut: Collection[Pair] = ()) -> Loss:
        """Takes the members in `gone` out of every chain that another full or level replica survives.

        level: range -> fill id that its tail reported level. cut: members that cannot reach each other: where they
        are neighbours the second one leaves, and its place in the chain's order is lost.
        """
        old_chains, old_joining = self.chains, self.joining
        gone_at = self.flags(gone)
        out = gone_at[self.chains]
        hit = out.any(axis=1)
        level_now = self._level(level)
        ended = gone_at[self.joining]
        self.joining = np.where(ended, np.int32(-1), self.joining)
        promoted = hit & level_now & (self.joining >= 0)
        stuck = (out | (self.chains < 0)).all(axis=1) & hit & ~promoted
        parted = self._part(out, ~stuck, self.pairs(cut), level_now) if cut else np.zeros(len(out), np.bool_)
        out[stuck] = False
        self._compact(out)
        self._append(promoted)
        moved = (self.chains != old_chains).any(axis=1)
        return Loss(
            self._removed(old_chains, old_joining),
            int(np.count_nonzero(self.chains[:, 0] != old_chains[:, 0])),
            int(np.count_nonzero(promoted)),
            int(np.count_nonzero(moved & (self.joining >= 0))),
            int(np.count_nonzero(ended)),
            int(np.count_nonzero(parted)),
            np.flatnonzero(stuck).astype(np.int64),
        )

    def promote(self, level: Mapping[int, int]) -> int:
        """Makes level joiners tails; returns how many. The head of a full chain leaves: the range was moving off it.

        For a draft in which nothing was lost: a chain that changed has to be reported level anew.
        """
        ready = self._level(level) & (self.lengths > 0)
        self.chains[ready & (self.lengths == self.replicas), 0] = -1
        self._compact(self.chains < 0)
        self._append(ready)
        return int(np.count_nonzero(ready))

    def fill(self, r: int, member: int) -> None:
        """Starts to fill a member, given as its index, with range r."""
        self.joining[r] = member

    @property
    def changed(self) -> Flags:
        """bool [P]: the ranges whose chain or joiner differs from the view's."""
        changed: Flags = (self.chains != self.view.chains).any(axis=1) | (self.joining != self.view.joining)
        return changed

    def build(self, members: Sequence[Member]) -> Chains:
        """The next view's chains, over `members`, which has all owners."""
        at = {m: i for i, m in enumerate(members)}
        index = np.array([*(at.get(m, -1) for m in self.members), -1], dtype=np.int32)  # -1 stays -1
        since = np.where(self.changed, self.view.epoch + 1, self.view.since)
        return Chains(self.view.epoch + 1, tuple(members), index[self.chains], index[self.joining], since)

    def _level(self, level: Mapping[int, int]) -> Flags:
        ready = np.zeros(len(self.joining), dtype=np.bool_)
        for r, fill in level.items():
            ready[r] = self.joining[r] >= 0 and self.view.since[r] == fill
        return ready

    def _part(self, out: Flags, rows: Flags, cut: Flags, level: Flags) -> Flags:
        """Marks in `out` who stands behind one that it cannot reach; returns the ranges that this changes."""
        parted = np.zeros(len(out), dtype=np.bool_)
        before = np.full(len(out), -1, dtype=np.int32)
        for column in range(self.replicas):
            here = self.chains[:, column]
            apart = rows & ~out[:, column] & cut[before, here]
            out[:, column] |= apart
            parted |= apart
            before = np.where(out[:, column] | (here < 0), before, here)
        # A level joiner has all that was acknowledged, and is kept: it can be promoted if it is all that is left.
        apart = rows & cut[before, self.joining] & ~level
        self.joining[apart] = -1
        parted |= apart
        return parted

    def _compact(self, out: Flags) -> None:
        """Takes the replicas marked out of their chains; the others keep their order."""
        rows = np.flatnonzero(out.any(axis=1))
        chains = np.where(out[rows], np.int32(-1), self.chains[rows])
        order = np.argsort(chains < 0, axis=1, kind="stable")
        self.chains = self.chains.copy()
        self.chains[rows] = np.take_along_axis(chains, order, axis=1)

    def _append(self, rows: Flags) -> None:
        """The joiners of these ranges become their tails."""
        at = np.flatnonzero(rows)
        self.chains[at, self.lengths[at]] = self.joining[at]
        self.joining[at] = -1

    def _removed(self, chains: NDArray[np.int32], joining: NDArray[np.int32]) -> tuple[Member, ...]:
        def held(chains: NDArray[np.int32], joining: NDArray[np.int32]) -> NDArray[np.int64]:
            everyone = np.concatenate((chains.ravel(), joining))
            return np.bincount(everyone + 1, minlength=len(self.members) + 1)[1:]

        fewer = held(self.chains, self.joining) < held(chains, joining)
        return tuple(sorted(self.members[i] for i in np.flatnonzero(fewer)))
