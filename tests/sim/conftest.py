from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from coordinator.view import ClusterConfig

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


def wait_for(cluster: Cluster, what: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Lets time pass until it is so."""
    until = cluster.clock.now + patience_s
    while not what():
        assert cluster.clock.now < until
        cluster.clock.run(cluster.clock.now + 0.01)
        assert cluster.violation is None, cluster.violation
