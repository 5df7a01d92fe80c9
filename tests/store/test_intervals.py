"""Order and intervals of keys against what plain Python says."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.kernels.hashing import HASH_END, table_salt
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.store import Table

P, TABLE = 8, 5
MASK = (1 << 64) - 1


def hashed(key: int) -> int:
    z = (key & MASK) ^ int(table_salt(TABLE))
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def range_of(key: int) -> int:
    return hashed(key) >> 61


def a_table() -> Table:
    return Table(TableSpec("t", 2, Accumulate()), TABLE, P)


keys_of = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), unique=True, max_size=60)


@given(keys_of, st.permutations(range(P)), st.integers(0, P))
@settings(deadline=None)
def test_order_is_checked_and_searched_by_position(keys: list[int], order: list[int], left_out: int) -> None:
    positions = np.full(P, -1, np.int64)
    for position, r in enumerate(order[:left_out]):
        positions[r] = position
    table = a_table()
    array = np.array(keys, np.int64)
    at = [int(positions[range_of(key)]) for key in keys]
    wrong = [i for i in range(len(at)) if at[i] < (max(at[:i], default=0) if i else 0)]
    assert table.first_misplaced(array, positions) == (wrong[0] if wrong else -1)
    placed = [key for key in keys if positions[range_of(key)] >= 0]
    fine = np.array(sorted(placed, key=lambda key: positions[range_of(key)]), np.int64)
    assert table.first_misplaced(fine, positions) == -1
    for position in range(left_out + 1):
        expected = sum(positions[range_of(int(k))] < position for k in fine)
        assert table.first_at(fine, positions, position) == expected


@given(keys_of, st.lists(st.integers(0, HASH_END), min_size=P, max_size=P))
@settings(deadline=None)
def test_keys_below_bounds_are_selected(keys: list[int], bounds: list[int]) -> None:
    array = np.array(keys, np.int64)
    chosen = a_table().select(array, np.array(bounds, np.int64))
    assert [int(k) for k in array[chosen]] == [k for k in keys if hashed(k) >> 2 < bounds[range_of(k)]]


@given(keys_of, st.integers(0, P - 1), st.lists(st.integers(0, HASH_END // P), max_size=5))
@settings(deadline=None)
def test_the_pieces_of_a_range_are_the_range(keys: list[int], r: int, cuts: list[int]) -> None:
    source, target = a_table(), a_table()
    array = np.array(keys, np.int64)
    source.apply(array, np.ones((len(keys), 2), np.float32), np.empty(0, np.float32))
    width = HASH_END // P
    bounds = sorted({r * width, *(r * width + cut for cut in cuts), (r + 1) * width})
    for low, high in itertools.pairwise(bounds):
        found, rows = source.dump_interval(r, low, high)
        assert all(low <= hashed(int(k)) >> 2 < high for k in found)
        target.load_range(r, found, rows)
    assert target.digest_range(r) == source.digest_range(r)
    assert target.count_range(r) == sum(range_of(k) == r for k in keys)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=300), st.integers(0, P - 1), st.integers(1, 40))
@settings(deadline=None)
def test_the_pages_of_a_range_have_each_of_its_keys_once(keys: list[int], r: int, most: int) -> None:
    table = a_table()
    array = np.array(keys, np.int64)
    table.apply(array, np.ones((len(keys), 2), np.float32), np.empty(0, np.float32))
    listed: list[int] = []
    place = 0
    while True:
        page, following = table.list_keys(r, place, most)
        assert len(page) <= 2 * most
        listed += page.tolist()
        if not following:
            break
        assert following > place
        place = following
    assert sorted(listed) == sorted(k for k in keys if range_of(k) == r)
