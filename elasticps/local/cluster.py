"""Starts, changes and ends a cluster whose processes all run on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from coordinator.core.names import check_name
from coordinator.core.view import ClusterConfig
from elasticps.errors import ConfigError, Error, KernelsMissing
from elasticps.local import certificates, operator_client, scaling, state, supervisor
from elasticps.local.etcd import EtcdPlan
from elasticps.local.operator_client import OperatorClient
from elasticps.local.process import CompilationNotice, Process, Restarter, ServerProcess, deaths_of, stop_all
from elasticps.local.scaling import SERVERS_MAX
from elasticps.local.zygote import Zygote
from elasticps.security.identity import Role
from elasticps.system import background, html
from elasticps.system.memory import parse_size

COORDINATORS_MAX = 5
_KILL_AFTER_S = 10.0
_ETCD_TRIES = 3  # another process may take a port between the look for a free one and etcd's start


class LocalCluster:
    """etcd, coordinators and servers on this machine.

        with eps.LocalCluster(servers=3) as cluster, eps.connect(cluster.url, worker="w0") as ps:
            ...

    servers      how many are started, s0, s1, …
    replicas     copies of each range; with fewer servers there are fewer, until more servers are started
    coordinators  how many are started, c0, c1, …: one leads, the others stand by
    ranges       slices of the hash space, a power of two
    memory_limit  what each server may use, such as "4GiB"; "": what its control group or the machine has
    plugins      modules that every server imports, for instance to register an optimizer
    measure      servers time requests, for the dashboard
    metrics_port  serve Prometheus metrics: c0 at this port, then the other coordinators, s0, s1, …; 0: none
    directory    for state, data and logs; must not exist. None: a temporary folder. Removed at the end
    detach       leave everything running when this process ends; otherwise it all ends with this process, even killed
    restart      start servers and coordinators that have died again under their names
    tls          a throw-away authority, and a certificate for every process; `url` is then any worker's
    environment  variables for the coordinator and the servers, beside those of this process
    timeout_s    for starting; the first start on a machine compiles the kernels
    progress     called with a line of text for each step of the start

    Raises ConfigError for arguments that cannot work, Error when a process does not start.
    """

    def __init__(
        self,
        name: str = "local",
        *,
        servers: int = 3,
        replicas: int = 2,
        coordinators: int = 1,
        ranges: int = 256,
        memory_limit: str = "",
        plugins: Iterable[str] = (),
        measure: bool = False,
        metrics_port: int = 0,
        directory: Path | None = None,
        detach: bool = False,
        restart: bool = False,
        tls: bool = False,
        environment: Mapping[str, str] | None = None,
        log_level: str = "info",
        timeout_s: float = 600.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        if not 1 <= servers <= SERVERS_MAX:
            raise ConfigError(f"a local cluster has 1 to {SERVERS_MAX} servers, not {servers}")
        if not 1 <= coordinators <= COORDINATORS_MAX:
            raise ConfigError(f"a local cluster has 1 to {COORDINATORS_MAX} coordinators, not {coordinators}")
        if detach and restart:
            raise ConfigError("a detached cluster has nobody who would start its dead servers again: leave one out")
        try:
            self.name = check_name("cluster", name)  # also the last part of the URL
            self.config = ClusterConfig(ranges=ranges, replicas=replicas, min_servers=servers)  # as etcd has it
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._first_servers = [f"s{i}" for i in range(servers)]  # names that `start` starts
        self._coordinators = [f"c{i}" for i in range(coordinators)]  # names, likewise
        self._given_directory = directory  # None: make a temporary one
        scaling.metrics_options(metrics_port, coordinators + servers - 1)  # of the last process: it needs a port, too
        self._metrics_port = metrics_port  # of the first process; 0: none
        self._detach = detach  # leave everything running
        self._tls = tls  # certificates for every process
        self._urls: dict[Role, str] = {}  # made so far, with their certificates
        self._environment = dict(environment or {})  # beside our own, for processes
        self._log_options = ("--log-level", log_level)  # of every command
        memory = ("--memory-limit", str(parse_size(memory_limit))) if memory_limit else ()
        plugged = (part for name in plugins for part in ("--plugin", name))
        measured = ("--measure",) if measure else ()
        self._server_options = (*self._log_options, *memory, *plugged, *measured)  # of every server's command
        self._timeout_s = timeout_s  # for starting
        self._progress = progress or (lambda _: None)  # called with a line of text per step
        self._owned = True  # by this process, until a detached cluster has started
        self._folder: Path | None = None  # state, data and logs, while it runs
        self._started_by = 0  # process id; 0: not started yet
        self._supervisor: supervisor.Supervisor | None = None  # ends everything if we die; None if detached
        self._zygote: Zygote | None = None  # forks our processes
        self._etcd_plan: EtcdPlan | None = None  # ports and data, kept while etcd is down
        self._etcd: Process | None = None  # while it runs
        self._processes: dict[str, Process] = {}  # servers and coordinators by name, dead ones too
        self._started: set[tuple[int, str]] = set()  # all that this object ever started: pid and moment
        self._options: dict[str, list[str]] = {}  # of each name's command, to start it again
        self._lock = threading.RLock()  # the table of processes
        self._unreported: list[str] = []  # ends of processes, until `ended` returns them
        self._troubles: dict[str, str] = {}  # why processes of these names could not be started again
        self._restarter = Restarter(self._start_dead_ones) if restart else None  # None: the dead stay dead

    def __repr__(self) -> str:
        if self._folder is None:
            return f"<LocalCluster {self.name!r}: not running>"
        running = ", ".join(server.name for server in self.servers if server.running)
        return f"<LocalCluster {self.name!r}: servers {running or 'none'}; {self.url}>"

    def _repr_html_(self) -> str:
        if self._folder is None:
            return html.described(repr(self), [])
        servers = [(s.name, s.pid, s.address, "runs" if s.running else "ended") for s in self.servers]
        described = [("url", self.url), ("replicas", self.config.replicas), ("ranges", self.config.ranges)]
        table = html.table(("server", "pid", "address", ""), [(n, str(pid), a, state) for n, pid, a, state in servers])
        return html.described(f"LocalCluster {self.name!r}", described, table)

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
        KernelsMissing.check()
        deadline = time.monotonic() + self._timeout_s
        self._started_by = os.getpid()
        try:
            self._folder, born = self._make_folder()
            if not self._detach:
                self._supervisor = supervisor.Supervisor(self._folder, born)
            if Zygote.possible():
                self._zygote = Zygote(self._folder / "zygote.log", {**os.environ, **self._environment})
                self._zygote.entrust(self._watch)
            self._first_etcd(deadline)
            background.run(operator_client.create_cluster(self.operator_url, self.config, deadline))
            self._progress("etcd is there; starting the coordinator and the servers")
            if self.config.replicas > len(self._first_servers):
                self._progress(f"{self.config.replicas} replicas need as many servers; until then there are fewer")
            for at, name in enumerate([*self._coordinators, *self._first_servers]):
                role = "coordinator" if name in self._coordinators else "server"
                self._spawn(name, role, scaling.metrics_options(self._metrics_port, at))
            notice = CompilationNotice([process.log for process in self._processes.values()], self._progress)
            for process in self._processes.values():
                process.wait_ready(deadline, notice)
                self._progress(f"{process.role} {process.name} is ready")
            background.run(
                operator_client.wait_for_servers(self.operator_url, self._first_servers, self.config.replicas, deadline)
            )
        except BaseException:
            self.stop()
            raise
        self._owned = not self._detach
        self._record()
        if self._restarter is not None:
            self._restarter.start()

    def stop(self) -> None:
        """Ends every process that this object started and removes the folder, logs included. May be called again.

        A fork of the process that started it ends nothing: there the cluster is still in use.
        """
        if self._started_by not in (0, os.getpid()):
            return
        if self._restarter is not None:
            self._restarter.stop()
        processes = list(self._processes.values())
        # The coordinator first: nobody need plan for servers that are ending.
        stop_all([p for p in processes if p.role == "coordinator"], kill_after_s=_KILL_AFTER_S)
        stop_all([p for p in processes if p.role == "server"], kill_after_s=_KILL_AFTER_S)
        self._end_others()
        if self._etcd is not None:
            stop_all([self._etcd], kill_after_s=_KILL_AFTER_S)
        self._end_zygote()
        self._remove_folder()
        if self._supervisor is not None:
            self._supervisor.close(_KILL_AFTER_S)
        self._processes.clear()
        self._etcd = self._etcd_plan = self._supervisor = self._folder = None
        self._urls.clear()

    # ------------------------------------------------------------------------------------------------ state

    @property
    def url(self) -> str:
        """The cluster's URL, for `eps.connect`."""
        return self._url_of(Role.WORKER)

    @property
    def operator_url(self) -> str:
        """The cluster's URL for an operator; without TLS the same as `url`."""
        return self._url_of(Role.OPERATOR)

    def _url_of(self, role: Role) -> str:
        if self._etcd_plan is None:
            raise ConfigError(f"the local cluster {self.name!r} is not running")
        with self._lock:  # or two threads make the same certificate
            if role not in self._urls:
                self._urls[role] = certificates.url_of(self._etcd_plan.url(self.name), self.directory, role)
            return self._urls[role]

    @property
    def directory(self) -> Path:
        """The folder with data and logs."""
        if self._folder is None:
            raise ConfigError(f"the local cluster {self.name!r} is not running")
        return self._folder

    @property
    def servers(self) -> tuple[ServerProcess, ...]:
        """Every server started here that has been ready, running or not."""
        with self._lock:
            return tuple(
                ServerProcess.of(p) for p in self._processes.values() if p.role == "server" and p.newest_ready()
            )

    def server(self, name: str) -> ServerProcess:
        """The server called `name`."""
        for server in self.servers:
            if server.name == name:
                return server
        there = scaling.existing([server.name for server in self.servers])
        raise ConfigError(f"the local cluster {self.name!r} has no server called {name!r}{there}")

    def log(self, name: str) -> str:
        """What the process called `name` ("s0", "c0", "etcd") has logged so far."""
        return (self.directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def ended(self) -> list[str]:
        """What has ended without being asked to since the last call, a line each: "server s1 was killed by SIGKILL"."""
        with self._lock:
            for process in [p for p in self._processes.values() if not p.running]:
                if self._restarter is None or process.left:
                    del self._processes[process.name]
                self._report_end(process)
            if self._etcd is not None and not self._etcd.running:
                self._report_end(self._etcd)
                self._etcd = None
            ends, self._unreported = self._unreported, []
        return ends

    def _report_end(self, process: Process) -> None:
        if not process.end_reported:
            process.end_reported = True
            self._unreported.append(f"{process.role} {process.name} (pid {process.pid}) {process.how_it_ended()}")

    # ---------------------------------------------------------------------------------------------- changes

    def kill(self, name: str) -> None:
        """SIGKILL to the process called `name` ("s0", "c0", "etcd"); returns when it is gone."""
        self._process(name).kill()
        if name == "etcd":
            self._etcd = None

    def pause(self, name: str) -> None:
        """SIGSTOP: the process called `name` stands still, with its connections open, until `resume`."""
        self._process(name).popen.send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT: the process called `name` goes on from where it was."""
        self._process(name).popen.send_signal(signal.SIGCONT)

    def start_server(self, name: str | None = None, *, zone: str = "", weight: float = 1.0) -> ServerProcess:
        """Starts one more server, or one that has ended again under its name; returns when it is ready."""
        with self._lock:
            if name is None:
                taken = {*self._processes, *(other.name for other in self._others())}
                name = next(f"s{i}" for i in range(len(taken) + 1) if f"s{i}" not in taken)
        self._start_again(name, "server", scaling.options(zone, weight))
        return self.server(name)

    def drain(self, name: str, *, timeout_s: float = 120.0) -> None:
        """Has everything that the server called `name` holds moved to others; returns when its process has ended.

        Timeout if that takes longer, such as for the last server; the drain goes on. `cancel_drain` takes it back.
        """
        with OperatorClient(self.operator_url) as operator:
            operator.wait_drained(operator.request_drain(name), timeout_s)
        scaling.wait_ended(self.directory, name)
        self._forget([name])

    def cancel_drain(self, name: str) -> bool:
        """Takes a drain back: what has moved stays where it is. False if there was none, or it is done."""
        with OperatorClient(self.operator_url) as operator:
            return operator.cancel_drain(name)

    def scale(
        self, servers: int, *, zone: str = "", weight: float = 1.0, timeout_s: float = 600.0
    ) -> scaling.ScaleResult:
        """Starts servers, of this zone and weight, or drains those with the highest numbers, until so many serve;
        returns when nothing moves any more."""
        with OperatorClient(self.operator_url) as operator:
            draining, leaving = operator.draining(), operator.leaving()
        record = state.read(self.directory)
        running = [] if record is None else [entry.name for entry in record.servers]
        planned = scaling.change(running, draining, servers, leaving)
        outcome = scaling.scale(
            self.operator_url, planned, lambda name, options: self._spawn(name, "server", options),
            lambda name: scaling.wait_ended(self.directory, name), zone=zone, weight=weight, timeout_s=timeout_s,
        )  # fmt: skip
        self._forget(planned.drain)
        return outcome

    def start_coordinator(self, name: str = "c0") -> None:
        """Starts one more coordinator, or one that has ended; returns when it takes part in elections."""
        self._start_again(name, "coordinator", [])

    def stop_etcd(self) -> None:
        """Ends etcd; its data stay."""
        if self._etcd is None:
            raise ConfigError("etcd is not running")
        stop_all([self._etcd], kill_after_s=_KILL_AFTER_S)
        self._etcd = None

    def start_etcd(self) -> None:
        """Starts etcd again, on the same port with the same data; returns when it serves."""
        if self._etcd is not None:
            raise ConfigError("etcd is running")
        self._start_etcd(time.monotonic() + self._timeout_s)

    # --------------------------------------------------------------------------------------------- plumbing

    def _make_folder(self) -> tuple[Path, str]:
        """Makes the folder. Returns it, and the birth by which its record is known."""
        if self._given_directory is None:
            folder = Path(tempfile.mkdtemp(prefix=f"elasticps-{self.name}-"))
            return folder, state.begin(folder, self.name).born
        return self._given_directory, state.claim(self._given_directory).born

    def _first_etcd(self, deadline: float) -> None:
        tls = certificates.begin(self.directory) if self._tls else None
        for tries_left in reversed(range(_ETCD_TRIES)):
            self._etcd_plan = EtcdPlan(self.directory / "etcd", tls)
            try:
                self._start_etcd(deadline)
            except ConfigError:  # there is no etcd that could run, nor a log of it
                raise
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
        new = not plan.data.exists()
        self._etcd = Process.start("etcd", "etcd", plan.command(), self.directory, plan.environment())
        self._watched(self._etcd)
        self._etcd.wait_until(plan.healthy, deadline)
        if new and self._tls:
            certificates.protect_etcd(plan.url(self.name), self.directory, deadline - time.monotonic())

    def _process(self, name: str) -> Process:
        with self._lock:
            process = self._etcd if name == "etcd" else self._processes.get(name)
            there = [*(["etcd"] if self._etcd is not None else []), *sorted(self._processes, key=scaling.by_number)]
        if process is None:
            raise ConfigError(
                f"the local cluster {self.name!r} has no process called {name!r}{scaling.existing(there)}"
            )
        return process

    def _start_again(self, name: str, role: str, options: list[str]) -> None:
        with self._lock:
            old = self._processes.get(name)
            if old is not None and old.running:
                raise ConfigError(f"{old.role} {name} is running, with pid {old.pid}")
            process = self._spawn(name, role, options)
        process.wait_ready(time.monotonic() + self._timeout_s)

    def _start_dead_ones(self) -> None:
        with self._lock:
            for name, process in list(self._processes.items()):
                try:
                    self._look_after(process)
                except Exception as error:  # a full disk, no memory: it may pass, and the others are to be looked after
                    text = f"{process.role} {name} cannot be started again as it should: {error}"
                    if self._troubles.get(name) != text:
                        self._troubles[name] = text
                        self._unreported.append(text)

    def _look_after(self, process: Process) -> None:
        if process.running:
            if process.name in self._troubles:  # it was started, and could not be written down
                self._record()
                del self._troubles[process.name]
            return
        self._report_end(process)
        if not process.left and (deaths := deaths_of(process)):
            self._spawn(process.name, process.role, self._options[process.name], deaths)

    def _spawn(self, name: str, role: str, options: list[str], deaths: int = 0) -> Process:
        more = [*options, *(self._server_options if role == "server" else self._log_options)]
        url = certificates.url_of(self.operator_url, self.directory, Role(role), name)
        command = scaling.server_command(role, url, name, more)
        environment = {**os.environ, **self._environment}
        process = Process.start(name, role, command, self.directory, environment, self._zygote)
        process.deaths = deaths
        with self._lock:
            self._processes[name], self._options[name] = process, options
            self._watched(process)
        return process

    def _watch(self, pid: int, moment: str) -> None:
        if self._supervisor is not None:
            self._supervisor.watch(pid, moment)

    def _end_zygote(self) -> None:
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def _watched(self, process: Process) -> None:
        self._watch(process.pid, process.moment)
        self._started.add((process.pid, process.moment))
        self._record()

    def _forget(self, drained: Iterable[str]) -> None:
        with self._lock:
            for name in drained:
                if (process := self._processes.pop(name, None)) is not None:
                    process.popen.wait()  # its first thread has ended, others may be about to
            self._record()

    def _end_others(self) -> None:
        with suppress(ConfigError):  # their record cannot be read
            supervisor.end_all([(p.pid, p.moment) for p in self._others()], kill_after_s=_KILL_AFTER_S)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            with suppress(OSError), state.locked(self._folder):  # who would add a server from now on is refused
                self._end_others()
                shutil.rmtree(self._folder, ignore_errors=True)
            shutil.rmtree(self._folder, ignore_errors=True)

    def _others(self) -> list[state.ProcessEntry]:
        """Servers of this cluster that another process has started, such as `elasticps scale`, and that run."""
        record = None if self._folder is None else state.read(self._folder)
        servers = () if record is None else record.servers
        return [entry for entry in servers if (entry.pid, entry.moment) not in self._started]

    def _record(self) -> None:
        with self._lock:
            processes = [*([self._etcd] if self._etcd else []), *self._processes.values()]
            entries = [state.ProcessEntry(p.name, p.role, p.pid, p.moment) for p in processes]
            if self._owned:
                entries.insert(0, state.this_process())

            def change(record: state.Record) -> state.Record:
                others = [entry for entry in record.servers if (entry.pid, entry.moment) not in self._started]
                return replace(
                    record, url=self.operator_url, processes=(*entries, *others), server_options=self._server_options,
                    environment=self._environment,
                )  # fmt: skip

            state.update(self.directory, change)
