"""Servers that scaling starts and drains, and the record that several processes change."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from elasticps.errors import ConfigError, Timeout
from elasticps.local import state, supervisor
from elasticps.local.operator_client import OperatorClient, held
from elasticps.local.process import Process
from elasticps.local.scaling import Change, by_number, change, spawn_recorded
from tests.conftest import NewCluster

Eventually = Callable[[Callable[[], bool]], None]


@pytest.mark.parametrize(
    ("running", "draining", "needed", "expected"),
    [
        ("s0 s1 s2", "", 3, Change(stay=("s0", "s1", "s2"))),
        ("s0 s1 s2", "", 5, Change(start=("s3", "s4"), stay=("s0", "s1", "s2"))),
        ("s0 s2 s10", "", 4, Change(start=("s1",), stay=("s0", "s2", "s10"))),  # a name that is free is taken again
        ("s0 s9 s10", "", 1, Change(drain=("s9", "s10"), stay=("s0",))),
        ("s0 s1 s2", "s2", 2, Change(stay=("s0", "s1"))),
        ("s0 s1 s2", "s2", 1, Change(drain=("s1",), stay=("s0",))),
        ("s0 s1 s2", "s1 s2", 2, Change(keep=("s1",), stay=("s0",))),
        ("s0 s1", "s1", 4, Change(start=("s2", "s3"), keep=("s1",), stay=("s0",))),
        ("mine s0", "", 1, Change(drain=("s0",), stay=("mine",))),
        ("", "", 2, Change(start=("s0", "s1"))),
    ],
)
def test_scaling_starts_and_drains_as_few_servers_as_possible(
    running: str, draining: str, needed: int, expected: Change
) -> None:
    assert change(running.split(), draining.split(), needed) == expected


def test_a_server_whose_process_is_about_to_end_is_not_kept() -> None:
    """It drains again however often its drain is taken back, and `scale` waited for it in vain."""
    assert change(["s0", "s1", "s2"], ["s1", "s2"], 2, leaving=["s1"]) == Change(keep=("s2",), stay=("s0",))
    assert change(["s0", "s1"], ["s1"], 2, leaving=["s1"]) == Change(start=("s2",), stay=("s0",))


@pytest.mark.parametrize("needed", [0, -1, 65])
def test_a_number_of_servers_that_cannot_be_is_refused(needed: int) -> None:
    with pytest.raises(ConfigError, match="1 to 64 servers"):
        change(["s0"], [], needed)


def test_names_are_sorted_as_people_count() -> None:
    assert sorted(["s10", "s2", "a", "s1"], key=by_number) == ["a", "s1", "s2", "s10"]


def add(entry: state.ProcessEntry, record: state.Record) -> state.Record:
    return replace(record, processes=(*record.processes, entry))


def test_changes_of_the_record_by_several_processes_all_stay(tmp_path: Path) -> None:
    url, options = "etcd://127.0.0.1:1/demo", ("--log-level", "info")
    state.write(tmp_path, state.Record("demo", url, (), options, {"KEY": "value"}))
    for name in ("s0", "s1"):
        state.update(tmp_path, partial(add, state.ProcessEntry(name, "server", 1, "a-moment-long-ago")))
    record = state.read(tmp_path)
    assert record is not None
    assert [entry.name for entry in record.processes] == ["s0", "s1"]
    assert (record.server_options, record.environment) == (options, {"KEY": "value"})
    assert record.servers == ()  # none of these runs


def test_a_record_that_is_gone_cannot_be_changed(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(ConfigError, match="has ended"):
            state.update(folder, lambda record: record)


def test_a_server_started_for_a_cluster_that_has_ended_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    state.write(tmp_path, state.Record("demo", "etcd://127.0.0.1:1/demo", ()))
    started: list[Process] = []

    def start(name: str, role: str, command: object, folder: Path, environment: object) -> Process:
        process = Process(name, role, tmp_path / "log", tmp_path / "out", _sleeper(), "")
        process.moment = supervisor.started_at(process.pid) or ""
        started.append(process)
        (tmp_path / supervisor.RECORD).unlink()  # `down` was faster
        return process

    monkeypatch.setattr(Process, "start", start)
    with pytest.raises(ConfigError, match="has ended"):
        spawn_recorded(tmp_path)("s5", [])
    eventually(lambda: not started[0].running)


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(60)"])


def test_a_cluster_grows_shrinks_and_ends_with_servers_that_others_started(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    cluster = local_cluster(servers=1, ranges=32)
    stranger = spawn_recorded(cluster.directory)("s1", ["--weight", "1"])
    stranger.popen.send_signal(signal.SIGSTOP)  # slow to start: it counts, and is waited for
    with ThreadPoolExecutor(1) as pool, OperatorClient(cluster.url) as operator:
        scaled = pool.submit(cluster.scale, 3)
        eventually(lambda: len(operator.view.servers) == 2 and operator.settled())
        stranger.popen.send_signal(signal.SIGCONT)
        outcome = scaled.result(120)
    assert (outcome.change.start, outcome.servers) == (("s2",), ("s0", "s1", "s2"))
    with OperatorClient(cluster.url) as operator:
        eventually(lambda: operator.settled() and sum(held(operator.view).values()) == 64)
        assert {server.name for server in operator.registered()} == {"s0", "s1", "s2"}
    cluster.drain("s2")
    with pytest.raises(ConfigError, match="no server called 's2'"):
        cluster.server("s2")
    assert cluster.ended() == []
    outcome = cluster.scale(1)
    assert (outcome.change.drain, outcome.servers) == (("s1",), ("s0",))
    assert stranger.popen.wait(60) == 0
    with pytest.raises(Timeout, match=r"s0 has 32 ranges left .*it is the last server.*--cancel"):
        cluster.drain("s0", timeout_s=3.0)
    assert cluster.cancel_drain("s0")
    assert not cluster.cancel_drain("s0")
    other = spawn_recorded(cluster.directory)("s1", [])
    cluster.stop()
    assert other.popen.wait(60) is not None
