"""A registered name, kept by renewing its lease through outages of the store.

A name belongs to its newest incarnation. Incarnations of servers are counted by name; a worker's incarnation is its id,
the revision of a write, so that any number of workers may start at once. A newer incarnation ends a session; an outage
of the store does not. A store that holds another cluster under the same name, because its data were lost, counts as
out: no member registers there.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Generic, Protocol, TypeVar

from coordinator.core import fields
from coordinator.core.errors import Damaged, Fenced, LeaseLost, OtherCluster, StoreUnavailable
from coordinator.core.keys import (
    CONFIG,
    INCARNATIONS,
    ROSTER,
    SERVERS,
    SIGNED_OFF,
    config_of,
    identity_of,
    last_worker,
    other_cluster,
    record_key,
    roster_of,
    worker_key,
)
from coordinator.core.names import app_of_worker
from coordinator.core.records import read
from coordinator.core.store import Entry, Guard, Put, Reset, Store
from coordinator.core.view import ServerInfo, WorkerInfo
from coordinator.membership import FAREWELL_S, LEASE_S, farewell, new_number

log = fields.logger(__name__)

_COUNT_MOST = 18  # digits of a count of incarnations, which are below 1 << 62
_RENEW_AFTER = 0.4  # of a lease's life: renewals cost a process that is idle more than all else that it does
_RETRY_S = 0.2  # pause between attempts while the store is out; each attempt waits for the store's time-out as well


class _Info(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    def to_json(self) -> bytes: ...


Info = TypeVar("Info", bound=_Info)


class Session(ABC, Generic[Info]):
    """A registered name, kept by renewing a lease before half of its life is over, until closed or fenced.

    It watches its keys, and reads them again only when one has changed, or after a call that failed: thousands of
    members that read them at each renewal would keep etcd busy.

    info      the member that is registered
    cluster   the identity of the cluster in which it is registered
    base      the numbers that the cluster gives out are above it
    lease     the lease of the key; another one after an outage that outlived the first
    deadline  loop time until which the store will keep the key, counted from when the last renewal was sent
    """

    def __init__(self, store: Store, key: str, info: Info, ttl_s: float, on_lost: Callable[[str], None]) -> None:
        self.info = info
        self.cluster = ""
        self.base = 0
        self.lease = 0
        self.deadline = 0.0
        self._store = store
        self._key = key
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()  # set when the keys are to be read with the next renewal

    async def start(self) -> None:
        """Takes the name, also from an older incarnation, and begins to renew. Raises Fenced if a newer one has it."""
        revision = await self._take()
        for key in (self._key, self._memory):
            self._watches.append(asyncio.create_task(self._watch(key, revision), name=f"watch of {key}"))
        self._changed.set()  # `_memory` may have changed before its watch began
        self._task = asyncio.create_task(self._renew(), name=f"lease of {self._key}")

    async def close(self) -> None:
        """Stops renewing, and gives the name up at once; if the store is out, the name ends with its lease."""
        await self._stop()
        await farewell(self._store, self.lease)

    async def _stop(self) -> None:
        tasks = [*self._watches, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    @abstractmethod
    def _memory(self) -> str:
        """The key by which the store remembers the newest incarnation of this name."""

    @abstractmethod
    async def newest(self) -> int:
        """Returns the newest incarnation of this name that the store remembers, registered or not."""

    async def _take(self) -> int:
        """Takes the name; returns the revision of that write."""
        sent = asyncio.get_running_loop().time()
        self.lease = await self._store.grant(self._ttl_s)
        while True:
            guard = await self.our_cluster()
            entry = await self._check_newest()
            expect = 0 if entry is None else entry.revision
            try:
                done = await self._store.compare_and_set(
                    self._key, self.info.to_json(), expect=expect, lease=self.lease, guard=guard
                )
            except LeaseLost:  # the attempts took longer than the lease lived
                sent = asyncio.get_running_loop().time()
                self.lease = await self._store.grant(self._ttl_s)
                continue
            if done is not None:
                self.deadline = sent + self._ttl_s
                await self.restore()
                return done

    async def restore(self) -> None:
        """Called when the member has registered, also in a new store that has adopted the cluster."""

    async def our_cluster(self) -> Guard | None:
        """Returns a condition that holds while the store holds this member's cluster. Raises OtherCluster if it does
        not."""
        entry = await self._store.get(CONFIG)
        found = identity_of(self._store, entry)
        if self.cluster and found != self.cluster:
            raise OtherCluster(other_cluster(self.cluster, found))
        self.cluster = found
        self.base = 0 if entry is None else config_of(entry).base
        return None if entry is None else Guard(CONFIG, entry.create_revision)

    async def _check_newest(self) -> Entry | None:
        """Returns the entry that is registered under this name. Raises Fenced if it, or the incarnation that the store
        remembers, is newer than this one."""
        newest = await self.newest()
        entry = await self._store.get(self._key)
        newest = max(newest, _incarnation(entry))
        if newest > self.info.incarnation:
            raise Fenced(f"{self._key} now belongs to incarnation {newest}; this is {self.info.incarnation}")
        return entry

    async def _watch(self, key: str, after: int) -> None:
        async with aclosing(self._store.watch(key, after=after)) as changes:
            async for change in changes:
                if isinstance(change, Reset) or key == (change.entry.key if isinstance(change, Put) else change.key):
                    self._changed.set()

    async def _renew(self) -> None:
        out = False
        while True:
            await self._pause(out)
            try:
                await self._renew_once()
            except StoreUnavailable as error:
                if not out:
                    log.warning("cannot be renewed, trying on", key=self._key, error=error)
                out = True
            except Exception as error:  # a member must not go on believing that it is registered when it is not
                if not isinstance(error, Fenced):
                    log.exception("renewing failed", key=self._key)
                self._on_lost(str(error) or repr(error))
                return
            else:
                if out:
                    log.warning("renewed again", key=self._key)
                out = False

    async def _pause(self, out: bool) -> None:
        """Waits until the lease is to be renewed; not so long if our keys change or the store was out."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_RETRY_S if out else self._ttl_s * _RENEW_AFTER):
                await self._changed.wait()
                await asyncio.sleep(_RETRY_S)  # changes that come together, and a store that hands them out in parts

    async def _renew_once(self) -> None:
        look = self._changed.is_set() or any(watch.done() for watch in self._watches)
        self._changed.clear()
        try:
            sent = asyncio.get_running_loop().time()
            left = await self._store.keep_alive(self.lease)
            entry = await self._check_newest() if look else None
            if look and (entry is None or entry.value != self.info.to_json()):  # peers could not find this member
                await self._take()
            else:
                self.deadline = sent + left
                await self.restore()  # what a store has not taken that stopped answering in the midst of it
        except LeaseLost:
            self._changed.set()  # until the name is taken
            log.warning("the lease ran out; registering again", key=self._key, incarnation=self.info.incarnation)
            await self._take()
        except BaseException:
            self._changed.set()
            raise


