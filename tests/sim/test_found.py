"""What the simulator has found, each as the shortest story that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from chaos.sim.threads import Threads
from coordinator.view import ClusterConfig
from elasticps.optimizers import Accumulate
from elasticps.spec import ASP

PATIENCE_S = 20.0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two servers, one leader, two replicas, on virtual time."""
    with virtual() as install:
        found = Cluster(1, Weather(), ClusterConfig(ranges=4, replicas=2, min_servers=2))
        install(found)
        found.start_leader("c0")
        found.start_server("s0")
        found.start_server("s1")
        yield found
        found.end()


def wait_for(cluster: Cluster, what: Callable[[], bool]) -> None:
    """Lets time pass until it is so."""
    until = cluster.clock.now + PATIENCE_S
    while not what():
        assert cluster.clock.now < until
        cluster.clock.run(cluster.clock.now + 0.01)
        assert cluster.violation is None, cluster.violation


def test_a_worker_finds_its_ranges_when_the_only_server_it_knows_has_come_back_without_them(cluster: Cluster) -> None:
    pulled: list[float] = []

    def program(threads: Threads) -> None:
        ps = cluster.connect(threads, "w0", ASP(), 1, "app")
        table = ps.table("t", dim=1, optimizer=Accumulate())
        ps.push({table: (np.arange(9), np.ones((9, 1), np.float32))})
        while not pulled or cluster.clock.now < 4.0:
            pulled.append(float(table.pull(np.arange(9)).sum()))
            threads.sleep(0.3)
        pulled.append(float("inf"))
        ps.close()

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: bool(pulled))
    cluster.kill(cluster.servers["s0"].process, power=False)
    wait_for(cluster, lambda: [s.name for s in view.servers] == ["s1"] if (view := cluster.view) else False)
    cluster.clock.run(cluster.clock.now + 0.5)  # the worker has heard of it
    cluster.start_server("s0")
    wait_for(cluster, cluster.whole)
    cluster.kill(cluster.servers["s1"].process, power=False)
    cluster.clock.run(cluster.clock.now + 0.1)
    cluster.start_server("s1")
    wait_for(cluster, lambda: pulled[-1] == float("inf"))
    assert set(pulled[:-1]) == {9.0}
