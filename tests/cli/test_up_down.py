"""`up`, `status` and `down` with real processes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import elasticps as eps
from elasticps.checkpoint.storage import Storage
from elasticps.cli import local
from elasticps.cli.app import app
from elasticps.cli.output import ExitCode
from elasticps.errors import ClusterUnreachable
from elasticps.local import LocalCluster, state
from tests.checkpoint.writer import Change, write
from tests.conftest import NewUrl
from tests.metrics.fleet import scrape

Eventually = Callable[[Callable[[], bool]], None]

ELASTICPS = [sys.executable, "-m", "elasticps"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Types a command; one that starts nothing runs here: importing it all would take ten times as long."""
    if arguments[0] in ("up", "scale") and "--dry-run" not in arguments:
        return subprocess.run([*ELASTICPS, *arguments], capture_output=True, text=True, timeout=200, check=False)
    result = CliRunner().invoke(app, arguments)
    return subprocess.CompletedProcess(arguments, result.exit_code, result.stdout, result.stderr)


def status(*arguments: str) -> tuple[int, dict[str, Any]]:
    done = run("status", "--json", *arguments)
    return done.returncode, json.loads(done.stdout)


def three_free_ports() -> int:
    """The first of three unused ports in a row."""
    return next(port for port in range(20_000, 30_000, 3) if all(map(is_free, range(port, port + 3))))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def test_a_detached_cluster_from_up_to_down(state_folder: Path, eventually: Eventually) -> None:
    port = three_free_ports()
    options = ["--servers", "2", "--ranges", "32", "--name", "demo", "--metrics-port", str(port)]
    up = run("up", *options, "--detach", "--json")
    assert up.returncode == ExitCode.OK, up.stderr
    started = json.loads(up.stdout)
    assert started["url"].startswith("etcd://127.0.0.1:")
    assert started["url"].endswith("/demo")
    record = state.read(state_folder / "demo")
    assert record is not None
    try:
        eventually(lambda: status()[0] == ExitCode.OK)
        seen = status()[1]
        assert seen["healthy"]
        assert seen["ranges"] == 32
        assert seen["epoch"] >= 1
        assert [server["id"] for server in seen["servers"]] == ["s0", "s1"]
        for server, before in zip(seen["servers"], started["servers"], strict=True):
            assert server["pid"] == before["pid"]
            assert server["address"] == before["address"]
            assert server["incarnation"] == 1
            assert server["rows"] == server["bytes"] == 0
        assert sum(server["ranges_headed"] for server in seen["servers"]) == 32

        shown = run("status", "--url", started["url"])
        assert shown.returncode == ExitCode.OK
        assert started["servers"][0]["address"] in shown.stdout

        assert "elasticps_coordinator_leader" in scrape(port)
        for number in (0, 1):
            assert f"s{number}" in str(scrape(port + 1 + number)["elasticps_server_info"])
        assert "is running" in run("up", "--name", "demo").stderr

        with eps.connect(started["url"], worker="w0", app="ads") as ps:
            table = ps.table("users", dim=8, optimizer=eps.Adagrad(lr=0.5))
            ps.push({table: (np.arange(1000), np.ones((1000, 8), np.float32))}).result()
        stored = json.loads(run("tables", "--json").stdout)["tables"]
        assert [(t["app"], t["name"], t["dim"], t["rows"]) for t in stored] == [("ads", "users", 8, 1000)]
        assert sum(there["rows"] for there in stored[0]["servers"].values()) == 2000
        assert "users  [keys, 8]  float32  adagrad lr=0.5  1,000" in run("tables", "--url", started["url"]).stdout

        one = json.loads(run("tables", "show", "users", "--app", "ads").stdout)
        assert (one["rows"], one["optimizer"]["kind"]) == (1000, "adagrad")
        assert "no table 'users'" in run("tables", "drop", "users", "--yes").stderr
        assert run("tables", "--name", "demo", "drop", "users", "--yes").returncode == ExitCode.USAGE
        assert "clear: users, 1,000 rows" in run("tables", "clear", "users", "--app", "ads", "--yes").stdout
        assert "drop: users, 0 rows" in run("tables", "drop", "users", "--app", "ads", "--yes").stdout
        assert json.loads(run("tables", "list", "--json").stdout)["tables"] == []

        printed = run("logs").stdout.splitlines()
        assert {line.split()[0] for line in printed} == {"c0", "etcd", "s0", "s1"}
        assert all(line.startswith("ts=") for line in run("logs", "s0").stdout.splitlines())
        assert len(run("logs", "--lines", "3").stdout.splitlines()) == 3
        assert "there are c0, etcd, s0, s1" in run("logs", "s7").stderr

        assert json.loads(run("audit", "--json").stdout)["clean"]

        victim = next(entry for entry in record.processes if entry.name == "s1")
        assert run("kill", "s1", "--signal", "STOP").returncode == ExitCode.OK
        assert victim.running
        assert run("kill", "s1", "--signal", "CONT").returncode == ExitCode.OK
        assert run("kill", "s7").returncode == ExitCode.USAGE
        assert run("kill", "s1").returncode == ExitCode.OK
        eventually(lambda: not victim.running)
        code, seen = status("--timeout", "10")
        silent = [server for server in seen["servers"] if server["id"] == "s1"]  # listed until its lease runs out
        assert code == (ExitCode.DEGRADED if silent else ExitCode.OK)
        for server in silent:
            assert (server["state"], server["pid"], server["rows"]) == ("no answer", None, None)
        assert "not running any more" in run("kill", "s1").stderr
        eventually(lambda: bool(status()[1]["ranges_short"] == 32))  # the leader has to notice, too
        assert "32 ranges have fewer replicas" in run("status").stdout
        audit = run("audit")
        assert audit.returncode == ExitCode.UNREACHABLE, audit.stdout  # a copy that is alone equals nothing
        assert "32 replicas of 32 ranges compared" in audit.stdout
        assert "nothing was compared" in audit.stdout
        assert "32 ranges have fewer than 2 replicas" in audit.stdout
        etcd = next(entry for entry in record.processes if entry.name == "etcd")
        assert run("kill", "etcd").returncode == ExitCode.OK
        assert not etcd.running
        assert run("audit", "--timeout", "1").returncode == ExitCode.UNREACHABLE
    finally:
        down = run("down")
    assert down.returncode == ExitCode.OK, down.stderr
    assert not any(entry.running for entry in record.processes)
    assert not (state_folder / "demo").exists()
    assert run("status").returncode == ExitCode.USAGE


