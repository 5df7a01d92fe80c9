"""Logs of the demo's own process while it kills others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_LOGS = """
import logging, sys
from pathlib import Path
from examples.demo.main import _logs_to

with _logs_to(Path(sys.argv[1])):
    logging.getLogger("coordinator.etcd").warning("a watch is broken")
logging.getLogger("coordinator.etcd").warning("said later")
"""


def test_warnings_about_killed_processes_go_to_a_file(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _LOGS, str(tmp_path / "demo.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == "said later\n"
    assert "WARNING coordinator.etcd: a watch is broken" in (tmp_path / "demo.log").read_text(encoding="utf-8")
