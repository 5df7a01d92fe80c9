"""One process of a local cluster: how it starts, what its log says, how it ends, and when it is started again."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticps.errors import ConfigError, Error, Timeout
from elasticps.local import supervisor
from elasticps.local.zygote import Forked, Zygote

_LOG_TAIL_BYTES = 2000
_LOG_SEARCHED_BYTES = 32_000  # a stack of Go is some 6,000
_USAGE = 2  # what our commands end with when an option is unusable
_COMPILING = b"compiling kernels for this machine"  # elasticps.kernels says so
_ERROR = re.compile(r"^error: (.+)\Z", re.MULTILINE)  # what a command prints last
_LOOK_EVERY_S = 0.1
_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)  # before a process that keeps dying is started again
_STEADY_S = 30.0  # after which a death counts as the first again
_FULL = os.strerror(errno.ENOSPC).lower()  # Go and Python say the same


@dataclass
class Process:
    """A process that was started in a session of its own, so that Ctrl-C reaches only whoever owns it."""

    name: str
    role: str  # "etcd", "coordinator" or "server"
    log: Path
    output: Path
    popen: subprocess.Popen[bytes] | Forked
    moment: str
    ready: dict[str, Any] = field(default_factory=dict)  # the newest line that it printed when it was ready
    started: float = field(default_factory=time.monotonic)
    deaths: int = 0  # of processes of this name, one soon after the other, before this one
    end_reported: bool = False  # by `LocalCluster.ended`, or known to who killed it

    @classmethod
    def start(
        cls, name: str, role: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None,
        zygote: Zygote | None = None,
    ) -> Process:  # fmt: skip
        """Runs `command` with its standard error appended to `<name>.log` and its output in `<name>.out`. zygote: what
        forks it, if it is a command of ours. ConfigError for a program that this machine cannot execute."""
        log, output = folder / f"{name}.log", folder / f"{name}.out"
        if zygote is not None:
            with suppress(OSError):  # it has ended: then as without
                forked = zygote.start(command, output, log, environment or os.environ)
                return cls(name, role, log, output, forked, supervisor.started_at(forked.pid) or "")
        with log.open("ab") as errors, output.open("wb") as out:
            try:
                popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=errors,
                    env=dict(environment) if environment is not None else None,
                    start_new_session=True,
                )
            except OSError as error:
                if error.filename != command[0]:  # no memory for a process: that is no fault of the program
                    raise
                # Of a file that is there the kernel means what runs it: the shell or loader that it names.
                lacking = isinstance(error, FileNotFoundError) and Path(command[0]).exists()
                why = "the interpreter that it names is not there" if lacking else error.strerror
                raise ConfigError(f"{command[0]} cannot be executed: {why}") from None
        # A child that we have not waited for keeps its id, so this reads its own moment, or None where it is dead.
        return cls(name, role, log, output, popen, supervisor.started_at(popen.pid) or "")

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def running(self) -> bool:
        return self.popen.poll() is None

    @property
    def left(self) -> bool:
        """Whether it is a server that has ended because it was asked to, such as by a drain."""
        return self.role == "server" and self.popen.poll() == 0

    def kill(self) -> None:
        """SIGKILL, and waits until it is gone."""
        self.end_reported = True  # the caller knows
        self.popen.kill()
        self.popen.wait()

    def wait_until(self, ready: Callable[[], bool], deadline: float) -> None:
        """Returns when `ready()`; Error if the process ends first, ConfigError if an option was unusable,
        Timeout at `deadline` (time.monotonic())."""
        while not ready():
            if not self.running:
                # Of etcd it means nothing: whatever is written in Go ends with it when it panics.
                kind = ConfigError if self.role != "etcd" and self.popen.poll() == _USAGE else Error
                raise kind(f"{self.role} {self.name} {self.how_it_ended()} before it was ready; {self.last_words()}")
            if time.monotonic() > deadline:
                raise Timeout(f"{self.role} {self.name} was not ready in time; {self.last_words()}")
            time.sleep(0.01)

    def wait_ready(self, deadline: float, waiting: Callable[[], None] = lambda: None) -> None:
        """Waits for the line of JSON that our own processes print when they are ready; keeps it in `ready`. Calls
        `waiting` every now and then."""

        def ready() -> bool:
            waiting()
            return bool(self.newest_ready())

        self.wait_until(ready, deadline)

    def newest_ready(self) -> dict[str, Any]:
        """The newest line that it printed when ready, one per incarnation. Empty before the first."""
        for line in reversed(self.output.read_bytes().splitlines(keepends=True)):
            if line.startswith(b"{") and line.endswith(b"\n"):
                self.ready = json.loads(line)
                break
        return self.ready

    def how_it_ended(self) -> str:
        """How it ended, in words such as "was killed by SIGKILL"."""
        code = self.popen.returncode
        if code is None:
            return "is running"
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        if code == 0:
            return "ended, as it was asked to"
        return f"ended with exit code {code}"

    def last_words(self) -> str:
        """The end of its log, for an error message; only the error that it ended with, if its log has one."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _LOG_SEARCHED_BYTES), os.SEEK_SET)
            text = log.read().decode(errors="replace").strip()
        error = _ERROR.search(text)
        if words := error[1] if error else _fatal(text):
            full = _FULL in words.lower()
            return f"{words}; make room where {self.log.parent} is" if full else words
        text = text[-_LOG_TAIL_BYTES:]
        return f"its log ends with:\n{text}" if text else "its log is empty: it had no time for more than to start"


