"""Servers as Ray actors on several raylets: what is killed comes back, and every sum is exact."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.errors import ConfigError, Timeout
from elasticps.local import certificates
from elasticps.local.etcd import EtcdPlan
from elasticps.local.process import Process
from elasticps.security.authority import Authority
from elasticps.security.identity import ANY, Identity, Role
from tests.ray.conftest import alive

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

KEYS = np.arange(500)
ONES = np.ones((500, 2), np.float32)

Eventually = Callable[[Callable[[], bool]], None]


class Pushes:
    """A worker that pushes all the time, in a thread of its own."""

    def __init__(self, url: str) -> None:
        self.steps = 0
        self._url = url
        self._stop = threading.Event()
        self._errors: list[Exception] = []
        self._sums: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with eps.connect(self._url, worker="w0", timeout=120.0) as ps:
                table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
                while not self._stop.is_set():
                    ps.push({table: (KEYS, ONES)}).result()
                    self.steps += 1
                ps.flush()
                self._sums = -ps.pull({table: KEYS})[table]
        except Exception as error:
            self._errors.append(error)

    def check(self) -> None:
        """Every row has each push exactly once."""
        self._stop.set()
        self._thread.join()
        assert not self._errors
        assert self.steps
        assert np.all(self._sums == self.steps), (self.steps, np.unique(self._sums))


@contextmanager
def pushing(url: str, eventually: Eventually) -> Iterator[Callable[[], None]]:
    """Pushes during the block; gives what waits until more of it is committed. Checks the sums at the end."""
    pushes = Pushes(url)

    def more() -> None:
        before = pushes.steps
        eventually(lambda: pushes.steps > before + 3)

    try:
        more()
        yield more
    finally:
        pushes.check()


def server(cluster: Any, name: str) -> Any:
    return next(each for each in cluster.servers if each.name == name)


def wait_replaced(cluster: Any, old: Any, eventually: Eventually) -> Any:
    """The server when it runs again, in another process."""

    def again() -> bool:
        found = server(cluster, old.name)
        return found.state == "running" and found.pid != old.pid and bool(found.address)

    eventually(again)
    return server(cluster, old.name)


def ranges_held(cluster: Any) -> dict[str, int]:
    from elasticps.local.operator_client import OperatorClient, held

    with OperatorClient(cluster.url.replace("{name}", "operator")) as operator:
        return held(operator.view)


def wait_whole(cluster: Any, servers: int, eventually: Eventually) -> None:
    """Returns when so many servers hold every range twice."""

    def whole() -> bool:
        found = ranges_held(cluster)
        return len(found) == servers and all(found.values()) and sum(found.values()) == 2 * 256

    eventually(whole)


def test_a_killed_node_process_and_actor_come_back_under_load_and_sums_are_exact(
    raylets: Any, eventually: Eventually
) -> None:
    from elasticps.ray import Cluster

    with Cluster(servers=3, replicas=2, coordinators=2) as cluster:
        assert len({each.node for each in cluster.servers}) == 3
        pids = {each.pid for each in cluster.servers}
        with pushing(cluster.url, eventually) as more:
            old = server(cluster, "s0")
            os.kill(old.pid, signal.SIGKILL)
            new = wait_replaced(cluster, old, eventually)
            assert new.incarnation > old.incarnation
            more()
            wait_whole(cluster, 3, eventually)

            old = server(cluster, "s1")
            os.kill(old.worker_pid, signal.SIGKILL)
            eventually(lambda: not alive(old.pid))  # the server went with its actor
            new = wait_replaced(cluster, old, eventually)
            more()
            wait_whole(cluster, 3, eventually)

            raylets.kill(new.node)  # the fourth node takes over
            newest = wait_replaced(cluster, new, eventually)
            assert newest.node != new.node
            eventually(lambda: not alive(new.pid))
            more()
            wait_whole(cluster, 3, eventually)
            pids |= {each.pid for each in cluster.servers}
            raylets.add()
    assert not any(map(alive, pids))


def test_a_cluster_grows_and_shrinks_while_training_goes_on(raylets: Any, eventually: Eventually) -> None:
    from elasticps.ray import Cluster

    with Cluster(servers=2, replicas=2) as cluster:
        with pushing(cluster.url, eventually) as more:
            grown = cluster.scale(4)
            assert grown.servers == ("s0", "s1", "s2", "s3")
            assert len({each.node for each in cluster.servers}) == 4
            more()
            pids = {each.name: each.pid for each in cluster.servers}
            cluster.drain("s1")
            eventually(lambda: not alive(pids["s1"]))
            more()
            assert cluster.scale(2).servers == ("s0", "s2")
            more()
            assert [each.name for each in cluster.servers] == ["s0", "s2"]
        with pytest.raises(Timeout, match="no room for 8 servers"):
            cluster.scale(12, timeout_s=1)
        assert [each.name for each in cluster.servers] == ["s0", "s2"]
    with pytest.raises(ConfigError, match="is not running"):
        _ = cluster.url


def test_a_server_leaves_a_node_that_is_preempted_and_one_that_stands_still_is_replaced(
    raylets: Any, eventually: Eventually
) -> None:
    from elasticps.ray import Cluster

    with Cluster(servers=3, replicas=2) as cluster, pushing(cluster.url, eventually) as more:
        old = server(cluster, "s2")
        os.kill(old.pid, signal.SIGSTOP)
        new = wait_replaced(cluster, old, eventually)
        assert not alive(old.pid)
        more()
        wait_whole(cluster, 3, eventually)

        raylets.drain(new.node)
        eventually(lambda: not alive(new.pid))
        assert server(cluster, "s2").state == "leaves"
        assert "s2" not in ranges_held(cluster)  # handed over before it ended
        more()
        raylets.kill(new.node)
        wait_replaced(cluster, new, eventually)
        wait_whole(cluster, 3, eventually)
        raylets.add()


def test_etcd_and_a_coordinator_that_are_killed_come_back_with_what_they_knew(
    raylets: Any, eventually: Eventually
) -> None:
    import ray

    from elasticps.ray import Cluster

    def pid_of(name: str) -> int:
        try:
            return int(ray.get(cluster._others[name].info.remote(), timeout=10)["pid"])
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return 0

    def runs_again(name: str, old: int) -> bool:
        return pid_of(name) not in (0, old)

    with Cluster(servers=2, replicas=2) as cluster, pushing(cluster.url, eventually) as more:
        for name in ("c0", "etcd"):
            old = pid_of(name)
            os.kill(old, signal.SIGKILL)
            eventually(partial(runs_again, name, old))
            more()
        url = cluster.url
        assert cluster.scale(1).servers == ("s0",)  # by the coordinator, over the same etcd
        assert cluster.url == url
        assert "etcd" in cluster.log("etcd")


def test_a_cluster_scales_by_itself(raylets: Any, eventually: Eventually) -> None:
    from elasticps.ray import Cluster

    rows = np.arange(800_000)
    with Cluster(servers=1, replicas=1, memory_limit="400MiB") as cluster, eps.connect(cluster.url, worker="w") as ps:
        cluster.autoscale(1, 2, every_s=1.0, shrink_after_s=3.0, memory_high=0.6, memory_low=0.5, load_high=1.0)
        table = ps.table("big", dim=32, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        for part in np.array_split(rows, 20):
            ps.push({table: (part, np.ones((len(part), 32), np.float32))}).result()
        eventually(lambda: len(cluster.servers) == 2)
        assert any("of the memory up to which it takes new rows" in each.reason for each in cluster.decisions)
        ps.drop_table("big")
        eventually(lambda: len(cluster.servers) == 1)
        assert any("1 servers have been enough" in each.reason for each in cluster.decisions)
        with pytest.raises(ConfigError, match="no policy to scale by"):
            cluster.autoscale(3, 2)


def certified(folder: Path, cluster: str, names: dict[str, Role]) -> tuple[EtcdPlan, str]:
    """An etcd that asks for certificates, and the URL of a cluster there, with {name} in the paths of each one's."""
    plan = EtcdPlan(folder / "etcd", certificates.begin(folder))
    authority = Authority(folder / "tls")
    for name, role in names.items():
        files = authority.issue(Identity(cluster, role, name, ANY if role is Role.WORKER else ""))
        shutil.copy(files.cert, folder / f"{name}.pem")
        shutil.copy(files.key, folder / f"{name}.key")
    return plan, f"{plan.url(cluster)}?ca={authority.ca}&cert={folder}/{{name}}.pem&key={folder}/{{name}}.key"


