"""What a draining server still holds, and which of these ranges have no copy at a server that stays. Pure.

A copy at a server that drains does not count: that server may be about to end. So if two servers with the same range
drain together, both have its last copy, until another server has one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from coordinator.core.reasons import names
from coordinator.core.view import View
from replication.chain import Member, Ranges


@dataclass(frozen=True)
class Handover:
    """What one draining server still holds.

    held     ranges [n] of which it has all acknowledged operations
    last     those of `held` of which no server that stays is a full replica
    holders  the servers that stay and are full replicas of any range in `held`
    others   other members with copies of ranges in `last` that do not count as servers that stay
    stay     how many servers stay
    """

    held: Ranges
    last: Ranges
    holders: tuple[Member, ...]
    others: tuple[Member, ...]
    stay: int

    def __str__(self) -> str:
        if not self.stay:
            return f"{len(self.held)} ranges left, and no server stays that could take them"
        text = f"{len(self.held)} ranges left"
        if not self.last.size:
            return f"{text}, all of which have a copy at a server that stays"
        text += f", {len(self.last)} of which have no copy at a server that stays"
        others = names([member.name for member in self.others])
        return f"{text} ({others} has copies, but drains or does not answer)" if others else text


def find_handover(view: View, member: Member, staying: Collection[Member]) -> Handover:
    """Finds what `member` has to hand over. staying: the registered servers that were not asked to drain, without those
    that are known not to answer."""
    chains = view.as_chains
    me, copies = chains.index(member), chains.copies
    held = np.flatnonzero((copies == me).any(axis=1) & (me >= 0))
    safe = np.array([*(m in staying and m != member for m in chains.members), False])
    last = held[~safe[view.chains[held]].any(axis=1)]
    holders = sorted(chains.members[i] for i in np.unique(view.chains[held]).tolist() if safe[i])
    others = sorted(chains.members[i] for i in np.unique(copies[last]).tolist() if i not in (me, -1))
    return Handover(held, last, tuple(holders), tuple(others), len(set(staying) - {member}))
