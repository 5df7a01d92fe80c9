"""A worker reports its activity when a server asks."""

from __future__ import annotations

from elasticps.client.parts import Parts
from elasticps.wire.activity import UseHeader, WatchHeader
from elasticps.wire.frames import Kind
from tests.client.fake_cluster import KEYS, ONES, Cluster
from tests.client.test_checkpoint_hold import eventually


def test_a_worker_reports_its_traffic_only_when_it_is_asked(cluster: Cluster) -> None:
    ps = cluster.connect()
    table = cluster.table(ps)
    for _ in range(3):
        ps.push({table: (KEYS, ONES)}).result()
    assert not cluster.a.got(Kind.USE)
    before = ps._dispatcher.connections.traffic
    assert min(before) > 0
    cluster.a.say(WatchHeader().header().pack())
    eventually(lambda: cluster.a.got(Kind.USE))
    [header] = cluster.a.got(Kind.USE)
    assert UseHeader.of(header).worker == ps.worker.id
    assert not cluster.b.got(Kind.USE)
    for peer in list(ps._dispatcher.connections.peers.values()):
        peer.link.close()
    assert ps._dispatcher.connections.traffic >= before


def test_rows_of_caches_and_shards_are_counted(cluster: Cluster) -> None:
    ps = cluster.connect()
    parts: Parts = ps._parts
    assert parts._use() == (0, 0, 0)
    pending: list[tuple[int, int, int]] = []

    def note() -> tuple[int, int, int]:
        pending.append(parts._use())
        return pending[-1]

    class Held:
        held = 5

        def leave(self, timeout_s: float) -> None:
            pass

    parts.shards._open.append(Held())  # type: ignore[arg-type]
    ps._dispatcher.on_watch = note
    cluster.a.say(WatchHeader().header().pack())
    eventually(lambda: pending)
    assert pending == [(0, 0, 5)]
