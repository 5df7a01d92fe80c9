"""`bench reader-cost`: what it makes of turns without a reader and beside one."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app
from benchmarks.reader_cost import READER, TRAINING, cost_of
from benchmarks.runner import Turn


def test_turns_are_compared_in_pairs_and_processor_time_is_of_a_step() -> None:
    without = [Turn(10, 1.0, {TRAINING: 0.04, READER: 9.0}), Turn(10, 4.0, {TRAINING: 0.04, READER: 9.0})]
    beside = [Turn(10, 2.0, {TRAINING: 0.06, READER: 0.01}), Turn(10, 5.0, {TRAINING: 0.06, READER: 0.03})]
    found = cost_of("deepfm", 100, 2, 2, 20.0, None, without, beside)
    assert (found.without, found.beside) == ((2000.0, 500.0), (1000.0, 400.0))
    assert found.ratio == pytest.approx(0.65)  # the median of 0.5 and 0.8
    assert found.cpu_us == (2000.0, 3000.0, 1000.0)
    assert found.dtype == "as the tables"


@pytest.mark.slow
def test_a_model_trains_without_a_reader_and_beside_one() -> None:
    options = "--model deepfm --workers 1 --servers 1 --batch 32 --turns 1 --seconds 0.1 --dtype float16 --json"
    result = CliRunner().invoke(app, ["reader-cost", *options.split()])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["model"], found["batch"], found["dtype"], len(found["beside"])) == ("deepfm", 32, "float16", 1)
    assert found["ratio"] == pytest.approx(found["beside"][0] / found["without"][0], abs=0.001)
    assert found["cpu_us"][0] > 0
