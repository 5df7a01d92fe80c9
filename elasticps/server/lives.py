"""One `Server` after another in one process: registered, listening, following views, until it is asked to end.

A server that a view has left out gives its copy up and begins another life under a new incarnation, on the same port.
Knows no signals and opens no socket, so that the simulator runs exactly this.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

from coordinator import fields
from coordinator.errors import CoordinationError, StoreUnavailable
from coordinator.membership import ROSTER, SERVERS, VIEW, ViewFollower, list_drains, request_drain, server_of
from coordinator.sessions import ServerSession, newest_incarnation, register_server
from coordinator.store import Entry as StoreEntry
from coordinator.store import Store
from coordinator.view import ClusterConfig, Roster, View
from elasticps import logs
from elasticps.coordination import read_tables
from elasticps.errors import SpecError
from elasticps.security.gate import Gate
from elasticps.server import fatal
from elasticps.server.protocol.headroom import NO_LIMIT, Memory
from elasticps.server.protocol.registered import Entry
from elasticps.server.replica_links import BEAT_S
from elasticps.server.server import Server
from elasticps.spec import TableSpec
from replication.chain import Member

log = fields.logger(__name__)

REPORT_S = 0.1
REGISTER_AGAIN_S = 0.2
OTHERS_LOOK_S = 0.5  # whether somebody is there to drain to

Build = Callable[[ServerSession, str, int, asyncio.AbstractEventLoop], Server]


@dataclass(frozen=True)
class Identity:
    """What a server registers of itself; addresses are "host:port"."""

    name: str
    address: str
    admin: str = ""
    zone: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """Where a server lives. `sock` listens all the time; `show` hears which life serves now, None between two."""

    store: Store
    config: ClusterConfig
    sock: socket.socket
    build: Build
    show: Callable[[Server | None], Awaitable[None]]


async def live(
    around: Surroundings,
    me: Identity,
    stop: asyncio.Future[str],
    leave: asyncio.Future[str],
    *,
    wait_s: float,
    drain_timeout_s: float,
) -> None:
    """Serves until `stop` is done, or until all has moved elsewhere once `leave` is, or `drain_timeout_s` have passed
    and nothing has its last copy here.

    Waits `wait_s` for the store before its first life, and as long as it takes before each other. Raises
    coordinator's `StoreUnavailable` when that was not enough, `Fenced` when the name is lost.
    """
    loop = asyncio.get_running_loop()
    served = False
    incarnation = 0
    registered_by = loop.time() + wait_s
    while not stop.done():
        try:
            if incarnation and (newest := await newest_incarnation(around.store, me.name)) > incarnation:
                resolve(stop, f"{me.name} now belongs to incarnation {newest}; this was {incarnation}")
                return  # to register again would take the name back, and so on for ever
            session = await register_server(
                around.store,
                name=me.name,
                address=me.address,
                admin=me.admin,
                zone=me.zone,
                weight=me.weight,
                on_lost=lambda reason: resolve(stop, reason),
                cluster=around.config.identity(around.store.cluster),
            )
            incarnation = session.info.incarnation
            try:
                async with _life(around, session) as server:
                    served = True
                    await around.show(server)
                    await asyncio.wait((stop, leave, server.removed), return_when=asyncio.FIRST_COMPLETED)
                    await around.show(None)
                    if leave.done() and not stop.done():
                        await _drain(around.store, server, stop, drain_timeout_s)
                # Only now: as long as the store does not answer, a leader may give what is left out ranges again.
                if not stop.done() and await _drained(around.store, session):
                    resolve(stop, "drained")
            finally:
                await session.close()
            if leave.done():  # as another one it would be given ranges, and go with them
                resolve(stop, "SIGTERM; the view has left it out before it was drained")
        except StoreUnavailable as error:  # only before it serves: from then on it does without the store
            if not served and loop.time() > registered_by:
                raise
            log.warning("cannot register, trying on", error=error)
            await asyncio.wait((stop, leave), timeout=REGISTER_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if leave.done():
                resolve(stop, "SIGTERM, before it was registered")


@asynccontextmanager
async def _life(around: Surroundings, session: ServerSession) -> AsyncIterator[Server]:
    """One incarnation: a server that listens and follows views and rosters."""
    loop, store = asyncio.get_running_loop(), around.store
    async with AsyncExitStack() as stack:
        server = around.build(session, session.cluster, around.config.ranges, loop)
        stack.callback(server.close)
        logs.bind(incarnation=session.info.incarnation, epoch=lambda: server.serving.epoch)
        follower = ViewFollower(store, fatal.watch)
        stack.push_async_callback(follower.close)
        follower.subscribe(server.adopt)
        follower.subscribe_roster(server.follow)
        await follower.start()
        server.know_tables(await _tables(store))
        listener = await server.streams.create_server(server.connection, sock=around.sock.dup())
        stack.callback(listener.close)
        for work in (_beat(server), _report(server), _refresh(store, server)):
            task = asyncio.create_task(work)
            task.add_done_callback(fatal.watch)
            stack.callback(task.cancel)
        yield server


async def _drain(store: Store, server: Server, stop: asyncio.Future[str], timeout_s: float) -> None:
    """Asks the leader to move everything off this server, and waits until it has, or for `stop`, or too long. As long
    as this is the last copy of something it is not too long, unless there was to be no time at all."""
    log.info("draining", ranges_held=server.subject.status()["ranges_held"], timeout_s=timeout_s)
    if not server.serving.listed:
        resolve(stop, "SIGTERM, before any view knew it")
        return
    loop = asyncio.get_running_loop()
    until = loop.time() + timeout_s
    asked = stays = False
    while timeout_s > 0 and not (stop.done() or server.removed.done()):
        asked = asked or await _asked(store, server)
        if await _nobody_else(store, server):
            log.warning("ends at once: no server is there that could take what it holds")
            break
        left = until - loop.time()
        if left <= 0:
            if not (alone := _last_copies(server)):
                break
            if not stays:
                log.error("stays, though its time is over: it has the last copy; SIGTERM again ends it", ranges=alone)
            stays = True
        wait_s = OTHERS_LOOK_S if left <= 0 else min(left, OTHERS_LOOK_S)
        await asyncio.wait((stop, server.removed), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    if not server.removed.done():
        held = server.subject.status()["ranges_held"]
        log.warning("ends with ranges still held: what has no other replica is lost", ranges_held=held)
        resolve(stop, "SIGTERM")


async def _asked(store: Store, server: Server) -> bool:
    """Whether the leader could be asked."""
    try:
        await request_drain(store, server.me.name)
    except (CoordinationError, ValueError) as error:  # or what is there under our name cannot be read
        log.warning("cannot ask to be drained, trying on", error=error)
        return False
    return True


def _last_copies(server: Server) -> int:
    """Of how many ranges no other server has a whole copy, as far as this one has heard."""
    view = server.serving.view
    if view is None or not server.serving.listed:
        return 0
    mine = (view.chains == view.index(server.me.name)).any(axis=1)
    alone = mine & ((view.chains >= 0).sum(axis=1) == 1)
    return int(alone.sum())


async def _nobody_else(store: Store, server: Server) -> bool:
    """Whether every server that is registered, or in the view, has been asked to go. One whose entry cannot be read has
    not."""
    try:
        listing, drains = await store.list(SERVERS), await list_drains(store)
    except StoreUnavailable:
        return False
    there = {_member(entry) for entry in listing.entries}
    there |= {other.member for other in view.servers} if (view := server.serving.view) is not None else set()
    return all(drains.get(member.name) == member.incarnation for member in there)


def _member(entry: StoreEntry) -> Member:
    """Who is registered; of an entry that cannot be read, an incarnation that there never is."""
    try:
        return server_of(entry.key, entry.value).member
    except ValueError:
        return Member(entry.key.removeprefix(SERVERS), 0)


async def _drained(store: Store, session: ServerSession) -> bool:
    """Whether this incarnation has been asked to go, by whomever: then it does not come back as another one."""
    with suppress(StoreUnavailable):
        return (await list_drains(store)).get(session.info.name) == session.info.incarnation
    return False


def plain(
    session: ServerSession,
    cluster: str,
    ranges: int,
    loop: asyncio.AbstractEventLoop,
    memory: Memory = NO_LIMIT,
    gate: Gate | None = None,
) -> Server:
    """A server that measures nothing."""
    return Server(session.info, cluster, ranges, loop, memory=memory, gate=gate)


def resolve(future: asyncio.Future[str], reason: str) -> None:
    """Gives the reason, unless there is one already."""
    if not future.done():
        future.set_result(reason)


async def _beat(server: Server) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        server.tick()


async def _report(server: Server) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        server.memory.look()
        if server.headroom.exceeded:
            server.executor.perform(server.replica.let_go)
        server.leaders.tell()


async def _refresh(store: Store, server: Server) -> None:
    """Reads the view and the roster when somebody speaks of newer ones, without waiting for the watch to bring them,
    and the registry when somebody speaks of a table that is not known."""
    while True:
        await server.news.behind.wait()
        server.news.behind.clear()
        try:
            view, roster = await store.get(VIEW), await store.get(ROSTER)
            if view is not None:
                server.adopt(View.decode(view.value))
            if roster is not None:
                server.follow(Roster.decode(roster.value))
            if server.registered.wanted:
                server.know_tables(await _tables(store))
        except StoreUnavailable:
            pass
        except ValueError:  # the view and the roster that are followed stay as they are
            log.exception("the store's view or roster cannot be read")
        await asyncio.sleep(0.02)


async def _tables(store: Store) -> dict[int, Entry]:
    """What is registered, also what is about to go: whose that is decides who may drop it. What cannot be read is left
    out."""
    found = {}
    for table in await read_tables(store, dropping=True):
        spec = None
        with suppress(SpecError):  # a plug-in that is not here
            spec = TableSpec.from_json(table.spec)
        found[table.id] = Entry(table.name.rpartition("/")[0], spec)
    return found
