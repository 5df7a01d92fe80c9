"""Keys and rows that servers list of a table, beside the pushed ones."""

from __future__ import annotations

import numpy as np
import pytest

import elasticps as eps
from tests.conftest import NewCluster
from tests.e2e.conftest import Connect
from tests.e2e.oracle import audited


def listed(table: eps.SparseTable, chunk: int) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for keys, rows in table.items(chunk):
        assert keys.dtype == np.int64
        assert rows.shape == (len(keys), table.dim)
        assert not found.keys() & set(keys.tolist()), "a key came twice"
        found.update(zip(keys.tolist(), rows.tolist(), strict=True))
    return found


@pytest.mark.parametrize("chunk", [1, 700, 65_536])
def test_a_table_lists_all_its_keys_and_rows(connect: Connect, chunk: int) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.Assign())
    assert (len(table), bool(table), list(table.keys())) == (0, True, [])
    keys = np.unique(np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 300 if chunk == 1 else 5_000))
    rows = np.arange(2 * len(keys), dtype=np.float32).reshape(-1, 2)
    ps.push({table: (keys, rows)}).result()
    table.pull([1, 2, 3])  # reading makes no rows
    assert len(table) == len(keys)
    assert listed(table, chunk) == dict(zip(keys.tolist(), rows.tolist(), strict=True))


def test_a_listing_is_complete_while_a_server_dies(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=3, replicas=2)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps:
        table = ps.table("t", dim=1, optimizer=eps.Assign())
        keys = np.arange(20_000)
        ps.push({table: (keys, keys[:, None].astype(np.float32))}).result()
        parts = table.keys(500)
        found = [next(parts) for _ in range(5)]
        cluster.kill("s1")
        found += parts
        assert np.array_equal(np.sort(np.concatenate(found)), keys)
        assert len(table) == len(keys)


@pytest.mark.parametrize("chunk", [0, -1, 1.5, True, 10**9, "all"])
def test_an_unusable_chunk_is_refused(connect: Connect, chunk: object) -> None:
    table = connect().table("t", dim=2, optimizer=eps.Assign())
    with pytest.raises(eps.InputError, match="chunk must be a number from 1 to"):
        table.keys(chunk)  # type: ignore[arg-type]


def test_loaded_rows_bypass_the_optimizer_and_reset_their_slots(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Adagrad(lr=1.0), init=eps.Constant(5.0))
    keys, ones = np.arange(2_000) * 977, np.ones((2_000, 3), np.float32)
    ps.push({table: (keys[:1_000], ones[:1_000])}).result()
    rows = np.random.default_rng(0).normal(size=(2_000, 3)).astype(np.float32)
    table.load(keys, rows)
    np.testing.assert_array_equal(table.pull(keys), rows)
    assert len(table) == 2_000
    ps.push({table: (keys, ones)}).result()
    moved = rows - table.pull(keys)  # a first step of Adagrad, for those too that had one: lr * 1 / sqrt(1)
    np.testing.assert_allclose(moved, 1.0, rtol=1e-5)
    tensor = ps.tensor("d", init=np.zeros((300, 70), np.float32), optimizer=eps.SGD(lr=1.0))
    values = np.random.default_rng(1).normal(size=(300, 70)).astype(np.float32)
    tensor.load(values)
    np.testing.assert_array_equal(tensor.pull(), values)


def test_loaded_rows_reach_every_replica(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=2, replicas=2)
    with eps.connect(cluster.url, worker="w0", timeout=60.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.Adagrad(lr=0.1), dtype="float16")
        keys = np.arange(5_000)
        ps.push({table: (keys[::2], np.ones((2_500, 2), np.float32))})
        rows = np.random.default_rng(0).normal(size=(5_000, 2)).astype(np.float16).astype(np.float32)
        table.load(keys, rows)
        report = audited(cluster.operator_url)
        assert report.clean, report
        cluster.kill("s0")
        np.testing.assert_array_equal(table.pull(keys), rows)


@pytest.mark.parametrize(
    ("keys", "rows", "text"),
    [
        ([1, 1], np.zeros((2, 2), np.float32), "each key once"),
        ([1], np.zeros((1, 3), np.float32), r"shape \(1, 2\)"),
        ([1.5], np.zeros((1, 2), np.float32), "keys must be int64"),
        ([1], np.zeros((1, 2), np.float64), "must be float32"),
    ],
)
def test_unusable_rows_are_refused(connect: Connect, keys: object, rows: object, text: str) -> None:
    table = connect().table("t", dim=2, optimizer=eps.Assign())
    with pytest.raises(eps.InputError, match=text):
        table.load(keys, rows)
    table.load([], np.empty((0, 2), np.float32))
    assert len(table) == 0
