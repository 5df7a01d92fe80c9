"""Coordinators and servers as real processes, with the command lines that a test wants, and their metrics."""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from elasticps.local.process import Process, stop_all
from tests.zygotes import Shared

START_S = 90.0


class Fleet:
    """Processes that end with the test. `folder` gets their logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, Process] = {}

    def start(self, name: str, arguments: Sequence[str]) -> Process:
        """Runs `elasticps arguments…`; returns at once."""
        command = [sys.executable, "-m", "elasticps", *arguments]
        zygote = Shared(self.folder / "zygote.log", os.environ) if Shared.possible() else None
        process = Process.start(name, arguments[0], command, self.folder, dict(os.environ), zygote)
        self.processes[name] = process
        return process

    def wait_ready(self) -> None:
        """Waits until each has said that it is ready."""
        deadline = time.monotonic() + START_S
        for process in self.processes.values():
            process.wait_ready(deadline)

    def stop(self) -> None:
        """Ends them all."""
        stop_all(list(self.processes.values()), kill_after_s=10)


def scrape(port: int) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The samples of a process: name -> labels, sorted -> value."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(get(port, "/metrics")):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


def get(port: int, path: str) -> str:
    """The body at a path of a process's endpoint."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as answer:
        return str(answer.read().decode())
