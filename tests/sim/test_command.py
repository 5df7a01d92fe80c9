"""`elasticps sim` as people type it."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import chaos.sim.cli
import chaos.sim.run
from chaos.sim.cluster import Cluster
from chaos.sim.run import Result
from chaos.sim.story import Kind
from chaos.sim.totals import BROKEN_LISTED, duration
from tests.sim.unfinished_stories import BEGUN, stay, vanish

app = typer.Typer()
app.command()(chaos.sim.cli.sim)


def test_a_seed_gives_the_same_events_each_time() -> None:
    first, second = (CliRunner().invoke(app, ["--seed", "4", "--trace"]) for _ in range(2))
    assert first.exit_code == 0
    assert first.stdout == second.stdout
    assert "0 broke a promise" in first.stdout


def test_a_broken_promise_ends_with_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Result(7, invariant="ack-safety", story="at 0.1 s s1 lacks step 3")
    monkeypatch.setattr(chaos.sim.run, "run", lambda seed, kind, **_: broken)
    result = CliRunner().invoke(app, ["--seed", "7"])
    assert result.exit_code == 1
    assert "elasticps sim --seed 7" in result.stdout
    result = CliRunner().invoke(app, ["--seed", "7", "--json"])
    assert json.loads(result.stdout)["broken"][0]["invariant"] == "ack-safety"


def test_a_soak_runs_until_it_is_stopped_and_then_reports_its_totals(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def run(seed: int, kind: Kind, **_: object) -> Result:
        seen.append(seed)
        if len(seen) > chaos.sim.cli.RUNS_PER_LINE + 5:
            raise KeyboardInterrupt
        return Result(seed, kind, "progress" if seed == 12 else "", "it waits")

    monkeypatch.setattr(chaos.sim.run, "run", run)
    result = CliRunner().invoke(app, ["--seed", "10", "--runs", "0", "--jobs", "1"])
    assert result.exit_code == 1
    assert seen[0] == 10
    assert "elasticps sim --seed 12" in result.stdout.splitlines()[1]
    assert f"up to seed {9 + chaos.sim.cli.RUNS_PER_LINE}: {chaos.sim.cli.RUNS_PER_LINE} runs" in result.stdout
    assert f"{chaos.sim.cli.RUNS_PER_LINE + 5} runs" in result.stdout
    assert f"seeds 10 to {14 + chaos.sim.cli.RUNS_PER_LINE} took" in result.stdout
    assert "CPU s a story" in result.stdout


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_many_seeds_that_are_stopped_report_their_totals(by: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def run(seed: int, kind: Kind, **_: object) -> Result:
        if seed == 3:
            signal.raise_signal(by)
        return Result(seed, kind)

    monkeypatch.setattr(chaos.sim.run, "run", run)
    result = CliRunner().invoke(app, ["--runs", "100000", "--jobs", "1"])
    assert result.exit_code == chaos.sim.cli.STOPPED
    assert "3 runs" in result.stdout
    assert "0 broke a promise" in result.stdout
    assert "seeds 0 to 2 took" in result.stdout
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_story_that_goes_round_at_one_moment_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """No virtual time passes, so only that of the machine can tell."""

    def round_and_round(cluster: Cluster, *_: object) -> None:
        while not cluster.over:
            pass

    monkeypatch.setattr(chaos.sim.cli, "MOST_CPU_S", 0.5)
    monkeypatch.setattr(Cluster, "start_worker", round_and_round)
    result = CliRunner().invoke(app, ["--seed", "4"])
    assert result.exit_code == 1
    assert "no end within 0.5 s of CPU" in result.stdout
    assert "in round_and_round" in result.stdout
    assert "elasticps sim --seed 4" in result.stdout
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_nobody_waits_for_the_end_of_a_story_when_it_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    begun = tmp_path / "begun"
    monkeypatch.setenv(BEGUN, str(begun))
    monkeypatch.setattr(chaos.sim.cli, "_play", stay)

    def stop() -> None:
        eventually(begun.exists)
        os.kill(os.getpid(), signal.SIGTERM)

    stopping = threading.Thread(target=stop)
    stopping.start()
    result = CliRunner().invoke(app, ["--runs", "9", "--jobs", "2"])
    stopping.join()
    assert result.exit_code == chaos.sim.cli.STOPPED
    assert "no story came to its end" in result.output


def test_broken_promises_are_counted_and_the_first_stories_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos.sim.run, "run", lambda seed, kind, **_: Result(seed, kind, "progress", "it waits"))
    result = CliRunner().invoke(app, ["--runs", "30", "--jobs", "1", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    found = [report[what] for what in ("runs", "failed", "first", "last", "jobs")]
    assert found == [30, 30, 0, 29, 1]
    assert [each["seed"] for each in report["broken"]] == list(range(BROKEN_LISTED))


def test_a_process_that_died_is_reported_and_nobody_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chaos.sim.cli, "_play", vanish)
    result = CliRunner().invoke(app, ["--runs", "2", "--jobs", "2"])
    assert result.exit_code == chaos.sim.cli.STOPPED
    assert "from seed 0 on" in result.output
    assert "no story came to its end" in result.output


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.14, "4.1 s"), (59.9, "59.9 s"), (200.2, "3 min 20 s"), (7501, "2 h 5 min")]
)
def test_a_duration_is_said_in_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_seeds_of_one_kind_run_in_several_processes_in_their_order() -> None:
    options = ["--seed", "3", "--runs", "3", "--flavour", "ghosts", "--training", "shards", "--json"]
    alone, shared = (CliRunner().invoke(app, [*options, "--jobs", jobs]) for jobs in ("1", "2"))
    assert alone.exit_code == 0
    first, second = (
        {what: found for what, found in json.loads(result.stdout).items() if what not in ("jobs", "took_s", "cpu_s")}
        for result in (alone, shared)
    )
    assert first["runs"] == 3
    assert second == first


def test_an_unknown_flavour_is_refused_and_the_known_flavours_are_listed() -> None:
    result = CliRunner().invoke(app, ["--flavour", "sunny"])
    assert result.exit_code == 2
    assert "limps" in result.output
