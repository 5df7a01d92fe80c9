"""A cluster comes back from a checkpoint: rows, slots, clocks, rounds and shards, with other servers than it had."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.keys import RESTORING
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.checkpoint.manifest import Manifest, WorkerEntry
from elasticps.checkpoint.restore import restore_cluster
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError, ClusterUnreachable, ConfigError
from elasticps.model.spec import TableSpec
from elasticps.store import Table
from elasticps.system import background
from tests.checkpoint.writer import Change, row, write
from tests.conftest import NewCluster
from tests.e2e.oracle import audited

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


def altered(url: str, to: Path) -> str:
    """A copy of a checkpoint with one altered byte of a row."""
    copied = Storage(to.as_uri())
    storage = Storage(url)
    for path, _ in storage.files():
        data = bytearray(storage.get(path))
        if path.startswith("000006/rows") and "s1-" in path:
            data[-100] ^= 1
        copied.put(path, data)
    return to.as_uri()


def put(url: str, key: str, value: bytes | None) -> bytes | None:
    """Writes a key of a cluster's etcd, or deletes it; what there was."""

    async def change() -> bytes | None:
        store = await open_store(url)
        try:
            before = await store.get(key)
            await (store.delete(key) if value is None else store.put(key, value))
            return None if before is None else before.value
        finally:
            await store.close()

    return background.run(change())


