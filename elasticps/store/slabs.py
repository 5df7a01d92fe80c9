"""The slabs in which a table's rows lie: taken as it grows, and given back once dropped rows leave enough room."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.store import index
from elasticps.store import native as field
from elasticps.store.memory import Allocator
from elasticps.store.segments import Segments

_LAST_SLAB = 1 << 26  # bytes
_RECLAIM_BYTES, _RECLAIM_SHARE = 4 << 20, 8  # with so much of it dropped, and such a part, a table gives memory back
_FIELDS = [field.H_FREE, field.H_NEXT, field.H_END, field.H_LOW, field.H_HIGH, field.H_ASIDE, field.H_UNSWEPT]


class Slabs:
    """The slabs of one table. header: the table's, with their state for kernels; segments: of its index."""

    def __init__(self, header: NDArray[np.int64], segments: Segments, memory: Allocator) -> None:
        self.nbytes = 0
        self._header, self._segments, self._memory = header, segments, memory
        self._slabs: dict[int, int] = {}  # address -> bytes
        self._to_empty: list[int] = []  # ranges that may have rows in the slab that is being emptied, the next one last

    @property
    def reusable_bytes(self) -> int:
        """Bytes of dropped rows, which the next rows take first."""
        h = self._header
        return self.nbytes - int(h[field.H_END] - h[field.H_NEXT] + h[field.H_ROWS] * h[field.H_STRIDE])

    def add(self) -> None:
        """Takes a slab. The next one doubles the table, up to 64 MB: a tensor of one row costs one row."""
        stride = int(self._header[field.H_STRIDE])
        nbytes = max(min(self.nbytes, _LAST_SLAB) // stride, 1) * stride
        slab = self._memory.allocate(nbytes)
        self._slabs[slab] = nbytes
        self.nbytes += nbytes
        self._header[field.H_NEXT] = slab
        self._header[field.H_END] = slab + nbytes

    def release(self) -> None:
        """Gives all slabs back, as there is no row any more."""
        for slab in self._slabs:
            self._memory.free(slab)
        self._slabs.clear()
        self.nbytes = 0
        self._header[_FIELDS] = 0

    def reclaim(self, rows: int) -> int:
        """Gives memory of dropped rows back to the system, by moving others together, a slab at a time and about `rows`
        rows in a call. Returns how many are left for other tables."""
        h, left = self._header, self._to_empty
        if not h[field.H_LOW] and not self._choose():
            return rows
        rows -= int(index.sweep(h, rows))
        while rows > 0 and left:
            if not index.move_out(h, left[-1]):
                index.keep_slab(h)
                return rows
            rows -= 1 + self._segments.count(left.pop())
        if not h[field.H_UNSWEPT] and not left:
            slab = int(h[field.H_LOW])
            self.nbytes -= self._slabs.pop(slab)
            self._memory.free(slab)
            h[field.H_LOW] = h[field.H_HIGH] = h[field.H_ASIDE] = 0
        return rows

    def _choose(self) -> bool:
        """Begins to empty the largest slab whose rows fit elsewhere, with room to spare, if there is much to be won."""
        h, free = self._header, self.reusable_bytes
        if free < max(_RECLAIM_BYTES, self.nbytes // _RECLAIM_SHARE):
            return False
        newest = int(h[field.H_END]) if h[field.H_NEXT] < h[field.H_END] else 0
        fitting = [(n, at) for at, n in self._slabs.items() if n + n // 4 <= free and at + n != newest]
        if not fitting:
            return False
        nbytes, slab = max(fitting)
        h[field.H_LOW], h[field.H_HIGH] = slab, slab + nbytes
        h[field.H_UNSWEPT], h[field.H_FREE] = h[field.H_FREE], 0
        self._to_empty[:] = self._segments.descriptors.there[::-1].tolist()  # others get rows elsewhere
        return True