def test_a_detached_cluster_is_scaled_and_drained(state_folder: Path, eventually: Eventually) -> None:
    assert run("up", "--servers", "2", "--ranges", "32", "--name", "demo", "--detach").returncode == ExitCode.OK
    try:
        planned = json.loads(run("scale", "3", "--dry-run", "--json").stdout)
        assert (planned["start"], planned["drain"]) == (["s2"], [])
        assert "s2" in {move["to"] for move in planned["moves"]}
        assert "start s2" in run("scale", "3", "--dry-run").stdout
        assert len(status()[1]["servers"]) == 2

        grown = run("scale", "3", "--zone", "rack1", "--json")
        assert grown.returncode == ExitCode.OK, grown.stderr
        assert json.loads(grown.stdout)["servers"] == ["s0", "s1", "s2"]
        seen = status()[1]["servers"]
        assert [(server["id"], server["zone"]) for server in seen] == [("s0", ""), ("s1", ""), ("s2", "rack1")]
        # Each says so when it has the view.
        eventually(lambda: sum(server["ranges_held"] for server in status()[1]["servers"]) == 64)

        assert run("drain", "s9").returncode == ExitCode.USAGE
        assert "was not asked to drain" in run("drain", "s1", "--cancel").stderr
        drained = run("drain", "s1", "--json")
        assert drained.returncode == ExitCode.OK, drained.stderr
        assert json.loads(drained.stdout)["server"] == "s1"
        eventually(lambda: [server["id"] for server in status()[1]["servers"]] == ["s0", "s2"])

        assert json.loads(run("scale", "1", "--json", "--yes").stdout)["drain"] == ["s2"]
        late = [run("drain", "s0", "--timeout", "0.5")]
        while "last server" not in late[-1].stderr and len(late) < 50:  # the leader has to say so first
            late.append(run("drain", "s0", "--timeout", "0.5"))
        assert {each.returncode for each in late} == {ExitCode.UNREACHABLE}
        assert "last server" in late[-1].stderr
        assert run("drain", "s0", "--cancel").returncode == ExitCode.OK
        record = state.read(state_folder / "demo")
        assert record is not None
        assert sorted(entry.name for entry in record.processes) == ["c0", "etcd", "s0", "s1"]
    finally:
        down = run("down")
    assert down.returncode == ExitCode.OK, down.stderr
    assert not any(entry.running for entry in record.processes)


