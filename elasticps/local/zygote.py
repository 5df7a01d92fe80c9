"""The zygote: a process that has imported everything and loaded every kernel, and forks servers and coordinators.

A forked process is ready at once, and a whole cluster takes the CPU time of one start, as on Android and in Chromium.
This is the owner's side; `cli/zygote.py` runs in the zygote. A forked process is the zygote's child: here a pidfd tells
when it ends, and the zygote its exit code.

Why not `multiprocessing.forkserver`: it is one for the whole program, so a cluster would share it with its user's own
pools; its children import the user's `__main__` again, which starts the next cluster where a script has no guard; they
have the environment of its start, not one each; and the program waits for them as it ends, which a detached cluster
must not need.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticps.local import supervisor

OURS = [sys.executable, "-m", "elasticps"]
"""What a command begins with that can be forked."""

ANSWER_S = 60.0  # without an answer for so long, imports and kernels included, the zygote stands still
REAPED_S = 5.0  # the same for an exit code, for which it only waits
END_S = 10.0

_COMMAND = [sys.executable, "-m", "elasticps.cli.zygote"]


class Zygote:
    """The owner's side of one zygote, which starts at once. May be used from any thread."""

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
        """Whether this system reports the end of a process that is no child of the caller."""
        return hasattr(os, "pidfd_open")

    @property
    def pid(self) -> int:
        return self._popen.pid

    def entrust(self, watch: Callable[[int, str], None]) -> None:
        """Has the supervisor end the zygote, too, if the owner dies. watch: takes a pid and the moment it began."""
        watch(self.pid, supervisor.started_at(self.pid) or "")

    def start(self, command: Sequence[str], out: Path, log: Path, environment: Mapping[str, str]) -> Forked:
        """Runs a command of ours with its standard output in `out` and its standard error appended to `log`. OSError
        if the zygote has ended, or stands still."""
        out.write_bytes(b"")  # now: whoever reads it next finds nothing of an earlier process
        log.touch()
        request = {
            "arguments": command[len(OURS) :],
            "out": str(out),
            "log": str(log),
            "environment": dict(environment),
            "folder": _working_folder(),
        }
        return Forked(self, self.ask(request))

    def ask(self, request: Mapping[str, Any], answer_s: float | None = None) -> int:
        """Sends one request, returns its answer. Kills the zygote if no answer comes within `answer_s` (default:
        ANSWER_S), or the wait is interrupted: a late answer would be taken for the next one's, and a process run that
        nobody knows of. TimeoutError, too, if another thread holds the zygote for so long."""
        if answer_s is None:
            answer_s = ANSWER_S
        if not self._lock.acquire(timeout=answer_s):
            raise TimeoutError("the zygote is busy")
        try:
            try:
                self._sock.settimeout(answer_s)
                self._sock.sendall(json.dumps(request).encode() + b"\n")
                line = self._lines.readline()
            except BaseException:
                self._popen.kill()
                raise
        finally:
            self._lock.release()
        if not line:
            raise ConnectionResetError("the zygote has ended")
        return int(line)

    def close(self) -> None:
        """Ends the zygote; the processes that it has forked live on."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._sock.close()
        self._popen.send_signal(signal.SIGCONT)  # one that stands still would not see it
        try:
            self._popen.wait(END_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Forked:
    """A process that a zygote has started, with the methods of `subprocess.Popen` that callers use."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._zygote = zygote
        self._lock = threading.Lock()
        self._handle = os.pidfd_open(pid)  # the zygote waits for nobody unasked: it is this very process
        weakref.finalize(self, os.close, self._handle)

    def poll(self) -> int | None:
        """The exit code, -n for death by signal n; None while it runs."""
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
                found = _exit_code(
                    self.pid
                )  # before the zygote has waited for it: from then on the id may be another's
                try:
                    self.returncode = self._zygote.ask({"wait": self.pid}, REAPED_S)
                except (OSError, ValueError):  # the zygote has ended, or stands still
                    self.returncode = -signal.SIGKILL if found is None else found
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, if the process still runs."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _working_folder() -> str:
    """This process's working folder, as a process has it that starts here now; "" if it was removed."""
    with suppress(OSError):
        return os.getcwd()
    return ""


def _exit_code(pid: int) -> int | None:
    """The exit code, as `subprocess` has it, of a zombie; None if the system does not tell."""
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None
