"""Rows that a reader gathers, of each type and with rows missing, compared with a model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.model.optimizers import Adagrad
from elasticps.model.spec import Init, Normal, TableSpec, Zeros
from elasticps.readers.rows import ReaderTable
from elasticps.readers.values import READER_DTYPES
from elasticps.store import Store
from elasticps.wire.row_blocks import RowBlock

RANGES, HELD, NONE = 16, 300, np.empty(0, np.int64)


@pytest.mark.parametrize("dtype", READER_DTYPES)
@pytest.mark.parametrize("stored", ["float32", "float16"])
@pytest.mark.parametrize("init", [Zeros(), Normal(std=0.1)], ids=["zeros", "normal"])
@given(seed=st.integers(0, 1 << 30), dim=st.integers(1, 70), n=st.integers(0, 100))
@settings(max_examples=15, deadline=None)
def test_rows_are_those_that_came_and_others_as_new_ones(
    dtype: str, stored: str, init: Init, seed: int, dim: int, n: int
) -> None:
    random = np.random.default_rng(seed)
    spec = TableSpec("rows", dim, Adagrad(lr=0.1), init, stored)
    table = ReaderTable(spec, 1, RANGES, dtype)
    held = random.choice(2 * HELD, HELD, replace=False)
    rows = random.standard_normal((HELD, dim)).astype(np.float32)
    words = table.codec.encode(rows) if table.codec.code else rows
    table.apply(RowBlock(1, held, words, NONE, NONE), None)
    decoded = dict(zip(held.tolist(), table.decode(words), strict=True))
    keys = random.integers(0, 2 * HELD, n)
    new = np.empty((n, dim), np.float32)
    Store(RANGES).create(spec, 1).gather(keys, new)
    expected = np.array([decoded.get(key, row) for key, row in zip(keys.tolist(), new, strict=True)], np.float32)
    np.testing.assert_array_equal(table.pull(keys), expected.reshape(n, dim))
    table.close()
