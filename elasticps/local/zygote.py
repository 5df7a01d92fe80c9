"""Servers and coordinators of one machine, forked from a process that has imported everything and loaded every kernel:
each is there at once, and a cluster takes the CPU time of one start. Android and Chromium start theirs so.

The zygote runs `main`, has one thread, and takes requests over a socket, a line of JSON
each: what to start, or whom to wait for. A forked process goes on as `python -m elasticps …` would. It is the zygote's
child, so a pidfd tells its end here, and the zygote its exit code.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

OURS = [sys.executable, "-m", "elasticps"]
"""What a command begins with that can be forked."""

_COMMAND = [sys.executable, "-c", "from elasticps.local.zygote import main; main()"]
_NAME_BYTES = 15  # of a process, as the kernel keeps it


class Zygote:
    """Begins at once, and is ready when the first process is asked for. May be used from any thread."""

    def __init__(self, log: Path, environment: Mapping[str, str]) -> None:
        self._sock, theirs = socket.socketpair()
        with log.open("ab") as errors, theirs:
            self._popen = subprocess.Popen(
                [*_COMMAND, str(theirs.fileno())], pass_fds=(theirs.fileno(),), stderr=errors,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=dict(environment), start_new_session=True,
            )  # fmt: skip
        self._lines = self._sock.makefile("rb")
        self._lock = threading.Lock()

    @staticmethod
    def possible() -> bool:
        """Whether this system can tell the end of a process that is not a child."""
        return hasattr(os, "pidfd_open")

    @property
    def pid(self) -> int:
        return self._popen.pid

    def start(self, command: Sequence[str], out: Path, log: Path, environment: Mapping[str, str]) -> Forked:
        """Runs a command of ours with its standard output in `out` and its standard error appended to `log`. OSError
        if the zygote has ended."""
        out.write_bytes(b"")  # now: whoever reads it next finds nothing of an earlier process
        log.touch()
        asked = {"arguments": command[len(OURS) :], "out": str(out), "log": str(log), "environment": dict(environment)}
        return Forked(self, self.ask(asked))

    def ask(self, asked: Mapping[str, Any]) -> int:
        """The answer to one request."""
        with self._lock:
            self._sock.sendall(json.dumps(asked).encode() + b"\n")
            line = self._lines.readline()
        if not line:
            raise ConnectionResetError("the zygote has ended")
        return int(line)

    def close(self) -> None:
        """Ends it; those whom it has started live on."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._sock.close()
        self._popen.wait()


class Forked:
    """A process that a zygote has started, as far as it is used like a `subprocess.Popen`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)  # the zygote waits for nobody unasked: it is this very process
        weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """The exit code, -n for the one who died of signal n; None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code when it has ended; subprocess.TimeoutExpired after so many seconds."""
        ended = select.poll()
        ended.register(self._handle, select.POLLIN)
        if not ended.poll(None if timeout is None else max(0.0, timeout) * 1000):
            raise subprocess.TimeoutExpired("elasticps", timeout or 0.0)
        with self._lock:
            if self.returncode is None:
                try:
                    self.returncode = self._zygote.ask({"wait": self.pid})
                except (OSError, ValueError):  # who could have told has ended, too
                    self.returncode = -signal.SIGKILL
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Signals it, if it runs."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


def serve(sock: socket.socket) -> list[str] | None:
    """Starts whom it is asked for until nobody asks any more. Returns in each of those, too: with its arguments."""
    with sock, sock.makefile("rb") as lines:
        for line in lines:
            asked = json.loads(line)
            if "wait" in asked:
                answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
            elif not (answer := os.fork()):
                break
            sock.sendall(b"%d\n" % answer)
        else:
            return None
    _become(asked)
    return list(asked["arguments"])


def _become(asked: Mapping[str, Any]) -> None:
    """What a new process has of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(asked["environment"])
    for path, descriptor in ((asked["out"], 1), (asked["log"], 2)):
        opened = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    arguments = asked["arguments"]
    with suppress(OSError, ValueError, IndexError):  # for ps and top, which show the zygote's command line
        name = arguments[arguments.index("--name") + 1]
        Path("/proc/self/comm").write_bytes(f"elasticps {name}".encode()[:_NAME_BYTES])


def _prepare() -> None:
    """Imports and loads all that the others will need. Where kernels are missing it is they who compile them, and say
    so."""
    from elasticps.cli import app  # noqa: F401
    from elasticps.server import process

    if process.is_warm():
        process.warm()
    gc.collect()
    gc.freeze()  # or each of the others would copy whatever the collector looks at


def main() -> None:
    """Of the zygote, and then of whom it has forked."""
    sock = socket.socket(fileno=int(sys.argv[1]))
    _prepare()
    arguments = serve(sock)
    if arguments is not None:
        from elasticps.cli import main as run

        sys.argv = ["elasticps", *arguments]
        run()