def _fatal(log: str) -> str:
    """The error that an etcd ended with, from its log; "" if there is none. A stack may follow it, no other event."""
    events = [line for line in log.splitlines() if line.startswith('{"level":')]
    with suppress(ValueError, LookupError):  # ValueError: cut off, as by a disk that is full
        event = json.loads(events[-1])
        if event["level"] in ("fatal", "panic"):
            return ": ".join(str(event[key]) for key in ("msg", "error") if key in event)
    return ""


def signal_name(number: int) -> str:
    """ "SIGKILL" for 9; Python has no names for most real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


@dataclass(frozen=True)
class ServerProcess:
    """A server of a local cluster; anybody may `kill -9` its `pid`.

    One that was left out of a view goes on as a new incarnation, in the same process and on the same ports.
    """

    name: str
    pid: int
    address: str
    admin: str
    incarnation: int
    running: bool

    @classmethod
    def of(cls, process: Process) -> ServerProcess:
        """The server that a process is, or was."""
        ready = process.ready
        return cls(process.name, process.pid, ready["address"], ready["admin"], ready["incarnation"], process.running)


class CompilationNotice:
    """Explains once why a start takes long, when one of several processes compiles kernels and the others wait."""

    def __init__(self, logs: Sequence[Path], tell: Callable[[str], None]) -> None:
        self._logs = logs
        self._tell = tell
        self._done = False

    def __call__(self) -> None:
        if not self._done and any(_COMPILING in log.read_bytes() for log in self._logs if log.exists()):
            self._done = True
            self._tell("compiling kernels for this machine: a first start takes up to a minute longer")


def stop_all(processes: Sequence[Process], *, kill_after_s: float) -> None:
    """Ends all at once (by SIGINT: on SIGTERM servers drain first), kills those that still run after `kill_after_s`;
    returns when every one has ended."""
    for process in processes:
        if process.running:
            process.popen.send_signal(signal.SIGINT)
            process.popen.send_signal(signal.SIGCONT)  # one that stands still would not hear
    deadline = time.monotonic() + kill_after_s
    for process in processes:
        try:
            process.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def deaths_of(process: Process) -> int:
    """The number of deaths in a row under a dead process's name; 0 while it is too early to start it again."""
    lived = time.monotonic() - process.started
    deaths = 1 if lived > _STEADY_S else process.deaths + 1
    return deaths if lived >= _PAUSES_S[min(deaths, len(_PAUSES_S)) - 1] else 0


class Restarter:
    """Calls `look`, which restarts dead processes and must not raise, ten times a second in a thread of its own."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="elasticps-restarter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_EVERY_S):
            self._look()
