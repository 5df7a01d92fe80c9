"""A batch is its matrix with fewer columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse as scipy_sparse

from elasticps.errors import InputError
from elasticps.sparse import Batch, localize
from elasticps.sparse import batch as module

FORMATS = ("csr", "csc", "coo", "lil", "dok", "bsr", "dia")


def dense_of(batch: Batch, columns: int) -> np.ndarray:
    """The dense matrix of a batch, entry by entry."""
    found = np.zeros((batch.rows, columns), np.float32)
    matrix = batch.matrix
    for i in range(batch.rows):
        for at in range(matrix.indptr[i], matrix.indptr[i + 1]):
            found[i, batch.keys[matrix.indices[at]]] += matrix.data[at]
    return found


@given(st.integers(0, 2**32 - 1), st.integers(0, 9), st.integers(1, 40), st.sampled_from(FORMATS), st.booleans())
@settings(max_examples=60)
def test_a_batch_is_the_same_matrix_in_any_format(seed: int, n: int, columns: int, form: str, sorts: bool) -> None:
    random = np.random.default_rng(seed)
    dense = np.where(random.random((n, columns)) < 0.2, random.normal(size=(n, columns)), 0).astype(np.float32)
    if n == 0 and form in ("bsr", "dia", "lil"):
        form = "csr"
    before = module._FEW_COLUMNS
    try:
        module._FEW_COLUMNS = 0 if sorts else 1 << 20
        batch = localize(scipy_sparse.csr_matrix(dense).asformat(form))
    finally:
        module._FEW_COLUMNS = before
    assert batch.keys.dtype == np.int64
    assert (np.diff(batch.keys) > 0).all()
    assert (dense_of(batch, columns) == dense).all()
    if form in ("csr", "csc", "coo"):
        assert batch.keys.tolist() == np.flatnonzero(dense.any(axis=0)).tolist()
    for shape in ((), (3,)):
        weights = random.normal(size=(columns, *shape)).astype(np.float32)
        errors = random.normal(size=(n, *shape)).astype(np.float32)
        product, gradient = batch.dot(weights[batch.keys]), batch.gradient(errors)
        assert product.dtype == gradient.dtype == np.float32
        np.testing.assert_allclose(product, dense @ weights, rtol=1e-5, atol=1e-5)
        whole = np.zeros((columns, *shape), np.float32)
        whole[batch.keys] = gradient
        np.testing.assert_allclose(whole, dense.T @ errors, rtol=1e-5, atol=1e-5)


def test_columns_have_keys_of_their_own_and_may_share_them() -> None:
    dense = np.array([[1, 2, 0, 4], [0, 0, 0, 8]], np.float64)
    batch = localize(scipy_sparse.csr_array(dense), keys=np.array([-7, 2**62, 5, -7]))
    assert batch.keys.tolist() == [-7, 2**62]
    assert batch.dot(np.array([10.0, 100.0], np.float32)).tolist() == [250, 80]
    assert batch.gradient(np.ones(2)).tolist() == [13, 2]


def test_repeated_entries_and_huge_column_numbers_are_allowed() -> None:
    data, columns = np.array([1, 2, 4], np.int16), np.array([2**62, 3, 2**62])
    matrix = scipy_sparse.csr_array((data, columns, np.array([0, 3])), shape=(1, 2**63 - 1))
    batch = localize(matrix)
    assert batch.keys.tolist() == [3, 2**62]
    assert batch.matrix.indices.dtype == np.int32
    assert batch.dot(np.array([1, 10], np.float32)).tolist() == [52]
    empty = localize(scipy_sparse.csr_array((0, 5)))
    assert (len(empty.keys), empty.rows, empty.dot(np.zeros(0, np.float32)).shape) == (0, 0, (0,))
    assert empty.gradient(np.zeros((0, 2), np.float32)).shape == (0, 2)


def test_the_callers_matrix_is_not_changed() -> None:
    matrix = scipy_sparse.csr_array(np.array([[0, 1.5], [2.5, 0]]))
    before = matrix.copy()
    batch = localize(matrix)
    batch.matrix.data[:] = 0
    assert (matrix != before).nnz == 0
    assert (matrix.indices == before.indices).all()
    single = scipy_sparse.csr_array(np.eye(3, dtype=np.float32))
    localize(single).matrix.data[:] = 7
    assert (single.data == 1).all()


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: localize(np.eye(3)), "takes a scipy.sparse matrix, such as csr_array, got ndarray"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3) * 1j)), "matrix of numbers, got complex128"),
        (lambda: localize(scipy_sparse.coo_array(np.ones(3))), r"matrix of numbers, got float64 of shape \(3,\)"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3)), [1, 2]), "3 columns need as many keys"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3)), [1.0, 2.0, 3.0]), "need as many keys, int64, got float64"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3))).dot(np.ones(2)), r"takes 3 weights.*\(2,\)"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3))).gradient(np.ones((3, 1, 1))), "takes 3 derivatives"),
        (lambda: localize(scipy_sparse.csr_array(np.eye(3))).dot(np.array(["a"] * 3)), "numbers are expected"),
    ],
)
def test_impossible_batches_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        make()


def test_a_matrix_with_entries_outside_of_it_is_refused() -> None:
    matrix = scipy_sparse.csr_array(np.eye(3))
    for wrong in (3, -1):
        matrix.indices[1] = wrong
        with pytest.raises(InputError, match="has entries in columns"):
            localize(matrix)
