"""Reuses the memory of frames' bodies once nothing refers to it any more.

Fresh memory costs a page fault per 4 KiB, more than the copy of what lands there. So a body's array is kept, and is
free when its reference count says so: logs, queues of a socket and views of a store may hold slices of it for as long
as they like, and nobody has to give anything back.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
LARGEST_BYTES = 4 << 20
STEP_BYTES = 128 << 10


class Pool:
    """Arrays to receive into; `retained_bytes` bounds what is kept for later, not what is in use, and larger ones than
    `largest_bytes` are not kept. Not thread-safe."""

    def __init__(self, retained_bytes: int, largest_bytes: int = LARGEST_BYTES) -> None:
        self._left = retained_bytes
        self._largest = largest_bytes
        self._arrays: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """uint8 [size], free for as long as a reference to it or to a slice of it exists."""
        if size > self._largest:
            return np.empty(size, np.uint8)
        arrays = self._arrays
        for i in range(len(arrays)):
            if size <= len(arrays[i]) <= 4 * max(size, STEP_BYTES) and sys.getrefcount(arrays[i]) == UNUSED:
                return arrays[i][:size]
        array = np.empty(-(-size // STEP_BYTES) * STEP_BYTES, np.uint8)
        if len(array) <= self._left:
            self._left -= len(array)
            arrays.append(array)
        return array[:size]


def _unused() -> int:
    arrays = [np.empty(1, np.uint8)]
    return sys.getrefcount(arrays[0])


UNUSED = _unused()
"""What `sys.getrefcount` says of an array that only a list refers to."""
