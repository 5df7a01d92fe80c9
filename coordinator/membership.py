"""Being a member: create a cluster, register under a lease and keep it, follow views and rosters.

A name belongs to its newest incarnation. A server's is counted by name; a worker's is its id, which is taken from the
revision of a write, so that any number of workers may start at once. Losing the store for a while is no reason to give
up a name; a newer incarnation is. A store that holds another cluster under our name, as its data were lost and it was
made anew, is as good as lost: nobody registers there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from coordinator import fields
from coordinator.errors import Fenced, LeaseLost, OtherCluster, StoreUnavailable, UnknownServer
from coordinator.names import check_name
from coordinator.records import read
from coordinator.store import Entry, Guard, Put, Reset, Store
from coordinator.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from replication.chain import Member

log = fields.logger(__name__)

CONFIG, VIEW, ROSTER = "config", "view", "roster"
RESTORING = "restoring"  # while a whole cluster comes back from a checkpoint: workers wait
RESTORE_FILLS = "restore-fills"  # while servers bring rows back from a checkpoint, under a lease
SERVERS, WORKERS = "servers/", "workers/"
DRAINS = "drains/"
BEGIN_ANEW = "begin-anew"  # ranges of which nobody is left, and the checkpoint from which they are brought back
SIGNED_OFF = b"signed off"
"""A worker's last word under its key: it is not coming back, whatever becomes of the lease."""

LEASE_S = 5.0  # how long a member stays registered without a word from it
LAST_WORKER = "last-worker/"
"""Below it, by name, JSON with the `id` of the worker that took part last: no older one may come back."""
INCARNATIONS = "incarnations/"
NUMBERS = "numbers"
WANTED_CHECKPOINTS = "checkpoints/wanted/"
NEWEST_CHECKPOINT = "checkpoints/newest"  # its number, and when it was made; number 0: when they were first asked for
"""Below it, requests of workers, which the leader answers in their place."""
FAILOVER = "failover"  # the newest one: epoch of its view, and in Unix time when it was found, and written; for people

FAREWELL_S = 1.0  # a lease that the store does not take back by then runs out by itself
_RETRY_S = 0.2  # pause between attempts while the store is out; each attempt waits for the store's time-out as well