def test_a_cluster_in_the_foreground_ends_with_ctrl_c_or_down(state_folder: Path) -> None:
    for end in ("ctrl-c", "down"):
        with subprocess.Popen(
            [*ELASTICPS, "up", "--servers", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("etcd://127.0.0.1:")
            record = state.read(state_folder / "local")
            assert record is not None
            assert record.owner is not None
            assert record.owner.pid == process.pid
            if end == "ctrl-c":
                process.send_signal(signal.SIGINT)
            else:
                assert run("down", "--name", "local").returncode == ExitCode.OK
            assert process.wait(100) == ExitCode.OK
        assert not any(entry.running for entry in record.processes)
        assert not (state_folder / "local").exists()


def test_a_cluster_that_begins_with_a_checkpoint(state_folder: Path, tmp_path: Path) -> None:
    table = eps.TableSpec("t", 3, eps.SGD(lr=0.1))
    place = str(tmp_path / "checkpoints")
    refused = run("up", "--servers", "1", "--replicas", "1", "--ranges", "4", "--name", "none", "--restore", place)
    assert refused.returncode == ExitCode.FAILED
    assert "has no checkpoint" in refused.stderr
    assert state.read(state_folder / "none") is None
    rows = {key: np.full(3, key, np.float32).tobytes() + bytes(4) for key in range(100)}
    write(Storage(place), 1, {"default/t": (7, table)}, {"default/t": Change(rows)})
    up = run("up", "--servers", "2", "--ranges", "8", "--name", "again", "--detach", "--restore", place)
    try:
        assert up.returncode == ExitCode.OK, up.stderr
        assert "restored from checkpoint 1: 1 tables, 100 rows" in up.stderr
        with eps.connect(up.stdout.strip(), worker="w0", timeout=60) as ps:
            assert ps.tables()["t"].rows == 100
    finally:
        run("down", "--name", "again")


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_an_interrupted_restore_is_no_success(
    state_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local, "restore_with_bar", interrupted)
    place = str(tmp_path / "checkpoints")
    write(Storage(place), 1, {}, {})
    done = CliRunner().invoke(app, ["up", "--servers", "1", "--ranges", "4", "--restore", place, *more])
    assert done.exit_code == ExitCode.INTERRUPTED, done.output
    assert "the restore had not finished" in done.stderr
    assert not (state_folder / "local").exists()


@pytest.mark.slow  # `tests/e2e/test_restore.py` does it without commands
def test_a_coordinator_restores_a_new_cluster_and_leaves_an_old_one_alone(
    etcd_url: NewUrl, tmp_path: Path, eventually: Eventually
) -> None:
    table = eps.TableSpec("t", 3, eps.SGD(lr=0.1))
    place = tmp_path / "checkpoints"
    rows = {key: np.full(3, key, np.float32).tobytes() + bytes(4) for key in range(100)}
    manifest = write(Storage(str(place)), 1, {"default/t": (7, table)}, {"default/t": Change(rows)})
    lost = place / "000001" / manifest.files[0].path
    data = lost.read_bytes()
    lost.unlink()
    url = etcd_url()
    options = ["--url", url, "--ranges", "8", "--replicas", "1", "--restore", str(place)]
    with ExitStack() as processes:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen([*ELASTICPS, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            processes.callback(process.wait)
            processes.callback(process.kill)
            return process

        first = start("coordinator", "--name", "c0", *options)
        start("server", "--url", url, "--name", "s0", "--wait", "60")

        def reported() -> bool:  # workers wait, and hear what holds it up
            try:
                eps.connect(url, worker="w0", timeout=0.2).close()
            except ClusterUnreachable as error:
                return "being restored from checkpoint 1" in str(error) and "is missing" in str(error)
            except eps.Error:
                return False
            raise AssertionError("a worker was let in")

        eventually(reported)
        lost.write_bytes(data)
        with eps.connect(url, worker="w0", timeout=40) as ps:
            assert ps.tables()["t"].rows == 100
            ps.drop_table("t")
        first.kill()
        first.wait()
        second = start("coordinator", "--name", "c1", *options)
        with eps.connect(url, worker="w0", timeout=40) as ps:
            ps.table("u", dim=2, optimizer=eps.SGD(lr=0.1))
            assert list(ps.tables()) == ["u"]
        assert second.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_coordinator_that_waits_for_etcd_ends_at_once_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    output = tmp_path / "output"
    with socket.socket() as silent:  # takes the connection, and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"etcd://127.0.0.1:{silent.getsockname()[1]}/demo"
        command = [*ELASTICPS, "coordinator", "--url", url, "--name", "c0", "--timeout", "200"]
        with output.open("w") as file, subprocess.Popen(command, stdout=file, stderr=file) as process:
            try:
                silent.settimeout(60)
                silent.accept()[0].close()  # it has begun to wait
                process.send_signal(number)
                assert process.wait(20) == ExitCode.OK
            finally:
                process.kill()
    assert output.read_text() == ""


def test_a_detached_cluster_whose_start_is_interrupted_at_its_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    ended: list[bool] = []
    monkeypatch.setattr(local, "_announce", interrupted)
    monkeypatch.setattr(LocalCluster, "start", lambda self: None)
    monkeypatch.setattr(LocalCluster, "stop", lambda self: ended.append(True))
    assert CliRunner().invoke(app, ["up", "--detach"]).exit_code == ExitCode.INTERRUPTED
    assert ended == [True]
