"""A cluster of real processes: started, changed, ended, and ended by the death of its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from elasticps.admin import fetch_health, fetch_status
from elasticps.errors import ConfigError
from elasticps.local import LocalCluster, state, supervisor
from elasticps.local import cluster as cluster_module
from elasticps.local.process import Process
from elasticps.local.process import stop_all as stop_all_really
from elasticps.system import background
from tests.conftest import NewCluster

Eventually = Callable[[Callable[[], bool]], None]


ANSWER_S = 30.0


def headed(cluster: LocalCluster) -> int:
    """How many ranges servers say that they head: each a moment after the view that says so."""
    return sum(background.run(fetch_status(server.admin, ANSWER_S))["ranges_headed"] for server in cluster.servers)


def test_three_servers_share_the_ranges_and_report_them(local_cluster: NewCluster, eventually: Eventually) -> None:
    cluster = local_cluster(servers=3, ranges=64)
    assert [server.name for server in cluster.servers] == ["s0", "s1", "s2"]
    answers = [background.run(fetch_status(server.admin, ANSWER_S)) for server in cluster.servers]
    assert [answer["pid"] for answer in answers] == [server.pid for server in cluster.servers]
    eventually(lambda: headed(cluster) == 64)
    assert {background.run(fetch_health(server.admin, ANSWER_S)) for server in cluster.servers} == {"SERVING"}
    assert state.read(cluster.directory) is not None
    assert oct(cluster.directory.stat().st_mode & 0o777) == "0o700"


def test_a_killed_server_is_reported_and_starts_again_under_its_name(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    cluster = local_cluster(servers=2)
    before = cluster.server("s1")
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: not cluster.server("s1").running)
    assert cluster.ended() == [f"server s1 (pid {before.pid}) was killed by SIGKILL"]
    assert cluster.ended() == []
    after = cluster.start_server("s1")
    assert after.running
    assert after.pid != before.pid
    assert after.incarnation > before.incarnation
    with pytest.raises(ConfigError, match="s1 is running"):
        cluster.start_server("s1")
    cluster.kill("s1")
    assert not cluster.server("s1").running
    assert cluster.start_server().name == "s2"
    with pytest.raises(ConfigError, match="no process called 's7'; there are etcd, c0, s0, s1, s2"):
        cluster.kill("s7")
    with pytest.raises(ConfigError, match="no server called 's7'; there are s0, s1, s2"):
        cluster.server("s7")


def test_dead_processes_start_again_under_their_names_with_restart(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    cluster = local_cluster(servers=2, restart=True)
    before = cluster.server("s1")
    os.kill(before.pid, signal.SIGKILL)
    eventually(lambda: any(s.name == "s1" and s.incarnation > before.incarnation for s in cluster.servers))
    assert cluster.ended() == [f"server s1 (pid {before.pid}) was killed by SIGKILL"]
    assert cluster.server("s1").running
    coordinator = pid_of(cluster, "c0")
    cluster.kill("c0")
    eventually(lambda: pid_of(cluster, "c0") != coordinator)


def test_a_failed_restart_is_reported_once_and_tried_again(
    local_cluster: NewCluster, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = local_cluster(servers=2, restart=True)
    update = state.update
    lines: list[str] = []

    def failed(name: str) -> bool:
        lines.extend(cluster.ended())
        return any(line.startswith(f"server {name} cannot be started again as it should: no room") for line in lines)

    def full(*_: object) -> None:
        raise ConfigError("no room")

    monkeypatch.setattr(state, "update", full)
    cluster.kill("s1")
    eventually(lambda: failed("s1"))
    monkeypatch.setattr(state, "update", update)
    eventually(lambda: pid_of(cluster, "s1") in [server.pid for server in cluster.servers if server.running])
    before = cluster.server("s0").pid
    cluster.kill("s0")
    eventually(lambda: any(server.name == "s0" and server.pid != before for server in cluster.servers))
    assert len(lines) == 1


def test_a_standby_coordinator_leads_when_the_leader_is_killed(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    cluster = local_cluster(servers=2, coordinators=2)
    leader, standby = ("c0", "c1") if "leads cluster" in cluster.log("c0") else ("c1", "c0")
    cluster.kill(leader)
    eventually(lambda: "leads cluster" in cluster.log(standby))


def test_a_frozen_server_comes_back_as_a_new_incarnation(local_cluster: NewCluster, eventually: Eventually) -> None:
    """When what it had is elsewhere: before that it may still be needed as it is."""
    cluster = local_cluster(servers=3)
    before = cluster.server("s1")
    cluster.pause("s1")
    eventually(lambda: "gone=s1#1" in cluster.log("c0"))
    held = [server for server in cluster.servers if server.name != "s1"]
    eventually(lambda: sum(background.run(fetch_status(s.admin, ANSWER_S))["ranges_held"] for s in held) == 512)
    cluster.resume("s1")
    eventually(lambda: cluster.server("s1").incarnation > before.incarnation)
    after = cluster.server("s1")
    assert (after.pid, after.address) == (before.pid, before.address)


def test_fewer_servers_than_replicas_are_reported_and_more_may_come(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    printed: list[str] = []
    cluster = local_cluster(servers=1, ranges=16, progress=printed.append)
    assert any("2 replicas need as many servers" in text for text in printed)
    second = cluster.start_server()
    eventually(lambda: background.run(fetch_status(second.admin, ANSWER_S))["ranges_held"] == 16)


def pid_of(cluster: LocalCluster, name: str) -> int:
    record = state.read(cluster.directory)
    assert record is not None
    return next(entry.pid for entry in record.processes if entry.name == name)


def test_etcd_can_go_away_and_come_back_on_its_port(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=1)
    url = cluster.url
    cluster.stop_etcd()
    assert background.run(fetch_status(cluster.servers[0].admin, ANSWER_S))["id"] == "s0"  # servers serve on
    cluster.start_etcd()
    assert cluster.url == url
    assert cluster.start_server().name == "s1"
    with pytest.raises(ConfigError, match="etcd is running"):
        cluster.start_etcd()


def test_ending_leaves_no_process_and_may_be_repeated() -> None:
    with LocalCluster(servers=1) as cluster:
        folder = cluster.directory
        record = state.read(folder)
        assert record is not None
    assert not folder.exists()
    assert [entry.role for entry in record.processes if entry.running] == ["owner"]
    cluster.stop()
    with pytest.raises(ConfigError, match="is not running"):
        _ = cluster.url


def test_ending_also_stops_a_server_that_is_just_starting(
    local_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of `elasticps scale`, after the last look for those that others have started."""
    cluster = local_cluster(servers=1)
    folder = cluster.directory
    late: list[subprocess.Popen[bytes]] = []

    def stop_all(processes: list[Process], *, kill_after_s: float) -> None:
        stop_all_really(processes, kill_after_s=kill_after_s)
        if [process.role for process in processes] == ["etcd"]:
            late.append(subprocess.Popen(["sleep", "60"]))
            entry = state.ProcessEntry("s1", "server", late[0].pid, supervisor.started_at(late[0].pid) or "")
            state.update(folder, lambda record: replace(record, processes=(*record.processes, entry)))

    monkeypatch.setattr(cluster_module, "stop_all", stop_all)
    cluster.stop()
    try:
        assert late[0].poll() is not None
    finally:
        late[0].kill()
        late[0].wait()
    assert not folder.exists()


