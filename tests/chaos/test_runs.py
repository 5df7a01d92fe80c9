"""Chaos runs as people type them, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from chaos.live import cli, netns
from elasticps.cli.output import guarded

app = typer.Typer()
app.command()(guarded(cli.chaos))
READY = ("kill-each-role", "rolling-restart", "random-day", "partition", "zombie")

SHORT = """
about: a pause and two kills
duration: 6
calm: 2
cluster: {servers: 3, coordinators: 1, ranges: 8}
load: {workers: 1, filling: 1000, pause_ms: 5}
faults:
  - {at: 0.5, do: pause, target: random, for: 0.2}
  - {at: 1, do: kill, target: worker, back: 0}
  - {at: 1.5, do: kill, target: head-of:hottest, back: 0}
"""
CUT = """
about: one server hears nobody
duration: 4
calm: 1
cluster: {kind: netns, servers: 3, coordinators: 1, ranges: 8}
load: {workers: 1, filling: 0, pause_ms: 5}
faults:
  - {at: 1, do: cut, target: head-of:hottest, to: everyone, way: in, for: 2}
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "chaos.live.cli", "chaos", *words]


def run(tmp_path: Path, text: str) -> dict[str, object]:
    plan = tmp_path / "short.yaml"
    plan.write_text(text)
    out = tmp_path / "out"
    done = subprocess.run(
        command("run", str(plan), "--seed", "3", "--json", "--out", str(out)),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    assert found == json.loads((out / "report.json").read_text())
    assert (out / "index.html").exists()
    assert (out / "timeline.png").exists()
    assert (out / "logs" / "s0.log").exists()
    return found


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.timeout(320)
def test_a_short_run_keeps_every_promise_and_writes_its_report(tmp_path: Path) -> None:
    found = run(tmp_path, SHORT)
    assert found["kept"]
    assert found["command"] == f"elasticps chaos run {tmp_path}/short.yaml --seed 3"
    assert [(fault["do"], fault["state"]) for fault in found["faults"]] == [  # type: ignore[attr-defined]
        ("pause", "over"), ("kill", "over"), ("kill", "over")
    ]  # fmt: skip
    assert found["operations"]["steps_committed"] > 10  # type: ignore[index]
    assert found["audit"]["clean"]  # type: ignore[index]


@pytest.mark.slow
@pytest.mark.timeout(620)
def test_a_short_run_of_everything_keeps_every_promise(tmp_path: Path) -> None:
    options = ["--seed", "5", "--duration", "40", "--tls", "--out", str(tmp_path), "--json"]
    done = subprocess.run(command("run", "everything", *options), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    begun = {fault["do"] for fault in found["faults"] if fault["state"] == "over"}
    assert {"hoard", "hostile", "etcd-new", "etcd-full", "kill", "pause"} <= begun
    assert len(found["memory"]) >= 5
    refused = re.findall(r"refused (\d+) times", "".join(log.read_text() for log in tmp_path.glob("logs/hoard*.log")))
    assert any(map(int, refused)), "no server was full"


@pytest.mark.slow
@pytest.mark.timeout(320)
@pytest.mark.skipif(bool(netns.refused()), reason=f"no namespaces here: {netns.refused()}")
def test_a_run_in_namespaces_keeps_every_promise(tmp_path: Path) -> None:
    assert run(tmp_path, CUT)["kept"]


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_a_run_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    plan = tmp_path / "short.yaml"
    plan.write_text(SHORT)
    marker = f"chaos-test-{os.getpid()}"
    environment = {**os.environ, "ELASTICPS_TEST_MARKER": marker}
    words = command("run", str(plan), "--out", str(tmp_path / "out"))
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "filling" in line:
                break
        assert len(marked(marker)) > 4
        process.send_signal(signal.SIGKILL)
        process.communicate()
    while marked(marker):
        time.sleep(0.05)


def marked(marker: str) -> list[str]:
    """Processes that were started with this in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_the_ready_plans_are_listed() -> None:
    shown = CliRunner().invoke(app, ["plans"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in READY)
    listed = json.loads(CliRunner().invoke(app, ["plans", "--json"]).output)
    assert {"name": "partition", "kind": "netns"}.items() <= {p["name"]: p for p in listed}["partition"].items()


@pytest.mark.parametrize(
    ("words", "text"),
    [(["run"], "run needs one plan"), (["run", "nothing"], "no ready plan is called 'nothing'"),
     (["summary", "/nowhere"], "no report.json")],
)  # fmt: skip
def test_a_run_that_is_impossible_is_refused_with_exit_code_2(words: list[str], text: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert text in result.stderr
