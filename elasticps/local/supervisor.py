"""Signals processes without ever hitting another one, and ends a cluster's processes when their owner dies.

A process id is used again after its process has ended, so a process is known by its id *and* the moment it began
(`started_at`). `Supervisor` runs this module as a script, in a process of its own. The owner of a cluster holds the
other end of that process's standard input and writes one "pid moment" line per process. When the pipe closes, however
the owner came to die, the supervisor kills all of them that still run, with what they have started, those that carry
the owner's mark, and those that only the cluster's record lists, and removes the cluster's folder. Only the standard
library is imported, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

RECORD = "cluster.json"
MARK = "ELASTICPS_STARTED_BY"  # the variable with the mark of a process on whose behalf others were started
# The numbers of a job of SLURM, PBS and LSF. A new job has the other variables of whoever submits it, the mark too.
_JOBS = (b"SLURM_JOB_ID", b"PBS_JOBID", b"LSB_JOBID")
_CLOSE_S = 1.0  # for a supervisor that reads no more
_MARKED_S = 5.0  # for killed processes to be gone


def started_at(pid: int) -> str | None:
    """Returns a text that tells a process from later ones with the same id; None if none runs (a zombie does not)."""
    if sys.platform == "linux":
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()  # the command before it may hold spaces and parentheses
        state, ticks = fields[0], fields[19]
        return None if state in "ZX" else f"{boot}:{ticks}"
    else:
        shown = subprocess.run(
            ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        return "-".join(shown[1:]) if shown and not shown[0].startswith("Z") else None


def is_running(pid: int, moment: str) -> bool:
    """Whether the process that began at `moment` still runs."""
    return started_at(pid) == moment


def send(pid: int, moment: str, number: int) -> bool:
    """Sends signal `number` to the process that began at `moment`; False where that one has ended."""
    with suppress(OSError, AttributeError):  # the kernel, or the platform, may not know pidfd
        handle = os.pidfd_open(pid)
        try:
            if not is_running(pid, moment):
                return False
            signal.pidfd_send_signal(handle, number)  # reaches that very process or none
        except ProcessLookupError:
            return False
        else:
            return True
        finally:
            os.close(handle)
    if not is_running(pid, moment):
        return False
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int, moment: str) -> None:
    """Kills the process that began at `moment`, unless it has ended or is another user's."""
    with suppress(PermissionError):
        send(pid, moment, signal.SIGKILL)


def descendants(pid: int) -> list[tuple[int, str]]:
    """Returns what a process has started, directly or not: ids and moments; none where /proc does not tell."""
    children: dict[int, list[int]] = {}
    with suppress(OSError):
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):  # it has ended meanwhile
                stat = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
                children.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(name))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        left += below
        found += [(each, moment) for each in below if (moment := started_at(each)) is not None]
    return found


def mark_of(pid: int) -> str:
    """Returns the mark of a running process: given on as the variable MARK, all descendants inherit it."""
    return f"{pid}:{started_at(pid)}"


def kill_marked(mark: str) -> None:
    """Kills every process that carries the mark, though it may have a session of its own and its parent may be dead.
    Finds none where /proc does not tell, none of other users, and none of a job that one of them has submitted."""
    variable, deadline = f"{MARK}={mark}".encode(), time.monotonic() + _MARKED_S
    while (found := _processes_with(variable)) and time.monotonic() < deadline:
        for pid, moment in found:
            kill(pid, moment)
        time.sleep(0.01)  # and again: one may have started another meanwhile


def _processes_with(variable: bytes) -> list[tuple[int, str]]:
    found, ours = [], _job_of({b"%s=%s" % each for each in os.environb.items()})
    with suppress(OSError):
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):  # it has ended meanwhile, or is another user's
                moment = started_at(pid)  # first: the variables are then those of this very process, or of none
                variables = set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
                if moment and variable in variables and _job_of(variables) <= ours:
                    found.append((pid, moment))
    return found


def _job_of(variables: set[bytes]) -> set[bytes]:
    return {each for each in variables if each.partition(b"=")[0] in _JOBS}


