"""Results of `elasticps bench allreduce` and `bench groups`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import groups
from benchmarks.allreduce import AllReduceLine, concluded
from benchmarks.cli import app
from benchmarks.core.cost import Machine, here_s, links_s, work
from benchmarks.groups import Trained, lines_of
from benchmarks.runner import Turn

HERE = Machine(memory_per_s=1e10, loopback_per_s=1e9, turn_s=1e-5, cores=2)


def test_the_time_of_a_step_follows_from_bytes_and_bandwidth() -> None:
    assert work("ring", 8.0, 4) == (48.0, 36.0, 6)  # each of 4 sends 2 · 3/4 of them
    assert work("servers", 8.0, 4).sent == 64.0
    assert work("group", 8.0, 4).sent == 16.0
    assert here_s("ring", 1e9, 2, HERE) == pytest.approx(2.0 + 1.5 / 20 + 2e-5)
    assert here_s("group", 0.0, 4, HERE) == pytest.approx(7e-5)


def test_the_fullest_link_decides_how_long_a_step_takes() -> None:
    assert links_s("ring", 8.0, 4, 4, 1, 1.0) == pytest.approx(2 * 15 / 16 * 8)
    assert links_s("ring", 8.0, 1, 4, 1, 1.0) == 0.0
    assert links_s("group", 8.0, 4, 4, 1, 1.0) == 64.0  # the server's
    assert links_s("group", 8.0, 4, 4, 4, 1.0) == links_s("group", 8.0, 4, 4, 9, 1.0) == 16.0  # the machines'
    assert links_s("servers", 8.0, 4, 4, 4, 1.0) == 64.0


def test_the_summary_names_the_fastest_way_for_each_size() -> None:
    taken = {"ring": (5.0, 20.0, 90.0), "servers": (2.0, 50.0, 400.0), "group": (3.0, 40.0, 80.0)}
    lines = [
        AllReduceLine(mb, 2, way, 1, ms, 1.0, 1.0)
        for way, times in taken.items()
        for mb, ms in zip((1.0, 16.0, 64.0), times, strict=True)
    ]
    lines.append(AllReduceLine(1.0, 4, "group", 1, 9.0, 1.0, 1.0))
    text = concluded(lines, 64.0, 4)
    assert "2 processes here: at 16 MB only a ring is fastest, from 16 MB on a group is faster than" in text
    assert "4 processes here: never a ring is fastest, never a group is faster than separate workers." in text
    assert "a ring 0.96 s, groups 1.02 s with as many servers as machines (4.10 s with one)" in text


def test_a_group_stands_beside_separate_workers() -> None:
    both = {
        "separate": Trained(100.0, 300.0, [Turn(5, s, {"workers": 0.04, "servers": 0.08}) for s in (4.0, 2.0, 0.5)]),
        "group": Trained(40.0, 60.0, [Turn(5, s, {"workers": 0.02, "servers": 0.02}) for s in (1.0, 0.8, 0.1)]),
    }
    apart, group = lines_of("dense", both, 4, 1000, batch=2)
    assert (apart.of_separate, apart.samples_per_s, apart.faster) == (1.0, 20.0, 1.0)
    assert (group.up_per_step, group.down_per_step, group.of_separate, group.faster) == (40, 60, 0.25, 2.5)
    assert (apart.worker_cpu_us_per_sample, apart.server_cpu_us_per_sample) == (1000.0, 2000.0)
    assert (group.worker_cpu_us_per_sample, group.server_cpu_us_per_sample) == (500.0, 500.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_benchmark_that_is_ended_leaves_no_folder(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Cluster:
        def __init__(self, **_: object) -> None:
            made.extend(tmp_path.iterdir())
            os.kill(os.getpid(), number)

    made: list[Path] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(groups, "LocalCluster", Cluster)
    done = CliRunner().invoke(app, ["groups"])
    assert done.exit_code
    assert len(made) == 1
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.slow
def test_both_commands_run() -> None:
    command = "allreduce --size 0.2 --processes 2 --servers 1 --servers 2 --steps 1 --json"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    outcome = json.loads(done.stdout)
    ways = {(line["way"], line["servers"]) for line in outcome["lines"]}
    assert ways == {("ring", 0), *((way, n) for way in ("servers", "group") for n in (1, 2))}
    assert all(line["taken_ms"] > 0 and line["predicted_ms"] > 0 for line in outcome["lines"])
    assert outcome["conclusion"].startswith("2 processes here: ")
    assert outcome["machine"]["loopback_per_s"] > 0

    done = CliRunner().invoke(app, ["groups", "--processes", "2", "--batch", "16", "--seconds", "0.1", "--json"])
    assert done.exit_code == 0, done.output
    lines = json.loads(done.stdout)
    assert [(line["model"], line["way"]) for line in lines] == [
        (model, way) for model in ("dense", "dlrm") for way in ("separate", "group")
    ]
    assert all(0.4 < line["of_separate"] < 0.65 for line in lines if (line["model"], line["way"]) == ("dense", "group"))
