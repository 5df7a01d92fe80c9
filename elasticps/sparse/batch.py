"""A minibatch's own keys, and the minibatch as a matrix with a column for each of them. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import InputError

try:
    from scipy import sparse as scipy_sparse
except ImportError as error:  # it is no part of a plain installation
    raise ImportError("elasticps.sparse needs SciPy: pip install 'elasticps[sparse]'") from error

Floats = NDArray[np.float32]

_FEW_COLUMNS = 8  # as many for each entry: then a flag for each column is cheaper than to sort


@dataclass(frozen=True, eq=False)
class Batch:
    """keys: int64 [m], each once, upwards; matrix: `scipy.sparse.csr_array`, float32 [n, m], whose column j is for
    `keys[j]`. Weights and gradients of a batch are arrays in the order of its keys."""

    keys: NDArray[np.int64]
    matrix: Any

    @property
    def rows(self) -> int:
        """Samples."""
        return int(self.matrix.shape[0])

    def dot(self, weights: object) -> Floats:
        """What a linear model says: float32 [n], or [n, k], for weights [m] or [m, k] of the keys."""
        return self._product(self.matrix, weights, len(self.keys), "weights, one for each key")

    def gradient(self, errors: object) -> Floats:
        """The gradient of what `dot` gives: float32 [m], or [m, k], for the loss's derivatives [n] or [n, k] by it."""
        return self._product(self.matrix.T, errors, self.rows, "derivatives, one for each sample")

    def _product(self, matrix: Any, values: object, n: int, what: str) -> Floats:
        array = np.asarray(values)
        if array.ndim not in (1, 2) or len(array) != n:
            raise InputError(f"a batch of {self.rows} samples and {len(self.keys)} keys takes {n} {what}, "
                             f"got an array of shape {array.shape}")  # fmt: skip
        if array.dtype.kind not in "fiub":
            raise InputError(f"{what}: numbers are expected, got {array.dtype}")
        made: Floats = np.asarray(matrix @ array.astype(np.float32, copy=False), np.float32)
        return made


def is_sparse(value: object) -> bool:
    """Whether SciPy made it."""
    return bool(scipy_sparse.issparse(value))


def row_of(vector: Any) -> Any:
    """A sparse vector as a matrix of one row; InputError if it is a matrix."""
    found = scipy_sparse.coo_array(vector)
    if found.ndim == 1 or found.shape[1] == 1:
        found = found.reshape((1, -1))
    if found.shape[0] != 1:
        raise InputError(f"dot takes a vector, got a matrix of shape {vector.shape}; use matrix @ vector")
    return found


def localize(samples: object, keys: object = None) -> Batch:
    """The batch of some samples, `scipy.sparse` of shape [n, columns] with numbers in it.

    Column j has key j, or keys[j] of int64 [columns]; columns of one key are added up. Entries that are stored count,
    also those that are zero. InputError for what is no such matrix.
    """
    if not is_sparse(samples):
        raise InputError(f"localize takes a scipy.sparse matrix, such as csr_array, got {type(samples).__name__}")
    given: Any = samples
    if given.ndim != 2 or given.dtype.kind not in "fiub":
        raise InputError(f"localize takes a matrix of numbers, got {given.dtype} of shape {given.shape}")
    matrix = scipy_sparse.csr_array(given)
    columns, n = matrix.indices, int(matrix.shape[1])
    if len(columns) and (columns.min() < 0 or columns.max() >= n):
        raise InputError(f"a matrix of {n} columns has entries in columns {columns.min()} to {columns.max()}")
    if keys is None:
        distinct, where = _renumber(columns, n)
    else:
        array = np.asarray(keys)
        if array.shape != (n,) or array.dtype.kind not in "iu" or array.dtype == np.uint64:
            raise InputError(f"{n} columns need as many keys, int64, got {array.dtype} of shape {array.shape}")
        array = array.astype(np.int64, copy=False)
        used, place = _renumber(columns, n)
        distinct, which = np.unique(array[used], return_inverse=True)
        where = which[place]
    index = np.int32 if max(len(columns), len(distinct)) < 2**31 else np.int64
    parts = matrix.data.astype(np.float32), where.astype(index), matrix.indptr.astype(index)
    return Batch(distinct, scipy_sparse.csr_array(parts, shape=(matrix.shape[0], len(distinct))))


def _renumber(columns: NDArray[Any], n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The columns that come, upwards, and of each entry the place of its own among them."""
    if n > _FEW_COLUMNS * len(columns):
        distinct, where = np.unique(columns, return_inverse=True)
        return distinct.astype(np.int64), where
    there = np.zeros(n, np.bool_)
    there[columns] = True
    return np.flatnonzero(there), (np.cumsum(there) - 1)[columns]
