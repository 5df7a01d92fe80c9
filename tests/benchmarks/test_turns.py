"""`bench turns`: two checkouts play in turns; here this one and itself."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.turns import Compared

ROOT = Path(__file__).parents[2]
SMALL = ["--replicas", "1", "--rows", "64", "--starts", "1", "--turns", "2", "--seconds", "0.05", "--json"]


def test_a_checkout_is_compared_with_itself() -> None:
    result = CliRunner().invoke(app, ["turns", str(ROOT), *SMALL])
    assert result.exit_code == 0, result.output
    lines = [Compared(**each) for each in json.loads(result.stdout)]
    assert [(line.replicas, line.operation, line.rows) for line in lines] == [
        (1, operation, 64) for operation in ("pull", "push", "window")
    ]
    for line in lines:
        assert line.low <= line.ratio <= line.high
        assert len(line.by_start) == 1
        assert line.other_us > 0 < line.this_us


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["turns", str(tmp_path)])
    assert result.exit_code == 2
    assert "root of a checkout" in " ".join(result.output.replace("│", " ").split())
