"""Where chaos happens on one machine: etcd members, coordinators, servers and workers as processes, each started,
signalled and started again by name, over a network that may be disturbed.

Unlike `elasticps.local.LocalCluster` nothing here waits: starting and ending are asked for, and looked at later, so
that one loop carries out faults which overlap. Everything ends with this process, however that ends (`keeper`).
"""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from chaos.live.plan import ClusterPlan
from elasticps.errors import Error
from elasticps.local import keeper
from elasticps.local.etcd import EtcdPlan, answers_healthy, etcd_binary, free_ports
from elasticps.local.process import Process, stop_all

CLUSTER = "chaos"
GRACE_S = 5.0
START_TIMEOUT_S = 180.0
RETRY_S = 1.0  # before a process that ended before it was ready is started again


@dataclass(frozen=True)
class Shape:
    """What a process's packets suffer: ms later (plus or minus jitter), percent of them lost, at most mbit per second
    (0: no limit)."""

    ms: float = 0.0
    jitter: float = 0.0
    percent: float = 0.0
    mbit: float = 0.0


class Network(Protocol):
    """How processes reach each other, and how that is disturbed."""

    def join(self, name: str) -> str:
        """The address on which a process of this name is to listen. May be called again."""

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` as this process of the network."""

    def publish(self, name: str, host: str, port: int) -> str:
        """ "host:port" under which others are to find what listens there; the port is the same."""

    def started(self, name: str, pid: int) -> None:
        """A process of this name runs now."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        """From now on nothing that the first of a pair sends gets to the second."""

    def mend(self, pairs: Sequence[tuple[str, str]]) -> None:
        """The end of that."""

    def shape(self, name: str, shape: Shape) -> None:
        """What this process's packets suffer from now on; `Shape()`: nothing."""

    def close(self) -> None:
        """Removes what was made."""


class Loopback:
    """Everything on 127.0.0.1: a network that nobody disturbs."""

    def join(self, name: str) -> str:
        return "127.0.0.1"

    def command(self, name: str, command: Sequence[str]) -> list[str]:
        return list(command)

    def publish(self, name: str, host: str, port: int) -> str:
        return f"{host}:{port}"

    def started(self, name: str, pid: int) -> None:
        """Nothing to do."""

    def cut(self, pairs: Sequence[tuple[str, str]]) -> None:
        raise Error("processes on loopback cannot be cut off from each other")

    mend = cut

    def shape(self, name: str, shape: Shape) -> None:
        raise Error("loopback cannot be slowed down")

    def close(self) -> None:
        """Nothing to do."""


@dataclass
class _Job:
    """How a process is started, and whether it should be running. since: of the newest start, time.monotonic()."""

    name: str
    role: str
    command: Callable[[], list[str]]
    environment: Mapping[str, str]
    process: Process | None = None
    wanted: bool = False  # it is to run: if it ends, nobody asked for that
    paused: bool = False
    since: float = 0.0
    healthy: Callable[[], bool] | None = None  # instead of the line that our own processes print when they are ready


@dataclass(frozen=True)
class _Etcd:
    """Where one member of etcd listens."""

    name: str
    host: str
    client: int
    peer: int
    public: str  # "host:port" of its client port as others dial it


class Processes:
    """Processes by name: started, signalled, started again, and all ended at the end. url: the cluster's, for workers;
    own_url: for this process, which is no part of a network that is disturbed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.url = self.own_url = ""
        self.folder = Path(tempfile.mkdtemp(prefix="elasticps-chaos-"))
        self._jobs: dict[str, _Job] = {}
        command = [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), str(self.folder)]
        self._keeper = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def close(self, logs_to: Path | None = None) -> None:
        """Ends everything and removes the folder; logs go to `logs_to` first."""
        processes = [job.process for job in self._jobs.values() if job.process is not None]
        for roles in (("worker", "hog"), ("coordinator",), ("server",), ("etcd",)):
            stop_all([p for p in processes if p.role in roles and p.running], grace_s=GRACE_S)
        if logs_to is not None:
            logs_to.mkdir(parents=True, exist_ok=True)
            for log in self.folder.glob("*.log"):
                shutil.copy(log, logs_to / log.name)
        self.network.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._keeper.stdin is not None:
            self._keeper.stdin.close()
        self._keeper.wait()

    def wait_ready(self, names: Sequence[str]) -> None:
        """Returns when all of these are ready; Error with the end of the log of one that is not."""
        deadline = time.monotonic() + START_TIMEOUT_S
        for name in names:
            job = self._jobs[name]
            assert job.process is not None
            job.process.wait_until(partial(self.ready, name), deadline)

    def names(self, role: str, *, paused: bool = True) -> list[str]:
        """Processes of a role that run; without those that are paused if `paused` is False."""
        found = (job for job in self._jobs.values() if job.role == role and _runs(job))
        return [job.name for job in found if paused or not job.paused]

    def running(self, name: str) -> bool:
        return _runs(self._jobs[name])

    def ready(self, name: str) -> bool:
        """Whether it has said that it serves, since it was last started."""
        job = self._jobs[name]
        if job.process is None or not job.process.running:
            return False
        return job.healthy() if job.healthy is not None else bool(job.process.newest_ready())

    def code(self, name: str) -> int | None:
        """The exit code of a process that has ended."""
        process = self._jobs[name].process
        return None if process is None else process.popen.poll()

    def poll(self) -> list[tuple[str, str]]:
        """What has ended though nobody asked it to, since the last call, and in which words; it is started again. One
        that was never ready, because etcd was away for instance, is started again without a word."""
        now, ended = time.monotonic(), list[tuple[str, str]]()
        for job in self._jobs.values():
            if not job.wanted or _runs(job) or job.process is None:
                continue
            if job.role == "worker" and job.process.popen.returncode == 0:
                job.wanted = False  # a training command that is done
                continue
            if (job.healthy is not None or job.process.newest_ready()) and not job.process.told:
                job.process.told = True
                words = job.process.last_words().splitlines()
                last = f": {words[-1]}" if len(words) > 1 else ""
                ended.append((job.name, f"{job.role} {job.name} {job.process.how_it_ended()}{last}"))
            if now - job.since > RETRY_S:
                self.start(job.name)
        return ended

    def start(self, name: str) -> None:
        """Starts a process that does not run; returns at once."""
        job = self._jobs[name]
        job.process = Process.start(name, job.role, job.command(), self.folder, job.environment)
        job.wanted, job.paused, job.since = True, False, time.monotonic()
        self.network.started(name, job.process.pid)
        if self._keeper.stdin is not None:
            self._keeper.stdin.write(f"{job.process.pid} {job.process.moment}\n".encode())

    def kill(self, name: str) -> None:
        """SIGKILL; returns at once."""
        self._signal(name, signal.SIGKILL, wanted=False)

    def terminate(self, name: str) -> None:
        """SIGTERM; returns at once."""
        self._signal(name, signal.SIGTERM, wanted=False)

    def pause(self, name: str) -> None:
        self._jobs[name].paused = True
        self._signal(name, signal.SIGSTOP, wanted=True)

    def resume(self, name: str) -> None:
        self._jobs[name].paused = False
        self._signal(name, signal.SIGCONT, wanted=True)

    def hog(self, count: int) -> list[str]:
        """Starts processes that do nothing but compute; their names, for `kill`."""
        names = [f"hog{len(self._jobs) + i}" for i in range(count)]
        for name in names:
            self._add(name, "hog", lambda: [sys.executable, "-I", "-S", "-c", "while True: pass"], dict(os.environ))
            self.start(name)
        return names

    def cordon(self, name: str) -> str:
        """Refused: processes of one machine have no nodes."""
        raise Error(f"{name} has no node that could be cordoned")

    def uncordon(self, node: str) -> None:
        """Refused as well."""
        raise Error(f"there is no node {node}")

    def add_worker(self, name: str, command: Callable[[], list[str]], *, says_ready: bool = True) -> None:
        """Starts a worker; `command` is asked at each start. One that does not say when it is ready is taken to be."""
        self.network.join(name)
        job = self._add(name, "worker", command, {**os.environ, "ELASTICPS_URL": self.url})
        if not says_ready:
            job.healthy = lambda: True
        self.start(name)

    def _signal(self, name: str, number: signal.Signals, *, wanted: bool) -> None:
        job = self._jobs[name]
        job.wanted = wanted
        if job.process is not None:
            if not wanted:
                job.process.told = True
            with suppress(ProcessLookupError):
                job.process.popen.send_signal(number)

    def _add(self, name: str, role: str, command: Callable[[], list[str]], environment: Mapping[str, str]) -> _Job:
        self._jobs[name] = _Job(name, role, lambda: self.network.command(name, command()), environment)
        return self._jobs[name]


class LocalStage(Processes):
    """A cluster of processes on this machine."""

    def __init__(self, plan: ClusterPlan, network: Network, progress: Callable[[str], None]) -> None:
        super().__init__(network)
        self.plan = plan
        self._progress = progress
        self._etcd = [self._place_etcd(f"e{i}") for i in range(plan.etcd)]
        self.url = f"etcd://{','.join(each.public for each in self._etcd)}/{CLUSTER}"
        self.own_url = f"etcd://{','.join(f'{each.host}:{each.client}' for each in self._etcd)}/{CLUSTER}"

    def start_all(self) -> None:
        """Starts etcd, coordinators and servers; returns when each is ready. The view may come a little later."""
        self._progress("starting etcd")
        for each in self._etcd:
            job = self._add(each.name, "etcd", partial(self._etcd_command, each), EtcdPlan.environment())
            job.healthy = partial(_healthy, each)
            self.start(each.name)
        self.wait_ready([each.name for each in self._etcd])
        self._progress("starting coordinators and servers")
        for number in range(self.plan.coordinators):
            self._add_coordinator(f"c{number}")
        for _ in range(self.plan.servers):
            self.grow()
        self.wait_ready(self.names("coordinator") + self.names("server"))

    def grow(self) -> str:
        """Starts one more server; its name. Returns at once."""
        name = next(name for i in range(1000) if (name := f"s{i}") not in self._jobs)
        host, (port, admin) = self.network.join(name), free_ports(2)
        public = self.network.publish(name, host, port).rpartition(":")[0]
        self.network.publish(name, host, admin)
        options = ["--host", host, "--port", str(port), "--admin-port", str(admin)]
        options += ["--advertise", public] if public != host else []
        self._add(name, "server", lambda: self._elasticps("server", name, options), dict(os.environ))
        self.start(name)
        return name

    def shrink(self, name: str) -> str:
        """Has a server drain and end for good; its name."""
        self.terminate(name)
        return name

    def _add_coordinator(self, name: str) -> None:
        plan = self.plan
        options = ["--ranges", str(plan.ranges), "--replicas", str(plan.replicas), "--min-servers", str(plan.servers)]
        self.network.join(name)
        self._add(name, "coordinator", lambda: self._elasticps("coordinator", name, options), dict(os.environ))
        self.start(name)

    def _elasticps(self, role: str, name: str, options: list[str]) -> list[str]:
        return [sys.executable, "-m", "elasticps", role, "--url", self.url, "--name", name, *options]

    def _place_etcd(self, name: str) -> _Etcd:
        host = self.network.join(name)
        client, peer = free_ports(2)
        return _Etcd(name, host, client, peer, self.network.publish(name, host, client))

    def _etcd_command(self, member: _Etcd) -> list[str]:
        client, peer = f"http://{member.host}:{member.client}", f"http://{member.host}:{member.peer}"
        return [
            *(str(etcd_binary()), "--name", member.name, "--data-dir", str(self.folder / f"{member.name}.etcd")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(f"{each.name}=http://{each.host}:{each.peer}" for each in self._etcd)),
        ]


def _runs(job: _Job) -> bool:
    return job.process is not None and job.process.running


def _healthy(member: _Etcd) -> bool:
    return answers_healthy(http.client.HTTPConnection(member.host, member.client, timeout=1.0))
