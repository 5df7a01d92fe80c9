"""Sums the gradients of several ranks: rows by key, always added up in the order of the ranks.

Ranks share the work: each key belongs to one part of several, and a call sums the keys of its part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels import njit
from elasticps.kernels.hashing import mix64

Floats = NDArray[np.float32]
Keys = NDArray[np.int64]
_FREE = np.int32(-1)
PIECE = 1 << 15  # floats that are added at once: what was written is still in the cache when the next rank's come


def merged(ranks: Sequence[tuple[Keys, Floats]], part: int, parts: int, keys: Keys, rows: Floats) -> int:
    """Sums gradients by key; returns the number of keys.

    ranks: the keys of each, int64 [n], which may repeat, and rows, float32 [n, dim]. The sums are written to `keys`,
    int64 [m], and `rows`, float32 [m, dim], where m is at least the number of all rows given.
    """
    total = sum(len(mine) for mine, _ in ranks)
    slots = np.full(1 << (2 * total).bit_length(), _FREE, np.int32)  # at most half of them are taken
    found = 0
    for mine, gradients in ranks:
        found = _add(mine, gradients, part, parts, keys, rows, slots, found)
    return int(found)


def _sum(ids: Any, gradients: Any, part: int, parts: int, keys: Any, rows: Any, slots: Any, found: int) -> Any:
    """Open addressing: a slot has the number of its key."""
    mask, dim = np.uint64(slots.shape[0] - 1), rows.shape[1]
    count = np.int64(found)
    for i in range(ids.shape[0]):
        key = ids[i]
        mixed = mix64(np.uint64(key))
        if np.int64(((mixed >> np.uint64(32)) * np.uint64(parts)) >> np.uint64(32)) != part:
            continue
        at = mixed & mask
        number = np.int64(slots[at])
        while number >= 0 and keys[number] != key:
            at = (at + np.uint64(1)) & mask
            number = np.int64(slots[at])
        if number < 0:
            number = count
            slots[at] = np.int32(number)
            keys[number] = key
            for d in range(dim):
                rows[number, d] = np.float32(0.0)
            count += 1
        for d in range(dim):
            rows[number, d] += gradients[i, d]
    return count


_SIGNATURE = "(int64[::1], float32[:, ::1], int64, int64, int64[::1], float32[:, ::1], int32[::1], int64)"
_add: Any = njit(_SIGNATURE, nogil=True, cache=True)(_sum)


def added(ranks: Sequence[Floats], out: Floats, mean: bool) -> None:
    """Writes ((rank 0 + rank 1) + rank 2) + … to `out`, all float32 [n]; with `mean`, divided by the number of
    ranks."""
    for start in range(0, len(out), PIECE):
        some = slice(start, start + PIECE)
        target = out[some]
        target[:] = ranks[0][some]
        for each in ranks[1:]:
            target += each[some]
        if mean:
            target /= np.float32(len(ranks))


def share(total: int, part: int, parts: int) -> tuple[int, int]:
    """The start and end of part number `part` when `total` is cut into `parts` that are as equal as can be."""
    return total * part // parts, total * (part + 1) // parts