def end_all(processes: list[tuple[int, str]], *, kill_after_s: float) -> None:
    """Ends all processes at once (by SIGINT: on SIGTERM servers drain first), kills those that still run after
    `kill_after_s`, and returns when all have ended."""
    waiting = [(pid, moment) for pid, moment in processes if send(pid, moment, signal.SIGINT)]
    for pid, moment in waiting:
        send(pid, moment, signal.SIGCONT)  # one that stands still would not hear
    deadline = time.monotonic() + kill_after_s
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        waiting = [(pid, moment) for pid, moment in waiting if is_running(pid, moment)]
    for pid, moment in waiting:
        send(pid, moment, signal.SIGKILL)
    while any(is_running(pid, moment) for pid, moment in waiting):
        time.sleep(0.01)


def supervise(owner: int, folder: str, born: str) -> None:
    """Reads processes from standard input until it closes or `owner` has died; then ends them, removes `folder`. born:
    as the record there says; if it says otherwise by then, the folder is another cluster's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, after it has cleaned up
    received = b""
    owned = True
    mark = mark_of(owner)
    while owned:
        owned = os.getppid() == owner  # looked at too, as a fork of the owner may hold the pipe open after its death
        while select.select([0], [], [], 0.5 if owned else 0.0)[0]:
            chunk = os.read(0, 4096)
            if not chunk:
                owned = False
                break
            received += chunk
    lines = [line.split() for line in received.decode().splitlines()]
    known = [(int(line[0]), line[1]) for line in lines if len(line) == 2]  # one had ended before its moment was read
    for pid, moment in known:
        _kill_tree(pid, moment)
    kill_marked(mark)
    end_all(list({*known, *_recorded(Path(folder), born)}), kill_after_s=0.0)
    _remove(Path(folder), born)


def _kill_tree(pid: int, moment: str) -> None:
    """Kills the process that began at `moment`, what it has started, and the process group that it leads, if any."""
    if not is_running(pid, moment):
        return
    below = descendants(pid)
    with suppress(OSError):  # it has ended meanwhile; some run as another user
        if os.getpgid(pid) == pid and is_running(pid, moment):
            os.killpg(pid, signal.SIGKILL)
    for each in ((pid, moment), *below):
        kill(*each)


def _remove(folder: Path, born: str) -> None:
    """Removes the folder unless it is another cluster's, under the lock that one takes to begin there."""
    with ExitStack() as stack:
        with suppress(FileNotFoundError):  # then none has begun beside it
            lock = stack.enter_context((folder.parent / ".lock").open("rb"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        if _record(folder).get("born", born) == born:
            shutil.rmtree(folder, ignore_errors=True)


def _recorded(folder: Path, born: str) -> list[tuple[int, str]]:
    """The processes in the cluster's record: another process than the owner may have started some (`scale`)."""
    with suppress(KeyError, TypeError):
        record = _record(folder)
        if record["born"] == born:
            return [(entry["pid"], entry["moment"]) for entry in record["processes"] if entry["role"] != "owner"]
    return []


def _record(folder: Path) -> dict[str, Any]:
    """Reads the record; empty if it is missing or unreadable."""
    with suppress(OSError, ValueError):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


class Supervisor:
    """The owner's side of a supervisor that runs until `close`. born: as the record in the cluster's folder says."""

    def __init__(self, folder: Path, born: str) -> None:
        # By its path and without site-packages: it starts in a few milliseconds.
        self._command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder), born]
        self._lock = threading.Lock()
        self._supervised: list[tuple[int, str]] = []
        self._process = self._start()

    @property
    def pid(self) -> int:
        """The process id of the supervisor that runs now."""
        return self._process.pid

    def watch(self, pid: int, moment: str) -> None:
        """Adds a process that the supervisor is to end. Replaces a supervisor that has died meanwhile."""
        with self._lock:
            self._supervised.append((pid, moment))
            try:
                self._send_lines([(pid, moment)])
            except OSError:
                self.close(_CLOSE_S)
                self._process = self._start()
                self._send_lines(self._supervised)

    def close(self, timeout_s: float) -> None:
        """Ends the supervisor; the processes that it would have ended are gone by now."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:  # a fork of this process still holds the other end
            self._process.kill()
            self._process.wait()

    def _start(self) -> subprocess.Popen[bytes]:
        # Not in our session, or Ctrl-C and a closing terminal would end it with us.
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)

    def _send_lines(self, processes: Iterable[tuple[int, str]]) -> None:
        assert self._process.stdin is not None
        for pid, moment in processes:
            self._process.stdin.write(f"{pid} {moment}\n".encode())


if __name__ == "__main__":
    supervise(int(sys.argv[1]), sys.argv[2], sys.argv[3])
