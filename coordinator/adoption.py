"""A store made anew takes over a cluster whose servers live, or a cluster that is dead is given up. Pure decisions, and
the writes that carry them out.

What a store holds, servers know as well: the view, the roster, tables, and which numbers are in use. Two things they
may not know. Whether there is a newer view: one that only a server knew which is not asked; so all that the newest view
lists must answer, or be given up by name. And to which application a table belongs, if no server has read that: then it
is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import (
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
    server_of,
    table_key,
)
from coordinator.core.lost_keys import UNHEARD
from coordinator.core.records import left_out, read
from coordinator.core.store import Entry, Listing, Store
from coordinator.core.view import ClusterConfig, Roster, View, WorkerInfo

log = fields.logger(__name__)

_Value = TypeVar("_Value")


_KEYS = (VIEW, ROSTER, RESTORING, RANGE_RECOVERY, HELD_UP)  # of one identity
_BELOW = (TABLES, LAST_WORKER, DRAINS, LOSSES, KNOWN)
_TRACES = (ROSTER, SERVERS, INCARNATIONS, TABLES)  # none of these comes before the config


class CannotAdopt(CoordinationError):
    """What servers and the store say does not fit together; the text says what to do."""


@dataclass(frozen=True)
class Witness:
    """What one server knows. newest: the highest number it has seen of a worker or a table; tables: specs by id, as
    JSON; apps: whose they are, by id, as far as it knows."""

    name: str
    incarnation: int
    view: View
    roster: Roster
    newest: int
    tables: Mapping[int, str]
    apps: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Adoption:
    """What to write, by key, in this order; the config comes last. unclear: names of several tables, which are left to
    their workers. epoch, version: of the newest view and roster that servers know; members: the cluster's servers, by
    name and incarnation."""

    writes: Mapping[str, bytes]
    unclear: tuple[str, ...]
    epoch: int
    version: int
    members: frozenset[tuple[str, int]]


def plan_adoption(witnesses: Sequence[Witness], given_up: Collection[str], app: str) -> Adoption:
    """From what the servers of a cluster say. app: of tables of which none knows whose they are. CannotAdopt if that is
    not enough, or not one cluster."""
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
    # Above that of the store before, also where no number was given since: workers tell stores apart by it.
    base = max(newest, default=0) + 1 + roster.version
    config = ClusterConfig(view.ranges, view.replicas, id=view.cluster.partition("@")[2], base=base)
    writes = {INCARNATIONS + SERVERS + name: str(number).encode() for name, number in incarnations.items()}
    writes |= tables
    writes[ROSTER] = replace(roster, version=roster.version + 1).encode()
    writes[VIEW] = view.encode()
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
    """Lets the store hold the cluster that was planned; if it holds that already, puts back what it has lost of it.
    CannotAdopt if nothing is lost, or if it holds another one that has servers."""
    ours = ClusterConfig.from_json(adoption.writes[CONFIG]).identity(store.cluster)
    listing = await store.list("")
    entries = listing.entries
    config = _good(entries, CONFIG, ClusterConfig.from_json)
    held = "" if config is None else config.identity(store.cluster)
    if held == ours or (config is None and _registered(entries) & adoption.members):
        await _mend(store, adoption, listing, config)
        return
    if servers := _below(entries, SERVERS):
        raise CannotAdopt(f"the store holds {held} with servers {', '.join(servers)}: end them first")
    await _clear(store, entries)
    for key, value in adoption.writes.items():
        await store.put(key, value)


async def _mend(store: Store, adoption: Adoption, listing: Listing, config: ClusterConfig | None) -> None:
    """Puts back what the store has lost of a cluster that it holds, and leaves the rest."""
    entries = {entry.key: entry for entry in listing.entries}
    view, roster = _good(listing.entries, VIEW, View.decode), _good(listing.entries, ROSTER, Roster.decode)
    fresh = {
        VIEW: view is not None and view.epoch >= adoption.epoch,
        ROSTER: roster is not None and roster.version >= adoption.version,
        CONFIG: config is not None,
    }
    if all(fresh.get(key, key in entries) for key in adoption.writes):
        assert config is not None
        ours = config.identity(store.cluster)
        raise CannotAdopt(f"the store holds {ours} already, and nothing of it is lost")
    for key, value in adoption.writes.items():
        entry = entries.get(key)
        if fresh.get(key, entry is not None):
            continue
        if key == CONFIG:  # numbers count from its creation, which may be later now
            found = ClusterConfig.from_json(value)
            value = replace(found, base=found.base + listing.revision).to_json()
        if await store.compare_and_set(key, value, expect=entry.revision if entry else 0) is None:
            raise CannotAdopt(f"somebody else has changed {key} just now: look at `elasticps status`, and try again")


async def restore_config(store: Store) -> ClusterConfig | None:
    """The config of the cluster whose store this is; one that was lost is made again as the view tells it. None if
    there never was one. CannotAdopt if there was, and its view is lost, too."""
    while True:
        listing = await store.list("")
        entries, found = listing.entries, _find(listing.entries, CONFIG)
        if (config := _good(entries, CONFIG, ClusterConfig.from_json)) is not None:
            return config
        view = _good(entries, VIEW, View.decode)
        if view is None:
            traces = [entry.key for entry in entries if entry.key in (CONFIG, VIEW) or entry.key.startswith(_TRACES)]
            if not traces:
                return None
            more = f" and {len(traces) - 1} more keys" if len(traces) > 1 else ""
            raise CannotAdopt(
                f"the store has lost the config of cluster {store.cluster}, and its view, but has {traces[0]}{more}: "
                "`elasticps cluster adopt` puts them back while servers live; if none does, delete all keys below "
                f"elasticps/{store.cluster}/ for a new one"
            )
        numbers = [worker.id for entry in entries if entry.key == ROSTER for worker in _workers(entry.value)]
        for entry in entries:
            if entry.key.startswith((TABLES, LAST_WORKER)):
                with left_out():
                    numbers.append(read(entry.key, entry.value, id=int)["id"])
        base = max(numbers, default=0) + listing.revision + UNHEARD
        made = ClusterConfig(view.ranges, view.replicas, id=view.cluster.partition("@")[2], base=base)
        expect = 0 if found is None else found.revision
        if await store.compare_and_set(CONFIG, made.to_json(), expect=expect) is not None:
            log.warning("put back", key=CONFIG, why=f"it was lost, and the view of epoch {view.epoch} tells it")
            return made


def _workers(value: bytes) -> tuple[WorkerInfo, ...]:
    try:
        return Roster.decode(value).workers
    except ValueError:
        return ()


@dataclass(frozen=True)
class DataGivenUp:
    """What a reset gives up: tables, by application and name, and ranges that servers held."""

    tables: tuple[str, ...]
    ranges: int
    servers: tuple[str, ...]


async def look_at_dead(store: Store) -> DataGivenUp:
    """What a reset would give up. CannotAdopt if the store holds no cluster, or one with registered servers."""
    entries = (await store.list("")).entries
    if _find(entries, CONFIG) is None:
        raise CannotAdopt(f"the store holds no cluster {store.cluster}")
    if servers := _below(entries, SERVERS):
        raise CannotAdopt(f"cluster {store.cluster} is not dead: {', '.join(servers)} are registered")
    view = _good(entries, VIEW, View.decode)
    names = () if view is None else tuple(server.name for server in view.servers)
    return DataGivenUp(tuple(_below(entries, TABLES)), 0 if view is None else view.ranges, names)


async def reset(store: Store, new_id: str) -> ClusterConfig:
    """Begins a cluster anew under its own name, with the same config and another identity. Numbers go on."""
    entries = (await store.list("")).entries
    config = _find(entries, CONFIG)
    if config is None:
        raise CannotAdopt(f"the store holds no cluster {store.cluster}")
    made = replace(config_of(config), id=new_id)
    if await store.compare_and_set(CONFIG, made.to_json(), expect=config.revision) is None:
        raise CannotAdopt(f"somebody else has changed cluster {store.cluster} just now")
    await _clear(store, entries)
    ours = made.identity(store.cluster)
    decoders: Mapping[str, Callable[[bytes], View | Roster]] = {VIEW: View.decode, ROSTER: Roster.decode}
    for key, decode in decoders.items():  # a leader that has not heard of it yet may have written one more
        while (entry := await store.get(key)) is not None:
            found = _good([entry], key, decode)
            if found is not None and found.cluster == ours:
                break
            await store.delete(key, expect=entry.revision)
    return made


async def _clear(store: Store, entries: Iterable[Entry]) -> None:
    """Deletes what belongs to one identity. The config is replaced, never deleted: numbers count from its creation."""
    for entry in entries:
        if entry.key in _KEYS or entry.key.startswith(_BELOW):
            await store.delete(entry.key, expect=entry.revision)


def _find(entries: Iterable[Entry], key: str) -> Entry | None:
    return next((entry for entry in entries if entry.key == key), None)


def _good(entries: Iterable[Entry], key: str, decode: Callable[[bytes], _Value]) -> _Value | None:
    """What is under a key; None if it is not there, or makes no sense."""
    entry = _find(entries, key)
    try:
        return None if entry is None else decode(entry.value)
    except ValueError:
        return None


def _registered(entries: Iterable[Entry]) -> set[tuple[str, int]]:
    found = set()
    for entry in entries:
        if entry.key.startswith(SERVERS):
            with left_out():
                server = server_of(entry.key, entry.value)
                found.add((server.name, server.incarnation))
    return found


def _below(entries: Iterable[Entry], prefix: str) -> list[str]:
    return [entry.key.removeprefix(prefix) for entry in entries if entry.key.startswith(prefix)]
