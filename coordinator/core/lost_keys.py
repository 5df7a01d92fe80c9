"""What a coordinator has read last under the keys without which its cluster cannot go on, kept from term to term. Pure.

etcd may lose keys while servers live: deleted by hand, overwritten, or as a snapshot was restored. A leader that knows
the last good value of such a key writes it back. It does so only while servers are registered: without any the cluster
may be about to be given up (`elasticps cluster reset`), or another one to move in (`adopt`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.core.store import Entry
from coordinator.core.view import ClusterConfig, Roster, View


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
