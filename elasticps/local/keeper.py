"""Signals processes without ever hitting a stranger, and ends a cluster's processes when their owner dies.

A process id is used again after its process has ended, so a process is known by its id *and* the moment it began
(`started_at`). Run as a script, this module is the keeper: the owner of a cluster holds the other end of its standard
input and writes one "pid moment" line per process; when that pipe closes, however the owner came to die, the keeper
kills what is still running, those too that only the cluster's record lists, and removes the cluster's folder. Only the
standard library is imported, so that it starts in a few milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

RECORD = "cluster.json"


def started_at(pid: int) -> str | None:
    """A text that no other process of this id ever has; None where none runs (a zombie does not)."""
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
        asked = subprocess.run(
            ["ps", "-o", "state=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout.split()
        return "-".join(asked[1:]) if asked and not asked[0].startswith("Z") else None


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


def end_all(processes: list[tuple[int, str]], *, grace_s: float) -> None:
    """Asks every process to end at once (SIGINT: servers take SIGTERM as a wish to hand everything over first), kills
    those that have not after `grace_s`; returns when all have ended."""
    waiting = [(pid, moment) for pid, moment in processes if send(pid, moment, signal.SIGINT)]
    for pid, moment in waiting:
        send(pid, moment, signal.SIGCONT)  # one that stands still would not hear
    deadline = time.monotonic() + grace_s
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        waiting = [(pid, moment) for pid, moment in waiting if is_running(pid, moment)]
    for pid, moment in waiting:
        send(pid, moment, signal.SIGKILL)
    while any(is_running(pid, moment) for pid, moment in waiting):
        time.sleep(0.01)


def keep(owner: int, folder: str, born: str) -> None:
    """Reads processes from standard input until it closes or `owner` has died; then ends them, removes `folder`. born:
    as the record there says; if it says otherwise by then, the folder is another cluster's."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its owner, after it has cleaned up
    received = b""
    owned = True
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
    end_all(list({*known, *_recorded(Path(folder), born)}), grace_s=0.0)
    if _record(Path(folder)).get("born", born) == born:
        shutil.rmtree(folder, ignore_errors=True)


def _recorded(folder: Path, born: str) -> list[tuple[int, str]]:
    """The processes in the cluster's record: another process than the owner may have started some (`scale`)."""
    with suppress(KeyError, TypeError):
        record = _record(folder)
        if record["born"] == born:
            return [(entry["pid"], entry["moment"]) for entry in record["processes"] if entry["role"] != "owner"]
    return []


def _record(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    with suppress(OSError, ValueError):
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2], sys.argv[3])
