"""Being a member: create a cluster, register under a lease and keep it, follow views and rosters.

A name belongs to its newest incarnation: a counter in the store, raised by compare-and-set by everyone who registers.
Losing the store for a while is no reason to give up a name; a newer incarnation is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Generic, Protocol, TypeAlias, TypeVar

from coordinator import fields
from coordinator.errors import Fenced, LeaseLost, StoreUnavailable, UnknownServer
from coordinator.names import check_name
from coordinator.store import Entry, Put, Reset, Store
from coordinator.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo

log = fields.logger(__name__)

CONFIG, VIEW, ROSTER = "config", "view", "roster"
SERVERS, WORKERS = "servers/", "workers/"
DRAINS = "drains/"
SIGNED_OFF = b"signed off"
"""A worker's last word under its key: it is not coming back, whatever becomes of the lease."""

LEASE_S = 5.0  # how long a member stays registered without a word from it
_INCARNATIONS = "incarnations/"
_NEXT_WORKER_ID = "next-worker-id"

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
    while (entry := await store.get(CONFIG)) is None:
        if await store.compare_and_set(CONFIG, config.to_json(), expect=0) is not None:
            return config
    found = ClusterConfig.from_json(entry.value)
    if (found.ranges, found.replicas, found.protocol) != (config.ranges, config.replicas, config.protocol):
        raise ValueError(f"cluster {store.cluster} exists with {found}, which differs from {config}")
    return found


async def next_number(store: Store, key: str) -> int:
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
    found = json.loads(value)
    number = found.get("incarnation") if isinstance(found, dict) else None
    if type(number) is not int or number < 1:
        raise ValueError(f"not a request to drain: {value[:100]!r}")
    return number


class Session(Generic[Info]):
    """A registered name, kept by renewing a lease every third of its life until closed or fenced.

    info      who we are
    lease     the lease that our key is under now; another one after an outage that outlived the first
    deadline  loop time until which the store will keep our key, counted from when the last renewal was sent
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        info: Info,
        ttl_s: float,
        on_lost: Callable[[str], None],
        last_word: bytes = b"",
    ) -> None:
        self.info = info
        self._last_word = last_word
        self.lease = 0
        self.deadline = 0.0
        self._store = store
        self._key = prefix + info.name
        self._counter = _INCARNATIONS + self._key
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
        if self._last_word:
            with suppress(StoreUnavailable, LeaseLost, TimeoutError):
                async with asyncio.timeout(FAREWELL_S):
                    await self._sign_off()
        await farewell(self._store, self.lease)

    async def _sign_off(self) -> None:
        entry = await self._store.get(self._key)
        if entry is not None and entry.value == self.info.to_json():
            await self._store.compare_and_set(self._key, self._last_word, expect=entry.revision, lease=self.lease)

    async def _take(self) -> None:
        sent = asyncio.get_running_loop().time()
        self.lease = await self._store.grant(self._ttl_s)
        while True:
            await self._check_newest()
            entry = await self._store.get(self._key)
            expect = 0 if entry is None else entry.revision
            try:
                done = await self._store.compare_and_set(
                    self._key, self.info.to_json(), expect=expect, lease=self.lease
                )
            except LeaseLost:  # the attempts took longer than the lease lived
                sent = asyncio.get_running_loop().time()
                self.lease = await self._store.grant(self._ttl_s)
                continue
            if done is not None:
                self.deadline = sent + self._ttl_s
                return

    async def _check_newest(self) -> None:
        newest = _count(await self._store.get(self._counter))
        if newest > self.info.incarnation:
            raise Fenced(f"{self._key} now belongs to incarnation {newest}; this is {self.info.incarnation}")

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
        await self._check_newest()
        if await self._store.get(self._key) is None:
            await self._take()
        else:
            self.deadline = sent + left


ServerSession: TypeAlias = Session[ServerInfo]
WorkerSession: TypeAlias = Session[WorkerInfo]


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
) -> ServerSession:
    """Registers a server under a new incarnation and keeps it registered, through outages of the store too.

    `address` and `admin` are "host:port". `on_lost(reason)` is called once, and only when a newer incarnation has the
    name: then this one must not serve on. Raises ValueError for unusable arguments, Fenced if overtaken at once.
    """
    ServerInfo(name, 1, address, admin, zone, weight)  # refuse bad arguments before a number is spent on them
    incarnation = await next_number(store, _INCARNATIONS + SERVERS + name)
    info = ServerInfo(name, incarnation, address, admin, zone, weight)
    session = Session(store, SERVERS, info, ttl_s, on_lost)
    await session.start()
    return session


async def register_worker(
    store: Store, *, name: str, app: str, ttl_s: float = LEASE_S, on_lost: Callable[[str], None] = lambda reason: None
) -> WorkerSession:
    """Registers a worker under a new incarnation with an id (from 1) that no worker had before.

    `on_lost` and errors as for `register_server`.
    """
    WorkerInfo(1, name, 1, app)
    number = await next_number(store, _NEXT_WORKER_ID)
    incarnation = await next_number(store, _INCARNATIONS + WORKERS + name)
    session = Session(store, WORKERS, WorkerInfo(number, name, incarnation, app), ttl_s, on_lost, SIGNED_OFF)
    await session.start()
    return session


async def newest_incarnation(store: Store, server: str) -> int:
    """The last one that was given to a server of that name; 0 if there never was one."""
    return _count(await store.get(_INCARNATIONS + SERVERS + server))


class ViewFollower:
    """The newest view and roster, as the store tells them. Callbacks run in the event loop, in order."""

    def __init__(self, store: Store) -> None:
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
        if self.view is None or view.epoch > self.view.epoch:
            self.view = view
            _tell(self._on_view, view)

    def _adopt_roster(self, value: bytes) -> None:
        roster = Roster.decode(value)
        if self.roster is None or roster.version > self.roster.version:
            self.roster = roster
            _tell(self._on_roster, roster)


_T = TypeVar("_T")


def _tell(callbacks: list[Callable[[_T], None]], news: _T) -> None:
    for callback in callbacks:
        try:
            callback(news)
        except Exception:  # a subscriber's failure is its own: the others still hear the news
            log.exception("a subscriber failed")


def _count(entry: Entry | None) -> int:
    return 0 if entry is None else int(entry.value)
