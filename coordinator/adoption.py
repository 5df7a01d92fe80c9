"""Gives a store that lost its data the cluster whose servers live, or gives up a cluster that is dead: pure decisions,
and the writes that carry them out.

Servers know what a store holds, too: the view, the roster, tables, and which numbers are in use. Two things they may
not know. There may be a newer view, known only to a server that was not asked; so every server of the newest view must
answer, or be given up by name. And no server may have read to which application a table belongs; then the caller names
an application for it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coordinator.core import fields
from coordinator.core.cluster_state import ClusterState
from coordinator.core.differences import ROSTER_CHANGES, VIEW_CHANGES, change_of
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import (
    CHANGES,
    CONFIG,
    DRAINS,
    HELD_UP,
    INCARNATIONS,
    KNOWN,
    LAST_WORKER,
    LOSSES,
    RANGE_RECOVERY,
    RESTORING,
    ROSTER,
    SERVERS,
    TABLES,
    VIEW,
    config_of,
    table_key,
)
from coordinator.core.lost_keys import UNHEARD
from coordinator.core.records import left_out, read
from coordinator.core.store import Entry, Listing, Store
from coordinator.core.view import ClusterConfig, Roster, View

log = fields.logger(__name__)

# What belongs to one identity of a cluster, and is deleted with it.
_KEYS = (VIEW, ROSTER, RESTORING, RANGE_RECOVERY, HELD_UP)
_BELOW = (TABLES, LAST_WORKER, DRAINS, LOSSES, KNOWN, CHANGES)
_TRACES = (ROSTER, SERVERS, INCARNATIONS, TABLES)  # a cluster that has one of these has had a config


class CannotAdopt(CoordinationError):
    """The servers and the store do not agree, or not enough is known; the text says what to do."""


@dataclass(frozen=True)
class Witness:
    """What one server knows of its cluster.

    newest  the highest number of a worker or a table that it has seen
    tables  specs by table id, as JSON
    apps    applications by table id, of the tables whose application it knows
    """

    name: str
    incarnation: int
    view: View
    roster: Roster
    newest: int
    tables: Mapping[int, str]
    apps: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Adoption:
    """What to write into a store so that it holds a cluster.

    writes          values by key, in this order; the config comes last
    unclear         names that several tables have: their workers create those tables again
    epoch, version  of the newest view and roster that servers know
    members         the servers of the cluster, by name and incarnation
    """

    writes: Mapping[str, bytes]
    unclear: tuple[str, ...]
    epoch: int
    version: int
    members: frozenset[tuple[str, int]]


def plan_adoption(witnesses: Sequence[Witness], given_up: Collection[str], app: str) -> Adoption:
    """Plans an adoption from what the servers of a cluster know. Raises CannotAdopt if a server is missing, or if they
    belong to several clusters. given_up: names of servers that cannot answer; app: the application of tables whose
    application no server knows."""
    clusters = sorted({witness.view.cluster for witness in witnesses})
    if len(clusters) != 1:
        raise CannotAdopt(f"these servers belong to {len(clusters)} clusters: {', '.join(clusters) or 'none'}")
    view = max((witness.view for witness in witnesses), key=lambda view: view.epoch)
    roster = max((witness.roster for witness in witnesses), key=lambda roster: roster.version)
    heard = {(witness.name, witness.incarnation) for witness in witnesses}
    silent = [s.name for s in view.servers if (s.name, s.incarnation) not in heard and s.name not in given_up]
    if silent:
        raise CannotAdopt(
            f"no answer from {', '.join(silent)}: bring them back, or say --without for each that is gone for good"
        )
    epoch, members = view.epoch, frozenset(heard | {(server.name, server.incarnation) for server in view.servers})
    view = replace(view, epoch=epoch + UNHEARD)
    specs = {number: spec for witness in witnesses for number, spec in witness.tables.items()}
    apps = {number: known for witness in witnesses for number, known in witness.apps.items() if known}
    tables, unclear = _tables(specs, {number: apps.get(number, app) for number in specs})
    incarnations: dict[str, int] = {}
    for name, number in members:
        incarnations[name] = max(number, incarnations.get(name, 0))
    newest = [witness.newest for witness in witnesses] + [worker.id for worker in roster.workers] + list(specs)
    # Above the base of the store before, even if no number was given out since: workers tell stores apart by the base.
    base = max(newest, default=0) + 1 + roster.version
    config = ClusterConfig(view.ranges, view.replicas, id=view.cluster.partition("@")[2], base=base)
    writes = {INCARNATIONS + SERVERS + name: str(number).encode() for name, number in incarnations.items()}
    writes |= tables
    roster = replace(roster, version=roster.version + 1)
    writes[ROSTER], writes[VIEW] = roster.encode(), view.encode()
    writes[CONFIG] = config.to_json()
    return Adoption(writes, unclear, epoch, roster.version, members)


def _tables(specs: Mapping[int, str], apps: Mapping[int, str]) -> tuple[dict[str, bytes], tuple[str, ...]]:
    keys: dict[str, list[int]] = {}
    for number, spec in specs.items():
        keys.setdefault(table_key(apps[number], str(json.loads(spec)["name"])), []).append(number)
    writes = {}
    for key, (number, *others) in keys.items():
        if not others:
            document = {"id": number, "spec": specs[number], "creator": 0, "by": "", "ready": True}
            writes[key] = json.dumps(document).encode()
    return writes, tuple(sorted({key.rpartition("/")[2] for key, numbers in keys.items() if len(numbers) > 1}))


async def adopt(store: Store, adoption: Adoption) -> None:
    """Carries an adoption out. A store that holds this cluster already gets back what it has lost of it. Raises
    CannotAdopt if nothing is lost, or if the store holds another cluster that has servers."""
    ours = ClusterConfig.from_json(adoption.writes[CONFIG]).identity(store.cluster)
    listing = await store.list("")
    state = ClusterState.parse(store.cluster, listing)
    registered = {(server.name, server.incarnation) for server in state.registered}
    held = "" if state.config is None else state.config.identity(store.cluster)
    if held == ours or (state.config is None and registered & adoption.members):
        await _mend(store, adoption, listing, state)
        return
    if state.servers:
        raise CannotAdopt(f"the store holds {held} with servers {', '.join(sorted(state.servers))}: end them first")
    await _clear(store, listing.entries)
    for key, value in adoption.writes.items():
        await store.put(key, value)
    await _give_notice(store, adoption, adoption.writes)


async def _mend(store: Store, adoption: Adoption, listing: Listing, state: ClusterState) -> None:
    """Puts back what the store has lost of a cluster that it holds, and leaves the rest."""
    revisions = {entry.key: entry.revision for entry in listing.entries}
    good = dict.fromkeys(revisions, True) | {
        VIEW: state.view is not None and state.view.epoch >= adoption.epoch,
        ROSTER: state.roster is not None and state.roster.version >= adoption.version,
        CONFIG: state.config is not None,
    }
    lost = [key for key in adoption.writes if not good.get(key)]
    if not lost:
        assert state.config is not None
        ours = state.config.identity(store.cluster)
        raise CannotAdopt(f"the store holds {ours} already, and nothing of it is lost")
    for key in lost:
        value = adoption.writes[key]
        if key == CONFIG:  # numbers count from the creation of its key, which may be later now
            config = ClusterConfig.from_json(value)
            value = replace(config, base=config.base + listing.revision).to_json()
        if await store.compare_and_set(key, value, expect=revisions.get(key, 0)) is None:
            raise CannotAdopt(f"somebody else has changed {key} just now: look at `elasticps status`, and try again")
    await _give_notice(store, adoption, lost)


async def _give_notice(store: Store, adoption: Adoption, written: Collection[str]) -> None:
    """Has those who follow the store read the view and the roster that were written: they know none from which a
    difference could begin."""
    for key, decode in ((VIEW, View.decode), (ROSTER, Roster.decode)):
        if key in written:
            await store.put(*change_of(decode(adoption.writes[key]), None))


async def restore_config(store: Store) -> ClusterConfig | None:
    """Returns the config of the cluster that the store holds. One that was lost is made again from the view. None if
    there never was one; raises CannotAdopt if there was, and the view is lost, too."""
    while True:
        listing = await store.list("")
        state = ClusterState.parse(store.cluster, listing)
        if state.config is not None:
            return state.config
        view = state.view
        if view is None:
            keys = [entry.key for entry in listing.entries]
            traces = [key for key in keys if key in (CONFIG, VIEW) or key.startswith(_TRACES)]
            if not traces:
                return None
            more = f" and {len(traces) - 1} more keys" if len(traces) > 1 else ""
            raise CannotAdopt(
                f"the store has lost the config of cluster {store.cluster}, and its view, but has {traces[0]}{more}: "
                "`elasticps cluster adopt` puts them back while servers live; if none does, delete all keys below "
                f"elasticps/{store.cluster}/ for a new one"
            )
        numbers = [worker.id for worker in state.roster.workers] if state.roster is not None else []
        numbers += [record.worker for record in state.records.values()]
        for entry in state.tables.values():
            with left_out():
                numbers.append(read(entry.key, entry.value, id=int)["id"])
        base = max(numbers, default=0) + listing.revision + UNHEARD
        made = ClusterConfig(view.ranges, view.replicas, id=view.cluster.partition("@")[2], base=base)
        if await store.compare_and_set(CONFIG, made.to_json(), expect=state.revisions[CONFIG]) is not None:
            log.warning("put back", key=CONFIG, why=f"it was lost, and the view of epoch {view.epoch} tells it")
            return made


@dataclass(frozen=True)
class DataGivenUp:
    """What a reset gives up: tables, by application and name, and the ranges that servers held."""

    tables: tuple[str, ...]
    ranges: int
    servers: tuple[str, ...]


async def look_at_dead(store: Store) -> DataGivenUp:
    """Returns what a reset would give up. Raises CannotAdopt if the store holds no cluster, or one with servers."""
    state = ClusterState.parse(store.cluster, await store.list(""))
    if not state.revisions[CONFIG]:
        raise CannotAdopt(f"the store holds no cluster {store.cluster}")
    if state.servers:
        raise CannotAdopt(f"cluster {store.cluster} is not dead: {', '.join(sorted(state.servers))} are registered")
    names = () if state.view is None else tuple(server.name for server in state.view.servers)
    tables = tuple(key.removeprefix(TABLES) for key in state.tables)
    return DataGivenUp(tables, 0 if state.view is None else state.view.ranges, names)


async def reset(store: Store, new_id: str) -> ClusterConfig:
    """Gives a cluster a new identity under its own name, with the same config and without data. Numbers go on."""
    entries = (await store.list("")).entries
    config = next((entry for entry in entries if entry.key == CONFIG), None)
    if config is None:
        raise CannotAdopt(f"the store holds no cluster {store.cluster}")
    made = replace(config_of(config), id=new_id)
    if await store.compare_and_set(CONFIG, made.to_json(), expect=config.revision) is None:
        raise CannotAdopt(f"somebody else has changed cluster {store.cluster} just now")
    await _clear(store, entries)
    ours = made.identity(store.cluster)
    while True:  # a leader that has not heard of it yet may have written one more
        listing = await store.list("")
        state = ClusterState.parse(store.cluster, listing)
        values = {VIEW: state.view, ROSTER: state.roster}
        old = [key for key, value in values.items() if state.revisions[key] and (not value or value.cluster != ours)]
        if not old:
            return made
        for key in old:
            below = VIEW_CHANGES if key == VIEW else ROSTER_CHANGES
            for entry in listing.entries:
                if entry.key.startswith(below):
                    await store.delete(entry.key, expect=entry.revision)
            await store.delete(key, expect=state.revisions[key])


async def _clear(store: Store, entries: Iterable[Entry]) -> None:
    """Deletes what belongs to one identity. The config is replaced, never deleted: numbers count from its creation."""
    for entry in entries:
        if entry.key in _KEYS or entry.key.startswith(_BELOW):
            await store.delete(entry.key, expect=entry.revision)
