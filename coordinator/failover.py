"""Views that follow a loss, a repair or a move, as functions of chains. Pure; every decision carries its reason.

Each view is one step that `replication.chain.unsafe_transition` allows: members leave, a level joiner becomes the tail,
a filling starts or is given up. The last full replica of a range is never taken away here: a range whose replicas are
all gone keeps its chain, and waits for one of them to come back (or for a restore, which is another decision).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import numpy as np

from replication.chain import Chains, Member


class Decision(NamedTuple):
    """The next chains, and why."""

    chains: Chains
    reason: str


class _Draft:
    """A range's replicas as names, while the next view is made."""

    __slots__ = ("full", "joiner")

    def __init__(self, full: list[Member], joiner: Member | None) -> None:
        self.full = full
        self.joiner = joiner


def form(members: Sequence[Member], ranges: int, replicas: int, epoch: int = 1) -> Chains:
    """Chains of a new cluster, dealt round; each member heads as many ranges as the next."""
    drafts = []
    for r in range(ranges):
        shift = 1 + (r // len(members)) % max(1, len(members) - 1)
        order = [members[r % len(members)]]
        others = [members[(r + shift + i) % len(members)] for i in range(len(members))]
        order += [m for m in others if m not in order]
        drafts.append(_Draft(order[: min(replicas, len(members))], None))
    since = np.full(ranges, epoch, dtype=np.int64)
    return _build(epoch, replicas, drafts, since)


def plan_failover(view: Chains, gone: Set[Member], level: Mapping[int, int]) -> Decision | None:
    """Takes the members in `gone` out of every chain that another full or level replica survives.

    level: range -> fill id that its tail reported level. None: nothing to do.
    """
    drafts = _drafts(view)
    promoted = refilled = stuck = 0
    for r, draft in enumerate(drafts):
        if draft.joiner in gone:
            draft.joiner = None
        kept = [m for m in draft.full if m not in gone]
        if len(kept) == len(draft.full):
            continue
        if draft.joiner is not None and level.get(r, -1) == view.since[r]:
            kept.append(draft.joiner)
            draft.joiner = None
        if not kept:
            stuck += 1
            continue
        promoted += kept[0] != draft.full[0]
        refilled += draft.joiner is not None
        draft.full = kept
    names = ", ".join(sorted(str(m) for m in gone if m in view.members))
    reason = f"{names} lost: {promoted} ranges have a new head, {refilled} fillings start again"
    if stuck:
        reason += f", {stuck} ranges wait for their last replica"
    return _decide(view, drafts, reason)


def plan_repair(
    view: Chains, live: Sequence[Member], level: Mapping[int, int], replicas: int, fills: int
) -> Decision | None:
    """Promotes what is level, and starts to fill ranges that have fewer than `replicas`, at most `fills` at a time.

    A level joiner of a full chain replaces its head: the range was on its way off that server.
    """
    drafts = _drafts(view)
    levelled = started = 0
    for r, draft in enumerate(drafts):
        if draft.joiner is not None and level.get(r, -1) == view.since[r]:
            draft.full = [*draft.full[max(0, len(draft.full) + 1 - replicas) :], draft.joiner]
            draft.joiner = None
            levelled += 1
    under_way = sum(d.joiner is not None for d in drafts)
    load = {m: sum(m in d.full or d.joiner == m for d in drafts) for m in live}
    for draft in drafts:
        if under_way >= fills:
            break
        free = [m for m in live if m not in draft.full]
        if draft.joiner is None and 0 < len(draft.full) < replicas and free:
            draft.joiner = min(free, key=lambda m: (load[m], m))
            load[draft.joiner] += 1
            under_way += 1
            started += 1
    reason = f"{levelled} ranges got a level replica, {started} fillings started, {under_way} under way"
    return _decide(view, drafts, reason)


def plan_move(view: Chains, r: int, to: Member) -> Decision | None:
    """Starts to move range r to another server: once `to` is level it takes the place of the oldest replica."""
    drafts = _drafts(view)
    draft = drafts[r]
    if draft.joiner is not None or to in draft.full or not draft.full:
        return None
    draft.joiner = to
    return _decide(view, drafts, f"range {r} moves from {draft.full[0]} to {to}")


def _drafts(view: Chains) -> list[_Draft]:
    return [_Draft(list(view.members_of(r)), view.joiner_of(r)) for r in range(view.ranges)]


def _decide(view: Chains, drafts: list[_Draft], reason: str) -> Decision | None:
    since = view.since.copy()
    changed = False
    for r, draft in enumerate(drafts):
        if tuple(draft.full) != view.members_of(r) or draft.joiner != view.joiner_of(r):
            since[r] = view.epoch + 1
            changed = True
    if not changed:
        return None
    return Decision(_build(view.epoch + 1, view.chains.shape[1], drafts, since), reason)


def _build(
    epoch: int, replicas: int, drafts: list[_Draft], since: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Chains:
    used = {m for d in drafts for m in (*d.full, d.joiner) if m is not None}
    members = tuple(sorted(used))
    at = {m: i for i, m in enumerate(members)}
    chains = np.full((len(drafts), replicas), -1, dtype=np.int32)
    joining = np.full(len(drafts), -1, dtype=np.int32)
    for r, draft in enumerate(drafts):
        chains[r, : len(draft.full)] = [at[m] for m in draft.full]
        if draft.joiner is not None:
            joining[r] = at[draft.joiner]
    return Chains(epoch, members, chains, joining, since)
