"""A table that grows and forgets comes back from a chain of checkpoints, in real processes of another number."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np

import elasticps as eps
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.range_recovery import restore_ranges
from elasticps.checkpoint.range_usage import RangeUsage, together
from elasticps.checkpoint.restore import restore_cluster
from elasticps.checkpoint.storage import Storage
from elasticps.cli.status import look
from elasticps.model.policies import Capacity, MinCount
from elasticps.system import background
from tests.conftest import NewCluster
from tests.e2e.oracle import audited, wait_for

KEYS = np.arange(3_000, dtype=np.int64)
ROWS = 1_000


def content(place: Path) -> tuple[dict[int, bytes], dict[int, int]]:
    """Whole rows, and waiting keys with their words, in the newest checkpoint there."""
    contents = Contents(Storage(place.as_uri()), catalog.chain(Storage(place.as_uri())))
    ((table, _),) = contents.manifest.tables.values()
    rows: dict[int, bytes] = {}
    usages: list[RangeUsage] = []
    for unit in contents.units(table):
        for piece in contents.read(unit):
            rows |= {key: row.tobytes() for key, row in zip(piece.keys.tolist(), piece.rows, strict=True)}
            usages += [piece.usage] if piece.usage is not None else []
    usage = together(usages)
    return rows, dict(zip(usage.keys.tolist(), usage.words.tolist(), strict=True))


def test_a_growing_table_is_restored_with_other_servers_to_the_bit(local_cluster: NewCluster, tmp_path: Path) -> None:
    cluster = local_cluster(servers=3, replicas=2, ranges=16)
    with eps.connect(cluster.url, worker="w0", timeout=100) as ps:
        users = ps.table(
            "users", dim=3, optimizer=eps.Adagrad(lr=0.1), admission=MinCount(2), eviction=[Capacity(ROWS, "most_used")]
        )
        for some in (KEYS, KEYS[:1_500]):
            ps.push({users: (some, np.ones((len(some), 3), np.float32))}).result()
        checkpoint_cluster(cluster.url, str(tmp_path / "first"))
        for _ in range(2):
            ps.push({users: (KEYS[1_200:1_800], np.ones((600, 3), np.float32))}).result()
        wait_for(lambda: ps.tables()["users"].rows <= 1.02 * ROWS, lambda: str(ps.tables()["users"]), 100.0)
        assert audited(cluster.url).clean
        taken = checkpoint_cluster(cluster.url, str(tmp_path / "first"))
        assert taken.since == 1
    rows, waiting = content(tmp_path / "first")
    assert 0.9 * ROWS <= len(rows) <= 1.02 * ROWS
    assert set(range(1_800, 3_000)) <= waiting.keys()
    assert not rows.keys() & waiting.keys()
    other = local_cluster(servers=2, replicas=1, ranges=32)
    restore_cluster(other.url, str(tmp_path / "first"))
    assert audited(other.url).clean
    checkpoint_cluster(other.url, str(tmp_path / "second"))
    assert content(tmp_path / "second") == (rows, waiting)


def test_lost_ranges_of_a_growing_table_come_back_with_keys_that_wait(
    local_cluster: NewCluster, eventually: Callable[[Callable[[], bool]], None], tmp_path: Path
) -> None:
    """Such a key gets its row with the next push, as it would have."""
    cluster = local_cluster(servers=3, replicas=1, ranges=16)
    with eps.connect(cluster.url, worker="w0", timeout=100) as ps:
        users = ps.table("users", dim=3, optimizer=eps.Adagrad(lr=0.1), admission=MinCount(2))
        for some in (KEYS, KEYS[:1_500]):
            ps.push({users: (some, np.ones((len(some), 3), np.float32))}).result()
        checkpoint_cluster(cluster.url, str(tmp_path / "first"))
        rows, waiting = content(tmp_path / "first")
        assert (len(rows), len(waiting)) == (1_500, 1_500)
        os.kill(next(server.pid for server in cluster.servers if server.name == "s1"), signal.SIGKILL)
        eventually(lambda: bool(background.run(look(cluster.url, 20.0))["ranges_waiting"]))
        restore_ranges(cluster.url, "", None, accept_loss=True, timeout_s=60)
        ps.flush()
        checkpoint_cluster(cluster.url, str(tmp_path / "second"), full=True)
        assert content(tmp_path / "second") == (rows, waiting)
        ps.push({users: (KEYS[1_500:], np.ones((1_500, 3), np.float32))}).result()
        assert ps.tables()["users"].rows == 3_000
