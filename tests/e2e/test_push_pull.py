"""Real workers, servers and etcd: pulls show the pushed sums."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import numpy as np
import pytest

import elasticps as eps
from tests.e2e.conftest import Connect, wait_for_others


def ones(n: int, dim: int) -> np.ndarray:
    return np.ones((n, dim), np.float32)


def test_rows_come_back_in_the_order_of_the_keys(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=3, optimizer=eps.Assign())
    keys = np.array([5, -1, 2**63 - 1, 0, -(2**63)])
    values = np.arange(15, dtype=np.float32).reshape(5, 3)
    ps.push({table: (keys, values)}).result()
    order = [4, 0, 0, 2, 1, 3]
    np.testing.assert_array_equal(table.pull(keys[order]), values[order])


def test_gradients_of_a_repeated_key_are_summed(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=2, optimizer=eps.Accumulate())
    ps.push({table: (np.array([7, 8, 7, 7]), ones(4, 2))}).result()
    assert table.pull([7, 8])[:, 0].tolist() == [3, 1]


def test_a_pull_sees_the_pushes_before_it_without_waiting_for_them(connect: Connect) -> None:
    ps = connect(window=64)
    table = ps.table("t", dim=1, optimizer=eps.Accumulate())
    keys = np.arange(100)
    for step in range(1, 50):
        ps.push({table: (keys, ones(100, 1))})
        assert set(table.pull(keys)[:, 0].tolist()) == {step}


def test_workers_add_up_exactly_through_lost_connections(connect: Connect) -> None:
    """Integer sums are exact in float32: one push lost or applied twice would show."""
    steps, keys = 150, np.arange(500)
    workers = [connect(f"w{i}") for i in range(3)]
    tables = [ps.table("t", dim=2, optimizer=eps.Accumulate()) for ps in workers]

    for table in tables:
        table.pull(keys)  # all join before the first step, at clock 0

    def train(ps: eps.Client, table: eps.SparseTable, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for step in range(steps):
            ps.push({table: (keys, ones(500, 2))})
            if step % 20 == seed:
                cut_connection(ps, rng)
        ps.flush()

    threads = [
        threading.Thread(target=train, args=(ps, table, i))
        for i, (ps, table) in enumerate(zip(workers, tables, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(tables[0].pull(keys).ravel().tolist()) == {3.0 * steps}
    assert [ps.committed for ps in workers] == [steps] * 3


def cut_connection(ps: eps.Client, rng: np.random.Generator) -> None:
    peers = list(ps._dispatcher.connections.peers.values())
    sock = peers[rng.integers(len(peers))].link.socket
    if isinstance(sock, socket.socket):
        with contextlib.suppress(OSError):  # it connects again
            sock.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (40_001,), (300, 301), (0, 4)])
def test_a_dense_tensor_keeps_its_shape_and_values(connect: Connect, shape: tuple[int, ...]) -> None:
    ps = connect()
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    tensor = ps.tensor("w", init=values, optimizer=eps.SGD(lr=0.5))
    np.testing.assert_array_equal(tensor.pull(), values)
    for copy in (True, False):
        ps.push({tensor: np.ones(shape, np.float32)}, copy=copy).result()
    out = np.empty(shape, np.float32)
    assert tensor.pull(out=out) is out
    np.testing.assert_allclose(out, values - np.float32(1.0), rtol=0, atol=1e-6)


def test_the_first_initial_values_of_a_tensor_stay(connect: Connect) -> None:
    first = connect("a").tensor("w", init=ones(300, 200), optimizer=eps.SGD(lr=1.0))
    second = connect("b").tensor("w", init=2 * ones(300, 200), optimizer=eps.SGD(lr=1.0))
    assert first.id == second.id
    assert set(second.pull().ravel().tolist()) == {1.0}


def test_a_large_push_is_one_step_in_several_frames(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=64, optimizer=eps.Accumulate())
    keys = np.random.default_rng(0).permutation(30_000)
    for _ in range(3):
        ps.push({table: (keys, ones(30_000, 64))})
    assert ps.clock == 3
    assert set(table.pull(keys).ravel().tolist()) == {3.0}
    ps.flush()
    assert ps.committed == 3


def test_pushed_arrays_may_change_at_once(connect: Connect) -> None:
    ps = connect(window=32)
    table, tensor = ps.table("t", dim=64, optimizer=eps.Accumulate()), None
    keys, grads = np.arange(20_000), ones(20_000, 64)
    tensor = ps.tensor("w", init=np.zeros(500_000, np.float32), optimizer=eps.Accumulate())
    dense = np.ones(500_000, np.float32)
    for _ in range(5):
        ps.push({table: (keys, grads), tensor: dense})
        keys += 1
        grads[:] = dense[:] = np.nan
        grads[:] = dense[:] = 1.0
    ps.flush()
    assert table.pull([4]).ravel().tolist() == [5.0] * 64
    assert set(tensor.pull().tolist()) == {5.0}


def test_a_step_in_parts_ticks_once(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=1, optimizer=eps.Accumulate())
    tensor = ps.tensor("w", init=np.zeros(10, np.float32), optimizer=eps.Accumulate())
    with ps.step() as step:
        step.push({table: ([1, 2, 3], ones(3, 1))})
        step.push({tensor: np.ones(10, np.float32)})
        with pytest.raises(eps.InputError, match="still open"):
            ps.push({})
    step.commit().result()
    assert (ps.clock, ps.committed) == (1, 1)
    assert table.pull([1, 2, 3, 4]).ravel().tolist() == [1, 1, 1, 0]
    assert tensor.pull().tolist() == [1.0] * 10
    ps.push({}).result()  # an empty step is a tick
    assert ps.clock == 2


def test_pulls_may_overlap(connect: Connect) -> None:
    ps = connect()
    table = ps.table("t", dim=64, optimizer=eps.Assign())
    keys = np.arange(20_000)
    values = np.random.default_rng(0).standard_normal((20_000, 64)).astype(np.float32)
    ps.push({table: (keys, values)})
    reads = [table.pull_async(keys[i::7]) for i in range(7)]
    for i in reversed(range(7)):
        np.testing.assert_array_equal(reads[i].result(), values[i::7])


def test_threads_share_a_client(connect: Connect) -> None:
    ps = connect(window=16)
    table = ps.table("t", dim=4, optimizer=eps.Accumulate())

    def work(number: int) -> None:
        keys = np.arange(number * 1000, number * 1000 + 100)
        for step in range(1, 30):
            ps.push({table: (keys, ones(100, 4))})
            assert set(table.pull(keys).ravel().tolist()) == {step}

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ps.flush()
    assert ps.committed == 4 * 29


def test_rows_never_pushed_have_the_same_values_for_every_worker(connect: Connect) -> None:
    keys = np.arange(-50, 50)
    pulled = []
    for worker in ("a", "b"):
        table = connect(worker).table("t", dim=8, optimizer=eps.SGD(lr=0.1), init=eps.Normal(std=0.1, seed=3))
        pulled.append(table.pull(keys))
    np.testing.assert_array_equal(pulled[0], pulled[1])
    assert 0.05 < pulled[0].std() < 0.2


def test_the_rate_is_a_property_of_the_step(connect: Connect) -> None:
    ps = connect()
    a = ps.table("a", dim=1, optimizer=eps.SGD(lr=lambda clock: 1.0 / clock))
    b = ps.table("b", dim=1, optimizer=eps.SGD(lr=1.0))
    ps.push({a: ([1], ones(1, 1)), b: ([1], ones(1, 1))})
    ps.push({a: ([1], ones(1, 1)), b: ([1], ones(1, 1))}, lr={b: 4.0})
    assert (a.pull([1]).item(), b.pull([1]).item()) == (-1.5, -5.0)


def test_applications_do_not_see_each_others_tables(connect: Connect) -> None:
    tables = []
    for app in ("ads", "search"):
        ps = connect("w0", app=app)
        table = ps.table("t", dim=1 if app == "ads" else 2, optimizer=eps.Accumulate())
        ps.push({table: ([1], ones(1, table.dim))}).result()
        tables.append(table)
    assert [t.pull([1]).tolist() for t in tables] == [[[1.0]], [[1.0, 1.0]]]


def test_a_timeout_of_hours_is_accepted(connect: Connect) -> None:
    table = connect("patient", timeout=12 * 3600.0).table("t", dim=1, optimizer=eps.Accumulate())
    assert table.pull(np.arange(3)).shape == (3, 1)


def test_a_worker_started_again_fences_its_older_self(
    connect: Connect, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    old = connect("w0")
    table = old.table("t", dim=1, optimizer=eps.Accumulate())
    new = connect("w0")
    again = new.table("t", dim=1, optimizer=eps.Accumulate())
    new.push({again: ([1], ones(1, 1))}).result()

    def fenced() -> bool:
        try:
            old.push({table: ([1], ones(1, 1))}).result()
        except eps.Closed as error:
            return "w0" in str(error)
        return False

    eventually(fenced)
    assert again.pull([2]).item() == 0


class TestBoundedDelay:
    def test_a_fast_worker_waits_for_the_slow_one_and_names_it(self, connect: Connect) -> None:
        slow, fast = connect("slow"), connect("fast", consistency=eps.SSP(staleness=2))
        tables = [ps.table("t", dim=1, optimizer=eps.Accumulate()) for ps in (slow, fast)]
        for table in tables:
            table.pull([1])  # both join, at clock 0
        slow.push({}).result()
        fast.push({}).result()
        for _ in range(2):
            fast.push({}).result()
        tables[1].pull([1])  # two ahead is allowed
        fast.push({}).result()
        wait_for_others(fast, 0.5)
        with pytest.raises(eps.Timeout, match="slow"):
            tables[1].pull([1])
        wait_for_others(fast, 60)
        read = tables[1].pull_async([1])
        assert not read.done()
        slow.push({}).result()
        read.result(timeout=60)

    def test_a_worker_that_leaves_does_not_hold_back_others(self, connect: Connect) -> None:
        slow, fast = connect("slow"), connect("fast", consistency=eps.SSP(staleness=0))
        table = fast.table("t", dim=1, optimizer=eps.Accumulate())
        slow.push({}).result()
        fast.push({}).result()
        fast.push({}).result()
        read = table.pull_async([1])
        slow.close()
        read.result(timeout=60)

    def test_a_new_worker_starts_at_the_minimum_clock(self, connect: Connect) -> None:
        old = connect("old")
        for _ in range(7):
            old.push({}).result()
        new = connect("new", consistency=eps.SSP(staleness=0))
        new.push({}).result()
        assert new.clock == 8


_NOTHING_IS_COMPILED = """
import sys

import numba.core.compiler
import numpy as np

import elasticps as eps


def no(*arguments, **options):
    raise AssertionError("a worker waits for a compiler")


with eps.connect(sys.argv[1], worker="warm", app="warm") as ps:
    numba.core.compiler.compile_extra = no
    table = ps.table("t", dim=40, optimizer=eps.SGD(lr=1.0))
    tensor = ps.tensor("w", init=np.zeros((30, 50), np.float32), optimizer=eps.Adam(lr=0.1))
    for n in (3, 20_000):
        keys = np.arange(n) % (n - 1)
        ps.push({table: (keys, np.ones((n, 40), np.float32)), tensor: np.ones((30, 50), np.float32)}).result()
        table.pull(keys)
        table.pull(keys, read="any")
        tensor.pull()
"""


def test_once_connected_a_worker_compiles_nothing(cluster: eps.LocalCluster) -> None:
    """It would do so in its first step, while others wait for it."""
    subprocess.run([sys.executable, "-c", _NOTHING_IS_COMPILED, cluster.url], timeout=200, check=True)
