"""Words for decisions: the reasons of views, for people. Pure.

A view's reason says what the view does, and after WAITING what stands in the way of more. The second part stays the
same from view to view until the trouble is over.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from coordinator.core.draft import Draft, Flags, Removal
from coordinator.core.repair import Capacity
from coordinator.core.share import Counts
from coordinator.core.view import REASON_MAX
from replication.chain import CopyState, Member

WAITING = "; waiting: "
_NAMES_SHOWN = 5


def names(some: Sequence[str]) -> str:
    """Lists names for people, not too many."""
    shown = ", ".join(some[:_NAMES_SHOWN])
    return shown if len(some) <= _NAMES_SHOWN else f"{shown} and {len(some) - _NAMES_SHOWN} more"


def whole_reason(done: Sequence[str], standing: str) -> str:
    """Joins what is done, as far as there is room, and all that stands in the way."""
    tail = f"{WAITING}{standing}" if standing else ""
    return "; ".join(done)[: REASON_MAX - len(tail)] + tail


def standing_part(parts: Sequence[str]) -> str:
    """Joins what stands in the way into one text that fits."""
    return "; ".join(parts)[: REASON_MAX // 2]


def standing_of(reason: str) -> str:
    """Returns the standing part of a view's reason."""
    return reason.partition(WAITING)[2]


def evidence(lost: Sequence[Member], why: Mapping[Member, str]) -> str:
    """Says which members are lost, and the evidence; once if it is the same for all."""
    if len({why[m] for m in lost}) == 1:
        return f"{names([m.name for m in lost])} lost ({why[lost[0]]})"
    return names([f"{m.name} ({why[m]})" for m in lost]) + " lost"


def stalled(joiners: Collection[Member]) -> list[str]:
    """Says which fillings were given up because they made no progress."""
    return [f"{names([m.name for m in joiners])} could not be filled: given up for now"] if joiners else []


def losses(
    removal: Removal, why: Mapping[Member, str], cut: Collection[tuple[Member, Member]], recovering: int
) -> list[str]:
    """Says what deaths and cuts have done. recovering: how many ranges are given up, to be recovered."""
    reasons = []
    if lost := [m for m in removal.removed if m in why]:
        text = (
            f"{evidence(lost, why)}: {removal.heads} ranges have a new head, {removal.restarted} fillings start again"
        )
        reasons.append(text + (f", {removal.ended} are given up" if removal.ended else ""))
    if removal.parted:
        pairs = [f"{a.name} and {b.name}" for a, b in sorted(cut)]
        reasons.append(f"{names(pairs)} cannot reach each other: {removal.parted} ranges go on without the second")
    if removal.promoted:
        reasons.append(f"{removal.promoted} level replicas take their capacity")
    if recovering:
        reasons.append(f"{recovering} ranges begin anew: nobody is left who has them")
    if removal.retained:
        reasons.append(f"{removal.retained} ranges wait until the replica that is left is confirmed")
    return reasons


def confirmed(count: int) -> list[str]:
    """Says how many ranges no longer wait for a retained copy."""
    return [f"{count} ranges go on with the replica that is left"] if count else []


def fetched(returned: int, lost: int) -> list[str]:
    """Says how many late copies have returned, and how many are given up."""
    reasons = [f"{returned} ranges have their second copy again, which gets what it lacks"] if returned else []
    return reasons + ([f"{lost} late copies are given up"] if lost else [])


def restores(draft: Draft, begun: int) -> list[str]:
    """Says how many ranges come back from a checkpoint: those that have a replica again, and those under way."""
    coming = np.count_nonzero(draft.copy_state == CopyState.RECOVERING)
    parts = [f"{begun} ranges are brought back"] if begun else []
    return parts + ([f"{coming} ranges come back from a checkpoint"] if coming else [])


def repairs(draft: Draft, promoted: int, started: Flags) -> list[str]:
    """Says what repair does in this view. promoted: ranges that got a replica; started: fillings, bool [ranges]."""
    if not promoted and not started.any():
        return []
    parts = [f"{promoted} ranges got a level replica"] if promoted else []
    if started.any():
        to = names(sorted(draft.members[i].name for i in np.unique(draft.joining[started])))
        parts.append(f"{np.count_nonzero(started)} fillings started on {to}")
    short, filling = (draft.lengths < draft.replicas) & (draft.lengths > 0), draft.joining >= 0
    under_way, to_follow = np.count_nonzero(short & filling), np.count_nonzero(short & ~filling)
    return [f"repair: {', '.join(parts)}; {under_way} under way, {to_follow} to follow"]


def drains(draft: Draft, draining: Collection[Member]) -> list[str]:
    """Says how far each drain is."""
    held = np.bincount(draft.chains[draft.chains >= 0], minlength=len(draft.members))
    left = {m: int(held[draft.members.index(m)]) for m in sorted(draining) if m in draft.members}
    reasons = [f"{m.name} drains: {count} ranges left" for m, count in left.items() if count]
    unsafe = int(np.count_nonzero(draft.only_at(draining)))
    return reasons + ([f"{unsafe} ranges have replicas only at servers that drain"] if unsafe else [])


def moves(draft: Draft, moved: int, missing: Counts) -> list[str]:
    """Says how many ranges are under way to newcomers, and to others. missing: of each member's share, [members]."""
    filling = (draft.joining >= 0) & (draft.lengths == draft.replicas)
    into = np.bincount(draft.joining[filling], minlength=len(draft.members))
    new = [i for i in np.flatnonzero(into).tolist() if 2 * missing[i] > into[i]]
    reasons = [
        f"{draft.members[i].name} joined: {max(missing[i], into[i])} of {len(filling)} ranges move to it, "
        f"{into[i]} under way"
        for i in new[:_NAMES_SHOWN]
    ]
    if len(new) > _NAMES_SHOWN:
        reasons.append(f"{len(new) - _NAMES_SHOWN} more joined: {into[new[_NAMES_SHOWN:]].sum()} ranges under way")
    others = int(into.sum() - into[new].sum())
    if others or (moved and not reasons):
        reasons.append(f"balance: {moved} ranges moved, {others} under way")
    return reasons


def no_memory(
    draft: Draft, serving: Collection[Member], draining: Collection[Member], capacity: Mapping[Member, Capacity]
) -> list[str]:
    """Says how many ranges wait because servers have no memory for them."""
    full = sorted(m.name for m in serving if m in capacity and capacity[m].repairs < 1)
    without_spare = sorted(m.name for m in serving if m in capacity and capacity[m].moves < 1)
    still = draft.joining < 0
    short = int(np.count_nonzero((draft.lengths > 0) & (draft.lengths < draft.replicas) & still))
    leaving = int(np.count_nonzero(draft.flags(draining)[draft.chains].any(axis=1) & still))
    reasons = []
    if short and full:
        reasons.append(f"no memory at {names(full)}: {short} ranges wait for a replica; add servers")
    if leaving and without_spare:
        whose = names(sorted(m.name for m in draining))
        reasons.append(f"no memory to spare at {names(without_spare)}: {leaving} ranges stay at {whose}; add servers")
    return reasons


def too_few(short: int, replicas: int, servers: int) -> str:
    """Says that ranges cannot have all their replicas."""
    return f"{short} ranges have fewer than {replicas} replicas, with {servers} {_plural(servers, 'server')} left"


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"