def test_servers_with_certificates_on_an_etcd_of_ones_own_come_back_and_others_are_refused(
    raylets: Any, eventually: Eventually, tmp_path: Path
) -> None:
    from elasticps.ray import Cluster

    roles = {"operator": Role.OPERATOR, "c0": Role.COORDINATOR, "w0": Role.WORKER}
    plan, url = certified(tmp_path, "safe", roles | {f"s{number}": Role.SERVER for number in range(3)})
    etcd = Process.start("etcd", "etcd", plan.command(), tmp_path, plan.environment())
    try:
        etcd.wait_until(plan.healthy, time.monotonic() + 60)
        certificates.protect_etcd(plan.url("safe"), tmp_path, 60)
        with (
            Cluster(servers=2, replicas=2, url=url) as cluster,
            pushing(cluster.url.replace("{name}", "w0"), eventually) as more,
        ):
            assert cluster.scale(3).servers == ("s0", "s1", "s2")
            old = server(cluster, "s0")
            os.kill(old.pid, signal.SIGKILL)
            assert wait_replaced(cluster, old, eventually).incarnation > old.incarnation
            more()
            wait_whole(cluster, 3, eventually)
            with pytest.raises(eps.Error), eps.connect(plan.url("safe"), worker="w1", timeout=5.0) as stranger:
                stranger.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
    finally:
        etcd.kill()


DRIVER = """
import sys, time, ray, elasticps.ray
ray.init(sys.argv[1], log_to_driver=False)
cluster = elasticps.ray.Cluster(servers=2, replicas=2)
actors = [cluster._others[name] for name in cluster._others]
print(*[each.pid for each in cluster.servers], *[ray.get(each.info.remote())["pid"] for each in actors], flush=True)
time.sleep(600)
"""


def test_all_ends_with_a_driver_that_is_killed(raylets: Any, eventually: Eventually) -> None:
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, raylets.address], stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 4  # two servers, etcd, a coordinator
        assert all(map(alive, pids))
    finally:
        driver.kill()
        driver.communicate()
    eventually(lambda: not any(map(alive, pids)))


def test_what_cannot_work_is_refused_with_a_reason(raylets: Any) -> None:
    from elasticps.ray import Cluster

    with pytest.raises(Timeout, match="no room for 6 servers with 1 CPUs, each on a node of its own"):
        Cluster(servers=6, timeout_s=1)
    with pytest.raises(ConfigError, match="1 to 64 servers, not 0"):
        Cluster(servers=0)
    with pytest.raises(eps.Error, match="plug-in 'no_such_module'"):
        Cluster(servers=1, replicas=1, plugins=["no_such_module"])
