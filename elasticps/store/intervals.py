"""Kernels on the order and the hashes of keys: for replication's checks of a batch, and for intervals of a range.

A key's hash is used with its upper 62 bits (`HASH_END` is their end), so that it fits a signed word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.store.index import ENTRY, digest, segment_of
from elasticps.store.native import H_SALT, H_SHIFT, kernel, load64

hash_key: Any = _hash_key

_AT_ONCE = 512  # rows
_S2 = np.uint64(2)


@kernel
def first_foreign(h: NDArray[np.int64], keys: NDArray[np.int64], allowed: NDArray[np.bool_]) -> int:
    """Index of the first key whose range is not allowed, or -1."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    for i in range(keys.shape[0]):
        if not allowed[np.int64(hash_key(keys[i], salt) >> shift)]:
            return i
    return -1


@kernel
def first_misplaced(h: NDArray[np.int64], keys: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Index of the first key whose range has no position (-1) or one before its predecessor's, or -1."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    last = 0
    for i in range(keys.shape[0]):
        position = positions[np.int64(hash_key(keys[i], salt) >> shift)]
        if position < last:
            return i
        last = position
    return -1


@kernel
def first_at(h: NDArray[np.int64], keys: NDArray[np.int64], positions: NDArray[np.int64], position: int) -> int:
    """Index of the first key, of keys in the order of their ranges' positions, at `position` or behind it."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    low, high = 0, keys.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if positions[np.int64(hash_key(keys[middle], salt) >> shift)] < position:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def select(h: NDArray[np.int64], keys: NDArray[np.int64], bounds: NDArray[np.int64], out: NDArray[np.int64]) -> int:
    """Writes the indices of the keys whose hash is below their range's bound; returns how many."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    n = 0
    for i in range(keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        if np.int64(hashed >> _S2) < bounds[np.int64(hashed >> shift)]:
            out[n] = i
            n += 1
    return n


@kernel
def ranges_of(h: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """Writes the range of every key."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    for i in range(keys.shape[0]):
        out[i] = np.int64(hash_key(keys[i], salt) >> shift)


@kernel
def hashes_of(h: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.int64]) -> None:
    """Writes the 62-bit hash of every key."""
    salt = np.uint64(h[H_SALT])
    for i in range(keys.shape[0]):
        out[i] = np.int64(hash_key(keys[i], salt) >> _S2)


@kernel
def list_interval(
    h: NDArray[np.int64], r: int, low: int, high: int, keys: NDArray[np.int64], rows: NDArray[np.int64]
) -> int:
    """Writes keys of range r and the words of their rows whose hashes are in low..high-1, in the segment's order.

    Each entry is written, and counted if it is one of them: a processor cannot guess which are, and a wrong guess costs
    more.
    """
    salt = np.uint64(h[H_SALT])
    base, capacity = segment_of(h, r)
    n: Any = 0
    most, width = keys.shape[0], np.uint64(max(high - low, 0))
    for i in range(capacity + min(capacity, 32)):
        if n == most:
            break
        key, row = load64(base + i * ENTRY), load64(base + i * ENTRY + 8)
        keys[n] = key
        rows[n] = row
        inside = (hash_key(key, salt) >> _S2) - np.uint64(low) < width
        n += np.int64(inside) & np.int64(row != 0)
    return n


@kernel
def digest_interval(h: NDArray[np.int64], r: int, low: int, high: int) -> np.uint64:
    """`index.digest` of the keys of range r whose hashes are in low..high-1."""
    salt = np.uint64(h[H_SALT])
    base, capacity = segment_of(h, r)
    keys, rows = np.empty(_AT_ONCE, np.int64), np.empty(_AT_ONCE, np.int64)
    total, n = np.uint64(0), 0
    for i in range(capacity + min(capacity, 32)):
        row = load64(base + i * ENTRY + 8)
        if row != 0:
            key = load64(base + i * ENTRY)
            place = np.int64(hash_key(key, salt) >> _S2)
            if low <= place < high:
                keys[n] = key
                rows[n] = row
                n += 1
                if n == _AT_ONCE:
                    total += digest(h, keys, rows)
                    n = 0
    return total + digest(h, keys[:n], rows[:n])
