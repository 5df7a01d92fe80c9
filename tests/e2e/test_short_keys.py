"""Short keys end to end: what is pulled and pushed is what it is without, through lost connections and servers."""

from __future__ import annotations

import numpy as np
import pytest

import elasticps as eps
from elasticps.model.spec import Filter
from tests.e2e.conftest import Connect
from tests.e2e.oracle import audited
from tests.e2e.test_push_pull import cut_connection

DIM = 3
BOTH: list[Filter] = [eps.KeysOnce(), eps.KeyDeltas()]


@pytest.mark.parametrize("coded", [False, True], ids=["exact", "int8"])
def test_rows_equal_those_of_a_table_with_whole_keys(cluster: eps.LocalCluster, connect: Connect, coded: bool) -> None:
    ps, random = connect(), np.random.default_rng(3)
    rows: list[Filter] = [eps.Int8()] if coded else []
    adagrad = eps.Adagrad(lr=0.1)
    short = ps.table("short", dim=DIM, optimizer=adagrad, push=rows + BOTH, pull=rows + BOTH)
    whole = ps.table("whole", dim=DIM, optimizer=adagrad, push=rows, pull=rows)
    for step in range(1, 13):
        keys = random.choice(5000, 400)  # some of them twice, in no order
        if step % 4 == 0:
            cut_connection(ps, random)
        assert short.pull(keys).tobytes() == whole.pull(keys).tobytes()
        assert short.pull(keys, read="any").shape == (400, DIM)
        distinct = random.permutation(np.unique(keys))
        grads = random.normal(size=(len(distinct), DIM)).astype(np.float32)
        ps.push({short: (distinct, grads), whole: (distinct, grads)})
    ps.flush()
    every = np.arange(5000)
    assert short.pull(every).tobytes() == whole.pull(every).tobytes()
    assert short.pull(every, exact=True).tobytes() == whole.pull(every, exact=True).tobytes()
    assert short.key_bytes.sent < 0.4 * short.key_bytes.whole
    assert whole.key_bytes == (0, 0)
    report = audited(cluster.url)
    assert report.clean, report


def test_a_repeated_key_list_is_sent_once(connect: Connect) -> None:
    ps = connect()
    table = ps.table("again", dim=1, optimizer=eps.Accumulate(), push=[eps.KeysOnce()], pull=[eps.KeysOnce()])
    keys, ones = np.arange(0, 9000, 9), np.ones((1000, 1), np.float32)
    for step in range(1, 21):
        ps.push({table: (keys, ones)}).result()
        assert (table.pull(keys[::-1]) == step).all()
    assert table.key_bytes.whole == 40 * 8000
    # Once to its head, once to its tail; and again when a connection breaks, as on a machine that has much to do.
    assert table.key_bytes.sent <= 10 * 8000


def test_large_pushes_and_pulls_with_short_keys_are_cut_into_frames(connect: Connect) -> None:
    ps = connect()
    table = ps.table("large", dim=4, optimizer=eps.Accumulate(), push=BOTH, pull=BOTH)
    keys = np.random.default_rng(4).permutation(200_000)
    grads = np.repeat(keys.astype(np.float32)[:, None], 4, axis=1)
    for step in (1, 2):
        ps.push({table: (keys, grads)}).result()
        assert (table.pull(keys) == step * grads).all()


def test_pushes_are_compressed_where_that_pays(cluster: eps.LocalCluster, connect: Connect) -> None:
    """A threshold leaves one float in fifty; keys go as differences inside."""
    ps, random = connect(), np.random.default_rng(5)
    filters = [eps.Threshold(2.0, feedback=False), eps.Zstd(), *BOTH]
    tensor = ps.tensor("w", init=np.zeros(70_000, np.float32), optimizer=eps.Accumulate(), push=filters)
    table = ps.table("t", dim=20, optimizer=eps.Accumulate(), push=filters, pull=BOTH)
    sums, rows, keys = np.zeros(70_000), np.zeros((300, 20)), np.arange(300)
    for step in range(6):
        grad, grads = (random.integers(-50, 51, n).astype(np.float32) / 25 for n in ((70_000,), (300, 20)))
        if step % 3 == 2:
            cut_connection(ps, random)
        ps.push({tensor: grad, table: (keys, grads)}, copy=step % 2 == 0)
        sums += np.where(abs(grad) >= 2, grad, 0)
        rows += np.where(abs(grads) >= 2, grads, 0)
    assert (tensor.pull() == sums).all()
    assert (table.pull(keys) == rows).all()
    assert tensor.zstd_bytes.sent + table.zstd_bytes.sent < 0.1 * (tensor.zstd_bytes.whole + table.zstd_bytes.whole)
    report = audited(cluster.url)
    assert report.clean, report


def test_rounds_and_tensors_work_with_short_keys(connect: Connect) -> None:
    ps = connect(consistency=eps.BSP())
    table = ps.table("mean", dim=2, optimizer=eps.Accumulate(), push=BOTH, pull=BOTH)
    tensor = ps.tensor("w", init=np.zeros(9, np.float32), optimizer=eps.Accumulate(), push=BOTH, pull=BOTH)
    keys = np.arange(50)
    for number in (1.0, 2.0):
        ps.push({table: (keys, np.full((50, 2), number, np.float32)), tensor: np.full(9, number, np.float32)})
    assert (table.pull(keys) == 3).all()
    assert (tensor.pull() == 3).all()


@pytest.mark.slow
def test_sums_are_exact_though_a_server_is_killed() -> None:
    short: list[Filter] = [eps.Threshold(2.0, feedback=False), eps.Zstd(), *BOTH]
    random, every = np.random.default_rng(1), np.arange(4000)
    sums, wholes = np.zeros((4000, 20)), np.zeros((4000, 20))
    with eps.LocalCluster(servers=3, replicas=2) as cluster, eps.connect(cluster.url, worker="w0", timeout=60) as ps:
        coded = ps.table("coded", dim=20, optimizer=eps.Accumulate(), push=short, pull=BOTH)
        exact = ps.table("exact", dim=20, optimizer=eps.Accumulate(), push=BOTH, pull=BOTH)
        for step in range(60):
            if step == 20:
                cluster.kill("s1")
            keys = random.choice(4000, 500, replace=False) if step % 3 else every[:500]
            grads = random.integers(-50, 51, (500, 20)).astype(np.float32) / 25
            whole = random.integers(-9, 9, (500, 20)).astype(np.float32)
            assert (exact.pull(keys) == wholes[keys]).all()
            ps.push({coded: (keys, grads), exact: (keys, whole)})
            sums[keys] += np.where(abs(grads) >= 2, grads, 0)
            wholes[keys] += whole
        assert (coded.pull(every) == sums).all()
        assert (exact.pull(every) == wholes).all()
        report = audited(cluster.url)
        assert report.clean, report
