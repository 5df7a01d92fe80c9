"""Keys of etcd are lost, or no coordinator leads, while real processes train."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.view import View
from elasticps.cli.status import look
from elasticps.local import LocalCluster
from elasticps.system import background
from tests.conftest import NewCluster

Eventually = Callable[[Callable[[], bool]], None]

pytestmark = [pytest.mark.slow, pytest.mark.ci]

KEYS, ONES = np.arange(300), np.ones((300, 2), np.float32)


async def _damage(url: str, key: str, value: bytes | None) -> None:
    store = await open_store(url)
    if value is None:
        await store.delete(key)
    else:
        await store.put(key, value)
    await store.close()


async def _read(url: str, key: str) -> bytes | None:
    store = await open_store(url)
    entry = await store.get(key)
    await store.close()
    return None if entry is None else entry.value


def _epoch(cluster: LocalCluster) -> int:
    value = background.run(_read(cluster.url, "view"))
    try:
        return 0 if value is None else View.decode(value).epoch
    except ValueError:
        return 0


def _lists(cluster: LocalCluster, name: str, incarnation: int) -> bool:
    """Returns whether the view lists this incarnation: an unnoticed death looks healthy before."""
    value = background.run(_read(cluster.url, "view"))
    servers = () if value is None else View.decode(value).servers
    return any((server.name, server.incarnation) == (name, incarnation) for server in servers)


def _is_whole(cluster: LocalCluster) -> bool:
    """Whether all ranges have all replicas: a second death while the first is repaired may take the last copy."""
    found = background.run(look(cluster.url, 5.0))
    return bool(found["healthy"]) and not found["ranges_short"]


def _trouble(cluster: LocalCluster) -> list[str]:
    found: list[str] = background.run(look(cluster.url, 5.0))["trouble"]
    return found


@pytest.mark.parametrize("value", [None, b"\0" * 40])
@pytest.mark.parametrize("remembered", [True, False])
def test_a_failover_works_after_the_view_was_lost(
    local_cluster: NewCluster, eventually: Eventually, remembered: bool, value: bytes | None
) -> None:
    """Where no coordinator remembers it, because all were away, the servers are asked."""
    cluster = local_cluster(servers=3, replicas=2, coordinators=2, ranges=64)
    with eps.connect(cluster.url, worker="w0", timeout=120.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        ps.push({table: (KEYS, ONES)}).result()
        cluster.kill("s1")
        cluster.start_server("s1")
        eventually(lambda: _lists(cluster, "s1", 2) and _is_whole(cluster))
        before = _epoch(cluster)
        if not remembered:
            cluster.kill("c0")
            cluster.kill("c1")
        background.run(_damage(cluster.url, "view", value))
        if not remembered:
            eventually(lambda: any("no coordinator leads" in line for line in _trouble(cluster)))
            assert any("key view" in line and "cluster adopt" in line for line in _trouble(cluster))
            cluster.start_coordinator("c0")
        eventually(lambda: _epoch(cluster) >= before)
        cluster.kill("s2")
        ps.push({table: (KEYS, ONES)}).result(120)
        assert (table.pull(KEYS) == 2).all()
        with eps.connect(cluster.url, worker="w1", timeout=120.0) as other:
            assert (other.table("t", dim=2, optimizer=eps.Accumulate()).pull(KEYS) == 2).all()


def test_a_worker_that_connects_is_told_that_no_coordinator_leads(
    local_cluster: NewCluster, eventually: Eventually
) -> None:
    cluster = local_cluster(servers=2, coordinators=1, ranges=64)
    cluster.kill("c0")
    eventually(lambda: bool(_trouble(cluster)))
    with pytest.raises(eps.Error, match="no coordinator leads"):
        eps.connect(cluster.url, worker="w", timeout=12.0)
