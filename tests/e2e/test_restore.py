"""A cluster comes back from a checkpoint: rows, slots, clocks, rounds and shards, with other servers than it had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.checkpoint.manifest import WorkerEntry
from elasticps.checkpoint.restore import restore_cluster
from elasticps.checkpoint.storage import Storage
from elasticps.spec import TableSpec
from tests.checkpoint.writer import Change, row, write
from tests.conftest import NewCluster

ROWS = TableSpec("rows", 5, eps.Adam(lr=0.1))
TENSOR = TableSpec.dense("tensor", (4, 3), eps.SGD(lr=0.1))
TABLES = {"default/rows": (3, ROWS), "default/tensor": (1 << 20, TENSOR)}
KEYS = list(range(-2000, 2000))
GONE = list(range(100))


def weights(data: dict[int, bytes], spec: TableSpec) -> np.ndarray[Any, Any]:
    return np.stack([np.frombuffer(data[key], np.float32)[: spec.dim] for key in sorted(data)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[int, bytes], dict[int, bytes]]:
    """A full one and an increment, of a cluster with 8 ranges."""
    url = (tmp_path_factory.mktemp("checkpoints")).as_uri()
    storage = Storage(url)
    rows, tensor = {key: row(ROWS, key + 5000) for key in KEYS}, {0: row(TENSOR, 7)}
    write(storage, 6, TABLES, {"default/rows": Change(rows), "default/tensor": Change(tensor)}, ranges=8)
    changed = {key: row(ROWS, key + 50_000) for key in KEYS[::10] if key not in GONE}
    rows = {key: data for key, data in (rows | changed).items() if key not in GONE}
    write(
        storage, 7, TABLES, {"default/rows": Change(changed, set(GONE))}, since=6, ranges=8,
        workers={"w0": WorkerEntry(70_000, "default", 41, 1, 1, 0)}, former={69_000: 12},
        closed={"default": 0},
        shards=[{"app": "default", "name": "train", "id": 65537, "spec": [100, 10, 1, None], "upcoming": 5, "done": 3,
                 "returned": [[4, 69_000, 12]], "doing": [[70_000, 3, 41, 0, 0]]}],
    )  # fmt: skip
    return url, rows, tensor


def test_everything_comes_back_into_other_ranges_and_servers(
    local_cluster: NewCluster, checkpoint: tuple[str, dict[int, bytes], dict[int, bytes]]
) -> None:
    url, rows, tensor = checkpoint
    cluster = local_cluster(servers=3, replicas=2, ranges=16)
    told: list[tuple[int, int]] = []
    report = restore_cluster(cluster.url, url, tell=lambda *done: told.append(done))
    assert report.cut == 7
    assert report.workers == {"w0": 41}
    assert report.rows == len(rows) + len(tensor)
    assert told[-1][0] == told[-1][1]
    with eps.connect(cluster.url, worker="w0", timeout=20) as ps:
        found = ps.resume()
        assert (found.clock, found.trained, found.predecessor) == (41, 41, True)
        assert found.steps == 40
        table = ps.open("rows")
        assert isinstance(table, eps.SparseTable)
        assert len(table) == len(rows)
        assert table.pull(np.array(sorted(rows))).tobytes() == weights(rows, ROWS).tobytes()
        slots = table.slots(np.array(sorted(rows)))
        at = dict(zip(slots, (5, 10), strict=True))
        for name, values in slots.items():
            wanted = np.stack([np.frombuffer(rows[key], np.float32)[at[name] : at[name] + 5] for key in sorted(rows)])
            assert values.tobytes() == wanted.tobytes()
        assert not table.pull(np.array(GONE)).any()
        blocks = ps.open("tensor")
        assert isinstance(blocks, eps.DenseTensor)
        assert blocks.pull().ravel().tobytes() == weights(tensor, TENSOR).ravel()[:12].tobytes()
        trained = []
        for shard in ps.shards(100, 10):
            trained.append(shard.start // 10)
            ps.push({table: (np.array([1]), np.zeros((1, 5), np.float32))}).result()
        assert sorted(trained) == [5, 6, 7, 8, 9]  # 3 and 4 were trained, as their workers' clocks say
        assert ps.clock == 46
