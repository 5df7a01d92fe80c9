"""A process that ends with its parent, by whatever the parent ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import elasticps
from tests.ray.conftest import alive

TETHER = str(Path(elasticps.__file__).parent / "ray" / "tether.py")
PARENT = f"""
import os, subprocess, sys, time
command = [sys.executable, "-I", "-S", {TETHER!r}, str(os.getpid()), "sleep", "600"]
tied = subprocess.Popen(command, start_new_session=True)
print(tied.pid, flush=True)
time.sleep(600)
"""


def test_a_tied_process_is_killed_with_its_parent(eventually: Callable[[Callable[[], bool]], None]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        tied = int(parent.stdout.readline())
        eventually(lambda: Path(f"/proc/{tied}/comm").read_text() == "sleep\n")
    finally:
        parent.kill()
        parent.communicate()
    eventually(lambda: not alive(tied))


def test_a_process_whose_parent_has_ended_already_is_killed_at_once() -> None:
    command = [sys.executable, "-I", "-S", TETHER, str(os.getppid()), "echo", "runs"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (-9, "")
    command[4] = str(os.getpid())
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "runs\n"
