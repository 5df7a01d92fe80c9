"""Runs one incarnation of a server after another in a process: registers it, listens, follows views, until it is to
end.

A server that a view has left out gives up its copy and starts again as a new incarnation on the same port. This module
knows no signals and opens no socket, so that the simulator runs exactly this.
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
from coordinator.core.keys import TABLES, TableEntry
from coordinator.core.store import Store
from coordinator.core.view import ClusterConfig
from coordinator.membership import ViewFollower, list_drains, newest_roster, newest_view
from coordinator.sessions import ServerSession, newest_incarnation, register_server
from elasticps.errors import SpecError
from elasticps.model.spec import TableSpec
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.options import DEFAULTS, ServerOptions
from elasticps.server.process.draining import Stays, drain
from elasticps.server.roles.replica_links import BEAT_S
from elasticps.server.server import Server
from elasticps.system import fatal, logs
from elasticps.system.coordination import entries_of, read_tables, tables_among

log = fields.logger(__name__)

PAUSE_S = 0.02  # between reads of the store that others cause
REPORT_S = 0.1
REGISTER_AGAIN_S = 0.2
LOG_AGAIN_S = 10.0  # between two lines about the same trouble

Build = Callable[[ServerSession, str, int, asyncio.AbstractEventLoop], Server]


@dataclass(frozen=True)
class ServerRegistration:
    """What a server registers of itself; addresses are "host:port"."""

    name: str
    address: str
    admin: str = ""
    zone: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What all incarnations of a server in one process share. `sock` listens all the time; `show` is called with the
    server that serves now, None between two; `stays` asks another server whether it serves and does not leave."""

    store: Store
    config: ClusterConfig
    sock: socket.socket
    build: Build
    show: Callable[[Server | None], Awaitable[None]]
    stays: Stays


async def serve_until(
    around: Surroundings,
    me: ServerRegistration,
    stop: asyncio.Future[str],
    leave: asyncio.Future[str],
    *,
    wait_s: float,
    drain_timeout_s: float,
) -> None:
    """Serves until `stop` is done. Once `leave` is done: until all ranges have moved elsewhere, or until
    `drain_timeout_s` have passed and servers that stay have copies of all that is here.

    Waits `wait_s` for the store before the first incarnation, and without limit before later ones. Raises
    coordinator's `StoreUnavailable` when `wait_s` was not enough, `Fenced` when the name is lost.
    """
    loop = asyncio.get_running_loop()
    served = False
    incarnation = 0
    registered_by = loop.time() + wait_s
    while not stop.done():
        try:
            if incarnation and (newest := await newest_incarnation(around.store, me.name)) > incarnation:
                resolve(stop, f"{me.name} now belongs to incarnation {newest}; this was {incarnation}")
                return  # to register again would take the name back, and the two would go on for ever
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
                async with _incarnation(around, session) as server:
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
                # Only now: while the store does not answer, a leader may still give this incarnation ranges again.
                if not stop.done() and await _drained(around.store, session):
                    resolve(stop, "drained")
            finally:
                await session.close()
            if leave.done():  # a new incarnation would be given ranges, and end with them
                resolve(stop, "SIGTERM; the view has left it out before it was drained")
        except StoreUnavailable as error:  # only before it serves: from then on it does without the store
            if not served and loop.time() > registered_by:
                raise
            log.warning("cannot register, trying on", error=error)
            await asyncio.wait((stop, leave), timeout=REGISTER_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if leave.done():
                resolve(stop, "SIGTERM, before it was registered")


@asynccontextmanager
async def _incarnation(around: Surroundings, session: ServerSession) -> AsyncIterator[Server]:
    """Runs one incarnation: a server that listens and follows views and rosters."""
    loop, store = asyncio.get_running_loop(), around.store
    async with AsyncExitStack() as stack:
        server = around.build(session, session.cluster, around.config.ranges, loop)
        stack.callback(server.close)
        logs.bind(incarnation=session.info.incarnation, epoch=lambda: server.serving.epoch)
        follower = ViewFollower(store, fatal.watch, lambda: server.serving.view)
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
    """Whether this incarnation has been asked to drain, by its operator or itself: then no other follows it."""
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
    """Resolves a future with a reason, unless it is done."""
    if not future.done():
        future.set_result(reason)


def _look_at_memory(server: Server) -> None:
    server.memory.look()
    if server.headroom.exceeded:
        server.executor.perform(server.replica.let_go)


async def _refresh(store: Store, server: Server) -> None:
    """Reads view and roster when a peer or worker names newer ones, without waiting for the watch, and the whole
    registry when one names a table by an id that is not known here."""
    while True:
        await server.updates.view_or_roster.wait()
        server.updates.view_or_roster.clear()
        try:
            if (view := await newest_view(store, server.serving.view)) is not None:
                server.adopt(view)
            if (roster := await newest_roster(store, server.serving.roster)) is not None:
                server.follow(roster)
            if server.registered.read_due:
                server.know_tables(await _tables(store))
        except StoreUnavailable:  # or its content is not valid, which the follower logs
            pass
        await asyncio.sleep(PAUSE_S)


async def _learn(store: Store, server: Server) -> None:
    """Reads registered tables by their keys, as soon as a worker creates them."""
    while True:
        await server.updates.tables.wait()
        server.updates.tables.clear()
        keys, server.registered.due_keys = server.registered.due_keys, set()
        found = list[TableEntry]()
        with suppress(StoreUnavailable):
            found = tables_among(await entries_of(store, sorted(keys), TABLES), dropping=True)
            server.learn_tables(_known(found))
        if len(found) < len(keys):  # workers that ask for missing tables do not make us read all the time
            await asyncio.sleep(PAUSE_S)


async def _tables(store: Store) -> dict[int, RegisteredTable]:
    """All registered tables, by id, also those being dropped: their owner may drop them again. Unreadable entries are
    left out."""
    return _known(await read_tables(store, dropping=True))


def _known(tables: Iterable[TableEntry]) -> dict[int, RegisteredTable]:
    found = {}
    for table in tables:
        spec = None
        with suppress(SpecError):  # a plug-in that is not here
            spec = TableSpec.from_json(table.spec)
        found[table.id] = RegisteredTable(table.name.rpartition("/")[0], spec)
    return found


async def keep_doing(what: str, every_s: float, work: Callable[[], None]) -> None:
    """Calls `work` every `every_s`. A refusal by the system, such as of a file descriptor or memory, is logged and
    tried again: it passes, while a server that ended for it might take the last copy of a range along."""
    loop = asyncio.get_running_loop()
    logged_at, failures = float("-inf"), 0
    while True:
        await asyncio.sleep(every_s)
        try:
            work()
        except (OSError, MemoryError) as error:
            failures += 1
            if loop.time() - logged_at >= LOG_AGAIN_S:
                log.error("the system refuses something, tried again", what=what, error=error, failures=failures)
                logged_at = loop.time()
        else:
            if failures:
                log.info("the system refuses nothing more", what=what, failures=failures)
            logged_at, failures = float("-inf"), 0
