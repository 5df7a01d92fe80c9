"""What a leader knows of its cluster: the store's keys, parsed as they come."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from enum import Enum
from typing import NamedTuple, TypeVar

from coordinator.core import fields
from coordinator.core.errors import Fenced
from coordinator.core.keys import (
    CONFIG,
    DRAINS,
    ELECTION,
    LAST_WORKER,
    RANGE_RECOVERY,
    RESTORE_FILLS,
    ROSTER,
    SERVERS,
    SIGNED_OFF,
    TABLES,
    VIEW,
    WORKERS,
    drained,
    last_worker,
    leaves,
    range_recovery_of,
    record_key,
    server_of,
    shown,
    worker_of,
)
from coordinator.core.last_good import LastGood
from coordinator.core.names import worker_name
from coordinator.core.store import Change, Delete, Entry, Guard, Listing, Put, Reset, Store
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Member

log = fields.logger(__name__)

REMEMBERED = 4096  # names of workers that have left: who comes back under one of them goes on where it was
AT_ONCE = 64  # names forgotten in one go

_Info = TypeVar("_Info", ServerInfo, WorkerInfo)


class Impact(Enum):
    """What a change of the store means to the planner. DEATH: a server has left, or is another one now."""

    NOTHING = 0
    CHANGE = 1
    DEATH = 2


class _Drain(NamedTuple):
    """A request to drain: of whom, the revision of the request, and whether the server's process is about to end."""

    member: Member
    revision: int
    leaves: bool


