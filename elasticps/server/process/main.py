"""A server process: signals, ports, the admin service and metrics around `lifecycle.serve_until`."""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from coordinator.connect import insist, open_store
from coordinator.core import fields
from coordinator.core.keys import CONFIG, config_of
from coordinator.core.sizing import rows_mark
from coordinator.core.store import Store
from coordinator.core.url import parse
from coordinator.core.view import ClusterConfig, ServerInfo
from elasticps import store as table_store
from elasticps.admin.service import start_admin
from elasticps.errors import ConfigError
from elasticps.kernels import announce, compiled, progress
from elasticps.security import credentials_of
from elasticps.security.gate import Gate
from elasticps.security.identity import Role
from elasticps.server.core.headroom import ServerMemory
from elasticps.server.fast import receive as fast_path
from elasticps.server.fast import sockets
from elasticps.server.options import ServerOptions
from elasticps.server.process.addresses import found_under, hidden, is_loopback, joined, listen
from elasticps.server.process.lifecycle import (
    Build,
    ServerRegistration,
    Surroundings,
    build_server,
    resolve,
    serve_until,
)
from elasticps.server.process.names import stays, wait_for_name
from elasticps.server.server import Server
from elasticps.store import journal, registry
from elasticps.system.descriptors import connections_for, raise_limit
from elasticps.system.memory import ENDLESS, Reading, find_limit, make_reader

log = fields.logger(__name__)

STORE_TIMEOUT_S = 10.0
DRAIN_TIMEOUT_S = 60.0
CONFIG_LOOK_S = 0.2
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
    drain_timeout_s: float = DRAIN_TIMEOUT_S,
    advertise: str = "",
    metrics_port: int = 0,
    measure: bool = False,
    wait_s: float = 0.0,
    take_over: bool = False,
    memory_limit: int = 0,
    insecure: bool = False,
    drain_signal: signal.Signals = signal.SIGTERM,
) -> None:
    """Runs a server until SIGINT, until it has drained after SIGTERM, or until another process takes its name.

    SIGTERM, and `elasticps drain`, have the leader move everything that this server holds to others; then it ends. It
    ends without that after `drain_timeout_s` from SIGTERM (0: at once) if servers that do not drain have copies of all
    that is here, if all servers have had SIGTERM, and on a second SIGTERM. Another `drain_signal` takes SIGTERM's part,
    which does nothing then.
    `plugins` are modules to import first; they may call `register_optimizer`. Ports of 0 are chosen by the system.
    For up to `wait_s` it waits for etcd, and for a coordinator to create the cluster; once it has served, for etcd as
    long as it takes.
    With a certificate in `url` every connection has TLS; without one a `host` that other machines reach is refused,
    unless `insecure`. Others find it under `advertise`, or under `host` if that is "", see `found_under`. It serves
    metrics unless `metrics_port` is 0; requests are timed then, or to `measure`, for the dashboard. ConfigError if
    another process lives under this name, unless it is to `take_over`.
    It takes no new rows when it uses most of `memory_limit` bytes; 0: what its control group or the machine has.
    When ready it prints one line of JSON on stdout. Raises coordinator's `StoreUnavailable` when the coordination
    store cannot be reached at start, `Fenced` when the name is lost later.
    """
    try:
        ServerInfo(name, 1, joined(advertise or "127.0.0.1", 1), zone=zone, weight=weight)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    credentials = credentials_of(url)
    if credentials is not None:
        credentials.require(Role.SERVER, name)
    elif not insecure and not is_loopback(host):
        raise ConfigError(
            f"without TLS whoever reaches {host} could read and change everything: give the URL ?ca=, cert= and key= "
            "(`elasticps certificates` makes them), or say --insecure where a network of your own protects it"
        )
    endpoints = parse(url).endpoints
    host_found = found_under(host, advertise, endpoints)
    if hidden(host_found, endpoints):
        log.warning("only this machine can reach the server, and etcd is on another one; --host names its address here")
    allowed = connections_for(raise_limit())
    for plugin in plugins:
        load_plugin(plugin)
    _warm_elsewhere()
    warm()
    gc.collect()
    gc.freeze()  # kernels and modules stay: no collection need look at them again
    gc.set_threshold(GARBAGE_THRESHOLD)
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[str] = loop.create_future()
    leave: asyncio.Future[str] = loop.create_future()
    loop.add_signal_handler(signal.SIGINT, resolve, stop, "SIGINT")
    if drain_signal is not signal.SIGTERM:
        loop.add_signal_handler(signal.SIGTERM, bool)  # nothing
    loop.add_signal_handler(drain_signal, lambda: resolve(stop if leave.done() else leave, drain_signal.name))

    async with AsyncExitStack() as stack:
        finding = asyncio.create_task(_find_cluster(url, wait_s, stack))
        await asyncio.wait((finding, stop, leave), return_when=asyncio.FIRST_COMPLETED)
        if not finding.done():  # asked to end before the cluster was found
            finding.cancel()
            await asyncio.gather(finding, return_exceptions=True)
            return
        store, config = finding.result()
        sock = listen(host, port)  # connections wait there until we are ready
        stack.callback(sock.close)
        serving: list[Server] = []  # the present incarnation
        admin = await start_admin(host, admin_port, lambda: serving[-1].admin if serving else None, credentials)
        stack.push_async_callback(admin.stop)
        address = joined(host_found, sock.getsockname()[1])
        admin_address = joined(host_found, int(admin.address.rpartition(":")[2]))
        memory = _memory(memory_limit)
        options = ServerOptions(memory=memory, gate=Gate(credentials, allowed.unknown), connections=allowed)
        tell: Callable[[bool], object] = bool  # nobody
        build: Build = partial(build_server, options=options)
        if metrics_port or measure:
            from elasticps.metrics.server import ServerMetrics  # a server without metrics need not wait for its import

            metrics = ServerMetrics()
            if metrics_port:
                await metrics.start(host, metrics_port)
                stack.push_async_callback(metrics.close)
            build = partial(metrics.build, options=options)
            tell = metrics.set_serving

        async def show(server: Server | None) -> None:
            tell(server is not None)
            if server is None:
                await admin.set_serving(False)
                return
            serving[:] = [server]
            await admin.set_serving(True)
            _say_ready(server.me)

        if not take_over:
            await wait_for_name(store, name, address, max(wait_s, STORE_TIMEOUT_S), credentials)
        around = Surroundings(store, config, sock, build, show, partial(stays, credentials=credentials))
        me = ServerRegistration(name, address, admin_address, zone, weight)
        await serve_until(around, me, stop, leave, wait_s=max(wait_s, STORE_TIMEOUT_S), drain_timeout_s=drain_timeout_s)
        log.info("stopping", reason=stop.result())


