"""A server process: sockets, registration and views around one `Server` after another.

A server that a view has left out gives its copy up and begins another life under a new incarnation, in the same
process and on the same port.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from coordinator.connect import open_store
from coordinator.errors import StoreUnavailable
from coordinator.membership import ROSTER, VIEW, ServerSession, ViewFollower, register_server
from coordinator.store import Store
from coordinator.view import ClusterConfig, Roster, View
from elasticps import store as table_store
from elasticps.admin.service import start_admin
from elasticps.errors import ConfigError
from elasticps.server.peers import BEAT_S
from elasticps.server.server import Server

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
REPORT_S = 0.1
CONNECT_BACKLOG = 512
GARBAGE_THRESHOLD = 20_000  # objects between collections: frames make no cycles, so little is ever found


async def serve(
    url: str,
    *,
    name: str,
    host: str = "127.0.0.1",
    port: int = 0,
    admin_port: int = 0,
    zone: str = "",
    weight: float = 1.0,
    plugins: Sequence[str] = (),
) -> None:
    """Runs a server until SIGTERM or SIGINT, or until another process takes its name.

    `plugins` are modules to import first; they may call `register_optimizer`. Ports of 0 are chosen by the system.
    When ready it prints one line of JSON on stdout. Raises coordinator's `StoreUnavailable` when the coordination
    store cannot be reached at start, `Fenced` when the name is lost later.
    """
    for plugin in plugins:
        importlib.import_module(plugin)
    table_store.warm()
    gc.collect()
    gc.freeze()  # kernels and modules stay: no collection need look at them again
    gc.set_threshold(GARBAGE_THRESHOLD)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stop, number.name)

    async with AsyncExitStack() as stack:
        store = await open_store(url, timeout_s=STORE_TIMEOUT_S)
        stack.push_async_callback(store.close)
        entry = await store.get("config")
        if entry is None:
            raise ConfigError(f"cluster {store.cluster!r} does not exist; `elasticps up` or a coordinator creates it")
        config = ClusterConfig.from_json(entry.value)
        sock = socket.create_server((host, port), backlog=CONNECT_BACKLOG)  # connections wait there until we are ready
        stack.callback(sock.close)
        address = f"{host}:{sock.getsockname()[1]}"
        lives: list[Server] = []
        admin = await start_admin(host, admin_port, lambda: lives[-1] if lives else None)
        stack.push_async_callback(admin.stop)
        while not stop.done():
            session = await register_server(
                store,
                name=name,
                address=address,
                admin=admin.address,
                zone=zone,
                weight=weight,
                on_lost=lambda reason: _resolve(stop, reason),
            )
            async with _life(store, session, config, sock) as server:
                lives[:] = [server]
                await admin.set_serving(True)
                ready = {"ready": True, "name": name, "address": address, "admin": admin.address}
                sys.stdout.write(json.dumps(ready | {"incarnation": session.info.incarnation}) + "\n")
                sys.stdout.flush()
                log.info("ready name=%s incarnation=%d address=%s", name, session.info.incarnation, address)
                await asyncio.wait((stop, server.removed), return_when=asyncio.FIRST_COMPLETED)
                await admin.set_serving(False)
        log.info("stopping name=%s reason=%r", name, stop.result())


@asynccontextmanager
async def _life(
    store: Store, session: ServerSession, config: ClusterConfig, sock: socket.socket
) -> AsyncIterator[Server]:
    """One incarnation: a server that listens and follows views and rosters."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        server = Server(session.info, store.cluster, config.ranges, loop)
        stack.callback(server.close)
        follower = ViewFollower(store)
        stack.push_async_callback(follower.close)
        follower.subscribe(server.adopt)
        follower.subscribe_roster(server.follow)
        await follower.start()
        listener = await loop.create_server(server.connection, sock=sock.dup())
        stack.callback(listener.close)
        for work in (_beat(server), _report(server), _refresh(store, server)):
            task = asyncio.create_task(work)
            stack.callback(task.cancel)
        yield server


def _resolve(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)


async def _beat(server: Server) -> None:
    while True:
        await asyncio.sleep(BEAT_S)
        server.tick()


async def _report(server: Server) -> None:
    while True:
        await asyncio.sleep(REPORT_S)
        server.tell_leaders()


async def _refresh(store: Store, server: Server) -> None:
    """Reads the view and the roster when somebody speaks of newer ones, without waiting for the watch to bring them."""
    while True:
        await server.behind.wait()
        server.behind.clear()
        with suppress(StoreUnavailable):
            view, roster = await store.get(VIEW), await store.get(ROSTER)
            if view is not None:
                server.adopt(View.decode(view.value))
            if roster is not None:
                server.follow(Roster.decode(roster.value))
        await asyncio.sleep(0.02)
