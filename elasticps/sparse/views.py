"""Tables and tensors as vectors and matrices: what is asked for is pulled, by keys or by blocks; norms and the like are
computed by the servers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.client.inputs import checked_keys, checked_read
from elasticps.client.tables import DenseTensor, SparseTable
from elasticps.errors import InputError
from elasticps.sparse.batch import Batch, is_sparse, localize, row_of

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]

MAX_KEYS = 1 << 24  # of a slice: 64 MiB of a vector
CHUNK = 65_536  # rows that are pulled at once, where all are

_NORMS = {1: "l1", 2: "l2", math.inf: "linf"}


class _View:
    """Rows of a table by key, or of a tensor by number. size: of a tensor, how many rows there are; None for a table,
    which has a row for each int64."""

    __array_ufunc__ = None  # `array @ view` is ours
    __iter__ = None  # a table would have no end

    def __init__(self, handle: SparseTable | DenseTensor, read: str) -> None:
        checked_read(handle.name, read)
        self.handle = handle
        self._read = read
        self.size = None if isinstance(handle, SparseTable) else handle.shape[0]

    @property
    def name(self) -> str:
        """Of the table or tensor."""
        return self.handle.name

    def reduce(self, how: str, *constants: float) -> Any:
        """What a function makes of all weights, as `SparseTable.reduce`."""
        return self.handle.reduce(how, *constants)

    def sum(self) -> float:
        """Of all weights that the servers have; computed there, as all that follow."""
        return self.handle.reduce("sum")

    def max(self) -> float:
        """The largest weight, -inf without any."""
        return self.handle.reduce("max")

    def min(self) -> float:
        """The smallest weight, inf without any."""
        return self.handle.reduce("min")

    def nonzero(self) -> int:
        """How many weights are not zero."""
        return self.handle.reduce("nonzero")

    def _keys(self, at: object) -> Keys:
        """What an index names: a number, a slice, or an array of keys."""
        if isinstance(at, slice):
            return self._slice(at)
        if (isinstance(at, np.ndarray) and at.dtype == np.bool_) or isinstance(at, bool):
            raise InputError(f"{self.name!r} is indexed by keys, not by a mask: pass np.flatnonzero(mask)")
        keys = checked_keys(self.name, np.asarray([at]) if isinstance(at, int | np.integer) else at)
        if self.size is None:
            return keys
        if len(keys) and (keys.min() < -self.size or keys.max() >= self.size):
            raise InputError(f"{self.name!r} has rows 0 to {self.size - 1}, not {keys.min()} to {keys.max()}")
        return np.where(keys < 0, keys + self.size, keys)

    def _slice(self, at: Any) -> Keys:
        for each in (at.start, at.stop, at.step):
            if each is not None and (isinstance(each, bool) or not isinstance(each, int | np.integer)):
                raise InputError(f"{self.name!r}: a slice has whole numbers, got {at}")
        if self.size is not None:
            span = range(*at.indices(self.size))
        elif at.start is None or at.stop is None or at.step == 0:
            raise InputError(f"table {self.name!r} has a row for every key: a slice needs a start and a stop")
        else:
            span = range(at.start, at.stop, at.step or 1)
        if len(span) > MAX_KEYS:
            raise InputError(f"{self.name!r}: a slice of {len(span):,} rows; pull at most {MAX_KEYS:,} at once")
        return np.arange(span.start, span.stop, span.step, dtype=np.int64)

    def _fits(self, x: Any, what: str) -> None:
        if self.size is not None and x != self.size:
            raise InputError(f"{self.name!r} has {self.size} rows, {what} has {x}")

    def _product(self, left: object) -> Floats:
        """left [n, rows] times this: of a sparse one only the rows that it has entries for are pulled."""
        if isinstance(left, Batch):
            return left.dot(self.pull(left.keys))
        if is_sparse(left):
            given: Any = left
            if given.ndim == 2:
                self._fits(given.shape[1], "the matrix")
            batch = localize(given)
            return batch.dot(self.pull(batch.keys))
        array = np.asarray(left)
        if array.ndim not in (1, 2) or array.dtype.kind not in "fiub":
            raise InputError(f"{self.name!r} is multiplied by matrices, got {array.dtype} of shape {array.shape}")
        self._fits(array.shape[-1], "the array")
        made: Floats = array.astype(np.float32, copy=False) @ self.pull(self._slice(slice(0, array.shape[-1])))
        return made

    def pull(self, keys: object) -> Floats:
        """Weights of keys, int64 [n], in their order."""
        raise NotImplementedError


class Vector(_View):
    """A table of dim 1, or a tensor of one dimension, as a vector of float32: of a table with an entry for each int64,
    most of them zero (or what its initialiser says), of which the servers have those that were pushed.

        w = sparse.Vector(ps.table("w", dim=1, optimizer=eps.FTRL(0.1, l1=1.0)))
        w[17], w[0:100], w[keys]  # what is pulled
        margins = samples @ w  # scipy.sparse: pulls what has a column
        w.norm(1), w.nonzero()  # computed by the servers

    read: as for `SparseTable.pull`. Errors are those of pulls and `reduce`.
    """

    def __init__(self, handle: SparseTable | DenseTensor, *, read: str = "tail") -> None:
        _check(handle)
        if isinstance(handle, SparseTable):
            if handle.dim != 1:
                raise InputError(f"a vector is a table of dim 1, {handle.name!r} has {handle.dim}: use Matrix")
        elif len(handle.shape) != 1:
            raise InputError(f"a vector is a table of dim 1 or a tensor of one dimension, got {handle!r}")
        super().__init__(handle, read)

    def pull(self, keys: object) -> Floats:
        """Entries of keys, int64 [n]: float32 [n]."""
        if isinstance(self.handle, SparseTable):
            return self.handle.pull(keys, read=self._read)[:, 0]
        return self.handle.take(keys, read=self._read)

    def __getitem__(self, at: object) -> Any:
        """A float for a whole number, else float32 [n] for a slice or keys."""
        found = self.pull(self._keys(at))
        return float(found[0]) if isinstance(at, int | np.integer) else found

    def __rmatmul__(self, left: object) -> Floats:
        return self._product(left)

    def dot(self, other: object) -> float:
        """The inner product, summed in float64, with a dense array [n], a sparse vector of SciPy, [n] or [1, n], or
        another Vector. Only entries that the other one has are pulled."""
        if isinstance(other, Vector):
            return _inner(self, other)
        if is_sparse(other):
            row = row_of(other)
            self._fits(row.shape[1], "the other vector")
            batch = localize(row)
            return float((batch.matrix.astype(np.float64) @ self.pull(batch.keys).astype(np.float64))[0])
        array = np.asarray(other)
        if array.ndim != 1 or array.dtype.kind not in "fiub":
            raise InputError(f"{self.name!r}: dot takes a vector of numbers, got {array.dtype} of shape {array.shape}")
        self._fits(len(array), "the other vector")
        return float(array.astype(np.float64) @ self.pull(self._slice(slice(0, len(array)))).astype(np.float64))

    def norm(self, order: float = 2) -> float:
        """Of order 1, 2 or inf, computed by the servers from the entries that they have."""
        given: object = order
        if not isinstance(given, int | float) or given not in _NORMS:
            raise InputError(f"{self.name!r}: norms are of order 1, 2 or inf, got {order!r}")
        return float(self.handle.reduce(_NORMS[order]))

    def step(self, batch: Batch | object, gradient: object) -> dict[SparseTable | DenseTensor, object]:
        """What `ps.push` takes, to push a gradient, float32 [m] in the order of a batch's keys, or of keys int64 [m].
        Of a tensor the others' gradients are zero."""
        keys = self._keys(batch.keys if isinstance(batch, Batch) else batch)
        values = _gradients(self.name, gradient, (len(keys),))
        if isinstance(self.handle, SparseTable):
            return {self.handle: (keys, values[:, None])}
        whole = np.zeros(self.handle.shape, np.float32)
        np.add.at(whole, keys, values)
        return {self.handle: whole}