_MODULES = (registry, fast_path, sockets, journal, progress)


def warm() -> None:
    """Compiles every kernel of a server, or loads it from the cache: afterwards no frame waits for a compiler."""
    table_store.warm()
    fast_path.warm()
    sockets.warm()
    journal.warm()
    progress.warm()


def is_warm() -> bool:
    """Whether the cache has all kernels of a server."""
    return all(compiled(str(module.__file__)) for module in _MODULES)


def _warm_elsewhere() -> None:
    """Compiles what the cache lacks in a process that ends: a compiler holds some 400 MB, which would count as this
    server's for as long as it runs, and leave no room for rows under a small limit. `warm` reports what fails."""
    for module in _MODULES:
        if not compiled(str(module.__file__)):
            announce(str(module.__file__))
            command = [sys.executable, "-c", f"from {__name__} import warm; warm()"]
            subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
            return


def _memory(limit: int) -> ServerMemory:
    """How memory is limited and measured. ConfigError for a limit that is used up before there is any row."""
    memory = ServerMemory(limit or find_limit(), make_reader())
    now = Reading(0, 0) if memory.read is None else memory.read()
    used = max(now.used, memory.limit - now.left)
    if (limit or now.left != ENDLESS) and used >= rows_mark(memory.limit, 1, 1):
        whose = "--memory-limit" if limit else "a limit of memory (`ulimit -v` or -d) of"
        raise ConfigError(
            f"{whose} {memory.limit:,} bytes: an empty server uses {used:,}, and takes new rows up to "
            f"{rows_mark(memory.limit, 1, 1):,} of that limit; give it more"
        )
    return memory


def _say_ready(me: ServerInfo) -> None:
    ready = {"ready": True, "name": me.name, "address": me.address, "admin": me.admin, "incarnation": me.incarnation}
    sys.stdout.write(json.dumps(ready) + "\n")
    sys.stdout.flush()
    log.info("ready", name=me.name, address=me.address)


async def _config(store: Store) -> ClusterConfig | None:
    entry = await store.get(CONFIG)
    return None if entry is None else config_of(entry)


async def _find_cluster(url: str, wait_s: float, stack: AsyncExitStack) -> tuple[Store, ClusterConfig]:
    until = asyncio.get_running_loop().time() + wait_s
    store = await open_store(url, timeout_s=max(wait_s, STORE_TIMEOUT_S))
    stack.push_async_callback(store.close)
    while True:
        config = await insist(lambda: _config(store), max(wait_s, STORE_TIMEOUT_S))
        if config is not None:
            try:
                config.check_protocol(store.cluster)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            return store, config
        if asyncio.get_running_loop().time() >= until:
            raise ConfigError(f"cluster {store.cluster!r} does not exist; `elasticps up` or a coordinator creates it")
        await asyncio.sleep(CONFIG_LOOK_S)


def load_plugin(name: str) -> None:
    """Imports a plug-in. ConfigError if there is none of that name, or it cannot be imported.

    The folder that the server was started in is looked through last: an installed command has it not on its path, as
    `python -m elasticps` has."""
    if os.sep in name or name.endswith(".py"):
        module = os.path.basename(name).removesuffix(".py")
        raise ConfigError(
            f"plug-in {name!r} is a path; name it as `import` would, {module!r}, and start the server in its folder or "
            "put that on PYTHONPATH"
        )
    try:
        here = os.getcwd()
        if not sys.flags.safe_path and here not in sys.path:
            sys.path.append(here)
        importlib.import_module(name)
    except Exception as error:
        log.debug("a plug-in fails", plugin=name, exc_info=True)
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            text = f"no module is called so, on PYTHONPATH, in {here} or among the installed packages"
        else:
            at = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({at.filename}, line {at.lineno})"
        raise ConfigError(f"plug-in {name!r} cannot be imported: {text}") from None
