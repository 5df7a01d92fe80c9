"""Processes of the command line that tests start and stop."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs `elasticps` until the block ends; yields the process, and the JSON of the first line that it prints."""
    command = [sys.executable, "-m", "elasticps", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            yield running, json.loads(running.stdout.readline())
        finally:
            running.send_signal(signal.SIGCONT)  # a test may have stopped it
            running.terminate()


@contextmanager
def reader_process(url: str, *options: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Runs a reader that others pull from."""
    with process("reader", "--url", url, "--listen", "127.0.0.1:0", *options) as found:
        yield found
