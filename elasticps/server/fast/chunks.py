"""Memory that is received into and sent from, used again when nobody refers to it any more.

Fresh memory costs a page fault per 4 KiB, more than the copy of what lands there. Whoever keeps bytes of a chunk is
either Python, and then the array's reference count says so, or the compiled path's log, which counts in `refs`. Nobody
gives anything back.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.pool import UNUSED, Bytes

SMALLEST_BYTES = 64 << 10
USUAL_BYTES = 4 << 20  # larger ones are made for one frame
LOOKED_AT = 16  # chunks that are given up and may be free by now
MOST = 1 << 16


class Chunks:
    """Chunks by number. refs: int64 [MOST], what the compiled log keeps of each; addresses: int64 [MOST].
    kept_bytes: of chunks that nobody uses."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self.arrays: list[Bytes] = []
        self.refs = np.zeros(MOST, np.int64)
        self.addresses = np.zeros(MOST, np.int64)
        self._free: list[int] = []  # numbers without an array
        self._left: deque[int] = deque()  # given up; free as soon as nobody refers to them
        self._left_bytes = 0

    def take(self, nbytes: int) -> int:
        """The number of a chunk of at least so many bytes that nobody refers to."""
        for _ in range(min(len(self._left), LOOKED_AT)):
            number = self._left.popleft()
            size = len(self.arrays[number])
            if not self.unused(number):
                self._left.append(number)
            elif nbytes <= size <= 4 * nbytes:
                self._left_bytes -= size
                return number
            elif self._left_bytes > self._kept_bytes:
                self._left_bytes -= size
                self.arrays[number] = _NONE
                self._free.append(number)
            else:
                self._left.append(number)
        array = np.empty(nbytes, np.uint8)
        if self._free:
            number = self._free.pop()
            self.arrays[number] = array
        else:
            number = len(self.arrays)
            if number == MOST:
                raise MemoryError(f"{MOST} received chunks are in use at once")
            self.arrays.append(array)
        self.addresses[number] = array.ctypes.data
        return number

    def give_up(self, number: int) -> None:
        """Nothing is received into it any more; what refers to it may do so as long as it likes."""
        self._left.append(number)
        self._left_bytes += len(self.arrays[number])

    def unused(self, number: int) -> bool:
        """Whether nobody refers to a chunk's bytes."""
        return self.refs[number] == 0 and not self.pinned(number)

    def pinned(self, number: int) -> bool:
        """Whether Python refers to them: a view, or a socket that still sends from them."""
        return sys.getrefcount(self.arrays[number]) > UNUSED


def size_for(needed: int) -> int:
    """Bytes of a chunk for frames of about this size."""
    if needed > USUAL_BYTES:
        return needed
    return min(max(1 << (4 * needed - 1).bit_length(), SMALLEST_BYTES), max(USUAL_BYTES, needed))


_NONE: Bytes = np.empty(0, np.uint8)


def int64_at(address: int, n: int) -> NDArray[np.int64]:
    """int64 [n] at an address."""
    if not n:
        return np.empty(0, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(address))
