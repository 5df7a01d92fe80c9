"""Memory that the ranks of a group share. It has no name, so that nothing is left when processes die.

Rank 0 makes it and hands its descriptor to the others through their sockets.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.torch.group.layout import Place

SPARE = 4096  # bytes, at least


class SharedMemory:
    """A piece of shared memory. descriptor: of its file, which the caller closes; the memory stays until then and
    after."""

    def __init__(self, descriptor: int) -> None:
        self.nbytes = os.fstat(descriptor).st_size
        self._bytes = np.frombuffer(mmap.mmap(descriptor, self.nbytes), np.uint8)

    def floats(self, start: int, count: int) -> NDArray[np.float32]:
        """float32 [count] at byte `start`."""
        return self._bytes[start : start + 4 * count].view(np.float32)

    def words(self, start: int, count: int) -> NDArray[np.int64]:
        """int64 [count] at byte `start`."""
        return self._bytes[start : start + 8 * count].view(np.int64)

    def rows(self, place: Place, count: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Keys int64 [n] and rows float32 [n, dim]: `count` of them, or all there is room for."""
        n = place.n if count is None else count
        return self.words(place.keys, n), self.floats(place.rows, n * place.dim).reshape(n, place.dim)


class Held:
    """An array that keeps an object alive, which owns its memory, as long as the array or a view of it lives."""

    def __init__(self, array: NDArray[np.float32], keeps: object) -> None:
        self.__array_interface__: dict[str, Any] = array.__array_interface__
        self._alive = array, keeps

    def view(self) -> NDArray[np.float32]:
        """The array."""
        return np.asarray(self)


def new(nbytes: int) -> int:
    """The descriptor of memory with room for so many bytes and half of that more: the next batch may be larger."""
    descriptor = os.memfd_create("elasticps-group", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, max(SPARE, nbytes + nbytes // 2))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
