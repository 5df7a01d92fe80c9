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
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from coordinator.connect import insist, open_store
from coordinator.errors import CoordinationError, StoreUnavailable
from coordinator.membership import (
    ROSTER,
    VIEW,
    ServerSession,
    ViewFollower,
    list_drains,
    register_server,
    request_drain,
)
from coordinator.store import Store
from coordinator.view import ClusterConfig, Roster, ServerInfo, View
from elasticps import logs
from elasticps import store as table_store
from elasticps.admin.service import start_admin
from elasticps.errors import ConfigError
from elasticps.server.peers import BEAT_S
from elasticps.server.server import Server

log = logging.getLogger(__name__)

STORE_TIMEOUT_S = 10.0
REPORT_S = 0.1
DRAIN_TIMEOUT_S = 60.0
CONFIG_LOOK_S = 0.2
REGISTER_AGAIN_S = 0.2
CONNECT_BACKLOG = 512
GARBAGE_THRESHOLD = 20_000  # objects between collections: frames make no cycles, so little is ever found

Build = Callable[[ServerSession, str, int, asyncio.AbstractEventLoop], Server]


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
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    advertise: str = "",
    metrics_port: int = 0,
    wait_s: float = 0.0,
) -> None:
    """Runs a server until SIGINT, until it has drained after SIGTERM, or until another process takes its name.

    SIGTERM, and `elasticps drain`, have the leader move everything that this server holds to others; then it ends. It
    ends without that after `drain_timeout_s` from SIGTERM (0: at once), and on a second SIGTERM.
    `plugins` are modules to import first; they may call `register_optimizer`. Ports of 0 are chosen by the system.
    For up to `wait_s` it waits for etcd, and for a coordinator to create the cluster; once it has served, for etcd as
    long as it takes.
    Others find it under `advertise`, or under `host` if that is "". It serves metrics unless `metrics_port` is 0.
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
    leave: asyncio.Future[str] = loop.create_future()
    loop.add_signal_handler(signal.SIGINT, _resolve, stop, "SIGINT")
    loop.add_signal_handler(signal.SIGTERM, lambda: _resolve(stop if leave.done() else leave, "SIGTERM"))

    async with AsyncExitStack() as stack:
        finding = asyncio.create_task(_find_cluster(url, wait_s, stack))
        await asyncio.wait((finding, stop, leave), return_when=asyncio.FIRST_COMPLETED)
        if not finding.done():  # asked to end before there was anything to end
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)
            return
        store, config = finding.result()
        sock = socket.create_server((host, port), backlog=CONNECT_BACKLOG)  # connections wait there until we are ready
        stack.callback(sock.close)
        lives: list[Server] = []
        admin = await start_admin(host, admin_port, lambda: lives[-1] if lives else None)
        stack.push_async_callback(admin.stop)
        address = _found_under(advertise or host, sock.getsockname()[1])
        admin_address = _found_under(advertise or host, int(admin.address.rpartition(":")[2]))
        build: Build = _plain
        if metrics_port:
            from elasticps.metrics.server import ServerMetrics  # who serves none need not wait for its import

            metrics = ServerMetrics()
            await metrics.start(host, metrics_port)
            stack.push_async_callback(metrics.close)
            build = metrics.build
        registered_by = loop.time() + max(wait_s, STORE_TIMEOUT_S)
        while not stop.done():
            try:
                session = await register_server(
                    store,
                    name=name,
                    address=address,
                    admin=admin_address,
                    zone=zone,
                    weight=weight,
                    on_lost=lambda reason: _resolve(stop, reason),
                )
                async with _life(store, session, config, sock, build) as server:
                    lives[:] = [server]
                    await admin.set_serving(True)
                    _say_ready(session.info)
                    await asyncio.wait((stop, leave, server.removed), return_when=asyncio.FIRST_COMPLETED)
                    await admin.set_serving(False)
                    if leave.done() and not stop.done():
                        await _drain(store, server, stop, drain_timeout_s)
                    if not stop.done() and await _drained(store, session):
                        _resolve(stop, "drained")
            except StoreUnavailable as error:  # only before it serves: from then on it does without the store
                if not lives and loop.time() > registered_by:
                    raise
                log.warning("name=%s cannot register, trying on: %s", name, error)
                await asyncio.wait((stop, leave), timeout=REGISTER_AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
                if leave.done():
                    _resolve(stop, "SIGTERM, before it was registered")
        log.info("stopping name=%s reason=%r", name, stop.result())


def _say_ready(me: ServerInfo) -> None:
    ready = {"ready": True, "name": me.name, "address": me.address, "admin": me.admin, "incarnation": me.incarnation}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    log.info("ready name=%s incarnation=%d address=%s", me.name, me.incarnation, me.address)


async def _find_cluster(url: str, wait_s: float, stack: AsyncExitStack) -> tuple[Store, ClusterConfig]:
    until = asyncio.get_running_loop().time() + wait_s
    store = await open_store(url, timeout_s=max(wait_s, STORE_TIMEOUT_S))
    stack.push_async_callback(store.close)
    while True:
        entry = await insist(lambda: store.get("config"), max(wait_s, STORE_TIMEOUT_S))
        if entry is not None:
            return store, ClusterConfig.from_json(entry.value)
        if asyncio.get_running_loop().time() >= until:
            raise ConfigError(f"cluster {store.cluster!r} does not exist; `elasticps up` or a coordinator creates it")
        await asyncio.sleep(CONFIG_LOOK_S)


@asynccontextmanager
async def _life(
    store: Store, session: ServerSession, config: ClusterConfig, sock: socket.socket, build: Build
) -> AsyncIterator[Server]:
    """One incarnation: a server that listens and follows views and rosters."""
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(session.close)
        server = build(session, store.cluster, config.ranges, loop)
        stack.callback(server.close)
        logs.bind(incarnation=session.info.incarnation, epoch=lambda: server.epoch)
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


async def _drain(store: Store, server: Server, stop: asyncio.Future[str], timeout_s: float) -> None:
    """Asks the leader to move everything off this server, and waits until it has, or for `stop`, or too long."""
    log.info("draining name=%s ranges_held=%d timeout_s=%g", server.me.name, server.status()["ranges_held"], timeout_s)
    if not server.listed:
        _resolve(stop, "SIGTERM, before any view knew it")
        return
    try:
        if timeout_s > 0:
            await request_drain(store, server.me.name)
    except CoordinationError as error:
        log.warning("name=%s cannot ask to be drained: %s", server.me.name, error)
        timeout_s = 0.0
    await asyncio.wait((stop, server.removed), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    if not server.removed.done():
        held = server.status()["ranges_held"]
        log.warning("name=%s ends with %d ranges still held: what has no other replica is lost", server.me.name, held)
        _resolve(stop, "SIGTERM")


async def _drained(store: Store, session: ServerSession) -> bool:
    """Whether this incarnation has been asked to go, by whomever: then it does not come back as another one."""
    with suppress(StoreUnavailable):
        return (await list_drains(store)).get(session.info.name) == session.info.incarnation
    return False


def _plain(session: ServerSession, cluster: str, ranges: int, loop: asyncio.AbstractEventLoop) -> Server:
    return Server(session.info, cluster, ranges, loop)


def _found_under(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