class Matrix(_View):
    """A table, as a matrix with a row of `dim` floats for each int64; or a tensor of two dimensions.

    e = sparse.Matrix(ps.table("e", dim=16, optimizer=eps.Adagrad(lr=0.1)))
    e[keys], e[0:10], e[keys, 3]  # rows, or some columns of them
    hidden = samples @ e  # [n, 16]
    e.norm()  # Frobenius', computed by the servers
    """

    def __init__(self, handle: SparseTable | DenseTensor, *, read: str = "tail") -> None:
        _check(handle)
        if not isinstance(handle, SparseTable) and len(handle.shape) != 2:
            raise InputError(f"a matrix is a table, or a tensor of two dimensions, got {handle!r}")
        super().__init__(handle, read)
        self.columns = handle.dim if isinstance(handle, SparseTable) else handle.shape[1]

    def pull(self, keys: object) -> Floats:
        """Rows of keys, int64 [n]: float32 [n, columns]."""
        if isinstance(self.handle, SparseTable):
            return self.handle.pull(keys, read=self._read)
        rows = self._keys(keys)
        keys_of_rows = rows[:, None] * self.columns + np.arange(self.columns)
        return self.handle.take(keys_of_rows.reshape(-1), read=self._read).reshape(len(rows), self.columns)

    def __getitem__(self, at: object) -> Any:
        """float32 [n, columns] for a slice or keys, [columns] for a whole number; a second index chooses columns."""
        rows, *columns = at if isinstance(at, tuple) else (at,)
        if len(columns) > 1:
            raise InputError(f"{self.name!r} has two dimensions, got {len(columns) + 1} indices")
        found = self.pull(self._keys(rows))
        if columns:
            try:
                found = found[:, columns[0]]
            except (IndexError, TypeError) as error:
                raise InputError(f"{self.name!r} has {self.columns} columns: {error}") from None
        return found[0] if isinstance(rows, int | np.integer) else found

    def __rmatmul__(self, left: object) -> Floats:
        return self._product(left)

    def dot(self, other: object, keys: object = None) -> Floats:
        """The rows of keys, int64 [n], times a vector [columns] or matrix [columns, k]: float32 [n], or [n, k]. Without
        keys all rows of a tensor."""
        array = np.asarray(other)
        if array.ndim not in (1, 2) or len(array) != self.columns or array.dtype.kind not in "fiub":
            raise InputError(f"{self.name!r} has {self.columns} columns, the other one {array.dtype} {array.shape}")
        if keys is None and self.size is None:
            raise InputError(f"table {self.name!r} has a row for every key: name those to multiply")
        chosen = self._slice(slice(None)) if keys is None else self._keys(keys)
        made = np.empty((len(chosen), *array.shape[1:]), np.float32)
        for some in _chunks(len(chosen)):
            made[some] = self.pull(chosen[some]) @ array.astype(np.float32, copy=False)
        return made

    def norm(self) -> float:
        """Frobenius', computed by the servers from the rows that they have."""
        return self.handle.reduce("l2")

    def step(self, batch: Batch | object, gradient: object) -> dict[SparseTable | DenseTensor, object]:
        """What `ps.push` takes, to push gradients, float32 [m, columns]; as `Vector.step`."""
        keys = self._keys(batch.keys if isinstance(batch, Batch) else batch)
        values = _gradients(self.name, gradient, (len(keys), self.columns))
        if isinstance(self.handle, SparseTable):
            return {self.handle: (keys, values)}
        whole = np.zeros(self.handle.shape, np.float32)
        np.add.at(whole, keys, values)
        return {self.handle: whole}


