"""Large clusters in the simulator: the program of their workers, and what its check finds."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import chaos.sim.cli
from chaos.sim.checks.counts import CountedPushes, amounts
from chaos.sim.checks.violation import Violation
from chaos.sim.monitor import StoryMonitor
from chaos.sim.run import run
from chaos.sim.story import Kind

app = typer.Typer()
app.command()(chaos.sim.cli.sim)
LARGE = Kind(flavour="large", servers=6, workers=12, ranges=64, seconds=2.0)


def test_each_worker_takes_its_steps_while_a_server_dies_and_one_joins() -> None:
    kind = Kind(flavour="large", servers=6, workers=12, ranges=64)
    reported: list[str] = []
    monitor = StoryMonitor(reported.append)
    monitor.every_s = 0.0
    result = run(3, kind, monitor=monitor)
    assert result.ok, result
    assert result.steps == 24
    assert result.views > 2
    assert result.options == " --flavour large --servers 6 --workers 12 --ranges 64 --seed 3"
    assert any("of 12 workers started" in line for line in reported)
    assert "checking everything" in reported[-1]
    assert run(3, kind) == result, "who looks on changes nothing"


def test_a_story_whose_time_is_over_says_how_far_it_was() -> None:
    result = run(3, LARGE, monitor=StoryMonitor(most_s=1e-6))
    assert result.invariant == "time"
    assert "virtual time" in result.story
    assert "no promise was broken" in result.story


@pytest.fixture
def counts() -> CountedPushes:
    return CountedPushes(keys=16)


def rows(counts: CountedPushes, keys: np.ndarray) -> np.ndarray:
    return np.stack([counts.begun[keys], counts.begun[keys] * amounts(keys)], axis=1).astype(np.float32)


def test_a_larger_cluster_keeps_every_promise_while_servers_come_and_go() -> None:
    result = run(3, LARGE)
    assert result.ok, result
    assert result.steps > 20
    assert result.views > 1
    assert result.options == " --flavour large --servers 6 --workers 12 --ranges 64 --seconds 2.0 --seed 3"


def test_the_newest_rows_pass(counts: CountedPushes) -> None:
    worker, _ = counts.start("w")
    counts.begin(worker, 1, np.array([1, 5]))
    keys = np.arange(16)
    counts.check("w", keys, rows(counts, keys), counts.least(worker, keys))


@pytest.mark.parametrize("change", [-1, 1])
def test_a_lost_push_and_one_taken_twice_are_found(counts: CountedPushes, change: int) -> None:
    worker, _ = counts.start("w")
    keys = np.array([1, 5])
    counts.begin(worker, 1, keys)
    found = rows(counts, keys)
    found[1] += change * np.array([1, amounts(keys)[1]])
    with pytest.raises(Violation, match="key 5"):
        counts.check("w", keys, found, counts.least(worker, keys))


def test_a_row_of_another_key_is_found(counts: CountedPushes) -> None:
    worker, _ = counts.start("w")
    keys = np.array([1, 5])
    counts.begin(worker, 1, keys)
    with pytest.raises(Violation, match="no number of its pushes"):
        counts.check("w", keys, rows(counts, keys)[::-1], counts.least(worker, keys))


def test_what_a_successor_is_told_decides_which_pushes_count(counts: CountedPushes) -> None:
    first, _ = counts.start("w")
    for clock in (1, 2, 3):
        counts.begin(first, clock, np.array([clock]))
    _, before = counts.start("w")
    assert before is first
    counts.resume(before, begun=2, trained=1)
    assert counts.committed[:4].tolist() == [0, 1, 0, 0]
    assert counts.begun[:4].tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--servers", "5"], "together"),
        (["--servers", "5", "--workers", "2", "--ranges", "12"], "power of two"),
        (["--servers", "5", "--workers", "2", "--ranges", "16", "--cuts"], "leave the other options out"),
    ],
)
def test_numbers_that_do_not_go_together_are_refused(options: list[str], why: str) -> None:
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 2
    assert why in " ".join(result.output.replace("│", " ").split())
