"""Weights of many rows at once, beside `put`."""

from __future__ import annotations

import numpy as np
import pytest

import elasticps as eps
from elasticps.store import Store, Table
from elasticps.store.layout import overwrite_found

RANGES, KEYS = 8, 60


def rows_of(table: Table, dim: int) -> np.ndarray:
    found = np.empty((KEYS, dim), np.float32)
    table.gather(np.arange(KEYS), found)
    return found


@pytest.mark.parametrize("dim", [1, 5, 16, 64, 100])
@pytest.mark.parametrize("seed", range(5))
def test_rows_that_are_there_get_their_weights_as_by_put_and_else_nothing_changes(dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    spec = eps.TableSpec("t", dim, eps.Assign())
    table, twin = Table(spec, 1, RANGES), Table(spec, 1, RANGES)
    first = np.arange(KEYS // 2)
    for each in (table, twin):
        each.put(first, np.ones((len(first), dim), np.float32))
    scratch = np.empty(KEYS, np.int64)
    for _ in range(20):
        some = rng.integers(0, KEYS if rng.random() < 0.3 else KEYS // 2, int(rng.integers(0, 50)))
        values = rng.random((len(some), dim), np.float32)
        before = rows_of(table, dim)
        there = not table.missing(some).any()
        assert overwrite_found(table.header, some, values, scratch) == there
        if there:
            twin.put(some, values)
        else:
            assert (rows_of(table, dim) == before).all()
        assert rows_of(table, dim).tobytes() == rows_of(twin, dim).tobytes()


def test_a_stamp_that_is_not_the_newest_is_left_to_put() -> None:
    """It has to be written first, and the row kept aside where a checkpoint wants it."""
    store = Store(RANGES)
    table = store.create(eps.TableSpec("t", 4, eps.Assign()), 1)
    keys, values, scratch = np.arange(10), np.ones((10, 4), np.float32), np.empty(10, np.int64)
    table.put(keys, values)
    store.pass_cut(np.arange(RANGES), 1)
    assert not overwrite_found(table.header, keys, values, scratch)
    table.put(keys, values)
    assert overwrite_found(table.header, keys, values, scratch)
