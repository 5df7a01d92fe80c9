from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from coordinator.core.view import ClusterConfig

PATIENCE_S = 20.0


@contextmanager
def begun(servers: int, ranges: int, replicas: int = 2, admin: bool = False) -> Iterator[Cluster]:
    """A cluster with one leader."""
    with virtual() as install:
        config = ClusterConfig(ranges=ranges, replicas=replicas, min_servers=servers)
        found = Cluster(1, Weather(), config, admin=admin)
        install(found)
        found.start_leader("c0")
        for i in range(servers):
            found.start_server(f"s{i}")
        yield found
        found.end()


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two servers, one leader, two replicas, on virtual time."""
    with begun(2, 4) as found:
        yield found


@pytest.fixture
def three() -> Iterator[Cluster]:
    """The same of three servers."""
    with begun(3, 16) as found:
        yield found


def wait_for(cluster: Cluster, what: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Lets time pass until it is so."""
    until = cluster.clock.now + patience_s
    while not what():
        assert cluster.clock.now < until
        cluster.clock.run(cluster.clock.now + 0.01)
        assert cluster.violation is None, cluster.violation
