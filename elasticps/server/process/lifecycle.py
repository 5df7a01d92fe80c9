"""One `Server` after another in one process: registered, listening, following views, until it is asked to end.

A server that a view has left out gives its copy up and begins another life under a new incarnation, on the same port.
Knows no signals and opens no socket, so that the simulator runs exactly this.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial

from coordinator.core import fields
from coordinator.core.errors import StoreUnavailable
from coordinator.core.keys import ROSTER, TABLES, VIEW, TableEntry, roster_of, view_of
from coordinator.core.store import Store
from coordinator.core.view import ClusterConfig
from coordinator.membership import ViewFollower, list_drains
from coordinator.sessions import ServerSession, newest_incarnation, register_server
from elasticps import logs
from elasticps.coordination import entries_of, read_tables, tables_among
from elasticps.errors import SpecError
from elasticps.model.spec import TableSpec
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.options import DEFAULTS, ServerOptions
from elasticps.server.process.draining import Stays, drain
from elasticps.server.process.housekeeping import keep_doing
from elasticps.server.roles.replica_links import BEAT_S
from elasticps.server.server import Server
from elasticps.system import fatal

log = fields.logger(__name__)

PAUSE_S = 0.02  # between reads of the store that others cause
REPORT_S = 0.1
REGISTER_AGAIN_S = 0.2

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
    """Where a server lives. `sock` listens all the time; `show` hears which life serves now, None between two; `stays`
    asks another server whether it serves and does not leave."""

    store: Store
    config: ClusterConfig
    sock: socket.socket
    build: Build
    show: Callable[[Server | None], Awaitable[None]]
    stays: Stays


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
    and a server that stays has a copy of all that is here.

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
                    if (
                        leave.done()
                        and not stop.done()
                        and (why := await drain(around.store, server, stop, drain_timeout_s, around.stays))
                    ):
                        resolve(stop, why)
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
        # Reports do not depend on a look at memory: leaders take a server that says nothing to be gone.
        for work in (
            keep_doing("a beat", BEAT_S, server.tick),
            keep_doing("a look at memory", REPORT_S, partial(_look_at_memory, server)),
            keep_doing("a report", REPORT_S, server.leaders.tell),
            _refresh(store, server),
            _learn(store, server),
        ):
            task = asyncio.create_task(work)
            task.add_done_callback(fatal.watch)
            stack.callback(task.cancel)
        yield server


async def _drained(store: Store, session: ServerSession) -> bool:
    """Whether this incarnation has been asked to go, by whomever: then it does not come back as another one."""
    with suppress(StoreUnavailable):
        return (await list_drains(store)).get(session.info.name) == session.info.incarnation
    return False


def build_server(
    session: ServerSession,
    cluster: str,
    ranges: int,
    loop: asyncio.AbstractEventLoop,
    options: ServerOptions = DEFAULTS,
) -> Server:
    """A server that measures nothing."""
    return Server(session.info, cluster, ranges, loop, options)


def resolve(future: asyncio.Future[str], reason: str) -> None:
    """Gives the reason, unless there is one already."""
    if not future.done():
        future.set_result(reason)


def _look_at_memory(server: Server) -> None:
    server.memory.look()
    if server.headroom.exceeded:
        server.executor.perform(server.replica.let_go)


async def _refresh(store: Store, server: Server) -> None:
    """Reads the view and the roster when somebody speaks of newer ones, without waiting for the watch to bring them,
    and the whole registry when somebody speaks of a table by its id that is not known."""
    while True:
        await server.updates.view_or_roster.wait()
        server.updates.view_or_roster.clear()
        try:
            view, roster = await store.get(VIEW), await store.get(ROSTER)
            if view is not None:
                server.adopt(view_of(view))
            if roster is not None:
                server.follow(roster_of(roster))
            if server.registered.read_due:
                server.know_tables(await _tables(store))
        except StoreUnavailable:  # or what it has makes no sense, of which the follower speaks
            pass
        await asyncio.sleep(PAUSE_S)


async def _learn(store: Store, server: Server) -> None:
    """Reads tables that are to be made by their keys, as soon as somebody wants them."""
    while True:
        await server.updates.tables.wait()
        server.updates.tables.clear()
        keys, server.registered.due_keys = server.registered.due_keys, set()
        found = list[TableEntry]()
        with suppress(StoreUnavailable):
            found = tables_among(await entries_of(store, sorted(keys), TABLES), dropping=True)
            server.learn_tables(_known(found))
        if len(found) < len(keys):  # whoever asks for what is not there does not make us ask all the time
            await asyncio.sleep(PAUSE_S)


async def _tables(store: Store) -> dict[int, RegisteredTable]:
    """What is registered, also what is about to go: whose that is decides who may drop it. What cannot be read is left
    out."""
    return _known(await read_tables(store, dropping=True))


def _known(tables: Iterable[TableEntry]) -> dict[int, RegisteredTable]:
    found = {}
    for table in tables:
        spec = None
        with suppress(SpecError):  # a plug-in that is not here
            spec = TableSpec.from_json(table.spec)
        found[table.id] = RegisteredTable(table.name.rpartition("/")[0], spec)
    return found
