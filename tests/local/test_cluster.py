"""A cluster of real processes: started, changed, ended, and ended by the death of its owner."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from elasticps.admin import fetch_health, fetch_status
from elasticps.errors import ConfigError, Error
from elasticps.local import LocalCluster, keeper, state
from tests.conftest import NewCluster

Eventually = Callable[[Callable[[], bool]], None]


def test_three_servers_share_the_ranges_and_say_so(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=3, ranges=64)
    assert [server.name for server in cluster.servers] == ["s0", "s1", "s2"]
    answers = [uvloop.run(fetch_status(server.admin, 5.0)) for server in cluster.servers]
    assert [answer["pid"] for answer in answers] == [server.pid for server in cluster.servers]
    assert sum(answer["ranges_headed"] for answer in answers) == 64
    assert {uvloop.run(fetch_health(server.admin, 5.0)) for server in cluster.servers} == {"SERVING"}
    assert state.read(cluster.directory) is not None
    assert oct(cluster.directory.stat().st_mode & 0o777) == "0o700"


def test_a_killed_server_is_reported_and_starts_again_under_its_name(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=2)
    before = cluster.server("s1")
    os.kill(before.pid, signal.SIGKILL)
    os.waitid(os.P_PID, before.pid, os.WEXITED | os.WNOWAIT)
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


def test_etcd_can_go_away_and_come_back_on_its_port(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=1)
    url = cluster.url
    cluster.stop_etcd()
    assert uvloop.run(fetch_status(cluster.servers[0].admin, 5.0))["id"] == "s0"  # servers serve on
    cluster.start_etcd()
    assert cluster.url == url
    assert cluster.start_server().name == "s1"
    with pytest.raises(ConfigError, match="etcd is running"):
        cluster.start_etcd()


def test_the_end_leaves_nothing_and_may_come_twice() -> None:
    with LocalCluster(servers=1) as cluster:
        folder = cluster.directory
        record = state.read(folder)
        assert record is not None
    assert not folder.exists()
    assert [entry.role for entry in record.processes if entry.running] == ["owner"]
    cluster.stop()
    with pytest.raises(ConfigError, match="is not running"):
        _ = cluster.url


def test_a_server_that_cannot_start_shows_its_log_and_ends_the_rest(tmp_path: Path) -> None:
    with pytest.raises(Error, match=r"(?s)server s0 ended with exit code 1 .*no_such_plugin"):
        LocalCluster(servers=1, plugins=["no_such_plugin"], directory=tmp_path / "c").start()
    assert not (tmp_path / "c").exists()


def test_a_notebook_that_is_on_an_event_loop_can_start_one() -> None:
    async def main() -> None:
        with LocalCluster(servers=1) as cluster:
            assert cluster.servers[0].running

    uvloop.run(main())


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
    eventually(lambda: not any(keeper.is_running(entry.pid, entry.moment) for entry in record.processes))
    eventually(lambda: not folder.exists())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"servers": 0}, "1 to 64"),
        ({"replicas": 2}, "replicas=2"),
        ({"ranges": 3}, "power of two"),
        ({"name": ""}, "name"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        LocalCluster(**arguments)  # type: ignore[arg-type]  # wrong values are the point
