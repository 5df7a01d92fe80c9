"""`bench train`: every way of training works, and what it counts."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from benchmarks import train
from benchmarks.cli import app
from benchmarks.runner import Turn
from benchmarks.train import TrainingLine, Way, line_of
from benchmarks.workers import Team
from elasticps.errors import Error


@pytest.mark.slow
def test_every_way_trains_and_is_counted() -> None:
    options = "--model dlrm --workers 2 --replicas 1 --servers 1 --batch 32 --seconds 0.1 --json"
    result = CliRunner().invoke(app, ["train", *options.split()])
    assert result.exit_code == 0, result.output
    lines = [TrainingLine(**line) for line in json.loads(result.stdout)]
    assert [(line.way, line.workers, line.replicas) for line in lines] == [
        ("alone", 1, 0),
        ("all-reduce", 2, 0),
        ("servers", 2, 1),
    ]
    assert (lines[0].of_alone, lines[0].worker_cpu_of_alone) == (1.0, 1.0)
    for line in lines:
        assert (line.model, line.batch, line.servers) == ("dlrm", 32, 1)
        assert line.steps >= train.ROUNDS * train.LEAST_STEPS * line.workers
        assert line.samples_per_s > 0
        assert line.of_alone == pytest.approx(line.samples_per_s / lines[0].samples_per_s, abs=0.001)
        assert set(line.server_cpu_us_per_sample) == ({"s0"} if line.way == "servers" else set())


@pytest.mark.slow  # the next one goes the same way
def test_a_worker_that_fails_ends_the_whole_team(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"model": "deepfm", "batch": 10_000_000}
    with (
        Team("training:Trainer", [job, job]) as team,
        pytest.raises(Error, match="a worker of the benchmark ended with exit code 1"),
    ):
        team.ask(2, "build", way="alone")
    assert "no batch of 10000000 samples" in capfd.readouterr().err


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(capfd: pytest.CaptureFixture[str]) -> None:
    job = {"model": "deepfm", "batch": 64, "workers": 2, "groups": [2], "meeting": "nowhere/at-all"}
    with (
        Team("training:Trainer", [job], answer_s=0.1) as team,
        pytest.raises(Error, match=r"did not answer 'build' within 0\.1 s"),
    ):
        team.ask(1, "build", way="alone")


def test_cpu_and_speed_are_shown_beside_one_process() -> None:
    turns = [Turn(2, 5.12, {"": 0.056}), Turn(6, 5.12, {"": 0.15}), Turn(2, 2.56, {"": 0.05})]
    alone = line_of("deepfm", 256, Way("alone"), turns, 3, None)
    assert (alone.samples_per_s, alone.worker_cpu_us_per_sample, alone.steps) == (200.0, 100.0, 10)
    turns = [Turn(10, 51.2, {"": 0.384, "s0": 0.0128, "s1": 0.0064})]
    line = line_of("deepfm", 256, Way("servers", 1, 2), turns, 3, alone)
    assert (line.of_alone, line.worker_cpu_of_alone) == (0.25, 1.5)
    assert line.server_cpu_ms_per_step == {"s0": 1.28, "s1": 0.64}
