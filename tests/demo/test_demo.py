"""The demo and the examples as a user runs them, with fewer epochs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elasticps.local import LocalCluster
from examples.demo import main
from examples.demo.faults import DemoCheckpoints
from examples.demo.main import INTERRUPTED, run

ROOT = Path(__file__).parents[2]


def test_both_trainings_agree(tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        code = run(servers=2, workers=2, epochs=1, out=tmp_path, elastic=False, lose=False, console=console)
    assert code == 0, captured.get()
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["agrees"] is True
    assert abs(report["auc_difference"]) <= 0.01
    for run_of in ("elasticps", "reference"):
        assert report[run_of]["auc"] > 0.75
        assert report[run_of]["samples"] == 80_000
        assert [e["epoch"] for e in report[run_of]["evaluations"]] == [1]
    assert set(report["elasticps"]["loss"]) == {"w0", "w1"}
    events = [m["event"] for m in report["timeline"]]
    assert [events[i] for i in (0, 1, 2, 4)] == ["start", "2 servers ready", "training begins", "training ends"]
    assert events[3].startswith("kill -9 of s")
    assert report["kill"]["recovered_ms"] > report["kill"]["written_ms"] > 0
    assert report["audit"]["clean"]
    assert report["audit"]["short"] == 256  # one server is left
    assert (tmp_path / "report.png").stat().st_size > 10_000


@pytest.mark.slow  # the parts have faster tests
def test_servers_come_and_go_and_a_worker_continues_at_its_place(tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        code = run(out=tmp_path, console=console)
    assert code == 0, captured.get()
    report = json.loads((tmp_path / "report.json").read_text())
    events = [m["event"] for m in report["timeline"] if m["kind"] != "phase"]
    assert any(event.startswith("w1 goes on at its step") for event in events)
    assert {"scale to 5 servers", "5 servers, nothing moves", "3 servers, nothing moves"} <= set(events)
    assert any(re.fullmatch(r"checkpoint \d+: [\d,]+ rows", event) for event in events)
    back_at = events.index("kill -9 of everything") + 1
    assert re.fullmatch(r"2 servers go on from checkpoint \d+", events[back_at])
    assert sorted(event.partition(" at its")[0] for event in events[back_at + 1 :]) == ["w0 goes on", "w1 goes on"]
    ((left, back),) = report["elasticps"]["away"]
    assert 0 < left < back < report["elasticps"]["seconds"]
    assert {len(held) for _, held in report["ranges"]} >= {2, 3, 5}
    assert sum(report["ranges"][-1][1].values()) == 512
    assert report["elasticps"]["samples"] == 14 * 80_000
    assert report["audit"]["clean"]


@pytest.mark.slow
def test_two_servers_that_die_at_once_are_explained_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clusters: list[LocalCluster] = []
    progress = main._Demo._progress

    class Recorded(LocalCluster):
        def start(self) -> None:
            clusters.append(self)
            super().start()

    def kill_two(*arguments: Any) -> None:
        progress(*arguments)
        while clusters:
            cluster = clusters.pop()
            for name in ("s0", "s1"):
                os.kill(cluster.server(name).pid, signal.SIGKILL)

    monkeypatch.setattr(main, "LocalCluster", Recorded)
    monkeypatch.setattr(main._Demo, "_progress", staticmethod(kill_two))
    console = Console(width=1000)
    with console.capture() as captured:
        code = run(out=tmp_path, epochs=1, kill=False, elastic=False, lose=False, console=console)
    text = captured.get()
    assert code == 1, text
    assert "Traceback" not in text
    assert "error: s0 and s1 died before other servers had copies: " in text
    assert "have lost both replicas, and what the model had learnt there is gone, in all tables" in text
    assert "--replicas 3" in text


def test_checkpoints_that_are_not_the_demos_stay(tmp_path: Path) -> None:
    mine = tmp_path / "checkpoints" / "model.pt"
    mine.parent.mkdir()
    mine.write_text("weeks of training")
    console = Console(width=400)
    with console.capture() as captured:
        code = run(out=tmp_path, epochs=1, console=console)
    assert (code, mine.read_text()) == (2, "weeks of training")
    assert f"{mine.parent} is not the demo's" in captured.get()


def test_checkpoints_of_an_earlier_demo_go(tmp_path: Path) -> None:
    for _ in range(2):
        DemoCheckpoints(tmp_path / "checkpoints")
        assert not (tmp_path / "checkpoints" / "000001").exists()
        (tmp_path / "checkpoints" / "000001").mkdir()


@pytest.mark.parametrize("stop", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupted_demo_ends_everything(tmp_path: Path, stop: signal.Signals) -> None:
    """That no process is left is checked at the end of the test run."""
    code = "import pathlib, sys; from examples.demo.main import run; sys.exit(run(out=pathlib.Path(sys.argv[1])))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        deadline = time.monotonic() + 90
        while not (tmp_path / "w1.log").exists():  # the workers are starting
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(stop)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == INTERRUPTED, out
    assert "interrupted" in out


@pytest.mark.parametrize("arguments", [{"workers": 0}, {"epochs": 0}, {"servers": 0}])
def test_unusable_arguments_are_an_error(tmp_path: Path, arguments: dict[str, Any]) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        assert run(out=tmp_path, console=console, **arguments) == 2
    assert "error: " in captured.get()


def _example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow  # likewise
def test_the_digits_are_learnt() -> None:
    last = _example("digits_cnn.py", "--epochs", "3").splitlines()[-1]
    assert float(last.removeprefix("test accuracy ").removesuffix("%")) > 90


@pytest.mark.slow  # the README's, which has a test of its own
def test_the_embeddings_script_learns() -> None:
    losses = [float(line.rpartition(" ")[2]) for line in _example("train_embeddings.py").splitlines()]
    assert losses[-1] < 0.75 * losses[0]