class _Info(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def incarnation(self) -> int: ...
    def to_json(self) -> bytes: ...


Info = TypeVar("Info", bound=_Info)


async def farewell(store: Store, lease: int) -> None:
    """Gives a lease back, if the store takes it within `FAREWELL_S`: who ends does not wait for longer."""
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await store.revoke(lease)


async def create_cluster(store: Store, config: ClusterConfig) -> ClusterConfig:
    """Creates the cluster, or returns the config of the one that exists.

    ValueError names both configs if the existing one differs in more than `min_servers`.
    """
    made = config if config.id else replace(config, id=secrets.token_hex(6))
    while (entry := await store.get(CONFIG)) is None:
        if await store.compare_and_set(CONFIG, made.to_json(), expect=0) is not None:
            return made
    found = ClusterConfig.from_json(entry.value)
    if (found.ranges, found.replicas, found.protocol) != (config.ranges, config.replicas, config.protocol):
        raise ValueError(f"cluster {store.cluster} exists with {found}, which differs from {config}")
    return found


async def new_number(store: Store) -> int:
    """A number above 0 that nobody gets again in this cluster, and above all that were given out before."""
    entry = await store.get(CONFIG)
    while True:
        revision = await store.put(NUMBERS, b"")
        before, entry = entry, await store.get(CONFIG)
        if entry == before:
            break  # else the store may have been made anew in between, where numbers count otherwise
    return number_of(entry, revision)


def number_of(config: Entry | None, revision: int) -> int:
    """The number that stands for a revision, of a write while the config was this: above those of all writes before,
    also in stores that this one has taken the cluster over from."""
    if config is None:
        return revision
    return ClusterConfig.from_json(config.value).base + revision - config.create_revision


async def _next_incarnation(store: Store, key: str) -> int:
    """Takes the next number, from 1, of the counter under `key`; nobody else gets the same one."""
    while True:
        entry = await store.get(key)
        number = _count(entry) + 1
        expect = 0 if entry is None else entry.revision
        if await store.compare_and_set(key, str(number).encode(), expect=expect) is not None:
            return number


async def request_drain(store: Store, name: str) -> ServerInfo:
    """Asks for everything that a server holds to be moved to others; returns the incarnation that this is about.

    Not refused where others cannot take it all, such as by the last server: it waits, and the view's reason says so.
    When nothing is left there, a view leaves the server out. UnknownServer if none of that name is registered.
    """
    while True:
        entry = await store.get(SERVERS + check_name("server", name))
        if entry is None:
            names = [e.key.removeprefix(SERVERS) for e in (await store.list(SERVERS)).entries]
            there = f"there are {', '.join(names)}" if names else "there are none"
            raise UnknownServer(f"cluster {store.cluster} has no server {name} registered; {there}")
        server = ServerInfo.from_json(entry.value)
        value = json.dumps({"incarnation": server.incarnation}).encode()
        asked = await store.get(DRAINS + name)
        if asked is not None and asked.value == value:
            return server
        expect = 0 if asked is None else asked.revision
        if await store.compare_and_set(DRAINS + name, value, expect=expect) is not None:
            return server


async def cancel_drain(store: Store, name: str) -> bool:
    """Takes the request back; what has moved stays where it is. False if there was none (any more)."""
    return await store.delete(DRAINS + check_name("server", name))


async def list_drains(store: Store) -> dict[str, int]:
    """The servers that are asked to drain, and which incarnations of them."""
    found = {}
    for entry in (await store.list(DRAINS)).entries:
        with suppress(ValueError):  # the leader logs what makes no sense
            found[entry.key.removeprefix(DRAINS)] = drained_incarnation(entry.value)
    return found


def drained_incarnation(value: bytes) -> int:
    """What is under `drains/<name>`. ValueError if it makes no sense."""
    number: int = read("a request to drain", value, incarnation=int)["incarnation"]
    if not number:
        raise ValueError("no server has incarnation 0")
    return number


class Session(ABC, Generic[Info]):
    """A registered name, kept by renewing a lease every third of its life until closed or fenced.

    info      who we are
    cluster   the identity of the cluster that we have registered in; base: numbers given out there are above it
    lease     the lease that our key is under now; another one after an outage that outlived the first
    deadline  loop time until which the store will keep our key, counted from when the last renewal was sent
    """

    def __init__(self, store: Store, prefix: str, info: Info, ttl_s: float, on_lost: Callable[[str], None]) -> None:
        self.info = info
        self.cluster = ""
        self.base = 0
        self.lease = 0
        self.deadline = 0.0
        self._store = store
        self._key = prefix + info.name
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Takes the name, from an older incarnation if need be, and begins to renew. Fenced if a newer one has it."""
        await self._take()
        self._task = asyncio.create_task(self._renew(), name=f"lease of {self._key}")

    async def close(self) -> None:
        """Stops renewing and gives the name up at once, or leaves that to the lease's end if the store is out."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await farewell(self._store, self.lease)

    @abstractmethod
    async def newest(self) -> int:
        """The newest incarnation that the store remembers for our name, whether it is registered or not."""

    async def _take(self) -> None:
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
                return

    async def restore(self) -> None:
        """Registered, perhaps in a store that was made anew and has taken our cluster over."""

    async def our_cluster(self) -> Guard | None:
        """What holds while the store holds the cluster that we belong to. OtherCluster if it does not."""
        entry = await self._store.get(CONFIG)
        found = identity_of(self._store, entry)
        if self.cluster and found != self.cluster:
            raise OtherCluster(other_cluster(self.cluster, found))
        self.cluster = found
        self.base = 0 if entry is None else ClusterConfig.from_json(entry.value).base
        return None if entry is None else Guard(CONFIG, entry.create_revision)

    async def _check_newest(self) -> Entry | None:
        """What is registered under our name. Fenced if that, or what the store remembers, is newer than we are."""
        newest = await self.newest()
        entry = await self._store.get(self._key)
        if entry is not None:
            newest = max(newest, _incarnation(entry.value))
        if newest > self.info.incarnation:
            raise Fenced(f"{self._key} now belongs to incarnation {newest}; this is {self.info.incarnation}")
        return entry

    async def _renew(self) -> None:
        out = False
        while True:
            await asyncio.sleep(_RETRY_S if out else self._ttl_s / 3)
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

    async def _renew_once(self) -> None:
        sent = asyncio.get_running_loop().time()
        try:
            left = await self._store.keep_alive(self.lease)
        except LeaseLost:
            log.warning("the lease ran out; registering again", key=self._key, incarnation=self.info.incarnation)
            await self._take()
            return
        entry = await self._check_newest()
        if entry is None or entry.value != self.info.to_json():  # nobody would find us by what else is there
            await self._take()
        else:
            self.deadline = sent + left


class ServerSession(Session[ServerInfo]):
    """A server's. Its incarnations are counted by name."""

    async def newest(self) -> int:
        return _count(await self._store.get(INCARNATIONS + self._key))


class WorkerSession(Session[WorkerInfo]):
    """A worker's. Its incarnation is its id. took_part: its own record is in the store; without it the cluster has
    forgotten the worker, which must not come back then, unless the store was made anew meanwhile.

    belongings  what this worker has written, by key: put back, where nobody else has, into a store made anew
    """

    took_part = False
    _restored = 0  # the base of the store that has our belongings

    def __init__(
        self, store: Store, prefix: str, info: WorkerInfo, ttl_s: float, on_lost: Callable[[str], None]
    ) -> None:
        super().__init__(store, prefix, info, ttl_s, on_lost)
        self.belongings: dict[str, bytes] = {}

    async def restore(self) -> None:
        if self.base > self._restored:
            for key, value in list(self.belongings.items()):
                await self._store.compare_and_set(key, value, expect=0)
        self._restored = self.base

    async def newest(self) -> int:
        record = await self._store.get(LAST_WORKER + self.info.name)
        if record is not None:
            try:
                return last_worker(record.value)
            except ValueError as error:
                if (ours := self.belongings.get(record.key)) is None:
                    raise
                log.warning("put back", key=record.key, reason=str(error))
                await self._store.compare_and_set(record.key, ours, expect=record.revision)
                return last_worker(ours)
        if self.took_part:
            await self.our_cluster()
            if self.base == self._restored:
                raise Fenced(f"{self._key} was away for so long that the cluster has forgotten it")
        return 0

    async def close(self) -> None:
        """Says that it leaves, so that nobody waits for it to come back; then as any member."""
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
    """Registers a server under a new incarnation and keeps it registered, through outages of the store too.

    `address` and `admin` are "host:port". `on_lost(reason)` is called once, and only when a newer incarnation has the
    name: then this one must not serve on. `cluster`: the identity that the store's cluster must have. Raises ValueError
    for unusable arguments, Fenced if overtaken at once, OtherCluster.
    """
    ServerInfo(name, 1, address, admin, zone, weight)  # refuse bad arguments before a number is spent on them
    if cluster and (found := identity_of(store, await store.get(CONFIG))) != cluster:
        raise OtherCluster(other_cluster(cluster, found))
    incarnation = await _next_incarnation(store, INCARNATIONS + SERVERS + name)
    info = ServerInfo(name, incarnation, address, admin, zone, weight)
    session = ServerSession(store, SERVERS, info, ttl_s, on_lost)
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
    number = await new_number(store)
    session = WorkerSession(store, WORKERS, WorkerInfo(number, name, number, app), ttl_s, on_lost)
    session.cluster = cluster
    await session.start()
    return session


async def newest_incarnation(store: Store, server: str) -> int:
    """The last one that was given to a server of that name; 0 if there never was one."""
    return _count(await store.get(INCARNATIONS + SERVERS + server))


class ViewFollower:
    """The newest view and roster, as the store tells them. Callbacks run in the event loop, in order. ended: is called
    with a task that follows, when it is over."""

    def __init__(self, store: Store, ended: Callable[[asyncio.Task[None]], object] = lambda task: None) -> None:
        self._ended = ended
        self.view: View | None = None
        self.roster: Roster | None = None
        self._store = store
        self._on_view: list[Callable[[View], None]] = []
        self._on_roster: list[Callable[[Roster], None]] = []
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads what there is, then follows. ValueError if the store holds no valid view or roster of ours."""
        for key, adopt in ((VIEW, self._adopt_view), (ROSTER, self._adopt_roster)):
            listing = await self._store.list(key)
            for entry in listing.entries:
                if entry.key == key:
                    adopt(entry.value)
            task = asyncio.create_task(self._follow(key, listing.revision, adopt), name=f"following the {key}")
            task.add_done_callback(self._ended)
            self._tasks.append(task)

    def subscribe(self, callback: Callable[[View], None]) -> None:
        """Calls back for each newer view, and at once if there is one already. Views between may be left out."""
        self._on_view.append(callback)
        if self.view is not None:
            callback(self.view)

    def subscribe_roster(self, callback: Callable[[Roster], None]) -> None:
        """Calls back for each newer roster, and at once if there is one already."""
        self._on_roster.append(callback)
        if self.roster is not None:
            callback(self.roster)

    async def wait_for(self, predicate: Callable[[View], bool], timeout_s: float) -> View:
        """The first view seen, from the present one on, that satisfies `predicate`. TimeoutError says where we are."""

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while self.view is None or not predicate(self.view):
                    await self._changed.wait()
                return self.view
        except TimeoutError:
            at = "no view yet" if self.view is None else f"at epoch {self.view.epoch}: {self.view.reason}"
            raise TimeoutError(f"cluster {self._store.cluster} did not get there in {timeout_s:g} s; {at}") from None

    async def close(self) -> None:
        """Stops following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, key: str, after: int, adopt: Callable[[bytes], None]) -> None:
        async with aclosing(self._store.watch(key, after=after)) as changes:
            async for change in changes:
                entries = change.listing.entries if isinstance(change, Reset) else ()
                for entry in (change.entry,) if isinstance(change, Put) else entries:
                    if entry.key != key:
                        continue
                    try:
                        adopt(entry.value)
                    except ValueError:  # one bad value must not end the following
                        log.exception("not adopted", key=key, revision=entry.revision)
                async with self._changed:
                    self._changed.notify_all()

    def _adopt_view(self, value: bytes) -> None:
        view = View.decode(value)
        if self.view is not None and view.cluster != self.view.cluster:
            log.warning("a view is ignored", reason=other_cluster(self.view.cluster, view.cluster))
        elif self.view is None or view.epoch > self.view.epoch:
            self.view = view
            _tell(self._on_view, view)

    def _adopt_roster(self, value: bytes) -> None:
        roster = Roster.decode(value)
        known = self.roster
        if known is None or (roster.cluster == known.cluster and roster.version > known.version):
            self.roster = roster
            _tell(self._on_roster, roster)


