"""The distinct ids of a batch, and which of them each id is: one pass, where `torch.unique` sorts."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.hashing import mix64
from elasticps.kernels import njit

_FREE = np.int32(-1)
_PADDING = np.int64(-1)


def distinct(ids: NDArray[np.int64], padding: int | None) -> tuple[NDArray[np.int64], NDArray[np.int64], bool]:
    """(keys, positions, padded) of ids int64 [n]: keys int64 in the order of their first appearance, without `padding`;
    positions int64 [n], ids[i] == keys[positions[i]], and len(keys) for padding; padded: there is some."""
    keys, positions = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    slots = np.full(1 << (2 * len(ids)).bit_length(), _FREE, np.int32)  # at most half of them are taken
    found, padded = _find(ids, 0 if padding is None else padding, padding is not None, keys, positions, slots)
    return keys[:found], positions, bool(padded)


def _fill(ids: Any, padding: int, pads: bool, keys: Any, positions: Any, slots: Any) -> Any:
    """Open addressing: a slot has the number of its key."""
    mask = np.uint64(slots.shape[0] - 1)
    found, padded = np.int64(0), False
    for i in range(ids.shape[0]):
        key = ids[i]
        if pads and key == padding:
            positions[i] = _PADDING
            padded = True
            continue
        at = mix64(np.uint64(key)) & mask
        number = np.int64(slots[at])
        while number >= 0 and keys[number] != key:
            at = (at + np.uint64(1)) & mask
            number = np.int64(slots[at])
        if number < 0:
            number = found
            slots[at] = np.int32(found)
            keys[found] = key
            found += 1
        positions[i] = number
    if padded:
        for i in range(ids.shape[0]):
            if positions[i] < 0:
                positions[i] = found
    return found, padded


_SIGNATURE = "(int64[::1], int64, boolean, int64[::1], int64[::1], int32[::1])"
_find: Any = njit(_SIGNATURE, nogil=True, cache=True)(_fill)
