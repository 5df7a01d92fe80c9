"""The index segments of a table's ranges: taken as ranges grow, and exchanged for smaller ones once few entries are
left."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.store import index
from elasticps.store.memory import LARGE, Allocator
from elasticps.store.native import D_CAPACITY, D_SEGMENT, D_STAMP, DESCRIPTOR, H_COUNTS, H_DESCRIPTORS, H_ROWS

SPARSE = 4  # a segment is exchanged once it has room for so many times its entries
_DENSE = 2  # an index that takes no more than so many times its entries is not searched for sparse segments
_WALKED = 8  # entries that are walked over in the time in which one is moved
_EMPTY_SEGMENT = np.zeros(2, np.int64)  # one empty entry, for ranges without any


class Segments:
    """The segments of one index. header: through which kernels find them; growth: numerator and denominator of the
    factor by which a segment grows; own_bytes: from which size on a segment is a mapping of its own, see `Allocator`.

    descriptors: int64 [ranges, DESCRIPTOR], see `native.D_SEGMENT`; counts: entries of each range, int64 [ranges];
    nbytes: bytes of all segments.
    """

    def __init__(
        self, header: NDArray[np.int64], ranges: int, memory: Allocator, growth: tuple[int, int] = (3, 2),
        own_bytes: int = LARGE,
    ) -> None:  # fmt: skip
        self.descriptors = np.zeros((ranges, DESCRIPTOR), np.int64)
        self.descriptors[:, D_SEGMENT] = _EMPTY_SEGMENT.ctypes.data
        self.counts = np.zeros(ranges, np.int64)
        self.nbytes = 0
        self._header, self._memory, self._growth, self._own_bytes = header, memory, growth, own_bytes
        header[H_DESCRIPTORS], header[H_COUNTS] = self.descriptors.ctypes.data, self.counts.ctypes.data

    def grow(self, r: int) -> None:
        """Makes room for more entries of range r."""
        self._resize(r, int(self.descriptors[r, D_CAPACITY]) * self._growth[0] // self._growth[1])

    def reserve(self, r: int, entries: int) -> None:
        """Makes room for so many entries of range r, at a load that leaves some growth."""
        if entries > index.row_limit(int(self.descriptors[r, D_CAPACITY])):
            self._resize(r, entries * 3 // 2)

    def release(self, r: int) -> None:
        """Gives the segment of range r back. Its entries count until they are subtracted."""
        segment, capacity = self.descriptors[r, :D_STAMP].tolist()
        if capacity:
            self.nbytes -= index.segment_entries(capacity) * index.ENTRY
            self.descriptors[r, :D_STAMP] = _EMPTY_SEGMENT.ctypes.data, 0
            self._memory.free(segment)

    def release_all(self) -> None:
        """Gives all segments back, and forgets the entries."""
        for r in np.flatnonzero(self.descriptors[:, D_CAPACITY]).tolist():
            self.release(r)
        self.counts[:] = 0
        self._header[H_ROWS] = 0

    def shrink(self, rows: int) -> int:
        """Exchanges sparse segments for smaller ones, a range at a time, in the time in which about `rows` entries are
        moved. Returns how many of these are left for others."""
        if self.nbytes <= _DENSE * index.ENTRY * int(self._header[H_ROWS]):
            return rows
        capacities = self.descriptors[:, D_CAPACITY]
        least = np.maximum(self.counts, index.FIRST_CAPACITY * (self.counts > 0))
        for r in np.flatnonzero(capacities > SPARSE * least).tolist():
            if rows <= 0:
                break
            rows -= 1 + int(self.counts[r]) + int(capacities[r]) // _WALKED
            if self.counts[r]:
                self._resize(r, int(self.counts[r]) * 3 // 2)
            else:
                self.release(r)
        return rows

    def _resize(self, r: int, capacity: int) -> None:
        capacity = max(capacity, index.FIRST_CAPACITY)
        old, old_capacity = self.descriptors[r, :D_STAMP].tolist()
        while True:
            nbytes = index.segment_entries(capacity) * index.ENTRY
            segment = self._memory.allocate(nbytes, self._own_bytes)
            if index.regrow(self._header, r, segment, capacity):
                break
            self._memory.free(segment)  # one found no place
            capacity += capacity // 8 + 1
        self.nbytes += nbytes
        if old_capacity:
            self.nbytes -= index.segment_entries(old_capacity) * index.ENTRY
            self._memory.free(old)
