"""Short visits to a cluster's coordination store: opens it, reads what a cluster is, closes it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from coordinator.connect import open_store
from coordinator.core.cluster_state import ClusterState
from coordinator.core.keys import CONFIG, SERVERS, TABLES, VIEW, TableEntry, server_of, table_of, view_of
from coordinator.core.records import left_out, noted, read
from coordinator.core.store import Entry, Store
from coordinator.core.url import parse
from coordinator.core.view import ServerInfo, View
from coordinator.membership import AT_ONCE
from elasticps.errors import ClusterUnreachable, ConfigError, Error

T = TypeVar("T")

NOT_YET = "cluster {!r} has no view: no server has served yet"
NO_CLUSTER = (
    "this etcd knows of no cluster {!r}: `elasticps up` or a coordinator makes one; if it has lost its data while "
    "servers live, `elasticps cluster adopt` takes them over"
)


@asynccontextmanager
async def opened(url: str, timeout_s: float) -> AsyncIterator[Store]:
    """The store at `url`, open until the block ends. ConfigError for an unusable URL, StoreUnavailable when etcd does
    not answer within `timeout_s`."""
    try:
        store = await open_store(url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        yield store
    finally:
        await store.close()


async def read_store(url: str, timeout_s: float, read: Callable[[Store], Awaitable[T]]) -> T:
    """Runs `read` with the store of the cluster at `url`. ConfigError for an unusable URL; ClusterUnreachable or
    StoreUnavailable when etcd does not answer within `timeout_s`."""
    try:
        cluster = parse(url)
        store = await open_store(url, timeout_s=timeout_s)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        async with asyncio.timeout(timeout_s):
            return await read(store)
    except TimeoutError:
        text = f"etcd at {', '.join(cluster.endpoints)} did not answer within {timeout_s:g} s"
        raise ClusterUnreachable(text) from None
    finally:
        await store.close()


async def read_state(store: Store) -> ClusterState:
    """All that the store holds of its cluster, parsed, as of one revision."""
    return ClusterState.parse(store.cluster, await store.list(""))


async def read_view(store: Store, error: type[Error] = ClusterUnreachable) -> View:
    """The cluster's view; raises `error` before there is one."""
    entry = await store.get(VIEW)
    if entry is None:
        made = await store.get(CONFIG) is not None
        raise error(NOT_YET.format(store.cluster) if made else NO_CLUSTER.format(store.cluster))
    return view_of(entry)


async def read_servers(store: Store) -> tuple[ServerInfo, ...]:
    """The registered servers, by name. Unreadable entries are left out."""
    found = []
    for entry in (await store.list(SERVERS)).entries:
        with left_out():
            found.append(server_of(entry.key, entry.value))
    return tuple(found)


async def read_tables(store: Store, *, dropping: bool = False) -> list[TableEntry]:
    """The registered tables, by name. Left out are unreadable entries, such as a spec with another name than its key,
    and a second table with an id that is taken. dropping: includes tables that are about to be dropped."""
    return tables_among((await store.list(TABLES)).entries, dropping=dropping)


def tables_among(
    entries: Iterable[Entry], *, dropping: bool = False, unreadable: dict[str, str] | None = None
) -> list[TableEntry]:
    """`read_tables` for entries that have been read already. unreadable: gets why an entry is left out, by key."""
    found: dict[int, TableEntry] = {}
    for entry in sorted(entries, key=lambda entry: entry.create_revision):
        with left_out() if unreadable is None else noted(entry.key, unreadable):
            table = table_of(entry.key, entry.value, dropping=dropping)
            if table is None:
                continue
            _check_name(entry.key, table)
            if found.setdefault(table.id, table) is not table:
                raise ValueError(f"{entry.key} has id {table.id}, which is that of {TABLES}{found[table.id].name}")
    return sorted(found.values(), key=lambda table: table.name)


async def entries_of(store: Store, keys: Sequence[str], prefix: str) -> Iterable[Entry]:
    """The entries of those `keys` that exist; all begin with `prefix`. Few are read one by one, many in one listing."""
    if len(keys) <= AT_ONCE:
        return filter(None, await asyncio.gather(*(store.get(key) for key in keys)))
    chosen = frozenset(keys)
    return [entry for entry in (await store.list(prefix)).entries if entry.key in chosen]


def _check_name(key: str, table: TableEntry) -> None:
    """ValueError if the spec has another name than the key. An unreadable spec is reported where it is needed."""
    try:
        name = read(f"the spec of {key}", table.spec.encode()).get("name")
    except ValueError:
        return
    if isinstance(name, str) and name != table.name.rpartition("/")[2]:
        raise ValueError(f"{key} has the spec of a table named {name!r:.200}")
