"""`bench servers`: workers push, and what it counts."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.many_servers import PushCost


def test_servers_time_for_a_push_is_measured() -> None:
    options = "--servers 2 --heads 3 --workers 3 --rounds 1 --seconds 0.5 --json"
    result = CliRunner().invoke(app, ["servers", *options.split()])
    assert result.exit_code == 0, result.output
    (cost,) = [PushCost(**line) for line in json.loads(result.stdout)]
    assert (cost.servers, cost.heads, cost.workers) == (2, 2, 3)
    assert cost.pushes_per_s > 0
    assert cost.servers_us > 0
