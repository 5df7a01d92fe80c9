"""Starts, changes and ends a cluster whose processes all run on this machine."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from coordinator.connect import open_store
from coordinator.membership import ViewFollower, create_cluster
from coordinator.names import check_name
from coordinator.view import ClusterConfig, View
from elasticps.errors import ConfigError, Error
from elasticps.local import keeper, state
from elasticps.local.etcd import EtcdPlan
from elasticps.local.process import Process, stop_all

_T = TypeVar("_T")

SERVERS_MAX = 64
_GRACE_S = 10.0
_ETCD_TRIES = 3  # another process may take a port between the look for a free one and etcd's start


@dataclass(frozen=True)
class ServerProcess:
    """A server of a local cluster; anybody may `kill -9` its `pid`."""

    name: str
    pid: int
    address: str
    admin: str
    incarnation: int
    running: bool


class LocalCluster:
    """etcd, a coordinator and servers on this machine.

        with eps.LocalCluster(servers=3) as cluster, eps.connect(cluster.url, worker="w0") as ps:
            ...

    servers      how many are started, s0, s1, …
    replicas     copies of each range
    ranges       slices of the hash space, a power of two
    plugins      modules that every server imports, for instance to register an optimizer
    directory    for state, data and logs; must not exist. None: a temporary folder. Removed at the end
    detach       leave everything running when this process ends; otherwise it all ends with this process, even killed
    environment  variables for the coordinator and the servers, beside those of this process
    timeout_s    for starting; the first start on a machine compiles the kernels
    progress     called with a line of text for each step of the start

    Not thread-safe. Raises ConfigError for arguments that cannot work, Error when a process does not start.
    """

    def __init__(
        self,
        name: str = "local",
        *,
        servers: int = 3,
        replicas: int = 1,
        ranges: int = 256,
        plugins: Iterable[str] = (),
        directory: Path | None = None,
        detach: bool = False,
        environment: Mapping[str, str] | None = None,
        log_level: str = "info",
        timeout_s: float = 300.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not 1 <= servers <= SERVERS_MAX:
            raise ConfigError(f"a local cluster has 1 to {SERVERS_MAX} servers, not {servers}")
        if replicas > 1:
            raise ConfigError(
                f"replicas={replicas} is not possible: this version keeps one copy of each range. Use replicas=1"
            )
        try:
            self.name = check_name("cluster", name)
            self.config = ClusterConfig(ranges=ranges, replicas=replicas, min_servers=servers)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._first_servers = [f"s{i}" for i in range(servers)]
        self._plugins = tuple(plugins)
        self._given_directory = directory
        self._detach = detach
        self._environment = dict(environment or {})
        self._log_level = log_level
        self._timeout_s = timeout_s
        self._progress = progress or (lambda _: None)
        self._owned = True  # by this process, until a detached cluster has started
        self._folder: Path | None = None
        self._keeper: subprocess.Popen[bytes] | None = None
        self._etcd_plan: EtcdPlan | None = None
        self._etcd: Process | None = None
        self._processes: dict[str, Process] = {}

    # ------------------------------------------------------------------------------------------------- life

    def __enter__(self) -> LocalCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._detach:
            self.stop()

    def start(self) -> None:
        """Starts everything; returns when every server serves under the first view."""
        if self._folder is not None:
            raise ConfigError(f"the local cluster {self.name!r} has been started already")
        deadline = time.monotonic() + self._timeout_s
        try:
            self._folder = self._make_folder()
            if not self._detach:
                self._start_keeper()
            self._first_etcd(deadline)
            _run(_create(self.url, self.config, deadline))
            self._progress("etcd is there; starting the coordinator and the servers")
            self._spawn("c0", "coordinator", [])
            for name in self._first_servers:
                self._spawn(name, "server", [])
            for process in self._processes.values():
                process.wait_ready(deadline)
                self._progress(f"{process.role} {process.name} is ready")
            _run(_wait_for_servers(self.url, self._first_servers, deadline))
        except BaseException:
            self.stop()
            raise
        self._owned = not self._detach
        self._record()

    def stop(self) -> None:
        """Ends every process that this object started and removes the folder, logs included. May be called again."""
        processes = list(self._processes.values())
        # The coordinator first: nobody need plan for servers that are ending.
        for role in ("coordinator", "server"):
            stop_all([p for p in processes if p.role == role], grace_s=_GRACE_S)
        if self._etcd is not None:
            stop_all([self._etcd], grace_s=_GRACE_S)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait()
        self._processes.clear()
        self._etcd = self._etcd_plan = self._keeper = self._folder = None

    # ------------------------------------------------------------------------------------------------ state

    @property
    def url(self) -> str:
        """The cluster's URL, for `eps.connect`."""
        if self._etcd_plan is None:
            raise ConfigError(f"the local cluster {self.name!r} is not running")
        return f"etcd://{self._etcd_plan.endpoint}/{self.name}"

    @property
    def directory(self) -> Path:
        """The folder with data and logs."""
        if self._folder is None:
            raise ConfigError(f"the local cluster {self.name!r} is not running")
        return self._folder

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        """Every server started here that has been ready, running or not."""
        return tuple(
            ServerProcess(p.name, p.pid, p.ready["address"], p.ready["admin"], p.ready["incarnation"], p.running)
            for p in self._processes.values()
            if p.role == "server" and p.ready
        )

    def server(self, name: str) -> ServerProcess:
        """The server called `name`."""
        for server in self.servers:
            if server.name == name:
                return server
        raise ConfigError(f"the local cluster {self.name!r} has no server called {name!r}")

    def log(self, name: str) -> str:
        """What the process called `name` ("s0", "c0", "etcd") has logged so far."""
        return (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def ended(self) -> list[str]:
        """What has ended without being asked to since the last call, a line each: "server s1 was killed by SIGKILL"."""
        gone = [p for p in self._processes.values() if not p.running]
        for process in gone:
            del self._processes[process.name]
        if self._etcd is not None and not self._etcd.running:
            gone.append(self._etcd)
            self._etcd = None
        return [f"{p.role} {p.name} (pid {p.pid}) {p.how_it_ended()}" for p in gone]

    # ---------------------------------------------------------------------------------------------- changes

    def kill(self, name: str) -> None:
        """SIGKILL to the server or coordinator called `name`; returns when the process is gone."""
        if name not in self._processes:
            raise ConfigError(f"the local cluster {self.name!r} has no process called {name!r}")
        self._processes[name].kill()

    def start_server(self, name: str | None = None, *, zone: str = "", weight: float = 1.0) -> ServerProcess:
        """Starts one more server, or one that has ended again under its name; returns when it is ready."""
        if name is None:
            name = next(f"s{i}" for i in range(len(self._processes) + 1) if f"s{i}" not in self._processes)
        self._start_again(name, "server", ["--zone", zone, "--weight", str(weight)])
        return self.server(name)

    def start_coordinator(self, name: str = "c0") -> None:
        """Starts one more coordinator, or one that has ended; returns when it takes part in elections."""
        self._start_again(name, "coordinator", [])

    def stop_etcd(self) -> None:
        """Ends etcd; its data stay."""
        if self._etcd is None:
            raise ConfigError("etcd is not running")
        stop_all([self._etcd], grace_s=_GRACE_S)
        self._etcd = None

    def start_etcd(self) -> None:
        """Starts etcd again, on the same port with the same data; returns when it serves."""
        if self._etcd is not None:
            raise ConfigError("etcd is running")
        self._start_etcd(time.monotonic() + self._timeout_s)

    # --------------------------------------------------------------------------------------------- plumbing

    def _make_folder(self) -> Path:
        if self._given_directory is None:
            folder = Path(tempfile.mkdtemp(prefix=f"elasticps-{self.name}-"))
            state.write(folder, state.Record(self.name, "", (state.this_process(),)))
            return folder
        state.claim(self._given_directory)
        return self._given_directory

    def _start_keeper(self) -> None:
        command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(self.directory)]
        # Not in our session, or Ctrl-C and a closing terminal would end it with us.
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def _first_etcd(self, deadline: float) -> None:
        for tries_left in reversed(range(_ETCD_TRIES)):
            self._etcd_plan = EtcdPlan(self.directory / "etcd")
            try:
                self._start_etcd(deadline)
            except Error:
                lost_a_race = "address already in use" in self.log("etcd")
                if not (lost_a_race and tries_left):
                    raise
                self._etcd = None
                shutil.rmtree(self._etcd_plan.data, ignore_errors=True)
            else:
                return

    def _start_etcd(self, deadline: float) -> None:
        plan = self._etcd_plan
        if plan is None:
            raise ConfigError(f"the local cluster {self.name!r} is not running")
        self._etcd = Process.start("etcd", "etcd", plan.command(), self.directory, plan.environment())
        self._watched(self._etcd)
        self._etcd.wait_until(plan.healthy, deadline)

    def _start_again(self, name: str, role: str, options: list[str]) -> None:
        old = self._processes.get(name)
        if old is not None and old.running:
            raise ConfigError(f"{old.role} {name} is running, with pid {old.pid}")
        self._spawn(name, role, options).wait_ready(time.monotonic() + self._timeout_s)
        self._record()

    def _spawn(self, name: str, role: str, options: list[str]) -> Process:
        try:
            check_name(role, name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        command = [sys.executable, "-m", "elasticps", role, "--url", self.url, "--name", name, *options]
        command += ["--log-level", self._log_level]
        if role == "server":
            command += [part for plugin in self._plugins for part in ("--plugin", plugin)]
        process = Process.start(name, role, command, self.directory, {**os.environ, **self._environment})
        self._processes[name] = process
        self._watched(process)
        return process

    def _watched(self, process: Process) -> None:
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.write(f"{process.pid} {process.moment}\n".encode())
        self._record()

    def _record(self) -> None:
        processes = [*([self._etcd] if self._etcd else []), *self._processes.values()]
        entries = [state.Entry(p.name, p.role, p.pid, p.moment) for p in processes]
        if self._owned:
            entries.insert(0, state.this_process())
        state.write(self.directory, state.Record(self.name, self.url, tuple(entries)))


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs `work` on a loop of its own, also where the caller is on a loop already (a notebook is)."""
    with ThreadPoolExecutor(1, thread_name_prefix="elasticps-local") as pool:
        return pool.submit(uvloop.run, work).result()


async def _create(url: str, config: ClusterConfig, deadline: float) -> None:
    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        await create_cluster(store, config)
    finally:
        await store.close()


async def _wait_for_servers(url: str, names: list[str], deadline: float) -> None:
    def complete(view: View) -> bool:
        return all(view.index(name) >= 0 for name in names) and bool((view.heads >= 0).all())

    store = await open_store(url, timeout_s=deadline - time.monotonic())
    try:
        follower = ViewFollower(store)
        await follower.start()
        try:
            await follower.wait_for(complete, timeout_s=deadline - time.monotonic())
        except (TimeoutError, asyncio.TimeoutError):
            raise Error(f"no view with the servers {', '.join(names)} was formed in time") from None
        finally:
            await follower.close()
    finally:
        await store.close()
