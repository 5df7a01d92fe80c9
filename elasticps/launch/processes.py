"""The processes that one task of a job has beside its command: servers, and for the first task etcd and a coordinator.

They end with this process, however it ends. etcd's data outlive it where other tasks go on: the task that is started in
its place goes on with them. Everything else is made again: servers come back as the next incarnations of their names.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from coordinator.connect import open_store
from coordinator.core.errors import CoordinationError
from coordinator.core.url import TlsFiles
from coordinator.membership import ViewFollower
from elasticps.errors import ConfigError, Error, Timeout
from elasticps.launch.core.task import LOOPBACK, Task
from elasticps.local import certificates, scaling, state, supervisor
from elasticps.local.etcd import EtcdPlan
from elasticps.local.process import CompilationNotice, Process, Restarter, deaths_of, stop_all
from elasticps.local.zygote import Zygote
from elasticps.security.identity import Role
from elasticps.server.process.addresses import found_under, is_loopback
from elasticps.system import background
from elasticps.system.coordination import read_state, read_store

_KILL_AFTER_S = 10.0
_AGAIN_S = 0.2
_CONNECT_S = 2.0
_COORDINATOR = "c0"
# Where there is one, a signal that no scheduler sends to every process of a job.
_DRAIN_ON: signal.Signals = getattr(signal, "SIGRTMIN", signal.SIGUSR2)


@dataclass(frozen=True)
class LaunchOptions:
    """What a cluster is made with, the same for all tasks of a job.

    servers, replicas, ranges  as for `LocalCluster`; servers in all
    server                     more options of every server's command
    coordinator                more options of the coordinator's command
    tls                        the folder of an authority, None: no TLS
    drain_s                    how long servers have to hand over
    start_s                    how long the start may take, until all servers of the job serve
    keeps_lost_rows            a cluster whose servers have all died goes on, as its rows may come from checkpoints
    """

    servers: int = 3
    replicas: int = 2
    ranges: int = 256
    server: tuple[str, ...] = ()
    coordinator: tuple[str, ...] = ()
    tls: Path | None = None
    drain_s: float = 60.0
    start_s: float = 600.0
    keeps_lost_rows: bool = False


class TaskProcesses:
    """Starts and ends the processes of a task. tell: called with a line of text for each step of the start."""

    def __init__(self, task: Task, options: LaunchOptions, tell: Callable[[str], None] = lambda line: None) -> None:
        self._task = task  # which part of the job is ours
        self._options = options  # of the whole job's cluster
        self._tell = tell  # takes a line for each step
        self._host = own_address(task)  # by which other machines find this one
        self._names = task.servers(options.servers)  # of this task's servers
        self._base: Path | None = None  # what the task that is started in this one's place finds; None: it is alone
        self._found_data = False  # of etcd there, before this process began
        self._folder: Path | None = None  # state and logs, while anything runs
        self._supervisor: supervisor.Supervisor | None = None  # ends everything if this process dies
        self._zygote: Zygote | None = None  # forks our processes; None for a task that has none
        self._etcd: EtcdPlan | None = None  # of the first task
        self._url = ""  # for operators; without TLS for all
        self._processes: dict[str, Process] = {}  # by name, dead ones too
        self._ends: list[str] = []  # lines about processes that have ended, until `ended` returns them
        self._leaving = False  # servers are not started again; etcd is, without which they cannot hand over
        self._draining: set[tuple[int, str]] = set()  # servers that have heard that they are to leave
        self._drain_lock = threading.Lock()  # of that set
        self._restarter = Restarter(self._start_dead_ones)  # in a thread of its own

    # ------------------------------------------------------------------------------------------------------ life

    def start(self) -> str:
        """Starts everything, waits until this task's servers serve, and returns the cluster's URL for workers.

        Raises ConfigError for what cannot work, Error for a process that does not start, Timeout where other tasks do
        not come."""
        deadline = time.monotonic() + self._options.start_s
        try:
            self._own_folder(deadline)
            if self._options.tls is not None:
                certificates.adopt(self._options.tls, self.folder)
            if self._task.first or self._names:
                self._zygote = Zygote(self.folder / "zygote.log", os.environ) if Zygote.possible() else None
                if self._zygote is not None:
                    self._zygote.entrust(self.watch)
            if self._task.first:
                self._start_etcd(deadline)
            self._url = self._url_for(Role.OPERATOR)
            for name in ([_COORDINATOR] if self._task.first else []) + self._names:
                self._spawn(name)
            ours = [process for process in self._processes.values() if process.role != "etcd"]
            notice = CompilationNotice([process.log for process in ours], self._tell)
            for process in ours:
                process.wait_ready(deadline, notice)
                self._tell(f"{process.role} {process.name} is ready")
            self._wait_for_view(deadline)
        except BaseException:
            self.stop(keep_etcd=self._found_data)
            raise
        self._restarter.start()
        return self._url_for(Role.WORKER)

    def leave(self) -> None:
        """Asks this task's servers to hand over what they hold, and to end; may be called again. Not by SIGTERM:
        schedulers may send that to every process of a job, when its command is still to have a while with the
        servers."""
        self._leaving = True
        for process in self._servers():
            self._ask_to_leave(process)

    def _ask_to_leave(self, process: Process) -> None:
        with self._drain_lock:
            new = (process.pid, process.moment) not in self._draining
            self._draining.add((process.pid, process.moment))
        if new:  # hearing it again, a server would end at once
            process.popen.send_signal(_DRAIN_ON)

    def have_left(self) -> bool:
        """Whether no server of this task runs any more."""
        return not any(process.running for process in self._servers())

    def stop(self, *, keep_etcd: bool = False) -> None:
        """Ends all processes at once. keep_etcd: leaves etcd's data for this task's next process. May be called
        again."""
        self._leaving = True
        self._restarter.stop()
        for role in ("coordinator", "server", "etcd"):  # nobody need plan for servers that are ending
            stop_all([p for p in self._processes.values() if p.role == role], kill_after_s=_KILL_AFTER_S)
            if role == "server" and self._folder is not None and (record := state.read(self._folder)) is not None:
                others = [(p.pid, p.moment) for p in record.servers]  # that `elasticps scale` has started
                supervisor.end_all(others, kill_after_s=_KILL_AFTER_S)
        if self._zygote is not None:
            self._zygote.close()
        if self._base is not None and not keep_etcd:
            shutil.rmtree(self._base / "etcd", ignore_errors=True)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if self._supervisor is not None:
            self._supervisor.close(_KILL_AFTER_S)
        if self._base is not None and not keep_etcd:
            with suppress(FileNotFoundError), state.locked(self._base):
                if not (self._base / "run").exists():  # no other process of this task has begun meanwhile
                    shutil.rmtree(self._base, ignore_errors=True)
        self._processes.clear()
        self._base = self._folder = self._supervisor = self._zygote = self._etcd = None

    # ----------------------------------------------------------------------------------------------------- state

    @property
    def operator_url(self) -> str:
        """The cluster's URL for an operator; without TLS the same as a worker's."""
        return self._url

    @property
    def folder(self) -> Path:
        """The folder with logs. ConfigError before the start."""
        if self._folder is None:
            raise ConfigError("nothing of this task runs")
        return self._folder

    @property
    def exposed(self) -> bool:
        """Whether other machines reach this task's ports, and nobody has to prove who he is."""
        return not is_loopback(self._host) and self._options.tls is None

    def ended(self) -> list[str]:
        """Returns what has ended without being asked to since the last call, a line each."""
        lines, self._ends = self._ends, []
        return lines

    def watch(self, pid: int, moment: str) -> None:
        """Has a process end with this one, however this one ends."""
        if self._supervisor is not None:
            self._supervisor.watch(pid, moment)

    def _servers(self) -> list[Process]:
        return [process for process in self._processes.values() if process.role == "server"]

    # -------------------------------------------------------------------------------------------------- plumbing

    def _own_folder(self, deadline: float) -> None:
        """Makes the folder, and has it removed with everything that runs if this process dies."""
        if self._task.count == 1:
            folder = state.folder_of(self._task.name)
            born = self._claim(folder, deadline).born
        else:  # not where `elasticps status` looks: machines may share that
            base = _private_folder(f"{self._task.name}.{self._task.number}")
            folder = base / "run"
            born = self._claim(folder, deadline).born
            self._base = base  # from now on it is ours to remove
            self._found_data = (base / "etcd").exists()
        self._folder = folder
        self._supervisor = supervisor.Supervisor(folder, born)

    def _claim(self, folder: Path, deadline: float) -> state.Record:
        """Claims the folder, when what this task's dead process has left is gone."""
        while True:
            try:
                return state.claim(folder)
            except ConfigError:
                record = state.read(folder)
                if record is None:
                    raise
                if (owner := record.owner) is not None or time.monotonic() > deadline:
                    if self._task.count == 1:
                        raise
                    who = "what it has started" if owner is None else f"process {owner.pid}"
                    raise ConfigError(
                        f"task {self._task.number} of cluster {self._task.name!r} runs on this machine already "
                        f"({who}): end it, or give this run a --name of its own"
                    ) from None
                time.sleep(_AGAIN_S)

    def _start_etcd(self, deadline: float) -> None:
        data = (self._base or self.folder) / "etcd"
        hosts = sorted({self._host, self._task.nodes[0], LOOPBACK, "localhost"})
        tls: TlsFiles | None = None if self._options.tls is None else certificates.etcd_files(self.folder, hosts)
        if data.exists() and not self._options.keeps_lost_rows and self._all_dead(data, tls, deadline):
            self._tell("an earlier run has left etcd's data, and none of its servers: the cluster begins again, empty")
            shutil.rmtree(data)
        announced = False
        while True:
            self._etcd = EtcdPlan(data, tls, self._host, self._task.port)
            new = not self._etcd.data.exists()
            process = Process.start("etcd", "etcd", self._etcd.command(), self.folder, self._etcd.environment())
            self._add(process)
            try:
                process.wait_until(self._etcd.healthy, deadline)
            except (ConfigError, Timeout):
                raise
            except Error:  # the etcd of this task's dead process, or a passer-by, still has the port or the data
                if new:
                    shutil.rmtree(self._etcd.data, ignore_errors=True)
                if "address already in use" not in process.log.read_text(errors="replace") or (
                    time.monotonic() + _AGAIN_S > deadline
                ):
                    raise
                if not announced:
                    self._tell(f"another process has etcd's port {self._task.port}: it is waited for, up to --timeout")
                announced = True
                process.log.write_bytes(b"")
                time.sleep(_AGAIN_S)
            else:
                break
        if new and tls is not None:
            certificates.protect_etcd(self._plain_url(), self.folder, deadline - time.monotonic())
        self._tell("etcd is there")

    def _all_dead(self, data: Path, tls: TlsFiles | None, deadline: float) -> bool:
        """Whether all servers that had rows by etcd's data have surely ended, and the rows with them. Asks an etcd of
        its own, whose port no other task knows."""
        plan = EtcdPlan(data, tls)
        process = Process.start("etcd", "etcd", plan.command(), self.folder, plan.environment())
        self.watch(process.pid, process.moment)
        try:
            process.wait_until(plan.healthy, deadline)
            url = certificates.url_of(plan.url(self._task.name), self.folder, Role.OPERATOR, "*")
            found = background.run(read_store(url, deadline - time.monotonic(), read_state))
        except (Error, CoordinationError):  # in use, or damaged: the start says so
            return False
        finally:
            stop_all([process], kill_after_s=_KILL_AFTER_S)
        return found.view is not None and all(_refuses(server.address) for server in found.view.servers)

    def _plain_url(self) -> str:
        """The cluster's URL without certificates."""
        if self._etcd is not None:
            return self._etcd.url(self._task.name)
        head = self._host if self._task.node == 0 else self._task.nodes[0]
        return f"etcd://{f'[{head}]' if ':' in head else head}:{self._task.port}/{self._task.name}"

    def _url_for(self, role: Role, name: str = "*") -> str:
        return certificates.url_of(self._plain_url(), self.folder, role, name)

    def _command(self, name: str) -> tuple[str, list[str]]:
        """Returns the role and the command of a process of ours."""
        options, role = self._options, Role.COORDINATOR if name == _COORDINATOR else Role.SERVER
        if role is Role.SERVER:
            more = [*scaling.options(self._task.zone, 1.0), *self._server_options()]
        else:
            numbers = {"replicas": options.replicas, "ranges": options.ranges, "min-servers": options.servers}
            given = [part for key, value in numbers.items() for part in (f"--{key}", str(value))]
            more = [*given, "--timeout", str(options.start_s), *options.coordinator]
        return role.value, scaling.server_command(role.value, self._url_for(role, name), name, more)

    def _server_options(self) -> list[str]:
        options = self._options
        times = ("--wait", str(options.start_s), "--drain-timeout", str(options.drain_s))
        leave = ("--drain-on", _DRAIN_ON.name.removeprefix("SIG"))
        return ["--host", self._host, *times, *leave, *(["--insecure"] if self.exposed else []), *options.server]

    def _spawn(self, name: str, deaths: int = 0) -> None:
        role, command = self._command(name)
        process = Process.start(name, role, command, self.folder, os.environ, self._zygote)
        process.deaths = deaths
        self._add(process)

    def _add(self, process: Process) -> None:
        self._processes[process.name] = process
        self.watch(process.pid, process.moment)
        entries = [state.ProcessEntry(p.name, p.role, p.pid, p.moment) for p in self._processes.values()]

        def change(record: state.Record) -> state.Record:
            ours = {entry.name for entry in entries} | {"owner"}
            others = [entry for entry in record.servers if entry.name not in ours]
            return replace(
                record, url=self._url or self._plain_url(), processes=(state.this_process(), *entries, *others),
                server_options=tuple(self._server_options()),
            )  # fmt: skip

        state.update(self.folder, change)
        if self._leaving and process.role == "server":  # asked while it was started again
            self._ask_to_leave(process)

    def _start_dead_ones(self) -> None:
        for process in list(self._processes.values()):
            if process.running or process.left or (self._leaving and process.role == "server"):
                continue
            if not process.end_reported:
                process.end_reported = True
                self._ends.append(f"{process.role} {process.name} (pid {process.pid}) {process.how_it_ended()}")
            if deaths := deaths_of(process):
                with suppress(Error, OSError):  # a full disk, no memory: tried again at the next look
                    self._start_again(process, deaths)

    def _start_again(self, process: Process, deaths: int) -> None:
        if process.role != "etcd":
            self._spawn(process.name, deaths)
        elif self._etcd is not None:
            again = Process.start("etcd", "etcd", self._etcd.command(), self.folder, self._etcd.environment())
            again.deaths = deaths
            self._add(again)

    def _wait_for_view(self, deadline: float) -> None:
        """Waits until the cluster has a view, with this task's servers."""

        async def there() -> None:
            store = await open_store(self._url, timeout_s=deadline - time.monotonic())
            follower = ViewFollower(store)
            try:
                await follower.start()
                await follower.wait_for(
                    lambda view: all(view.index(name) >= 0 for name in self._names), deadline - time.monotonic()
                )
            finally:
                await follower.close()
                await store.close()

        try:
            background.run(there())
        except TimeoutError as error:
            raise Timeout(f"{error}; {self._options.servers} servers of all tasks are waited for") from None


def own_address(task: Task) -> str:
    """Returns the address by which other machines of a job reach this one; loopback where there is no other one.
    ConfigError if it cannot be found out."""
    if len(task.nodes) == 1:
        return task.nodes[0]
    try:
        return found_under("0.0.0.0", "", [f"{node}:{task.port}" for node in task.nodes])
    except ConfigError:
        raise ConfigError(
            f"no way leads from here to any of {', '.join(task.nodes[:5])}: name machines so that others can reach "
            "them, or the first one's address with --head"
        ) from None


def _refuses(address: str) -> bool:
    """Whether nobody listens at an address of a machine that answers."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _private_folder(name: str) -> Path:
    """Makes the folder of a task, which another process of the same task finds again. ConfigError if others may write
    there."""
    folder = Path(tempfile.gettempdir()) / f"elasticps-{os.getuid()}-{name}"
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    made = folder.lstat()
    if not stat.S_ISDIR(made.st_mode) or made.st_uid != os.getuid() or made.st_mode & 0o077:
        raise ConfigError(f"{folder} is not this user's alone: remove it, or name another folder in TMPDIR")
    return folder