_T = TypeVar("_T")


def _tell(callbacks: list[Callable[[_T], None]], news: _T) -> None:
    for callback in callbacks:
        try:
            callback(news)
        except Exception:  # a subscriber's failure is its own: the others still hear the news
            log.exception("a subscriber failed")


def identity_of(store: Store, config: Entry | None) -> str:
    """The identity of the cluster that a store holds, "" if it holds none; `config`: what is under that key."""
    return "" if config is None else ClusterConfig.from_json(config.value).identity(store.cluster)


def other_cluster(ours: str, found: str) -> str:
    """What to say of a store that holds another cluster than ours, or none."""
    there = f"holds cluster {found}" if found else "holds no cluster"
    return f"the store {there}, not {ours}: its data were lost, or it was made anew; see `elasticps cluster --help`"


def begins_anew(value: bytes) -> tuple[frozenset[int], frozenset[Member]]:
    """What is under `begin-anew`: ranges, and members that are given up. ValueError if it makes no sense."""
    said = read(BEGIN_ANEW, value, ranges=list, given_up=list)
    try:
        given_up = frozenset(Member(str(name), int(incarnation)) for name, incarnation in said["given_up"])
        return frozenset(map(int, said["ranges"])), given_up
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{BEGIN_ANEW} makes no sense: {error}") from None


def last_worker(value: bytes) -> int:
    """The id in a record below `last-worker/`. ValueError if there is none."""
    number: int = read("a record of a worker", value, id=int)["id"]
    return number


def _incarnation(value: bytes) -> int:
    """Whose key it is; 0 for what is no registration."""
    try:
        number: int = read("a registration", value, incarnation=int)["incarnation"]
    except ValueError:
        return 0
    return number


def _count(entry: Entry | None) -> int:
    return 0 if entry is None else int(entry.value)
