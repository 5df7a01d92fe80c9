"""A coordinator's state of its cluster: that of the store as of the last change, with the last good value in place of
each key that the store has lost or damaged and that the cluster cannot do without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from enum import Enum

from coordinator.core import fields
from coordinator.core.cluster_state import SINGLE, ClusterState
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
    TABLES,
    VIEW,
    WORKERS,
    record_key,
    shown,
)
from coordinator.core.lost_keys import LastGood
from coordinator.core.store import Change, Delete, Entry, Guard, Listing, Put, Reset, Store
from coordinator.core.view import ClusterConfig, Roster, View

log = fields.logger(__name__)

REMEMBERED = 4096  # names of workers that have left: a worker that comes back under one goes on where it was
AT_ONCE = 64  # names forgotten in one go


class Impact(Enum):
    """What a change of the store means to the planner. DEATH: a server has left, or another incarnation has its
    name."""

    NOTHING = 0
    CHANGE = 1
    DEATH = 2


class ClusterTracker:
    """The cluster as of the last change seen.

    state    what the store says
    config, view, roster  as the store says, or the last good values if it has lost them; None if none is known
    damage   what is wrong with the store's config, view or roster, by key: it is gone, makes no sense, or is older than
             one before
    certain  this tracker saw the view go, so that the last good one is the newest that was ever written
    """

    def __init__(self, cluster: str, listing: Listing, last_good: LastGood | None = None) -> None:
        self.cluster = cluster
        self.last_good = LastGood() if last_good is None else last_good
        self._seen = 0
        self._reset(listing)

    def _reset(self, listing: Listing) -> None:
        self._seen = listing.revision
        self.state = ClusterState.parse(self.cluster, listing)
        for key, why in self.state.nonsense.items():
            if key not in SINGLE:
                log.warning("an entry is ignored", key=key, why=why)
        self._follows = False
        self.config: ClusterConfig | None = None
        self.view: View | None = None
        self.roster: Roster | None = None
        self.damage: dict[str, str] = {}
        self.certain = False
        self.last_good.list_tables(self.state.tables.values())
        for key in SINGLE:  # the config first: it tells the identity of the others
            if self.state.revisions[key]:
                self._take(key)
            else:
                self._lose(key)
        self._follows = True

    async def follow(self, store: Store, on_change: Callable[[Impact], None]) -> None:
        """Follows the store; ends only with the store or an error."""
        async with aclosing(store.watch("", after=self._seen)) as changes:
            async for change in changes:
                impact = self._apply(change)
                if impact is not Impact.NOTHING:
                    on_change(impact)

    def check_leadership(self, guard: Guard) -> None:
        """Raises Fenced if the office is no longer the one of `guard`."""
        if self.state.term != guard.create_revision:
            raise Fenced("somebody else has the office" if self.state.term else "the office is vacant")

    @property
    def identity(self) -> str | None:
        """The identity that the cluster's views bear; None without a config."""
        return None if self.config is None else self.config.identity(self.cluster)

    @property
    def number(self) -> int:
        """A number above all that this cluster gave out, and above its rosters' versions, each of which took a
        write."""
        base = 0 if self.config is None else self.config.base
        return base + max(0, self.state.revision - self.last_good.created) + 1

    def drains_done(self) -> list[tuple[str, int]]:
        """Returns keys and revisions of requests to drain incarnations that are gone: replaced, or neither registered
        nor listed."""
        done = []
        for name, (member, revision, _) in self.state.drains.items():
            server = self.state.servers.get(member.name)
            listed = self.view is not None and self.view.as_chains.index(member) >= 0
            if (server is None and not listed) or (server is not None and server.incarnation > member.incarnation):
                done.append((DRAINS + name, revision))
        return done

    def forgotten(self) -> list[tuple[str, int]]:
        """Returns keys and revisions of records to drop: of workers that are not listed, the newest `REMEMBERED`
        stay."""
        records = self.state.records
        if len(records) <= REMEMBERED:
            return []
        listed = {record_key(worker.name) for worker in (self.roster.workers if self.roster else ())}
        listed |= {record_key(worker.name) for worker in self.state.workers.values()}
        away = sorted((record, key) for key, record in records.items() if key not in listed)
        return [(key, revision) for (_, revision), key in away[: min(AT_ONCE, len(away) - REMEMBERED)]]

    def written(self, key: str, value: ClusterConfig | View | Roster, revision: int) -> None:
        """Takes over a config, view or roster that this leader has written."""
        made = self.state.revisions[key] == 0
        self.state = self.state.written(key, value, revision)
        self.damage.pop(key, None)
        if isinstance(value, ClusterConfig):
            self.config = self.last_good.config = value
            self.last_good.created = revision if made else self.last_good.created
        elif isinstance(value, View):
            self.view = self.last_good.view = value
        else:
            self.roster = self.last_good.roster = value
            signed_off = self.state.signed_off & {worker.name for worker in value.workers}
            self.state = replace(self.state, signed_off=signed_off)

    def _apply(self, change: Change) -> Impact:
        if isinstance(change, Reset):
            self._reset(change.listing)
            return Impact.CHANGE
        key = change.entry.key if isinstance(change, Put) else change.key
        if key in SINGLE and change.revision <= self.state.revisions[key]:
            return Impact.NOTHING  # this leader's own write, known since it was answered, or a loss repaired since
        before, self.state = self.state, self.state.apply(change)
        if isinstance(change, Put):
            return self._put(change.entry)
        return self._delete(change, before)

    def _put(self, entry: Entry) -> Impact:
        key, state = entry.key, self.state
        if key in SINGLE:
            self._take(key)
        elif key in state.nonsense:
            log.warning("an entry is ignored", key=key, why=state.nonsense[key])
        if key.startswith(TABLES):
            self.last_good.put_table(entry)
        if key.startswith(SERVERS) and self._replaces(key.removeprefix(SERVERS)):
            return Impact.DEATH
        if key.startswith(LAST_WORKER):
            return Impact.CHANGE if len(state.records) > REMEMBERED else Impact.NOTHING
        planned = (*SINGLE, ELECTION, RANGE_RECOVERY, RESTORE_FILLS)
        return Impact.CHANGE if key in planned or key.startswith((SERVERS, WORKERS, DRAINS)) else Impact.NOTHING

    def _delete(self, change: Delete, before: ClusterState) -> Impact:
        key = change.key
        if key in SINGLE:
            self._lose(key)
            return Impact.CHANGE
        if key.startswith(TABLES):
            return Impact.CHANGE if self.last_good.delete_table(key) else Impact.NOTHING
        if key.startswith(SERVERS):
            return Impact.DEATH if key.removeprefix(SERVERS) in before.servers else Impact.NOTHING
        if key.startswith(LAST_WORKER):
            return Impact.CHANGE if len(self.state.records) > REMEMBERED else Impact.NOTHING
        gone = key.removeprefix(DRAINS) in before.drains if key.startswith(DRAINS) else key in before.workers
        return Impact.CHANGE if gone or key in (ELECTION, RESTORE_FILLS) else Impact.NOTHING

    def _replaces(self, name: str) -> bool:
        """Whether the view lists another incarnation of this server."""
        server = self.state.servers.get(name)
        index = -1 if server is None or self.view is None else self.view.index(server.name)
        return self.view is not None and index >= 0 and self.view.servers[index] != server

    # -- config, view and roster: what the store says, or the last good value -----------------------------------------

    def _take(self, key: str) -> None:
        """Takes over the store's config, view or roster, unless it cannot be right."""
        state, good = self.state, self.last_good
        try:
            if key in state.nonsense:
                self._damaged(key, state.nonsense[key])
                return
            if key == VIEW and state.view is not None:
                good.take_view(state.view, self.identity)
                self.view = state.view
            elif key == ROSTER and state.roster is not None:
                good.take_roster(state.roster, self.identity)
                self.roster = state.roster
            elif state.config is not None:
                other = good.take_config(state.config, state.config_created)
                self.config = state.config
                if other:  # a foreign view or roster may be this cluster's now, and the other way round
                    self.view, self.roster = None, None
                    for each in (VIEW, ROSTER):
                        if state.revisions[each]:
                            self._take(each)
        except ValueError as error:
            self._damaged(key, f"holds {shown(self._encoded(key))}: {error}")
        else:
            self.damage.pop(key, None)

    def _encoded(self, key: str) -> bytes:
        value = {CONFIG: self.state.config, VIEW: self.state.view, ROSTER: self.state.roster}[key]
        return b"" if value is None else value.to_json() if isinstance(value, ClusterConfig) else value.encode()

    def _lose(self, key: str) -> None:
        """Notes that the key of the config, the view or the roster is absent: lost, if the cluster has had it."""
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