def test_ending_works_with_a_damaged_record(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=1)
    record, folder = state.read(cluster.directory), cluster.directory
    assert record is not None
    (folder / "cluster.json").write_text("{")
    cluster.stop()
    assert [entry.role for entry in record.processes if entry.running] == ["owner"]
    assert not folder.exists()


def test_a_server_that_cannot_start_shows_its_log_and_ends_the_rest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)server s0 ended with exit code 2 .*no_such_plugin"):
        LocalCluster(servers=1, plugins=["no_such_plugin"], directory=tmp_path / "c").start()
    assert not (tmp_path / "c").exists()


def test_a_cluster_can_be_started_inside_an_event_loop() -> None:
    async def main() -> None:
        with LocalCluster(servers=1) as cluster:
            assert cluster.servers[0].running

    uvloop.run(main())


def test_a_program_with_a_cluster_prints_nothing_else() -> None:
    program = """
import elasticps as eps
with eps.LocalCluster(servers=1) as cluster, eps.connect(cluster.url, worker="w0") as ps:
    ps.flush()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_supervisor_that_has_died_is_replaced_when_the_next_server_starts(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    """The server ran, but `start_server` raised BrokenPipeError, and nothing ended it with its owner any more."""
    cluster = local_cluster(servers=1)
    assert cluster._supervisor is not None
    before = cluster._supervisor.pid
    os.kill(before, signal.SIGKILL)
    eventually(lambda: not supervisor.started_at(before))
    assert cluster.start_server().running
    assert cluster.server("s1").name == "s1"
    assert cluster._supervisor.pid != before
    record = state.read(cluster.directory)
    assert record is not None
    ours = [entry for entry in record.processes if entry.role != "owner"]
    cluster._supervisor.close(60)  # as when its owner dies: it ends all there are
    eventually(lambda: not any(supervisor.is_running(entry.pid, entry.moment) for entry in ours))


def test_a_fork_that_ends_inside_the_cluster_stops_no_process() -> None:
    """A worker of a DataLoader that called sys.exit took the trainer's cluster along."""
    program = """
import os, sys
from elasticps.local import LocalCluster
with LocalCluster(servers=1) as cluster:
    if not (child := os.fork()):
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert cluster.server("s0").running, "the server"
    assert cluster.directory.exists(), "the folder"
    if not (child := os.fork()):
        cluster.stop()
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert cluster.start_server().running
print("both live")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "both live\n"), done.stderr


def test_everything_ends_when_the_owner_is_killed(eventually: Eventually) -> None:
    program = """
import sys, time
from elasticps.local import LocalCluster
cluster = LocalCluster(servers=1)
cluster.start()
print(cluster.directory, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        record = state.read(folder)
        assert record is not None
        assert len([entry for entry in record.processes if entry.running]) == 4
        owner.kill()
    eventually(lambda: not any(supervisor.is_running(entry.pid, entry.moment) for entry in record.processes))
    eventually(lambda: not folder.exists())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"servers": 0}, "1 to 64"),
        ({"replicas": 0}, "replicas"),
        ({"coordinators": 0}, "1 to 5 coordinators"),
        ({"detach": True, "restart": True}, "leave one out"),
        ({"ranges": 3}, "power of two"),
        ({"name": ""}, "name"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LocalCluster(**arguments)  # type: ignore[arg-type]  # wrong values are the point
