"""A cluster for chaos runs on one machine: etcd members, coordinators, servers and workers as processes, which are
started, signalled and started again by name, over a network that may be disturbed.

Unlike `elasticps.local.LocalCluster` nothing here waits: starting and ending are asked for, and looked at later, so
that one loop carries out faults which overlap. Everything ends with this process, however that ends (`supervisor`).
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from chaos.live.etcd import Etcd
from chaos.live.load import APP
from chaos.live.nemesis import PEERS
from chaos.live.network import ProcessNetwork
from chaos.live.plan import ClusterPlan
from elasticps.errors import Error
from elasticps.local import certificates
from elasticps.local.etcd import EtcdPlan, free_ports
from elasticps.local.process import Process, stop_all
from elasticps.local.supervisor import Supervisor
from elasticps.security.identity import ANY, Role

PROGRAMS = {"hoard": "chaos.live.memory_filler", "hostile": "chaos.live.hostile"}  # by what plans call them
CLUSTER = "chaos"
MARK = "ELASTICPS_CHAOS_RUN"  # in the environment of all processes of a run: its folder
KILL_AFTER_S = 5.0
START_TIMEOUT_S = 180.0
RETRY_S = 1.0  # before a process that ended before it was ready is started again


@dataclass
class _Job:
    """How a process is started, and whether it should run. since: when it was last started, time.monotonic()."""

    name: str
    role: str
    command: Callable[[], list[str]]
    environment: Mapping[str, str]
    process: Process | None = None
    should_run: bool = False  # if it ends meanwhile, it ends unasked
    paused: bool = False
    since: float = 0.0
    worked: bool = False  # a process of this name, before this one, has said that it was ready
    healthy: Callable[[], bool] | None = None  # instead of the line that our own processes print when they are ready


class Processes:
    """Starts, signals and ends processes by name.

    url, follower_url    of the cluster, for workers and for readers
    own_url, reader_url  for this process, as an operator and as a worker: its network is not disturbed
    """

    def __init__(self, network: ProcessNetwork) -> None:
        self.network = network
        self.url = self.follower_url = self.own_url = self.reader_url = ""
        self.folder = Path(tempfile.mkdtemp(prefix="elasticps-chaos-"))
        self._jobs: dict[str, _Job] = {}
        self._supervisor = Supervisor(self.folder, "")

    def close(self, logs_to: Path | None = None) -> list[str]:
        """Ends all processes and removes the folder, whose logs go to `logs_to` first. Returns, in words, what is left
        nevertheless, and what could not be kept."""
        processes = [job.process for job in self._jobs.values() if job.process is not None]
        cluster = ("coordinator", "server", "etcd")
        for roles in ({p.role for p in processes} - {*cluster}, *({role} for role in cluster)):
            stop_all([p for p in processes if p.role in roles and p.running], kill_after_s=KILL_AFTER_S)
        left = [] if logs_to is None else self._keep_logs(logs_to)
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._supervisor.close(KILL_AFTER_S)
        left += [f"process {pid} of the run was left: {words}" for pid, words in _marked(str(self.folder))]
        return left + ([f"the folder {self.folder} was left"] if self.folder.exists() else [])

    def _keep_logs(self, folder: Path) -> list[str]:
        """Copies the logs. Returns what went wrong instead of raising it: there is more to end."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for log in (*self.folder.glob("*.log"), *self.folder.glob("*.findings")):
                shutil.copy(log, folder / log.name)
        except OSError as error:
            return [f"logs of the run are lost, which should have gone to {folder}: {error.strerror}"]
        return []

    def wait_ready(self, names: Sequence[str]) -> None:
        """Waits until all of these processes are ready. Raises Error with the end of the log of one that is not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for name in names:
            job = self._jobs[name]
            assert job.process is not None
            job.process.wait_until(partial(self.ready, name), deadline)

    def names(self, role: str, *, paused: bool = True) -> list[str]:
        """Returns the processes of a role that run; with paused=False, without those that are paused."""
        found = (job for job in self._jobs.values() if job.role == role and _runs(job))
        return [job.name for job in found if paused or not job.paused]

    def running(self, name: str) -> bool:
        return _runs(self._jobs[name])

    def ready(self, name: str) -> bool:
        """Whether a process has said that it is ready, since it was last started."""
        job = self._jobs[name]
        if job.process is None or not job.process.running:
            return False
        return job.healthy() if job.healthy is not None else bool(job.process.newest_ready())

    def worked(self, name: str) -> bool:
        """Whether a process of this name has ever said that it was ready."""
        job = self._jobs[name]
        return job.worked or (job.process is not None and bool(job.process.newest_ready()))

    def code(self, name: str) -> int | None:
        """Returns the exit code of a process; None if it runs, or never ran."""
        process = self._jobs[name].process
        return None if process is None else process.popen.poll()

    def poll(self) -> list[tuple[str, str]]:
        """Returns what `ended` returns, and starts those of these processes again that should run."""
        gone = [job for job in self._jobs.values() if job.process is not None and not _runs(job)]
        ended, now = self.ended(), time.monotonic()  # a process that has ended since is seen next time
        for job in gone:
            if job.should_run and now - job.since > RETRY_S:
                self.start(job.name)
        return ended

    def ended(self) -> list[tuple[str, str]]:
        """Returns the processes that have ended unasked since the last call, with their last words. Leaves out those
        that were never ready, for instance because etcd was away."""
        ended = list[tuple[str, str]]()
        for job in self._jobs.values():
            if not job.should_run or _runs(job) or job.process is None:
                continue
            if job.role not in ("server", "coordinator", "etcd") and job.process.popen.returncode == 0:
                job.should_run = False  # it is done, such as a training command
                continue
            if (job.healthy is not None or job.process.newest_ready()) and not job.process.end_reported:
                job.process.end_reported = True
                job.should_run = job.role not in PEERS  # what they knew, and had done, has gone with them
                words = job.process.last_words().splitlines()
                last = f": {words[-1]}" if len(words) > 1 else ""
                ended.append((job.name, f"{job.role} {job.name} {job.process.how_it_ended()}{last}"))
        return ended

    def late(self, names: Iterable[str]) -> list[str]:
        """Returns which of these processes should run and are not ready yet."""
        return [name for name in names if self._jobs[name].should_run and not self.ready(name)]

    def start(self, name: str) -> None:
        """Starts a process that does not run; returns at once."""
        job = self._jobs[name]
        job.worked = self.worked(name)
        environment = {**job.environment, MARK: str(self.folder)}
        job.process = Process.start(name, job.role, job.command(), self.folder, environment)
        job.should_run, job.paused, job.since = True, False, time.monotonic()
        self.network.started(name, job.process.pid)
        self._supervisor.watch(job.process.pid, job.process.moment)

    def kill(self, name: str) -> None:
        """Sends SIGKILL; returns at once."""
        self._signal(name, signal.SIGKILL, should_run=False)

    def terminate(self, name: str) -> None:
        """Sends SIGTERM; returns at once."""
        self._signal(name, signal.SIGTERM, should_run=False)

    def pause(self, name: str) -> None:
        job = self._jobs[name]
        job.paused = True
        self._signal(name, signal.SIGSTOP, should_run=job.should_run)  # it may just have been killed

    def resume(self, name: str) -> None:
        job = self._jobs[name]
        job.paused = False
        self._signal(name, signal.SIGCONT, should_run=job.should_run)

    def beside(self, do: str, count: int, seconds: float) -> list[str]:
        """Starts processes beside the cluster, and returns their names. Hogs only compute, until they are killed; those
        of PROGRAMS end after so many seconds."""
        names = [f"{do}{len(self._jobs) + i}" for i in range(count)]
        for name in names:
            if do == "hog":
                command = ["-I", "-S", "-c", "while True: pass"]
            else:
                command = ["-m", PROGRAMS[do], self.url, name, str(seconds)]
            self._add(name, do, partial(list, [sys.executable, *command]), dict(os.environ))
            self.start(name)
        return names

    def memory_used(self, name: str) -> int:
        """Returns the bytes of memory that a process has of its own; 0 if it does not run."""
        process = self._jobs[name].process
        try:
            now = psutil.Process(process.pid).memory_info() if process is not None and process.running else None
        except psutil.Error:
            now = None
        return 0 if now is None else now.rss - now.shared

    def cordon(self, name: str) -> str:
        """Raises Error: processes of one machine have no nodes."""
        raise Error(f"{name} has no node that could be cordoned")

    def uncordon(self, node: str) -> None:
        """Raises Error, as `cordon` does."""
        raise Error(f"there is no node {node}")

    def fill_etcd(self, full: bool) -> bool:
        """Raises Error, as the next two do: the etcd of a cluster that was there before the run is not to be ruined."""
        raise Error("this etcd is not the run's own")

    def forget_etcd(self) -> None:
        raise Error("this etcd is not the run's own")

    def adopt(self) -> str:
        raise Error("this etcd is not the run's own")

    def add_worker(self, name: str, command: Callable[[], list[str]], *, says_ready: bool = True) -> None:
        """Starts a worker by what `command` returns, at each start. One that does not say when it is ready counts as
        ready."""
        self.network.join(name)
        job = self._add(name, "worker", command, {**os.environ, "ELASTICPS_URL": self.url})
        if not says_ready:
            job.healthy = lambda: True
        self.start(name)

    def add_reader(self, name: str, command: Callable[[], list[str]]) -> None:
        """Starts a process of a reader, which says when it is ready, by what `command` returns at each start."""
        self.network.join(name)
        self._add(name, "reader", command, dict(os.environ))
        self.start(name)

    def listening(self, name: str) -> tuple[str, str]:
        """Chooses a port for a process of this name: where it listens, as host:port, and where others find it."""
        host, (port,) = self.network.join(name), free_ports(1)
        return f"{host}:{port}", self.network.publish(name, host, port)

    def _signal(self, name: str, number: signal.Signals, *, should_run: bool) -> None:
        job = self._jobs[name]
        job.should_run = should_run
        if job.process is not None:
            if not should_run:
                job.process.end_reported = True
            with suppress(ProcessLookupError):
                job.process.popen.send_signal(number)

    def _add(self, name: str, role: str, command: Callable[[], list[str]], environment: Mapping[str, str]) -> _Job:
        self._jobs[name] = _Job(name, role, lambda: self.network.command(name, command()), environment)
        return self._jobs[name]


class LocalStage(Processes):
    """A cluster of processes on this machine."""

    def __init__(self, plan: ClusterPlan, network: ProcessNetwork, progress: Callable[[str], None]) -> None:
        super().__init__(network)
        self.plan = plan
        self._progress = progress
        self._admin: dict[str, str] = {}
        self._etcd = Etcd(plan.etcd, network, self.folder)
        if plan.tls:
            self._etcd.tls = certificates.begin(self.folder, self._etcd.hosts)
        self.url = self._url(Role.WORKER)
        self.follower_url = self._url(Role.READER)
        self.own_url = self._url(Role.OPERATOR, public=False)
        self.reader_url = self._url(Role.WORKER, public=False)

    def start_all(self) -> None:
        """Starts etcd, coordinators and servers, and waits until each is ready. The view may come a little later."""
        self._progress("starting etcd")
        for each in self._etcd.members:
            job = self._add(each.name, "etcd", partial(self._etcd.command, each), EtcdPlan.environment())
            job.healthy = partial(self._etcd.healthy, each)
            self.start(each.name)
        self.wait_ready([each.name for each in self._etcd.members])
        self._progress("starting coordinators and servers")
        for number in range(self.plan.coordinators):
            self._add_coordinator(f"c{number}")
        for _ in range(self.plan.servers):
            self.grow()
        self.wait_ready(self.names("coordinator") + self.names("server"))

    def grow(self) -> str:
        """Starts one more server; returns its name at once."""
        name = next(name for i in range(1000) if (name := f"s{i}") not in self._jobs)
        host, (port, admin) = self.network.join(name), free_ports(2)
        public = self.network.publish(name, host, port).rpartition(":")[0]
        self._admin[name] = self.network.publish(name, host, admin)
        # They time requests, as all do that serve metrics: what is tried is what runs.
        options = ["--host", host, "--port", str(port), "--admin-port", str(admin), "--measure"]
        options += ["--advertise", public] if public != host else []
        # Nobody else reaches loopback, or namespaces that the run has made.
        options += [] if self.plan.tls else ["--insecure"]
        options += ["--memory-limit", self.plan.memory] if self.plan.memory else []
        self._add(name, "server", lambda: self._elasticps("server", name, options), dict(os.environ))
        self.start(name)
        return name

    def shrink(self, name: str) -> str:
        """Lets a server drain and end for good; returns its name."""
        self.terminate(name)
        return name

    def fill_etcd(self, full: bool) -> bool:
        """Makes etcd refuse every write, or take writes again; returns False if it does not answer."""
        return self._etcd.set_full(full)

    def forget_etcd(self) -> None:
        """Deletes all data of etcd, of which no member may run."""
        self._etcd.forget()

    def adopt(self) -> str:
        """Starts `elasticps cluster adopt`, as an operator does for an etcd that lost its data; returns its name."""
        name = f"adopt{len(self._jobs)}"
        words = ["cluster", "adopt", "--url", self.own_url, "--app", APP, "--timeout", "20", "--server"]
        command = [sys.executable, "-m", "elasticps", *words, self._admin[self.names("server")[0]]]
        self._add(name, "adopt", lambda: command, dict(os.environ)).healthy = lambda: True
        self.start(name)
        return name

    def _add_coordinator(self, name: str) -> None:
        plan = self.plan
        options = ["--ranges", str(plan.ranges), "--replicas", str(plan.replicas), "--min-servers", str(plan.servers)]
        self.network.join(name)
        self._add(name, "coordinator", lambda: self._elasticps("coordinator", name, options), dict(os.environ))
        self.start(name)

    def _elasticps(self, role: str, name: str, options: list[str]) -> list[str]:
        url = self._url(Role(role), name)
        return [sys.executable, "-m", "elasticps", role, "--url", url, "--name", name, *options]

    def _url(self, role: Role, name: str = ANY, *, public: bool = True) -> str:
        return certificates.url_of(self._etcd.url(CLUSTER, public=public), self.folder, role, name)


def _runs(job: _Job) -> bool:
    return job.process is not None and job.process.running


def _marked(folder: str) -> Iterator[tuple[int, str]]:
    """Yields the processes that the run in that folder has started, and their command lines."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == folder:
                yield process.pid, " ".join(process.cmdline())
