"""The example of serving: a service answers while its model is trained and servers die, and shows newer steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_service_answers_while_its_model_is_trained(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.serving.run", "--seconds", "8", "--kills", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr + (tmp_path / "processes.log").read_text()
    summary = json.loads(done.stdout)
    first, last = summary["steps"]
    assert summary["answers"] > 0
    assert summary["failed"] == 0
    assert last > first
    assert json.loads((tmp_path / "served.json").read_text()) == summary
    assert (tmp_path / "served.png").stat().st_size > 10_000
