"""Tables and stores: properties that the twin does not cover."""

from __future__ import annotations

import ctypes
import inspect
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher
from numpy.typing import NDArray

from elasticps.errors import InputError, SpecError
from elasticps.kernels import hashing
from elasticps.model import spec
from elasticps.model.policies import MinCount
from elasticps.model.spec import TableSpec
from elasticps.store import Store, Table, index, intervals, native, registry, warm


def table(dim: int = 4, ranges: int = 8, optimizer: spec.ServerOptimizer | None = None) -> Table:
    return Table(TableSpec("t", dim, optimizer or spec.Adagrad(0.5), spec.Normal(seed=1)), 7, ranges)


def fill(made: Table, keys: NDArray[np.int64]) -> None:
    made.apply(keys, np.ones((len(keys), made.spec.dim), np.float32), made.spec.optimizer.step_values(1))


def read(made: Table, keys: NDArray[np.int64]) -> NDArray[np.float32]:
    out = np.empty((len(keys), made.spec.dim), np.float32)
    made.gather(keys, out)
    return out


def ranges_of(made: Table, keys: NDArray[np.int64]) -> NDArray[np.int32]:
    out = np.empty(len(keys), np.int32)
    hashing.key_ranges(keys, hashing.table_salt(made.table_id), hashing.range_shift(made.ranges), out)
    return out


def test_a_range_holds_the_keys_that_hash_there() -> None:
    made, keys = table(), np.arange(-500, 500)
    fill(made, keys)
    where = ranges_of(made, keys)
    for r in range(made.ranges):
        assert sorted(made.range_keys(r)) == keys[where == r].tolist()
        assert made.count_range(r) == (where == r).sum()


def test_the_first_foreign_key_is_found() -> None:
    made, keys = table(), np.arange(100)
    where = ranges_of(made, keys)
    for r in range(made.ranges):
        allowed = np.arange(made.ranges) != r
        assert made.first_foreign(keys, allowed) == np.flatnonzero(where == r)[0]
    assert made.first_foreign(keys, np.ones(made.ranges, np.bool_)) == -1
    assert made.first_foreign(keys[:0], np.zeros(made.ranges, np.bool_)) == -1


def test_a_digest_sees_every_part_and_no_order() -> None:
    one, two = table(ranges=2), table(ranges=2)
    keys = np.arange(200)
    fill(one, keys)
    fill(two, keys[::-1].copy())
    assert [one.digest_range(r) for r in (0, 1)] == [two.digest_range(r) for r in (0, 1)] != [0, 0]
    r = int(ranges_of(one, keys[:1])[0])
    dumped, rows = one.dump_range(r)
    digest = one.digest_range(r)
    for byte in range(one.stride):
        changed = rows.copy()
        changed[0, byte] ^= 1
        one.load_range(r, dumped, changed)
        assert one.digest_range(r) != digest
    one.load_range(r, dumped, rows)
    assert one.digest_range(r) == digest


def test_two_keys_that_swap_their_rows_change_the_digest() -> None:
    made, keys = table(ranges=2), np.arange(50)
    fill(made, keys)
    dumped, rows = made.dump_range(0)
    digest = made.digest_range(0)
    rows[[0, 1]] = rows[[1, 0]]
    made.load_range(0, dumped, rows)
    assert made.digest_range(0) != digest


def test_unaligned_slices_of_a_received_frame_are_accepted() -> None:
    made = table()
    grads = np.arange(12, dtype=np.float32).reshape(3, 4)
    frame = b"x" + np.array([1, 2, 3]).tobytes() + grads.tobytes() + np.array([0.5], np.float32).tobytes()
    keys = np.frombuffer(frame, np.int64, 3, 1)
    assert not keys.flags.aligned
    assert not keys.flags.writeable
    made.apply(keys, np.frombuffer(frame, np.float32, 12, 25).reshape(3, 4), np.frombuffer(frame, np.float32, 1, 73))
    other = table()
    other.apply(np.array([1, 2, 3]), grads, np.array([0.5], np.float32))
    np.testing.assert_array_equal(read(made, keys), read(other, keys))


