"""What a leader puts back when etcd loses a key without which the cluster cannot go on. Pure.

etcd may lose keys while servers live: somebody deletes or overwrites them, or restores a snapshot of etcd. A leader
that knows the last good value (`LastGood`, kept from term to term) writes it back. It does so only while servers are
registered: without any the cluster may be about to be given up (`elasticps cluster reset`), or another one to move in
(`adopt`).

A lost view may also come from the servers (`put_back`). A view that is older than one which a server has followed must
never be put back: chains that changed since would begin again with replicas that lack acknowledged steps. So every
server of the newest known view must be heard, and none may follow a newer one; unless the leader saw the key go, and so
knows its last value. Every other case is left to a person: `elasticps cluster adopt` takes the word of the servers that
are left.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from coordinator.core.planner import Plan
from coordinator.core.reasons import names
from coordinator.core.store import Entry
from coordinator.core.view import REASON_MAX, ClusterConfig, Roster, View
from replication.chain import Member

UNHEARD = 1 << 16  # views that only workers, coordinators and servers which are given up may know
REMEDY = "`elasticps cluster adopt --server HOST:ADMIN-PORT` puts it back, with --without for each server that is gone"


@dataclass
class LastGood:
    """The newest good values that this coordinator has seen.

    created  the revision at which the config's key began to exist: numbers count from there
    tables   the entries of registered tables, by key; lost: those that were deleted though nobody had dropped them
    """

    config: ClusterConfig | None = None
    created: int = 0
    view: View | None = None
    roster: Roster | None = None
    tables: dict[str, bytes] = field(default_factory=dict)
    lost: dict[str, bytes] = field(default_factory=dict)

    def take_config(self, config: ClusterConfig, created: int) -> bool:
        """Takes over a config. Returns whether it is another cluster's than before; then nothing that was known counts
        any more. Raises ValueError if it changes what is fixed for ever, or would give numbers out a second time."""
        known = self.config
        if known is not None and known.id and not config.id:
            raise ValueError("it has no id")
        other = known is not None and known.id != config.id
        if known is not None and not other:
            if (known.ranges, known.replicas) != (config.ranges, config.replicas):
                raise ValueError(
                    f"it says {config.ranges} ranges x {config.replicas} replicas, the cluster was made with "
                    f"{known.ranges} x {known.replicas}"
                )
            if config.base < known.base:
                raise ValueError(f"its base {config.base} is below {known.base}: numbers would be given out twice")
        if other:
            self.tables.clear()
            self.lost.clear()
        self.config, self.created = config, created
        return other

    def view_of(self, cluster: str | None) -> View | None:
        """The newest view of the cluster with this identity."""
        return self.view if self.view is not None and self.view.cluster == cluster else None

    def roster_of(self, cluster: str | None) -> Roster | None:
        """The newest roster of the cluster with this identity."""
        return self.roster if self.roster is not None and self.roster.cluster == cluster else None

    def take_view(self, view: View, cluster: str | None) -> None:
        """Takes over a view of the cluster with this identity. Raises ValueError if it is older than one before, or
        foreign in place of ours."""
        known = self.view_of(cluster)
        if known is not None and view.cluster != cluster:
            raise ValueError(f"it is the view of {view.cluster}, this is {cluster}")
        if known is not None and view.epoch < known.epoch:
            raise ValueError(f"it is the view of epoch {view.epoch}, and {known.epoch} had been reached")
        self.view = view

    def take_roster(self, roster: Roster, cluster: str | None) -> None:
        """Takes over a roster. Raises ValueError as `take_view` does."""
        known = self.roster_of(cluster)
        if known is not None and roster.cluster != cluster:
            raise ValueError(f"it is the roster of {roster.cluster}, this is {cluster}")
        if known is not None and roster.version < known.version:
            raise ValueError(f"it is version {roster.version}, and {known.version} had been reached")
        self.roster = roster

    def list_tables(self, entries: Iterable[Entry]) -> None:
        """Takes over the list of registered tables. A missing one may have been dropped unseen."""
        self.tables = {entry.key: entry.value for entry in entries}
        self.lost = {key: value for key, value in self.lost.items() if key not in self.tables}

    def put_table(self, entry: Entry) -> None:
        """Notes that a table's entry was written."""
        self.tables[entry.key] = entry.value
        self.lost.pop(entry.key, None)

    def delete_table(self, key: str) -> bool:
        """Notes that a table's entry was deleted. Returns whether it was lost: a drop marks the entry before."""
        value = self.tables.pop(key, None)
        if value is None or not _is_in_use(value):
            return False
        self.lost[key] = value
        return True


def _is_in_use(value: bytes) -> bool:
    """Whether an entry is a table's that nobody drops."""
    try:
        document = json.loads(value)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and not document.get("dropping")


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
