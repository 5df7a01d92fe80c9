"""The content of the store of a cluster, parsed: one immutable value, followed from change to change. Pure.

All readers of a cluster's keys parse them here: the leader, `status`, metrics, the dashboard. An entry that makes no
sense never keeps the others from being read: it is left out, and `nonsense` says why. Of the config, the view and the
roster the last good value stays as long as the key exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from coordinator.core.keys import (
    CONFIG,
    DRAINS,
    ELECTION,
    FAILOVER,
    HELD_UP,
    KNOWN,
    LAST_WORKER,
    LOSSES,
    NEWEST_CHECKPOINT,
    RANGE_RECOVERY,
    RATES,
    RESTORE_FILLS,
    RESTORING,
    ROSTER,
    SERVERS,
    SIGNED_OFF,
    TABLES,
    VIEW,
    WORKERS,
    Failover,
    RangeRecovery,
    drained,
    last_worker,
    leaves,
    merge_losses,
    range_recovery_of,
    server_of,
    shown,
    worker_of,
)
from coordinator.core.names import worker_name
from coordinator.core.records import read
from coordinator.core.store import Change, Delete, Entry, Listing, Put, Reset
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Member

SINGLE = (CONFIG, VIEW, ROSTER)  # the keys that a cluster cannot do without
_NO_RECOVERY = RangeRecovery()


class Drain(NamedTuple):
    """A request to drain. leaves: the server's process is about to end."""

    member: Member
    revision: int
    leaves: bool


class Rate(NamedTuple):
    """A learning rate that was set for all workers, of the table with this id."""

    table: int
    lr: object


class Record(NamedTuple):
    """The worker that took part last under a name, and the revision of that record."""

    worker: int
    revision: int


@dataclass(frozen=True)
class ClusterState:
    """The keys of one cluster at one revision of the store."""

    cluster: str  # its name
    revision: int = 0  # the newest that was seen
    term: int = 0  # of the leader, 0 for none
    leader: str = ""  # its name
    config: ClusterConfig | None = None  # None: there is none yet
    view: View | None = None  # the newest that made sense
    roster: Roster | None = None  # the newest that made sense
    revisions: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(SINGLE, 0))  # of these three; 0: absent
    config_created: int = 0  # the revision at which the config's key began to exist
    servers: Mapping[str, ServerInfo] = field(default_factory=dict)  # registered now, by name
    workers: Mapping[str, WorkerInfo] = field(default_factory=dict)  # registered now, by key
    signed_off: frozenset[str] = frozenset()  # names of workers that have said that they leave
    records: Mapping[str, Record] = field(default_factory=dict)  # by key
    drains: Mapping[str, Drain] = field(default_factory=dict)  # by server
    recovery: RangeRecovery = _NO_RECOVERY  # ranges that come back from a checkpoint
    restores: bool = False  # servers bring rows back from a checkpoint
    restoring: bool = False  # a whole cluster comes back from a checkpoint: workers wait
    checkpoint: tuple[int, float] | None = None  # the newest one's number, and when it was made
    failover: Failover | None = None  # the newest one
    losses: Mapping[str, bytes] = field(default_factory=dict)  # below LOSSES and KNOWN, as `merge_losses` takes them
    held_up: str = ""  # why lost ranges do not come back
    tables: Mapping[str, Entry] = field(default_factory=dict)  # as registered, by key; see `keys.table_of`
    rates: Mapping[str, Rate] = field(default_factory=dict)  # by key
    nonsense: Mapping[str, str] = field(default_factory=dict)  # why an entry makes no sense, by key

    @classmethod
    def parse(cls, cluster: str, listing: Listing, before: ClusterState | None = None) -> ClusterState:
        """Parses a listing of all keys. before: an earlier state, whose config, view and roster stay where the present
        ones make no sense."""
        made = _Edit(cls(cluster))
        there = {entry.key: entry for entry in listing.entries}
        if before is not None:
            single = {"config": before.config, "view": before.view, "roster": before.roster}
            made.values |= {name: value for name, value in single.items() if name in there}
        for entry in listing.entries:
            made.put(entry)
        return made.build(listing.revision)

    def apply(self, change: Change) -> ClusterState:
        """Returns the state after a change of the store."""
        if isinstance(change, Reset):
            return ClusterState.parse(self.cluster, change.listing, self)
        made = _Edit(self)
        if isinstance(change, Put):
            made.put(change.entry)
        else:
            made.delete(change)
        return made.build(max(self.revision, change.revision))

    def written(self, key: str, value: ClusterConfig | View | Roster, revision: int) -> ClusterState:
        """Returns the state after a write of the config, the view or the roster whose outcome is known before the watch
        shows it."""
        made = _Edit(self)
        made.values[key] = value
        if key == CONFIG and not self.revisions[CONFIG]:
            made.values["config_created"] = revision
        made.section("revisions")[key] = revision
        made.forget_nonsense(key)
        return made.build(max(self.revision, revision))

    @property
    def draining(self) -> frozenset[Member]:
        """The incarnations that are asked to drain."""
        return frozenset(drain.member for drain in self.drains.values())

    @property
    def leaving(self) -> frozenset[Member]:
        """The incarnations that are asked to drain because their processes are about to end."""
        return frozenset(drain.member for drain in self.drains.values() if drain.leaves)

    @property
    def registered(self) -> tuple[ServerInfo, ...]:
        """The registered servers, by name."""
        return tuple(self.servers[name] for name in sorted(self.servers))