View = Vector | Matrix


def _check(handle: object) -> None:
    if not isinstance(handle, SparseTable | DenseTensor):
        raise InputError(f"a view is one of a table or a tensor of a client's, got {handle!r:.100}")


def _gradients(name: str, values: object, shape: tuple[int, ...]) -> Floats:
    array = np.asarray(values)
    if array.dtype.kind not in "fiub" or array.shape != shape:
        raise InputError(f"{name!r}: a gradient of shape {shape} is expected, got {array.dtype} {array.shape}")
    return np.ascontiguousarray(array, np.float32)


def _chunks(n: int) -> Iterator[slice]:
    return (slice(at, at + CHUNK) for at in range(0, n, CHUNK))


def _inner(one: Vector, other: Vector) -> float:
    """Of two vectors that servers have: what is pulled are the rows that the smaller one has."""
    for first, second in ((one, other), (other, one)):
        if first.size is not None:
            if second.size is not None:
                second._fits(first.size, f"{first.name!r}")
            parts = [np.arange(some.start, min(some.stop, first.size)) for some in _chunks(first.size)]
            break
    else:
        if len(other.handle) < len(one.handle):  # type: ignore[arg-type]  # tables
            one, other = other, one
        parts = list(one.handle.keys(CHUNK))  # type: ignore[union-attr]
    return float(sum(one.pull(keys).astype(np.float64) @ other.pull(keys).astype(np.float64) for keys in parts))