class ClusterTracker:
    """The cluster as of the last change seen.

    damage     what is wrong with the store's config, view or roster, by key: it is gone, makes no sense, or is older
               than one before. `config`, `view` and `roster` are the last good values then, or None where none is known
    certain    the view was lost under our eyes, so that the last good one is the newest that was ever written
    revision   the newest one that was seen
    term       of the leader, 0 for none
    revisions  of the config, the view and the roster, to write against; servers and workers by their keys
    drains     the requests to drain, by their keys
    signed_off  the names of workers that have said they leave
    recoverable     the ranges that are to begin anew; given_up: members that a person says cannot come back
    restores    servers bring rows back from a checkpoint
    records     of the workers that took part last under their names: id and revision, by their keys
    """

    def __init__(self, cluster: str, listing: Listing, last_good: LastGood | None = None) -> None:
        self.cluster = cluster
        self.last_good = LastGood() if last_good is None else last_good
        self._reset(listing)

    def _reset(self, listing: Listing) -> None:
        self._seen = self.revision = listing.revision
        self._follows = False
        self.config: ClusterConfig | None = None
        self.view: View | None = None
        self.roster: Roster | None = None
        self.revisions = {CONFIG: 0, VIEW: 0, ROSTER: 0}
        self._entries: dict[str, Entry] = {}
        self.damage: dict[str, str] = {}
        self.certain = False
        self.servers: dict[str, ServerInfo] = {}
        self.workers: dict[str, WorkerInfo] = {}
        self.signed_off: set[str] = set()
        self.records: dict[str, tuple[int, int]] = {}
        self.drains: dict[str, _Drain] = {}
        self.recoverable: frozenset[int] = frozenset()
        self.given_up: frozenset[Member] = frozenset()
        self.restores = False
        self.term = 0
        self.last_good.list_tables(entry for entry in listing.entries if entry.key.startswith(TABLES))
        there = {entry.key for entry in listing.entries}
        if CONFIG not in there:  # before the others, whose identity it tells
            self._lose(CONFIG)
        for entry in listing.entries:
            self._put(entry)
        for key in (VIEW, ROSTER):
            if key not in there:
                self._lose(key)
        self._follows = True

    async def follow(self, store: Store, on_change: Callable[[Impact], None]) -> None:
        """Keeps this up to date; ends only with the store or an error."""
        async with aclosing(store.watch("", after=self._seen)) as changes:
            async for change in changes:
                impact = self._apply(change)
                if impact is not Impact.NOTHING:
                    on_change(impact)

    def check_leadership(self, guard: Guard) -> None:
        """Fenced if the office is no longer ours."""
        if self.term != guard.create_revision:
            raise Fenced("somebody else has the office" if self.term else "the office is vacant")

    @property
    def identity(self) -> str | None:
        """What the cluster's views say of it, None without a config."""
        return None if self.config is None else self.config.identity(self.cluster)

    @property
    def number(self) -> int:
        """Above all numbers that were given out in this cluster, and all versions of its rosters: each took a write."""
        base = 0 if self.config is None else self.config.base
        return base + max(0, self.revision - self.last_good.created) + 1

    @property
    def draining(self) -> frozenset[Member]:
        """The incarnations that were asked to drain."""
        return frozenset(drain.member for drain in self.drains.values())

    @property
    def leaving(self) -> frozenset[Member]:
        """Those of them whose processes are about to end."""
        return frozenset(drain.member for drain in self.drains.values() if drain.leaves)

    def drains_done(self) -> list[tuple[str, int]]:
        """Keys and revisions of requests about incarnations that are gone: replaced, or neither registered nor
        listed."""
        done = []
        for key, (member, revision, _) in self.drains.items():
            server = self.servers.get(SERVERS + member.name)
            listed = self.view is not None and self.view.as_chains.index(member) >= 0
            if (server is None and not listed) or (server is not None and server.incarnation > member.incarnation):
                done.append((key, revision))
        return done

    def written(self, key: str, value: ClusterConfig | View | Roster, revision: int) -> None:
        """We have written the config, the view or the roster ourselves."""
        made = self.revisions[key] == 0
        self.revisions[key], self.revision = revision, max(revision, self.revision)
        self.damage.pop(key, None)
        if isinstance(value, ClusterConfig):
            self.config = self.last_good.config = value
            self.last_good.created = revision if made else self.last_good.created
        elif isinstance(value, View):
            self.view = self.last_good.view = value
        else:
            self.roster = self.last_good.roster = value

    def _apply(self, change: Change) -> Impact:
        if isinstance(change, Reset):
            self._reset(change.listing)
            return Impact.CHANGE
        self.revision = max(change.revision, self.revision)
        if isinstance(change, Put):
            return self._put(change.entry)
        return self._delete(change)

    def _put(self, entry: Entry) -> Impact:
        key = entry.key
        if key in self.revisions:
            if entry.revision <= self.revisions[key]:
                return Impact.NOTHING  # our own write, known since it was answered
            self.revisions[key] = entry.revision
            self._entries[key] = entry
            self._take(entry)
        elif key == ELECTION:
            self.term = entry.create_revision
        elif key.startswith(SERVERS):
            _register(self.servers, key, lambda: server_of(key, entry.value))
            return Impact.DEATH if self._replaces(key) else Impact.CHANGE
        elif key.startswith(WORKERS):
            self._put_worker(entry)
        elif key.startswith(DRAINS):
            self._put_drain(entry)
        elif key.startswith(LAST_WORKER):
            return self._put_record(entry)
        elif key == RANGE_RECOVERY:
            self._put_recovery(entry)
        elif key == RESTORE_FILLS:
            self.restores = True
        else:
            if key.startswith(TABLES):
                self.last_good.put_table(entry)
            return Impact.NOTHING
        return Impact.CHANGE

    def _take(self, entry: Entry) -> None:
        """Reads the config, the view or the roster. The last good value stays where this one cannot be right."""
        key, good = entry.key, self.last_good
        try:
            if key == VIEW:
                good.take_view(view := View.decode(entry.value), self.identity)
                self.view = view
            elif key == ROSTER:
                good.take_roster(roster := Roster.decode(entry.value), self.identity)
                self.roster = roster
            else:
                other = good.take_config(config := ClusterConfig.from_json(entry.value), entry.create_revision)
                self.config = config
                if other:  # what was foreign may be ours now, and the other way round
                    self.view, self.roster = None, None
                    for held in [held for name, held in self._entries.items() if name != CONFIG]:
                        self._take(held)
        except ValueError as error:
            self._damaged(key, f"holds {shown(entry.value)}: {error}")
        else:
            self.damage.pop(key, None)

    def _lose(self, key: str) -> None:
        """The key of the config, the view or the roster is not there. Only what the cluster has had is lost."""
        self.revisions[key] = 0
        self._entries.pop(key, None)
        self._fall_back(key)
        if {CONFIG: self.config, VIEW: self.view, ROSTER: self.roster}[key] is None:
            self.damage.pop(key, None)
        else:
            self._damaged(key, "is gone")

    def _fall_back(self, key: str) -> None:
        good = self.last_good
        if key == CONFIG:
            self.config = good.config
        elif key == VIEW:
            self.view = good.view_of(self.identity)
        else:
            self.roster = good.roster_of(self.identity)

    def _damaged(self, key: str, why: str) -> None:
        if key == VIEW and key not in self.damage:
            self.certain = self._follows
        if self.damage.get(key) != why:
            log.error("the store has lost a key of the cluster", key=key, why=f"{key} {why}")
        self.damage[key] = why
        self._fall_back(key)

    def _put_worker(self, entry: Entry) -> None:
        name = worker_name(entry.key.removeprefix(WORKERS))
        if entry.value == SIGNED_OFF:
            self.workers.pop(entry.key, None)
            self.signed_off.add(name)
        else:
            _register(self.workers, entry.key, lambda: worker_of(entry.key, entry.value))
            self.signed_off.discard(name)

    def _put_record(self, entry: Entry) -> Impact:
        try:
            self.records[entry.key] = last_worker(entry.value), entry.revision
        except ValueError:
            log.exception("an entry is ignored", key=entry.key)
        return Impact.CHANGE if len(self.records) > REMEMBERED else Impact.NOTHING

    def forgotten(self) -> list[tuple[str, int]]:
        """Keys and revisions of records to drop: of those that are not listed the newest `REMEMBERED` stay."""
        if len(self.records) <= REMEMBERED:
            return []
        listed = {record_key(worker.name) for worker in (self.roster.workers if self.roster else ())}
        listed |= {record_key(worker.name) for worker in self.workers.values()}
        away = sorted((record, key) for key, record in self.records.items() if key not in listed)
        return [(key, revision) for (_, revision), key in away[: min(AT_ONCE, len(away) - REMEMBERED)]]

    def _put_drain(self, entry: Entry) -> None:
        try:
            member = drained(entry.key, entry.value)
        except ValueError:
            log.exception("an entry is ignored", key=entry.key)
            self.drains.pop(entry.key, None)
        else:
            self.drains[entry.key] = _Drain(member, entry.revision, leaves(entry.value))

    def _put_recovery(self, entry: Entry) -> None:
        self.recoverable, self.given_up = frozenset(), frozenset()
        try:
            self.recoverable, self.given_up = range_recovery_of(entry.value)
        except ValueError:
            log.exception("an entry is ignored", key=entry.key)

    def _replaces(self, key: str) -> bool:
        """Whether the view lists another incarnation of the server under this key."""
        server = self.servers.get(key)
        index = -1 if server is None or self.view is None else self.view.index(server.name)
        return self.view is not None and index >= 0 and self.view.servers[index] != server

    def _delete(self, change: Delete) -> Impact:
        if change.key == ELECTION:
            self.term = 0
            return Impact.CHANGE
        if change.key in self.revisions:
            if change.revision <= self.revisions[change.key]:
                return Impact.NOTHING  # we have put it back since
            self._lose(change.key)
            return Impact.CHANGE
        if change.key.startswith(TABLES):
            return Impact.CHANGE if self.last_good.delete_table(change.key) else Impact.NOTHING
        if change.key == RESTORE_FILLS:
            self.restores = False
            return Impact.CHANGE
        if change.key == RANGE_RECOVERY:
            self.recoverable, self.given_up = frozenset(), frozenset()
            return Impact.NOTHING
        if self.servers.pop(change.key, None) is not None:
            return Impact.DEATH
        if self.records.pop(change.key, None) is not None:
            return Impact.CHANGE if len(self.records) > REMEMBERED else Impact.NOTHING
        if self.drains.pop(change.key, None) is not None:
            return Impact.CHANGE
        return Impact.NOTHING if self.workers.pop(change.key, None) is None else Impact.CHANGE


def _register(members: dict[str, _Info], key: str, parse: Callable[[], _Info]) -> None:
    """One member whose entry makes no sense must not keep the leader from serving the others."""
    try:
        info = parse()
    except ValueError:
        log.exception("an entry is ignored", key=key)
        members.pop(key, None)
    else:
        members[key] = info
