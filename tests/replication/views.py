"""Views that follow a loss, a repair or a move, as functions of chains alone: what tests of the replica plan with.

The rules are those of `coordinator.core.draft` and `coordinator.core.repair`, which the planner has them from too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from coordinator.core.draft import Draft
from coordinator.core.repair import Limits, start_fills
from coordinator.core.ring import Node
from replication.chain import Chains, Member


class Decision(NamedTuple):
    """The next chains, and why."""

    chains: Chains
    reason: str


def form(members: Sequence[Member], ranges: int, replicas: int, epoch: int = 1) -> Chains:
    """Chains of a new cluster, dealt round; each member heads as many ranges as the next."""
    order = sorted(members)
    count = len(order)
    chains = np.full((ranges, replicas), -1, dtype=np.int32)
    for r in range(ranges):
        head = r % count
        shift = 1 + (r // count) % max(1, count - 1)
        others = [(head + shift + i) % count for i in range(count)]
        row = [head, *(i for i in others if i != head)][: min(replicas, count)]
        chains[r, : len(row)] = row
    since = np.full(ranges, epoch, dtype=np.int64)
    return Chains(epoch, tuple(order), chains, np.full(ranges, -1, dtype=np.int32), since)


def plan_failover(view: Chains, gone: Set[Member], level: Mapping[int, int]) -> Decision | None:
    """Takes the members in `gone` out of every chain that another full or level replica survives.

    level: range -> fill id that its tail reported level. None: nothing to do.
    """
    draft = Draft(view)
    loss = draft.lose(gone, level)
    names = ", ".join(sorted(str(m) for m in gone if m in view.members))
    reason = f"{names} lost: {loss.heads} ranges have a new head, {loss.restarted} fillings start again"
    if loss.stuck.size:
        reason += f", {loss.stuck.size} ranges wait for their last replica"
    return _decide(draft, reason)


def plan_repair(
    view: Chains, live: Sequence[Member], level: Mapping[int, int], replicas: int, fills: int
) -> Decision | None:
    """Promotes what is level, and starts to fill ranges that have fewer than `replicas`, at most `fills` at a time.

    replicas: the width of `view.chains`. A level joiner of a full chain replaces its head.
    """
    draft = Draft(view, live)
    if replicas != draft.replicas:
        raise ValueError(f"chains of {draft.replicas} replicas cannot be planned with {replicas}")
    levelled = draft.promote(level)
    started = start_fills(draft, {m: Node(m.name) for m in live}, Limits(fills, fills)).started
    under_way = int(np.count_nonzero(draft.joining >= 0))
    return _decide(draft, f"{levelled} ranges got a level replica, {started} fillings started, {under_way} under way")


def plan_move(view: Chains, r: int, to: Member) -> Decision | None:
    """Starts to move range r to another server: once `to` is level it takes the place of the oldest replica."""
    full = view.members_of(r)
    if view.joiner_of(r) is not None or to in full or not full:
        return None
    draft = Draft(view, [to])
    draft.fill(r, draft.members.index(to))
    return _decide(draft, f"range {r} moves from {full[0]} to {to}")


def _decide(draft: Draft, reason: str) -> Decision | None:
    if not draft.changed.any():
        return None
    return Decision(draft.build(sorted(draft.owners)), reason)
