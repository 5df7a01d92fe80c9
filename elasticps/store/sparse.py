"""Which floats of a row filters send: chosen where it is encoded, put back where it arrives.

A row is spread out in its own memory: the floats that came stand at its front, and go where they belong from the last
one on. Whatever was sent as their places, they stay within the row and in order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import mix64 as _mix64
from elasticps.store.native import carray, kernel, pointer

TOP_K, RANDOM_K, THRESHOLD = 4, 5, 6
_FACTOR = np.uint64(0x100000001B3)  # FNV-1's
_HALF = np.uint64(32)
_INFINITY, _NAN = np.float32(np.inf), np.float32(np.nan)

mix64: Any = _mix64


@kernel
def _drawn(draw: np.uint64, j: int, left: int, dim: int) -> np.int64:
    """Which float of the j-th of `left` stretches of a row was drawn."""
    low, high = j * dim // left, (j + 1) * dim // left
    return low + np.int64(mix64(draw << _HALF | np.uint64(j)) >> _HALF) % (high - low)


@kernel
def spread(code: int, marks: int, left: int, dim: int, target: int) -> None:
    """Puts the first `left` floats of the row of `dim` at `target` where they belong. marks: a filter's words."""
    if code == THRESHOLD:
        return
    x, positions = carray(pointer(target), (dim,), np.float32), carray(pointer(marks), (left,), np.uint16)
    draw = np.uint64(carray(pointer(marks), (1,), np.uint32)[0])
    after = dim
    for j in range(left - 1, -1, -1):
        place: Any = np.int64(positions[j]) if code == TOP_K else _drawn(draw, j, left, dim)
        place = min(max(place, j), after - 1)
        value = x[j]
        for i in range(place + 1, after):
            x[i] = 0
        x[place] = value
        after = place
    for i in range(after):
        x[i] = 0


@kernel
def spread_rows(code: int, marks: int, words: int, n: int, left: int, dim: int, target: int) -> None:
    """The same for n rows one after another, `words` words from one's to the next's."""
    for i in range(n):
        spread(code, marks + 4 * words * i, left, dim, target + 4 * dim * i)


@kernel
def draw_rows(seed: int, source: int, n: int, dim: int, left: int, marks: int, words: int, target: int) -> None:
    """Draws `left` floats of each row, from `seed` and the row's bits, and writes what says which. Of a row that is not
    finite it hands on that."""
    for i in range(n):
        x = carray(pointer(source + 4 * dim * i), (dim,), np.float32)
        bits = carray(pointer(source + 4 * dim * i), (dim,), np.uint32)
        chosen = carray(pointer(target + 4 * left * i), (left,), np.float32)
        mixed, finite = np.uint64(seed), True
        for j in range(dim):
            mixed = (mixed ^ np.uint64(bits[j])) * _FACTOR
            finite = finite and abs(x[j]) < _INFINITY
        draw = mix64(mixed) >> _HALF
        carray(pointer(marks + 4 * words * i), (1,), np.uint32)[0] = np.uint32(draw)
        for j in range(left):
            chosen[j] = x[_drawn(draw, j, left, dim)] if finite else _NAN


def largest(rows: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Where the k largest of each row stand, in order: int64 [n, k]. What is not a number comes first."""
    size = np.abs(rows)
    size[np.isnan(size)] = np.inf
    found = np.argpartition(size, rows.shape[1] - k, axis=1)[:, rows.shape[1] - k :]
    found.sort(axis=1)
    return found
