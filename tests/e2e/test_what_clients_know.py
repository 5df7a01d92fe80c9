"""What a client says of itself: numbers, and pages in notebooks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import elasticps as eps
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect


def test_a_client_knows_its_steps_bytes_servers_and_tables(connect: Connect) -> None:
    ps = connect(consistency=eps.SSP(staleness=3), window=5)
    before = ps.stats()
    assert before["steps.pushed"] == before["tables.open"] == before["view.changes"] == 0
    keys, grads = np.arange(100), np.ones((100, 4), np.float32)
    plain = ps.table("plain", dim=4, optimizer=eps.SGD(lr=0.5))
    cached = ps.table("cached", dim=4, optimizer=eps.SGD(lr=0.1), cache=eps.Cache(rows=1_000, staleness=1))
    short = ps.table("short", dim=4, optimizer=eps.Assign(), push=[eps.TopK(0.5), eps.KeysOnce()])
    ps.push({plain: (keys, grads), cached: (keys, grads), short: (keys, grads)}).result()
    for _ in range(2):
        cached.pull(keys)
    stats = ps.stats()
    assert all(type(value) in (int, float) for value in stats.values())
    assert stats["steps.pushed"] == stats["steps.committed"] == 1
    assert (stats["steps.outstanding"], stats["steps.window"], stats["staleness.bound"]) == (0, 5, 3)
    assert stats["bytes.sent"] > before["bytes.sent"] > 0
    assert stats["bytes.received"] > 0
    assert stats["servers.known"] == stats["servers.connected"] == 3
    assert (stats["ranges.total"], stats["ranges.without_server"]) == (256, 0)
    assert stats["view.epoch"] == ps.view.epoch
    assert stats["view.age_s"] > 0
    assert stats["table.plain.lr"] == 0.5
    assert stats["table.cached.cache.pulled"] == 200
    assert stats["table.cached.cache.hits"] >= 100
    assert stats["table.short.feedback.rows"] == 100
    assert stats["table.short.keys.whole_bytes"] > 0
    assert "table.short.lr" not in stats


def test_a_client_counts_failovers_and_shows_itself_when_its_cluster_is_gone(
    local_cluster: NewCluster, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    cluster = local_cluster(servers=3, replicas=2, ranges=16)
    with eps.connect(cluster.url, worker="w0", timeout=60) as ps:
        table = ps.table("<t>", dim=2, optimizer=eps.Adagrad(lr=0.1), push=[eps.BFloat16()])
        tensor = ps.tensor("w", init=np.zeros((2, 3), np.float32), optimizer=eps.SGD(lr=0.1))
        ps.push({table: ([1], [[1.0, 2.0]])}).result()
        cluster.kill("s1")
        ps.push({table: ([1, 2, 3, 4, 5, 6, 7, 8], np.ones((8, 2), np.float32))}).result()
        eventually(lambda: ps.stats()["view.changes"] >= 1)
        assert ps.stats()["servers.reconnects"] >= 1
        pages = [cluster._repr_html_()]
        assert "s1" in pages[0]
        cluster.stop()
        pages += [ps._repr_html_(), table._repr_html_(), tensor._repr_html_(), cluster._repr_html_()]
        eventually(lambda: ps.stats()["servers.connected"] == 0)
    pages.append(ps._repr_html_())
    assert "&lt;t&gt;" in pages[1]
    assert "steps.pushed" in pages[1]
    assert "BFloat16" in pages[2]
    assert "(2, 3)" in pages[3]
    assert "not running" in pages[4]
    assert "closed" in pages[5]
    for page in pages:
        assert "<t>" not in page


def test_the_state_of_a_growing_table_is_shown(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.SGD(lr=0.1), usage="count", eviction=[eps.Capacity(1_000)])
    ps.push({table: (np.arange(10), np.ones((10, 2), np.float32))}).result()
    page = table.state()._repr_html_()
    assert "<th style='text-align:left'>rows</th><td>10</td>" in page
    assert "evicted: idle" in page
    assert "rows of that count" in page
    assert "capacity" in table._repr_html_().lower()