class _Edit:
    """A state being changed: it copies only the mappings that change."""

    def __init__(self, state: ClusterState) -> None:
        self.values: dict[str, Any] = {each.name: getattr(state, each.name) for each in fields(state)}
        self._copied: set[str] = set()

    def build(self, revision: int) -> ClusterState:
        return ClusterState(**(self.values | {"revision": revision}))

    def section(self, name: str) -> dict[str, Any]:
        """One of the mappings, for writing."""
        if name not in self._copied:
            self._copied.add(name)
            self.values[name] = dict(self.values[name])
        found: dict[str, Any] = self.values[name]
        return found

    def put(self, entry: Entry) -> None:
        if entry.key in SINGLE:
            self.section("revisions")[entry.key] = entry.revision
        try:
            self._read(entry)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            self._leave_out(entry.key)
            self.section("nonsense")[entry.key] = f"holds {shown(entry.value)}: {error}"
        else:
            self.forget_nonsense(entry.key)

    def delete(self, change: Delete) -> None:
        key = change.key
        if key in SINGLE:
            self.values[key] = None
            self.section("revisions")[key] = 0
            if key == CONFIG:
                self.values["config_created"] = 0
        else:
            self._leave_out(key)
        self.forget_nonsense(key)

    def forget_nonsense(self, key: str) -> None:
        if key in self.values["nonsense"]:
            del self.section("nonsense")[key]

    def _read(self, entry: Entry) -> None:
        key, value, values = entry.key, entry.value, self.values
        if key == CONFIG:
            values["config_created"] = entry.create_revision
            values["config"] = ClusterConfig.from_json(value)
        elif key == VIEW:
            values["view"] = View.decode(value)
        elif key == ROSTER:
            values["roster"] = Roster.decode(value)
        elif key == ELECTION:
            values["term"], values["leader"] = entry.create_revision, _leader(value)
        elif key == RANGE_RECOVERY:
            values["recovery"] = range_recovery_of(value)
        elif key in (RESTORE_FILLS, RESTORING):
            values["restores" if key == RESTORE_FILLS else "restoring"] = True
        elif key == NEWEST_CHECKPOINT:
            found = read(key, value, cut=int, time=float)
            values["checkpoint"] = found["cut"], found["time"]
        elif key == FAILOVER:
            values["failover"] = Failover.from_json(value)
        elif key == HELD_UP:
            values["held_up"] = _held_up(value)
        else:
            self._read_below(entry)

    def _read_below(self, entry: Entry) -> None:
        key, value = entry.key, entry.value
        if key.startswith(SERVERS):
            self.section("servers")[key.removeprefix(SERVERS)] = server_of(key, value)
        elif key.startswith(WORKERS):
            name = worker_name(key.removeprefix(WORKERS))
            if value == SIGNED_OFF:
                self.section("workers").pop(key, None)
                self.values["signed_off"] |= {name}
            else:
                self.values["signed_off"] -= {name}
                self.section("workers")[key] = worker_of(key, value)
        elif key.startswith(LAST_WORKER):
            self.section("records")[key] = Record(last_worker(value), entry.revision)
        elif key.startswith(DRAINS):
            drain = Drain(drained(key, value), entry.revision, leaves(value))
            self.section("drains")[key.removeprefix(DRAINS)] = drain
        elif key.startswith(TABLES):
            self.section("tables")[key] = entry
        elif key.startswith(RATES):
            found = read(key, value, table=int, lr=object)
            self.section("rates")[key] = Rate(found["table"], found["lr"])
        elif key.startswith((LOSSES, KNOWN)):
            if key.startswith(LOSSES):
                read(key, value, ranges=list, cut=int, url=str, rows=int, lacking=list)
            merge_losses({key: value})
            self.section("losses")[key] = value

    def _leave_out(self, key: str) -> None:
        """Forgets the value of a key that is gone, or makes no sense. Of the three single keys the last value stays."""
        values = self.values
        if key == ELECTION:
            values["term"], values["leader"] = 0, ""
        elif key in _ABSENT:
            name, absent = _ABSENT[key]
            values[name] = absent
        for prefix, name in _BELOW:
            if key.startswith(prefix):
                part = key.removeprefix(prefix) if name in ("servers", "drains") else key
                if part in values[name]:
                    del self.section(name)[part]


def _leader(value: bytes) -> str:
    """The name under ELECTION, "" if there is none: the key alone says that somebody leads."""
    try:
        return str(read(ELECTION, value, name=str)["name"])
    except ValueError:
        return ""


def _held_up(value: bytes) -> str:
    try:
        return str(read(HELD_UP, value, reason=str)["reason"])
    except ValueError as error:
        return str(error)


_ABSENT: Mapping[str, tuple[str, Any]] = {
    RANGE_RECOVERY: ("recovery", _NO_RECOVERY),
    RESTORE_FILLS: ("restores", False),
    RESTORING: ("restoring", False),
    NEWEST_CHECKPOINT: ("checkpoint", None),
    FAILOVER: ("failover", None),
    HELD_UP: ("held_up", ""),
}
_BELOW = (
    (SERVERS, "servers"),
    (WORKERS, "workers"),
    (LAST_WORKER, "records"),
    (DRAINS, "drains"),
    (TABLES, "tables"),
    (RATES, "rates"),
    (LOSSES, "losses"),
    (KNOWN, "losses"),
)
