"""The chains of the next view in the making: the rules of `replication.chain` as steps over all ranges. Pure.

Each step is one that `replication.chain.unsafe_transition` allows: members leave, a level joiner becomes the tail, a
filling starts or is given up. A range whose replicas are all gone keeps its chain, and waits for one of them to come
back; unless that cannot be, and it is to be recovered from a checkpoint (`empty`), which others decide.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replication.chain import COMPLETE, Chains, CopyState, Member, Ranges

Flags: TypeAlias = NDArray[np.bool_]
Pair: TypeAlias = tuple[Member, Member]


class Removal(NamedTuple):
    """The result of taking members out of chains.

    removed    those that are in fewer chains than before, or joining in fewer
    heads      ranges with a new head; promoted: with a level joiner that became a replica at once
    restarted  ranges whose filling begins again, because their chain is another; ended: that lost their joiner
    parted     ranges that lost a replica, or their joiner, because two neighbours cannot reach each other
    retained   ranges left with one replica, where one that fell silent or is cut off keeps its copy
    stuck      ranges [n] whose replicas are all gone; they are left as they are
    """

    removed: tuple[Member, ...]
    heads: int
    promoted: int
    restarted: int
    ended: int
    parted: int
    retained: int
    stuck: Ranges


class Draft:
    """Chains in the making, as indices into `members`: those of the view it starts from, then `others`.

    chains int32 [P, R], joining, copy_state int32 [P], recovery_epoch int64 [P]: as in `Chains`.
    leaving int32 [P]: as in `View`.
    """

    def __init__(self, view: Chains, others: Iterable[Member] = (), leaving: NDArray[np.int32] | None = None) -> None:
        known = set(view.members)
        self.view = view
        self.members: tuple[Member, ...] = (*view.members, *(m for m in others if m not in known))
        self.chains = view.chains.copy()
        self.joining = view.joining.copy()
        self.copy_state = view.copy_state.copy()
        self.recovery_epoch = view.recovery_epoch.copy()
        self.leaving = np.full_like(self.joining, -1) if leaving is None else leaving.copy()

    @classmethod
    def fresh(cls, chains: NDArray[np.int32], members: Sequence[Member]) -> Draft:
        """Makes a draft from chains of a cluster without a view."""
        nobody = np.full(len(chains), -1, np.int32)
        return cls(Chains(0, tuple(members), chains, nobody, np.zeros(len(chains), np.int64)))

    @property
    def replicas(self) -> int:
        """R: the longest that a chain can be."""
        return int(self.chains.shape[1])

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 [P]: the number of full replicas of each range."""
        lengths: NDArray[np.int64] = np.count_nonzero(self.chains >= 0, axis=1)
        return lengths

    @property
    def tails(self) -> NDArray[np.int32]:
        """int32 [P]: the last full replica of each range, -1 if there is none."""
        tails: NDArray[np.int32] = self.chains[np.arange(len(self.chains)), np.maximum(self.lengths, 1) - 1]
        return tails

    @property
    def complete(self) -> Flags:
        """bool [P]: the ranges whose joiner has a retained copy with all acknowledged operations."""
        complete: Flags = np.isin(self.copy_state, COMPLETE)
        return complete

    @property
    def away(self) -> Flags:
        """bool [P]: the ranges whose joiner has a retained copy, complete or late."""
        away: Flags = self.complete | (self.copy_state == CopyState.LATE)
        return away

    @property
    def filling(self) -> Flags:
        """bool [P]: the ranges of which a member is being filled."""
        filling: Flags = (self.joining >= 0) & ~self.away
        return filling

    @property
    def owners(self) -> set[Member]:
        """The members that are in a chain, or join one."""
        used = set(np.unique(self.chains).tolist()) | set(np.unique(self.joining).tolist())
        return {self.members[i] for i in used - {-1}}

    def only_at(self, members: Collection[Member]) -> Flags:
        """bool [P]: the ranges all of whose full replicas are at these members."""
        only: Flags = (self.flags(members)[self.chains] | (self.chains < 0)).all(axis=1) & (self.lengths > 0)
        return only

    def flags(self, members: Collection[Member]) -> Flags:
        """bool [members + 1]: which members of the draft are among these. The last element, of index -1, is False."""
        return np.array([*(m in members for m in self.members), False])

    def pairs(self, pairs: Collection[Pair]) -> Flags:
        """bool [members + 1, members + 1]: which two members are a pair, in either order; index -1 is in none."""
        at = {m: i for i, m in enumerate(self.members)}
        table = np.zeros((len(at) + 1, len(at) + 1), dtype=np.bool_)
        for a, b in pairs:
            if a in at and b in at:
                table[at[a], at[b]] = table[at[b], at[a]] = True
        return table

    def lose(
        self,
        gone: Collection[Member],
        level: Mapping[int, int],
        cut: Collection[Pair] = (),
        silent: Collection[Member] = (),
    ) -> Removal:
        """Takes the members in `gone` out of every chain that another full or level replica survives.

        level: range -> fill id that its tail reported level. cut: members that cannot reach each other: where they
        are neighbours the second one leaves, and its place in the chain's order is lost. silent: those of `gone` that
        may live. Where they, or those cut off, leave a single replica, also one that was level only, the last of them
        keeps its copy.
        """
        old_chains, old_joining = self.chains, np.where(self.away, np.int32(-1), self.joining)
        gone_at, ended_at = self.flags(gone), self.flags(set(gone) - set(silent))
        out = gone_at[self.chains]
        hit = out.any(axis=1)
        level_now = self._level(level) | self.complete
        ended = gone_at[self.joining] & ~self.away
        self._end(ended)
        ready = level_now & (self.joining >= 0) & ~gone_at[self.joining]
        stuck = (out | (self.chains < 0)).all(axis=1) & hit & ~ready
        parted = self._part(out, ~stuck, self.pairs(cut), level_now) if cut else np.zeros(len(out), np.bool_)
        out[stuck] = False
        promoted = out.any(axis=1) & ready
        keeping = out & ~ended_at[old_chains] & ~(promoted & self.complete)[:, None]
        self._compact(out)
        self._append(promoted)
        retained = self._keep(keeping, old_chains, promoted)
        moved = (self.chains != old_chains).any(axis=1) & ~self.away
        return Removal(
            self._removed(old_chains, old_joining),
            int(np.count_nonzero(self.chains[:, 0] != old_chains[:, 0])),
            int(np.count_nonzero(promoted)),
            int(np.count_nonzero(moved & (self.joining >= 0))),
            int(np.count_nonzero(ended)),
            int(np.count_nonzero(parted)),
            retained,
            np.flatnonzero(stuck).astype(np.int64),
        )

    def empty(self, rows: Ranges) -> None:
        """Gives up the content of these ranges, which no server has any more: they are recovered from a checkpoint."""
        self.chains[rows] = -1
        self._end(self._rows(rows))
        self.recovery_epoch[rows] = self.view.epoch + 1

    def bring_back(self, r: int, member: int) -> None:
        """Lets a member, given by index, restore range r, whose content was given up."""
        self.joining[r], self.copy_state[r] = member, CopyState.RECOVERING

    def begin(self, level: Mapping[int, int]) -> int:
        """Makes members that have restored a range its replicas; returns in how many ranges."""
        ready = self._level(level) & (self.copy_state == CopyState.RECOVERING)
        self.chains = self.chains.copy()
        self._append(ready)
        return int(np.count_nonzero(ready))

    def returned(self, gone: Collection[Member], cut: Collection[Pair]) -> dict[int, int]:
        """Returns the ranges whose joiner has retained its copy, answers again and may be the tail, in the form of
        reports of level joiners."""
        back = (self.copy_state == CopyState.SUCCESSOR) & ~self.flags(gone)[self.joining]
        back &= ~self.pairs(cut)[self.tails, self.joining]
        return {r: int(self.view.since[r]) for r in np.flatnonzero(back).tolist()}

    def confirm(self, alone: Mapping[Member, int], ended: Collection[Member], returned: Collection[int]) -> int:
        """Lets the single replicas of ranges go on without the retained copies, which are late from then on: replicas
        that have been alone for a while (see `Health.alone`), or whose retained copy has ended. Leaves out ranges in
        `returned`. Returns in how many ranges."""
        epochs = np.array([*(alone.get(m, 0) for m in self.members), 0])
        done = self.complete & ((epochs[self.tails] >= self.view.since) | self.flags(ended)[self.joining])
        done[list(returned)] = False
        self.copy_state[done] = CopyState.LATE
        return int(np.count_nonzero(done))

    def fetch(
        self,
        gone: Collection[Member],
        ended: Collection[Member],
        overdue: Collection[Member],
        cut: Collection[Pair],
        spent: Mapping[int, int],
    ) -> tuple[int, int]:
        """Lets late copies catch up whose servers are there again, and gives up the late copies whose servers have
        ended, are overdue, or are cut off from the replica that is left, and those that are `spent` (fill ids by
        range): that replica no longer has the operations that they lack. While that replica is gone, only copies whose
        servers have ended are given up: any other may be the last. Returns how many."""
        late, there = self.copy_state == CopyState.LATE, ~self.flags(gone)[self.tails]
        lost = self.flags(overdue)[self.joining] | self.pairs(cut)[self.tails, self.joining] | self._reported(spent)
        lost = (lost & there | self.flags(ended)[self.joining]) & (late | (self.copy_state == CopyState.CATCHING_UP))
        back = late & there & ~lost & ~self.flags(gone)[self.joining]
        self._end(lost)
        self.copy_state[back] = CopyState.CATCHING_UP
        return int(np.count_nonzero(back)), int(np.count_nonzero(lost))

    def promote(self, level: Mapping[int, int], draining: Collection[Member] = ()) -> int:
        """Makes level joiners tails; returns how many. In a full chain a joiner takes the place of a member that
        drains, or of the member that is to leave, or of the head.

        For a draft in which nothing was lost: a chain that changed has to be reported level again.
        """
        ready = self._level(level) & (self.lengths > 0)
        self._retire(self.chains, ready, self.flags(draining))
        self._compact(self.chains < 0)
        self._append(ready)
        return int(np.count_nonzero(ready))

    def settled(self, draining: Collection[Member]) -> NDArray[np.int32]:
        """int32 [P, R]: the chains as they will be when every filling under way is level."""
        after = copy(self)
        after.chains, after.joining, after.copy_state = self.chains.copy(), self.joining.copy(), self.copy_state.copy()
        ready = (after.joining >= 0) & (after.lengths > 0)
        after._retire(after.chains, ready, after.flags(draining))
        after._compact(after.chains < 0)
        after._append(ready)
        chains: NDArray[np.int32] = after.chains
        return chains

    def fill(self, r: int, member: int, leaving: int = -1) -> None:
        """Starts to fill a member with range r; `leaving` leaves when it is level, -1 for none. Both are indices."""
        self.joining[r], self.copy_state[r] = member, CopyState.NONE
        self.leaving[r] = leaving

    def give_up(self, members: Collection[Member]) -> int:
        """Ends the fillings of these members; returns how many."""
        ended = self.flags(members)[self.joining] & ~self.complete
        self._end(ended)
        return int(np.count_nonzero(ended))

    def stop(self, pairs: Collection[Pair], level: Mapping[int, int]) -> list[Member]:
        """Ends the fillings between the two members of each pair, except level ones; returns the members that were
        being filled."""
        ended = self.pairs(pairs)[self.tails, self.joining] & ~self._level(level) & ~self.away
        joiners = [self.members[i] for i in np.unique(self.joining[ended]).tolist()]
        self._end(ended)
        return joiners

    def release(self, draining: Collection[Member], live: Collection[Member]) -> int:
        """Takes members that drain out of chains which no other member can join, but never the last replica that
        serves, of `live`. Returns how many replicas are given up."""
        out = self.flags(draining)[self.chains]
        serving = np.array([*(m in live for m in self.members), False])
        held = np.count_nonzero(serving[self.chains], axis=1)
        out &= ((held > 0) & (held == len(live)) & (self.joining < 0))[:, None]
        self._compact(out)
        return int(np.count_nonzero(out))

    @property
    def changed(self) -> Flags:
        """bool [P]: the ranges whose chain or joiner differs from the view's."""
        view = self.view
        changed: Flags = (self.chains != view.chains).any(axis=1)
        changed |= (
            (self.joining != view.joining)
            | (self.copy_state != view.copy_state)
            | (self.recovery_epoch != view.recovery_epoch)
        )
        return changed

    def build(self, members: Sequence[Member]) -> Chains:
        """Returns the next view's chains, over `members`, which contains all owners."""
        index = self.indices(members)
        since = np.where(self.changed, self.view.epoch + 1, self.view.since)
        joining = index[self.joining]
        return Chains(
            self.view.epoch + 1,
            tuple(members),
            index[self.chains],
            joining,
            since,
            self.copy_state,
            self.recovery_epoch,
        )

    def indices(self, members: Sequence[Member]) -> NDArray[np.int32]:
        """int32 [members + 1]: the index in `members` of each member of the draft; index -1 stays -1."""
        at = {m: i for i, m in enumerate(members)}
        return np.array([*(at.get(m, -1) for m in self.members), -1], dtype=np.int32)

    @property
    def intended(self) -> NDArray[np.int32]:
        """int32 [P]: the member that leaves when the joiner is level, -1 if none does (any more)."""
        there = (self.chains == self.leaving[:, None]).any(axis=1) & (self.joining >= 0)
        intended: NDArray[np.int32] = np.where(there & (self.lengths == self.replicas), self.leaving, np.int32(-1))
        return intended

    def _retire(self, chains: NDArray[np.int32], ready: Flags, draining: Flags) -> None:
        """Makes room for the joiners of full chains."""
        rows = np.flatnonzero(ready & (self.lengths == self.replicas))
        drains = draining[chains[rows]]
        intended = (chains[rows] == self.leaving[rows, None]) & (self.leaving[rows, None] >= 0)
        who = np.where(drains.any(axis=1), np.argmax(drains, axis=1), np.argmax(intended, axis=1))
        chains[rows, who] = -1

    def _rows(self, rows: Ranges) -> Flags:
        flags = np.zeros(len(self.joining), dtype=np.bool_)
        flags[rows] = True
        return flags

    def _level(self, level: Mapping[int, int]) -> Flags:
        """bool [P]: the ranges whose present joiner is reported level; a late one never is."""
        ready: Flags = self._reported(level) & (self.copy_state != CopyState.LATE)
        return ready

    def _reported(self, fills: Mapping[int, int]) -> Flags:
        reported = np.zeros(len(self.joining), dtype=np.bool_)
        for r, fill in fills.items():
            reported[r] = self.joining[r] >= 0 and self.view.since[r] == fill
        return reported

    def _part(self, out: Flags, rows: Flags, cut: Flags, level: Flags) -> Flags:
        """Marks in `out` each member behind a neighbour that it cannot reach; returns the ranges that this changes."""
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
        self._end(apart)
        parted |= apart
        return parted

    def _compact(self, out: Flags) -> None:
        """Takes the replicas marked in `out` out of their chains; the others keep their order."""
        rows = np.flatnonzero(out.any(axis=1))
        chains = np.where(out[rows], np.int32(-1), self.chains[rows])
        order = np.argsort(chains < 0, axis=1, kind="stable")
        self.chains = self.chains.copy()
        self.chains[rows] = np.take_along_axis(chains, order, axis=1)

    def _append(self, rows: Flags) -> None:
        """Makes the joiners of these ranges their tails."""
        at = np.flatnonzero(rows)
        self.chains[at, self.lengths[at]] = self.joining[at]
        self._end(rows)

    def _end(self, rows: Flags) -> None:
        """Ends the fillings of these ranges: no member joins them any more."""
        self.joining[rows] = -1
        self.copy_state[rows] = CopyState.NONE

    def _keep(self, out: Flags, before: NDArray[np.int32], promoted: Flags) -> int:
        """Lets the last member marked in `out` retain its copy, in ranges where one replica of the chains `before`, or
        of their joiners, is left. Returns in how many ranges."""
        at = np.flatnonzero(out.any(axis=1) & (self.lengths == 1))
        stood = out.shape[1] - 1 - np.argmax(out[at, ::-1], axis=1)
        left = np.argmax(before[at] == self.chains[at, :1], axis=1)
        self.joining[at] = before[at, stood]
        self.copy_state[at] = np.where((stood > left) & ~promoted[at], CopyState.SUCCESSOR, CopyState.PREDECESSOR)
        return len(at)

    def _removed(self, chains: NDArray[np.int32], joining: NDArray[np.int32]) -> tuple[Member, ...]:
        def held(chains: NDArray[np.int32], joining: NDArray[np.int32]) -> NDArray[np.int64]:
            everyone = np.concatenate((chains.ravel(), joining))
            return np.bincount(everyone + 1, minlength=len(self.members) + 1)[1:]

        fewer = held(self.chains, np.where(self.away, np.int32(-1), self.joining)) < held(chains, joining)
        return tuple(sorted(self.members[i] for i in np.flatnonzero(fewer)))
