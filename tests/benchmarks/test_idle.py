"""`bench idle`: workers connect and rest, and what it counts."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.idle import IdleCost


def test_time_of_idle_workers_is_measured() -> None:
    result = CliRunner().invoke(app, ["idle", *["--workers", "3", "--processes", "2", "--seconds", "1", "--json"]])
    assert result.exit_code == 0, result.output
    cost = IdleCost(**json.loads(result.stdout))
    assert (cost.workers, cost.processes) == (3, 2)
    assert cost.worker_percent >= 0