class ServerSession(Session[ServerInfo]):
    """The session of a server. Its incarnations are counted by name."""

    @property
    def _memory(self) -> str:
        return INCARNATIONS + self._key

    async def newest(self) -> int:
        key, ours = self._memory, self.info.incarnation
        entry = await self._store.get(key)
        try:
            if (found := _count(entry)) >= ours:
                return found
            why = "a store that was made anew does not know of it"
            if 0 < (other := _incarnation(await self._store.get(self._key))) < ours:  # it came there, and has ranges
                raise Fenced(
                    f"{self._key} belongs to incarnation {other}, of a store that was made anew; this is {ours}"
                )
        except Damaged as error:  # then this incarnation is the newest that is known
            why = str(error)
        log.warning("put back", key=key, reason=why)
        expect = 0 if entry is None else entry.revision
        await self._store.compare_and_set(key, str(ours).encode(), expect=expect)
        return ours


class WorkerSession(Session[WorkerInfo]):
    """The session of a worker, whose incarnation is its id.

    took_part   the worker's record is in the store; without it the cluster has forgotten the worker, which must not
                come back then, unless the store was replaced meanwhile
    belongings  values that this worker has written, by key: put back into a new store where no other worker has
    """

    took_part = False
    _restored = 0  # the base of the store that has our belongings

    def __init__(self, store: Store, key: str, info: WorkerInfo, ttl_s: float, on_lost: Callable[[str], None]) -> None:
        super().__init__(store, key, info, ttl_s, on_lost)
        self.belongings: dict[str, bytes] = {}

    @property
    def _memory(self) -> str:
        return record_key(self.info.name)

    async def restore(self) -> None:
        if self.base > self._restored:
            for key, value in list(self.belongings.items()):
                await self._store.compare_and_set(key, value, expect=0)
        self._restored = self.base

    async def newest(self) -> int:
        key = self._memory
        record, ours = await self._store.get(key), self.belongings.get(key)
        if record is not None:
            try:
                return last_worker(record.value)
            except ValueError as error:
                if ours is None:
                    raise
                why = str(error)
        elif not self.took_part:
            return 0
        else:
            await self.our_cluster()
            if self.base != self._restored:  # a new store, into which all belongings are put back
                return 0
            if ours is None or not await self._listed():
                raise Fenced(
                    f"{self._key} was away for so long that the cluster has forgotten it: there is no {key}, and the "
                    "roster does not list it"
                )
            why = "somebody has deleted it"  # not a leader: a leader forgets no listed worker
        log.warning("put back", key=key, reason=why)
        await self._store.compare_and_set(key, ours, expect=0 if record is None else record.revision)
        return last_worker(ours)

    async def _listed(self) -> bool:
        """Whether the roster lists this incarnation."""
        entry = await self._store.get(ROSTER)
        return entry is not None and self.info in roster_of(entry).workers

    async def close(self) -> None:
        """Signs the worker off, so that it is not expected back, then closes as any session does."""
        if self._task is not None:
            self._task.cancel()
        with suppress(StoreUnavailable, LeaseLost, TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                entry = await self._store.get(self._key)
                if entry is not None and entry.value == self.info.to_json():
                    await self._store.compare_and_set(self._key, SIGNED_OFF, expect=entry.revision, lease=self.lease)
        await super().close()


async def register_server(
    store: Store,
    *,
    name: str,
    address: str,
    admin: str = "",
    zone: str = "",
    weight: float = 1.0,
    ttl_s: float = LEASE_S,
    on_lost: Callable[[str], None],
    cluster: str = "",
) -> ServerSession:
    """Registers a server under a new incarnation, and keeps it registered through outages of the store.

    `address` and `admin` are "host:port". `on_lost(reason)` is called once, and only when a newer incarnation has the
    name: then this one must not serve on. `cluster`: the identity that the store's cluster must have. Raises ValueError
    for unusable arguments, Fenced if overtaken at once, Damaged if its count makes no sense, OtherCluster.
    """
    ServerInfo(name, 1, address, admin, zone, weight)  # refuse bad arguments before a number is spent on them
    if cluster and (found := identity_of(store, await store.get(CONFIG))) != cluster:
        raise OtherCluster(other_cluster(cluster, found))
    incarnation = await _next_incarnation(store, INCARNATIONS + SERVERS + name)
    info = ServerInfo(name, incarnation, address, admin, zone, weight)
    session = ServerSession(store, SERVERS + name, info, ttl_s, on_lost)
    session.cluster = cluster
    await session.start()
    return session


async def register_worker(
    store: Store,
    *,
    name: str,
    app: str,
    ttl_s: float = LEASE_S,
    on_lost: Callable[[str], None] = lambda reason: None,
    cluster: str = "",
) -> WorkerSession:
    """Registers a worker with an id, above 0, that no worker had before; its incarnation is the same number.

    `on_lost`, `cluster` and errors as for `register_server`.
    """
    WorkerInfo(1, name, 1, app)
    if app_of_worker(name) != app:
        raise ValueError(f"worker {name!r} cannot be one of application {app!r}: call it {app}/NAME")
    number = await new_number(store)
    session = WorkerSession(store, worker_key(name), WorkerInfo(number, name, number, app), ttl_s, on_lost)
    session.cluster = cluster
    await session.start()
    return session


async def newest_incarnation(store: Store, server: str) -> int:
    """Returns the newest incarnation of a server; 0 if there never was one."""
    return _count(await store.get(INCARNATIONS + SERVERS + server))


async def _next_incarnation(store: Store, key: str) -> int:
    """Takes the next number, from 1, of the counter under `key`; every caller gets another one."""
    while True:
        entry = await store.get(key)
        number = _count(entry) + 1
        expect = 0 if entry is None else entry.revision
        if await store.compare_and_set(key, str(number).encode(), expect=expect) is not None:
            return number


def _incarnation(entry: Entry | None) -> int:
    """Returns the incarnation in a registration; 0 if there is none, or if it makes no sense."""
    try:
        number: int = 0 if entry is None else read("a registration", entry.value, incarnation=int)["incarnation"]
    except ValueError:
        return 0
    return number


def _count(entry: Entry | None) -> int:
    if entry is None:
        return 0
    if not entry.value.isdigit() or len(entry.value) > _COUNT_MOST:
        raise Damaged(
            f"{entry.key} holds {entry.value[:40]!r}, which is no number: put there the newest incarnation that a "
            "server of that name had, as `elasticps status` and the logs tell"
        )
    return int(entry.value)
