"""A server process: sockets, registration and views around one `Server`."""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import signal
import socket
from collections.abc import Sequence

from coordinator.connect import open_store
from coordinator.membership import ViewFollower, register_server
from coordinator.view import ClusterConfig, ServerInfo
from elasticps import store as table_store
from elasticps.admin.service import start_admin
from elasticps.errors import ConfigError
from elasticps.server.connection import Connection
from elasticps.server.server import Server

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
TICK_S = 0.25
CONNECT_BACKLOG = 512


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
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _resolve, stop, number.name)

    store = await open_store(url, timeout_s=STORE_TIMEOUT_S)
    try:
        entry = await store.get("config")
        if entry is None:
            raise ConfigError(f"cluster {store.cluster!r} does not exist yet; create it with `elasticps up` or a coordinator")
        config = ClusterConfig.from_json(entry.value)
        sock = socket.create_server((host, port), backlog=CONNECT_BACKLOG)  # connections wait there until we are ready
        address = f"{host}:{sock.getsockname()[1]}"
        admin = await start_admin(host, admin_port, lambda: server.status())
        session = await register_server(
            store, name=name, address=address, admin=admin.address, zone=zone, weight=weight,
            on_lost=lambda reason: _resolve(stop, reason),
        )  # fmt: skip
        server = Server(session.info, store.cluster, config.ranges)
        follower = ViewFollower(store)
        follower.subscribe(server.adopt)
        follower.subscribe_roster(server.follow)
        await follower.start()
        listener = await loop.create_server(lambda: Connection(server, loop), sock=sock)
        ticker = asyncio.create_task(_tick(server))
        admin.set_serving(True)
        ready = {"ready": True, "name": name, "address": address, "admin": admin.address,
                 "incarnation": session.info.incarnation}  # fmt: skip
        print(json.dumps(ready), flush=True)
        log.info("ready name=%s incarnation=%d address=%s admin=%s", name, session.info.incarnation, address,
                 admin.address)  # fmt: skip
        reason = await stop
        log.info("stopping name=%s reason=%r", name, reason)
        admin.set_serving(False)
        ticker.cancel()
        listener.close()
        await follower.close()
        await session.close()
        await admin.stop()
    finally:
        await store.close()


def _resolve(future: asyncio.Future[str], reason: str) -> None:
    if not future.done():
        future.set_result(reason)


async def _tick(server: Server) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        server.tick()
