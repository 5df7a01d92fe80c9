"""The view that a cluster goes on from when the store has lost its own: what the leader remembers, or servers follow.
Pure.

A view that is older than one which a server has followed must never be put back: chains that changed since would begin
again with replicas that lack acknowledged steps. So every server which the newest known view lists must be heard, and
none may have a newer one; unless the leader saw the key go, and so knows the last value. What cannot be decided so is
left to a person: `elasticps cluster adopt` takes the word of those that are left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coordinator.core.planner import Plan
from coordinator.core.reasons import names
from coordinator.core.view import REASON_MAX, View
from replication.chain import Member

UNHEARD = 1 << 16  # views that only workers, coordinators and servers which are given up may know
REMEDY = "`elasticps cluster adopt --server HOST:ADMIN-PORT` puts it back, with --without for each server that is gone"


def is_outdated(view: View | None, epochs: Mapping[Member, int]) -> bool:
    """Whether the servers show that the store's view (None: it has none) is not the newest. One that says so alone,
    while another follows the store's, is not believed."""
    listed = () if view is None else view.as_chains.members
    heard = [epoch for member, epoch in epochs.items() if epoch and (view is None or member in listed)]
    return bool(heard) and min(heard) > (0 if view is None else view.epoch)


def put_back(
    ours: View | None, certain: bool, why: str, epochs: Mapping[Member, int], views: Mapping[Member, View]
) -> Plan:
    """The view to write in place of what the store has, which is wrong as `why` says; or none yet, and the reason.

    ours: the last good one that is known; certain: it is the newest that was ever written. epochs: of the views that
    servers follow, of all that are heard; views: those themselves, of servers that were asked.
    """
    if certain and ours is not None:
        return Plan(ours, f"{why}: put back as it was")
    newest = max(epochs.values(), default=0)
    candidate = ours
    if ours is None or newest > ours.epoch:
        if not newest:
            return Plan(None, f"{why}, and no server follows any: {REMEDY}")
        if older := sorted(m.name for m, epoch in epochs.items() if 0 < epoch < newest):
            return Plan(None, f"{why}, and servers do not agree: {names(older)} follow an older one. {REMEDY}")
        found = {view.encode(): view for view in views.values() if view.epoch == newest}
        if len(found) > 1:
            return Plan(None, f"{why}, and servers follow {len(found)} different ones of epoch {newest}: {REMEDY}")
        candidate = next(iter(found.values()), None)
        if candidate is None:
            return Plan(None, f"{why}: servers are asked for that of epoch {newest}")
    assert candidate is not None
    if unheard := sorted(m.name for m in candidate.as_chains.members if m not in epochs):
        return Plan(None, f"{why}, and {names(unheard)} may know a newer one than that of epoch {candidate.epoch}, and "
                    f"cannot be heard: {REMEDY}")  # fmt: skip
    text = f"{why}: put back as servers know it, of epoch {candidate.epoch}"[:REASON_MAX]
    return Plan(replace(candidate, epoch=candidate.epoch + UNHEARD, reason=text), text)
