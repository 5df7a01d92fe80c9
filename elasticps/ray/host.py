"""A Ray actor that runs one process of a cluster: etcd, a coordinator or a server.

Actor and process live and die together. A process that ends takes the actor's worker process along, so that Ray starts
the actor again, maybe on another node, and with it the process: a server comes back as its next incarnation. When the
worker process dies, however it came to die, the kernel kills the process (`tether`). One that stands still is killed.

A server that has been drained ends for good: then the actor has Ray forget it. When Ray drains the actor's node, as
before a preemption, the server is asked to leave, and the actor waits for the end of the node: Ray would start it again
on the very same one.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from elasticps.admin import fetch_health
from elasticps.errors import ClusterUnreachable, ConfigError, ServerError
from elasticps.local import etcd, scaling
from elasticps.local.process import Process, stop_all
from elasticps.ray import tether
from elasticps.security import credentials_of
from elasticps.system import background

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between looks at the node and at the process
ANSWER_S = 2.0  # for one answer of the process
SILENT_S = 20.0  # a process that has not answered for so long stands still
PAUSE_S = 1.0  # before a process that could not be started is started again
KILL_AFTER_S = 10.0
_LOG_BYTES = 1 << 20


@dataclass(frozen=True)
class HostedProcess:
    """What an actor runs.

    name, role  such as "s0" and "server"; roles: "etcd", "coordinator", "server"
    folder      name of the folder for its log, and the data of an etcd
    url         of the cluster, for this process; "" for etcd
    machine     address of the only machine where it can run, as others find it over loopback; "": others find it under
                its node's address
    options     of its command
    ready_s     how long a start may take
    """

    name: str
    role: str
    folder: str
    url: str = ""
    machine: str = ""
    options: tuple[str, ...] = ()
    ready_s: float = 600.0


@dataclass
class _Running:
    """The process, and what is known of it. answers: asks it whether it lives."""

    process: Process
    answers: Callable[[], bool]
    heard_at: float = field(default_factory=time.monotonic)
    left: bool = False  # asked to leave, because the node is drained


class ProcessHost:
    """The actor. RuntimeError if its process cannot be started the first time."""

    def __init__(self, spec: HostedProcess) -> None:
        context = ray.get_runtime_context()
        self._spec = spec
        self._node = context.get_node_id()
        self._me = context.current_actor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it calls what Ray itself has deprecated
            self._again = bool(context.was_current_actor_reconstructed)
        self._folder = folder_of(spec.folder)
        self._closing = threading.Event()
        self._begun = threading.Event()
        self._running: _Running | None = None
        self._trouble = ""
        # One thread for the whole life: the process ends with the thread that has started it.
        threading.Thread(target=self._run, name=f"elasticps-{spec.name}", daemon=True).start()
        self._begun.wait()
        if self._trouble:
            raise RuntimeError(self._trouble)

    def __repr__(self) -> str:
        return f"elasticps({self._spec.role} {self._spec.name})"  # before each line that the worker process prints

    # --- what the cluster asks --------------------------------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """The process: its id, that of the worker process, the node, and what the process said when it was ready."""
        running = self._running
        return {
            "pid": 0 if running is None else running.process.pid,
            "worker_pid": os.getpid(),
            "node": self._node,
            "leaves": running is not None and running.left,
            "ready": {} if running is None else running.process.newest_ready(),
            "endpoint": self._endpoint if self._spec.role == "etcd" else "",
        }

    def log(self) -> str:
        """The end of what the process has logged on this node."""
        with suppress(OSError):
            return (self._folder / f"{self._spec.name}.log").read_bytes()[-_LOG_BYTES:].decode(errors="replace")
        return ""

    def leave(self, node: str, worker_pid: int) -> None:
        """Ends this actor for good, if it is the one in that worker process."""
        if (node, worker_pid) == (self._node, os.getpid()):
            self._closing.set()
            ray.actor.exit_actor()

    def stop(self) -> None:
        """Ends the process, and nothing follows it; the data of an etcd go with it. The caller kills the actor."""
        self._closing.set()
        if self._running is not None:
            stop_all([self._running.process], kill_after_s=KILL_AFTER_S)
        if self._spec.role == "etcd":
            shutil.rmtree(self._folder / "etcd", ignore_errors=True)

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._running = self._start()
        except Exception as error:
            if not self._again:
                self._trouble = str(error)
                self._begun.set()
                return
            log.error("%s %s cannot be started: %s", self._spec.role, self._spec.name, error)
            time.sleep(PAUSE_S)  # what it needs may come back
            os._exit(1)
        self._begun.set()
        try:
            self._watch(self._running)
        except Exception:  # the process ends with this thread
            if not self._closing.is_set():
                log.exception("%s cannot be watched; Ray starts it again", self._spec.name)
                os._exit(1)

    def _watch(self, running: _Running) -> None:
        """Returns when the process has been stopped; otherwise the worker process ends."""
        while True:
            with suppress(subprocess.TimeoutExpired):
                running.process.popen.wait(LOOK_S)
                break
            if not self._closing.is_set():
                self._look(running)
        if self._closing.is_set():
            return
        if running.left:
            while self._node in draining_nodes():
                time.sleep(LOOK_S)
        elif running.process.left:
            # A dead node's actor may live on beside the one that has replaced it, and end when that one has taken the
            # server's name. So whoever gets this message looks whether it is meant.
            with suppress(Exception):
                ray.get(self._me.leave.remote(self._node, os.getpid()), timeout=KILL_AFTER_S)
        if not self._closing.is_set():
            os._exit(1)

    def _look(self, running: _Running) -> None:
        if self._spec.role == "server" and not running.left and self._node in draining_nodes():
            running.left = True
            running.process.popen.send_signal(signal.SIGTERM)
        if running.answers():
            running.heard_at = time.monotonic()
        elif time.monotonic() - running.heard_at > SILENT_S:
            running.process.kill()

    def _start(self) -> _Running:
        spec = self._spec
        self._folder.mkdir(parents=True, exist_ok=True)
        here = ray.util.get_node_ip_address()
        check_machine(spec, here)
        host = "127.0.0.1" if spec.machine else here
        deadline = time.monotonic() + spec.ready_s
        if spec.role == "etcd":
            plan = etcd.EtcdPlan.stored(self._folder / "etcd", host, self._folder / "etcd.json")
            self._endpoint = plan.endpoint
            process = self._start_process(plan.command(), plan.environment())
            _wait(process, partial(process.wait_until, plan.healthy, deadline))
            return _Running(process, plan.healthy)
        credentials = credentials_of(spec.url) if spec.role == "server" else None  # once: they keep what could be read
        more = ["--take-over", "--host", host, "--zone", self._node[:12]] if spec.role == "server" else []
        if spec.role == "server" and self._again:
            more += ["--wait", "60"]  # the store may have gone down with the same node
        command = scaling.server_command(spec.role, spec.url, spec.name, [*spec.options, *more])
        process = self._start_process(command, {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))})
        _wait(process, partial(process.wait_ready, deadline))
        if spec.role == "coordinator":
            return _Running(process, partial(_stands, process.pid))
        return _Running(process, partial(_serves, process.ready["admin"], credentials))

    def _start_process(self, command: list[str], environment: dict[str, str]) -> Process:
        tied = [sys.executable, "-I", "-S", str(tether.__file__), str(os.getpid()), *command]
        return Process.start(self._spec.name, self._spec.role, tied, self._folder, environment)


def check_machine(spec: HostedProcess, here: str) -> None:
    """Raises ConfigError if a process that others find over loopback would run on another machine than theirs."""
    if spec.machine not in ("", here):
        raise ConfigError(
            f"{spec.role} {spec.name} cannot run on the machine {here}: its cluster was begun on {spec.machine}, Ray's "
            "only machine then, and listens on loopback there; begin a cluster for several machines, by `url` with "
            "certificates or by insecure=True"
        )


def _wait(process: Process, ready: Callable[[], None]) -> None:
    try:
        ready()
    except BaseException:
        if process.running:
            process.kill()
        raise


def _serves(admin: str, credentials: Credentials | None) -> bool:
    try:
        background.run(fetch_health(admin, ANSWER_S, credentials=credentials), 2 * ANSWER_S)
    except (ServerError, ConfigError):  # it refuses to answer us, or we cannot ask: no reason to kill it
        return True
    except (ClusterUnreachable, TimeoutError):
        return False
    return True


def _stands(pid: int) -> bool:
    """Whether a process is not stopped: all that can be seen of a coordinator from outside."""
    with suppress(OSError):
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0] != "T"
        )
    return True


def draining_nodes() -> set[str]:
    """Ids of the nodes that Ray drains; none while Ray's control store does not answer.

    Ray has no public call for it; Ray Train learns of preemptions by the same one.
    """
    with suppress(Exception):
        return set(ray._private.state.state.get_draining_nodes())
    return set()


def folder_of(name: str) -> Path:
    """The folder of this name on this node, in that of Ray's session."""
    return Path(ray._private.worker._global_node.get_session_dir_path()) / "elasticps" / name
