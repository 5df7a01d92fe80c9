"""`elasticps sim` as people type it."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

import chaos.sim.cli
import chaos.sim.run
from chaos.sim.run import Result
from chaos.sim.story import Kind

app = typer.Typer()
app.command()(chaos.sim.cli.sim)


def test_a_seed_gives_the_same_events_each_time() -> None:
    first, second = (CliRunner().invoke(app, ["--seed", "5", "--trace"]) for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    assert "0 broke a promise" in first.stdout


def test_a_broken_promise_ends_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Result(7, invariant="ack-safety", story="at 0.1 s s1 lacks step 3")
    monkeypatch.setattr(chaos.sim.run, "run", lambda seed, kind, trace: broken)
    result = CliRunner().invoke(app, ["--seed", "7"])
    assert result.exit_code == 1
    assert "elasticps sim --seed 7" in result.stdout
    result = CliRunner().invoke(app, ["--seed", "7", "--json"])
    assert json.loads(result.stdout)["broken"][0]["invariant"] == "ack-safety"


def test_a_soak_runs_until_it_is_stopped_and_then_says_what_it_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(seed: int, kind: Kind, trace: bool) -> Result:
        seen.append(seed)
        if len(seen) > chaos.sim.cli.RUNS_PER_LINE + 5:
            raise KeyboardInterrupt
        return Result(seed, kind, "progress" if seed == 12 else "", "it waits")

    monkeypatch.setattr(chaos.sim.run, "run", run)
    result = CliRunner().invoke(app, ["--seed", "10", "--runs", "0"])
    assert result.exit_code == 1
    assert seen[0] == 10
    assert "elasticps sim --seed 12" in result.stdout.splitlines()[1]
    assert f"up to seed {9 + chaos.sim.cli.RUNS_PER_LINE}: {chaos.sim.cli.RUNS_PER_LINE} runs" in result.stdout
    assert f"{chaos.sim.cli.RUNS_PER_LINE + 5} runs" in result.stdout


def test_seeds_of_one_kind_run_in_several_processes_in_their_order() -> None:
    wanted = ["--seed", "3", "--runs", "3", "--flavour", "ghosts", "--training", "shards", "--json"]
    alone, shared = (CliRunner().invoke(app, [*wanted, "--jobs", jobs]) for jobs in ("1", "2"))
    assert alone.exit_code == 0
    assert json.loads(alone.stdout)["runs"] == 3
    assert shared.stdout == alone.stdout


def test_a_flavour_that_is_not_known_is_refused_with_those_that_are() -> None:
    result = CliRunner().invoke(app, ["--flavour", "sunny"])
    assert result.exit_code == 2
    assert "limps" in result.output