@pytest.mark.parametrize(
    ("keys", "grads", "values"),
    [
        (np.arange(3), np.zeros((2, 4), np.float32), np.ones(1, np.float32)),
        (np.arange(3), np.zeros((3, 5), np.float32), np.ones(1, np.float32)),
        (np.arange(3), np.zeros((3, 4), np.float32), np.ones(2, np.float32)),
        (np.arange(3, dtype=np.int32), np.zeros((3, 4), np.float32), np.ones(1, np.float32)),
        (np.arange(3.0), np.zeros((3, 4), np.float32), np.ones(1, np.float32)),
        (np.arange(6)[::2], np.zeros((3, 4), np.float32), np.ones(1, np.float32)),
        (np.arange(3), np.zeros((3, 4)), np.ones(1, np.float32)),
        (np.arange(3), np.zeros((4, 3), np.float32).T, np.ones(1, np.float32)),
    ],
)
def test_arrays_that_do_not_fit_change_nothing(keys: Any, grads: Any, values: Any) -> None:
    made = table()
    with pytest.raises((InputError, TypeError)):
        made.apply(keys, grads, values)
    with pytest.raises((InputError, TypeError)):
        made.put_if_absent(keys, grads if values.shape == (1,) else grads[:2])
    assert made.rows == 0


def test_a_range_accepts_only_its_own_keys() -> None:
    made, keys = table(), np.arange(20)
    fill(made, keys)
    r = int(ranges_of(made, keys[:1])[0])
    dumped, rows = made.dump_range(r)
    with pytest.raises(InputError, match="does not lie in range"):
        made.load_range((r + 1) % made.ranges, dumped, rows)
    with pytest.raises(InputError, match="rows need uint8"):
        made.load_range(r, dumped, rows[:, :-8])
    with pytest.raises(InputError, match="there are 8 ranges"):
        made.first_foreign(keys, np.ones(4, np.bool_))


def test_an_empty_batch_changes_nothing() -> None:
    made, none = table(), np.empty(0, np.int64)
    fill(made, none)
    assert read(made, none).shape == (0, 4)
    assert made.put_if_absent(none, np.empty((0, 4), np.float32)) == 0
    assert made.nbytes == 0