def test_a_restore_succeeds_after_failures_and_interruptions(
    local_cluster: NewCluster, checkpoint: tuple[str, dict[int, bytes], dict[int, bytes]], tmp_path: Path
) -> None:
    url, rows, tensor = checkpoint
    cluster = local_cluster(servers=4, replicas=2, ranges=16)

    # What cannot be read is refused, and leaves nothing.
    with pytest.raises(CheckpointError, match="has no checkpoint 5; there are 6, 7"):
        restore_cluster(cluster.url, url, cut=5)
    with pytest.raises(CheckpointError, match="altered: range"):
        restore_cluster(cluster.url, altered(url, tmp_path / "altered"))
    assert put(cluster.url, RESTORING, b'{"cut": 7, "url": "s3://b", "done": 0.25, "error": "no bucket"}') is None
    with pytest.raises(ClusterUnreachable, match=r"restored from checkpoint 7 of s3://b: 25% is there .*: no bucket"):
        eps.connect(cluster.url, worker="w0", timeout=2.0)
    with pytest.raises(CheckpointError, match="is being restored"):
        checkpoint_cluster(cluster.url, str(tmp_path / "none"))
    put(cluster.url, RESTORING, None)
    assert cluster_rows(cluster.url) == 0

    # A server dies in the middle.
    victims = [server for server in cluster.servers if server.name == "s1"]

    def tell(done: int, of: int | None) -> None:
        if done and victims:
            os.kill(victims.pop().pid, signal.SIGKILL)

    report = restore_cluster(cluster.url, url, progress=tell)
    assert not victims
    assert report.cut == 7
    assert report.workers == {"w0": 41}
    assert report.rows >= len(rows) + len(tensor)  # what the dead one had done somebody did again
    with eps.connect(cluster.url, worker="w0", timeout=100) as ps:
        found = ps.resume()
        assert (found.clock, found.trained, found.predecessor) == (41, 41, True)
        assert found.steps == 40
        assert ps.worker.id > 70_000
        table = ps.open("rows")
        assert isinstance(table, eps.SparseTable)
        check_rows(table, rows)
        blocks = ps.open("tensor")
        assert isinstance(blocks, eps.DenseTensor)
        assert blocks.pull().ravel().tobytes() == weights(tensor, TENSOR).ravel()[:12].tobytes()
        trained = []
        for shard in ps.shards(100, 10):
            trained.append(shard.start // 10)
            ps.push({table: (np.array([1]), np.zeros((1, 5), np.float32))}).result()
        assert sorted(trained) == [5, 6, 7, 8, 9]  # 3 and 4 were trained, as their workers' clocks say
        assert ps.clock == 46

        # Some tables of a cluster that is trained.
        for names, error in (
            (["rows"], "has a table 'default/rows': drop it first"),
            (["row"], "no table 'default/row'"),
        ):
            with pytest.raises(ConfigError, match=error):
                restore_cluster(cluster.url, url, tables=names)
        with pytest.raises(ConfigError, match="or name the tables"):
            restore_cluster(cluster.url, url)
        number = table.id
        ps.drop_table("rows")
        report = restore_cluster(cluster.url, url, tables=["rows"])
        assert (report.rows, report.workers) == (len(rows), {})
        again = ps.open("rows")
        assert isinstance(again, eps.SparseTable)
        assert again.id != number
        check_rows(again, rows)
        ps.push({again: (np.array([1]), np.zeros((1, 5), np.float32))}).result()
        assert ps.committed == 47
    assert audited(cluster.url).clean


def cluster_rows(url: str) -> int:
    with eps.connect(url, worker="looker", timeout=20) as ps:
        assert not ps.tables()
        return sum(table.rows for table in ps.tables().values())


def check_rows(table: eps.SparseTable, rows: dict[int, bytes]) -> None:
    """Compares all rows, weights and slots, bit for bit."""
    keys = np.array(sorted(rows))
    assert len(table) == len(rows)
    assert table.pull(keys).tobytes() == weights(rows, ROWS).tobytes()
    slots = np.concatenate(list(table.slots(keys).values()), axis=1)
    assert slots.tobytes() == np.stack([np.frombuffer(rows[key], np.float32)[5:16] for key in keys]).tobytes()
    assert not table.pull(np.array(GONE)).any()


STEPS = 8


def pushed(worker: int, step: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng((worker, step)).normal(size=(50, 5)).astype(np.float32)


def train(
    url: str, last: int, at: Callable[[int], None] = lambda step: None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Rounds of two workers up to the last one; rows and slots behind it."""
    keys = np.arange(50)
    with ExitStack() as workers:
        clients = [
            workers.enter_context(eps.connect(url, worker=f"w{i}", consistency=eps.BSP(), timeout=99)) for i in range(2)
        ]
        tables = [ps.table("rows", dim=5, optimizer=eps.Adam(lr=0.1)) for ps in clients]
        first = clients[0].resume().clock + 1
        assert clients[1].resume().clock + 1 == first
        with ThreadPoolExecutor(2) as pool:

            def run(i: int) -> None:
                for step in range(first, last + 1):
                    clients[i].push({tables[i]: (keys, pushed(i, step))})
                    if i == 0:
                        at(step)
                clients[i].flush()

            list(pool.map(run, range(2)))
        slots = np.concatenate(list(tables[0].slots(keys).values()), axis=1)
        return tables[0].pull(keys), slots


def test_restored_rounds_equal_uninterrupted_ones(local_cluster: NewCluster, tmp_path: Path) -> None:
    place = str(tmp_path)
    first = local_cluster(name="first", servers=2, replicas=2, ranges=4)
    with ThreadPoolExecutor(1) as beside:
        made: list[Future[Manifest]] = []

        def at(step: int) -> None:  # while they train on, one after the other
            if step in (3, 6):
                made.append(beside.submit(checkpoint_cluster, first.url, place))

        train(first.url, STEPS, at)
        cuts = [future.result(120) for future in made]
    assert [manifest.since for manifest in cuts] == [0, cuts[0].cut]
    for server in first.servers:
        os.kill(server.pid, signal.SIGKILL)
    then = local_cluster(name="then", servers=3, replicas=2, ranges=16)
    report = restore_cluster(then.url, place)
    assert len({*report.workers.values()}) == 1
    assert [*cuts[1].closed.values()] == [*report.workers.values()][:1]
    rows_now, slots_now = train(then.url, STEPS + 2)
    rows, slots = np.empty((50, 5), np.float32), np.empty((50, 11), np.float32)
    alone = Table(ROWS, 1, 2)
    for step in range(1, STEPS + 3):
        mean = (pushed(0, step) + pushed(1, step)) / np.float32(2)
        alone.apply(np.arange(50), mean, ROWS.optimizer.step_values(step))
    alone.gather(np.arange(50), rows)
    alone.read_slots(np.arange(50), slots)
    assert rows_now.tobytes() == rows.tobytes()
    assert slots_now.tobytes() == slots.tobytes()