def unmixed(hashed: int, table_id: int) -> int:
    """The key of a hash: SplitMix64's finaliser backwards."""
    mask = (1 << 64) - 1

    def unshift(z: int, by: int) -> int:
        x = z
        for _ in range(64 // by):
            x = z ^ (x >> by)
        return x

    z = unshift(hashed, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & mask
    z = unshift(z, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & mask
    z = unshift(z, 30) ^ int(hashing.table_salt(table_id))
    return z - (1 << 64) if z >> 63 else z


def test_colliding_keys_are_found() -> None:
    made = table(ranges=2)
    for place in (0, 0x12345678, 0xFFFFFFFF):
        keys = np.array([unmixed(1 << 63 | place << 31 | low, made.table_id) for low in range(300)])
        assert (ranges_of(made, keys) == 1).all()
        fill(made, keys)
        assert sorted(made.range_keys(1).tolist()) == sorted(keys.tolist())
        fill(made, keys)
        assert made.rows == 300
        made.clear()


def test_keys_in_the_order_of_another_index_do_not_pile_up() -> None:
    made, copy = table(ranges=2), table(ranges=2)
    fill(made, np.arange(30_000))
    listed = made.range_keys(0)
    for at in range(0, len(listed), 100):
        fill(copy, listed[at : at + 100])
        base, capacity = (copy._descriptors.get(0, word) for word in (native.D_SEGMENT, native.D_CAPACITY))
        assert capacity <= max(2 * copy.count_range(0), 8)
    segment = np.ctypeslib.as_array((ctypes.c_int64 * (2 * index.segment_entries(capacity))).from_address(base))
    salt, shift = hashing.table_salt(copy.table_id), np.uint64(63)
    descriptors = copy._descriptors.words.ravel()
    distance = [
        base // index.ENTRY + at - (index._start(key, salt, shift, descriptors, 1) & native.ADDRESS) // index.ENTRY
        for at, (key, row) in enumerate(segment.reshape(-1, 2).tolist())
        if row
    ]
    assert min(distance) == 0
    assert np.mean(distance) < 3


def test_memory_is_small_for_small_tensors_and_is_returned() -> None:
    store = Store(256)
    for i in range(300):
        bias = store.create(TableSpec.dense(f"bias{i}", (10,), spec.Adam()), i)
        assert bias.put_if_absent(np.zeros(1, np.int64), np.ones((1, 10), np.float32)) == 1
    assert store.rows == 300
    assert store.nbytes < 300_000
    big = store.create(TableSpec("big", 64, spec.Adagrad(0.1)), 300)
    fill(big, np.arange(20_000))
    assert big.nbytes <= 20_000 * (1.3 * 512 + 32) * 1.3, "slabs double while a table is small"
    for r in range(255):
        big.drop_range(r)
    before = big.nbytes
    fill(big, np.arange(10_000))
    assert big.nbytes < before * 1.1, "rows of dropped ranges are used again"
    for i in range(301):
        store.drop(i, np.arange(256), np.zeros(256, np.int64))
    assert len(store.bury(np.zeros(256, np.int64))) == 301
    assert (store.rows, store.nbytes) == (0, 0)


def test_a_table_is_usable_after_it_was_emptied() -> None:
    made, keys = table(), np.arange(1000)
    fill(made, keys)
    expected = read(made, keys)
    for r in range(made.ranges):
        made.drop_range(r)
    assert (made.rows, made.nbytes) == (0, 0)
    fill(made, keys)
    np.testing.assert_array_equal(read(made, keys), expected)


def test_a_store_knows_its_tables() -> None:
    store = Store(2)
    described = TableSpec("a", 4, spec.SGD(0.1))
    assert store.create(described, 5) is store.create(described, 5)
    with pytest.raises(SpecError, match=r"table 'a' \(id 5\) exists with another spec: dim is 8, not 4"):
        store.create(TableSpec("a", 8, spec.SGD(0.1)), 5)


def test_a_dropped_table_stays_until_all_replicas_have_dropped_it() -> None:
    store, acked = Store(4), np.array([10, 10, -1, 10])
    keys = np.arange(200)
    made = store.create(TableSpec("a", 4, spec.SGD(0.1)), 5)
    store.changed.clear()
    fill(made, keys)
    store.drop(5, np.array([0, 1]), np.array([3, 11]))
    assert (store.live, store.tables, made.dropped) == ({}, {5: made}, True)
    assert store.changed == {5}
    assert [bool(made.count_range(r)) for r in range(4)] == [False, False, True, True]
    assert store.bury(acked) == []
    store.drop(5, np.array([3]), np.array([9]))
    assert store.bury(acked) == []
    acked[1] = 11
    assert store.bury(acked) == [5]
    assert (store.tables, store.rows, store.dropped_in(3), store.dropped_in(2)) == ({}, 0, [5], [])
    late = store.create(TableSpec("a", 4, spec.SGD(0.1)), 5)  # somebody has not heard of it
    assert (store.live, late.dropped) == ({}, True)
    assert store.bury(acked) == [5]
    store.erase(np.array([3]))  # it comes back from a replica that has not dropped it yet
    late = store.create(TableSpec("a", 4, spec.SGD(0.1)), 5)
    assert store.bury(acked) == []
    store.drop(5, np.array([3]), np.array([0]))
    assert store.bury(acked) == [5]


def test_a_replica_filled_after_a_table_was_dropped_agrees_with_one_that_dropped_it() -> None:
    old, new, r = Store(4), Store(4), np.array([2])
    made = old.create(TableSpec("a", 4, spec.SGD(0.1), admission=MinCount(2)), 5)
    assert made.lifecycle is not None
    made.lifecycle.begin(r, made.spec)
    assert old.words(2) != new.words(2)
    old.drop(5, r, np.array([3]))
    new.drop(5, r, np.array([0]))
    assert old.words(2) == new.words(2)


def test_dropped_tables_are_remembered_in_few_bytes() -> None:
    ranges = 65_536
    store, every = Store(ranges), np.arange(ranges)
    store.create(TableSpec("a", 4, spec.SGD(0.1)), 5)
    for number in (5, 6):
        store.drop(number, every, every + 1)
    assert store.bury(every) == []
    assert store.bury(every + 1) == [5]
    assert sum(each.nbytes for each in store.dropped.values()) <= 2 * store.dropped_bytes < 20_000
    assert not store._dropped_at
    store.erase(np.array([9]))
    assert [store.dropped_in(r) for r in (8, 9, ranges - 1)] == [[5, 6], [], [5, 6]]


def test_nothing_compiles_once_warm() -> None:
    warm()
    for kernel, _ in registry._SIGNATURES:
        assert len(kernel.signatures) == 1
        assert not kernel._can_compile


def test_every_kernel_that_tables_call_is_compiled_at_the_start() -> None:
    called = re.findall(r"\b(index|intervals)\.([a-z]\w*)\(", inspect.getsource(Table))
    found = [getattr({"index": index, "intervals": intervals}[module], name) for module, name in called]
    kernels = {each for each in found if isinstance(each, Dispatcher)}
    assert intervals.digest_interval in kernels
    assert kernels <= {kernel for kernel, _ in registry._SIGNATURES}


def test_the_first_use_from_several_threads_compiles_once() -> None:
    @numba.njit
    def kernel(numbers):  # type: ignore[no-untyped-def]
        return numbers.sum()

    signature = (numba.types.Array(numba.types.int64, 1, "C"),)
    together = threading.Barrier(4)

    def load() -> None:
        together.wait(10)
        registry._load(kernel, signature)

    with ThreadPoolExecutor(4) as threads:
        for loading in [threads.submit(load) for _ in range(4)]:
            loading.result()
    assert len(kernel.signatures) == 1


def test_several_threads_may_register_the_same_optimizer() -> None:
    def update(w, s, g, v, c):  # type: ignore[no-untyped-def]
        w[0] += g[0]

    together = threading.Barrier(3)

    def register() -> None:
        together.wait(10)
        registry.register_optimizer("from-several-threads", update)

    with ThreadPoolExecutor(3) as threads:
        for registering in [threads.submit(register) for _ in range(3)]:
            registering.result()
    optimizer = spec.Custom(name="from-several-threads", slots=0)
    assert callable(registry.update_kernel(optimizer))


def reclaimed(made: Table, rows: int = 5_000, most: int = 400) -> None:
    for _ in range(most):
        made.reclaim(rows)


def test_memory_of_dropped_rows_is_returned() -> None:
    """Only its own table could use it: with several tables a server would use more than it may."""
    made, keys = table(dim=64), np.arange(40_000)
    fill(made, keys)
    there = keys[ranges_of(made, keys) < 2]
    values = read(made, there)
    for r in range(2, made.ranges):
        made.drop_range(r)
    before = made.nbytes
    dropped = made.reusable_bytes
    assert dropped > 12 << 20
    digests = [made.digest_range(r) for r in (0, 1)]
    reclaimed(made)
    assert made.reusable_bytes < 4 << 20
    assert made.nbytes == before - (dropped - made.reusable_bytes)
    assert [made.digest_range(r) for r in (0, 1)] == digests
    np.testing.assert_array_equal(read(made, there), values)


@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8, 13])
def test_rows_that_come_while_memory_goes_back_stay(steps: int) -> None:
    """They may take the places that others were to be moved to."""
    made, keys = table(dim=64), np.arange(40_000)
    fill(made, keys)
    for r in range(3, made.ranges):
        made.drop_range(r)
    left = keys[ranges_of(made, keys) < 3]
    values = read(made, left)
    reclaimed(made, most=steps)
    more = np.arange(100_000, 135_000)
    for part in np.array_split(more, 7):
        fill(made, part)
        reclaimed(made, rows=1_000, most=1)
    made.drop_range(0)
    reclaimed(made)
    left, found = left[ranges_of(made, left) > 0], values[ranges_of(made, left) > 0]
    np.testing.assert_array_equal(read(made, left), found)
    more = more[ranges_of(made, more) > 0]
    assert made.rows == len(left) + len(more)
    fresh = table(dim=64)
    fill(fresh, more)
    np.testing.assert_array_equal(read(made, more), read(fresh, more))
    assert 0 <= made.reusable_bytes <= made.nbytes
