"""The index segments of a table's ranges: taken as ranges grow, and exchanged for smaller ones once few entries are
left."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticps.store import index
from elasticps.store.memory import LARGE, Allocator
from elasticps.store.native import D_CAPACITY, D_COUNT, D_SEGMENT, H_DESCRIPTORS, H_ROWS
from elasticps.store.range_map import RangeMap

SPARSE = 4  # a segment is exchanged once it has room for so many times its entries
_DENSE = 2  # an index that takes no more than so many times its entries is not searched for sparse segments
_WALKED = 8  # entries that are walked over in the time in which one is moved
_EMPTY_SEGMENT = np.zeros(2, np.int64)  # one empty entry, for ranges without any


class Segments:
    """The segments of one index. header: through which kernels find them; growth: numerator and denominator of the
    factor by which a segment grows; own_bytes: from which size on a segment is a mapping of its own, see `Allocator`.

    descriptors: of the ranges that have a segment, see `native.D_SEGMENT`; nbytes: bytes of all segments.
    """

    def __init__(
        self, header: NDArray[np.int64], ranges: int, memory: Allocator, growth: tuple[int, int] = (3, 2),
        own_bytes: int = LARGE,
    ) -> None:  # fmt: skip
        blank = _EMPTY_SEGMENT.ctypes.data, 0, 0, 0
        self.descriptors = RangeMap(ranges, blank, header, H_DESCRIPTORS)
        self.nbytes = 0
        self.begun: Callable[[int], object] = bool  # called when a range gets a segment
        self._header, self._memory, self._growth, self._own_bytes = header, memory, growth, own_bytes

    @property
    def counts(self) -> NDArray[np.int64]:
        """Entries of each range, int64 [ranges], as they are now."""
        return self.descriptors.everywhere(D_COUNT)

    def count(self, r: int | NDArray[np.int64]) -> int:
        """Entries of range r, or of several ranges together."""
        if isinstance(r, np.ndarray):
            return int(self.descriptors.read(r, D_COUNT).sum())
        return self.descriptors.get(r, D_COUNT)

    def grow(self, r: int) -> None:
        """Makes room for more entries of range r."""
        self._resize(r, self.descriptors.get(r, D_CAPACITY) * self._growth[0] // self._growth[1])

    def reserve(self, r: int, entries: int) -> None:
        """Makes room for so many entries of range r, at a load that leaves some growth."""
        if entries > index.row_limit(self.descriptors.get(r, D_CAPACITY)):
            self._resize(r, entries * 3 // 2)

    def release(self, r: int) -> None:
        """Gives the segment of range r back, and its descriptor. Its entries stay in the number of all until they are
        subtracted."""
        segment, capacity = (self.descriptors.get(r, word) for word in (D_SEGMENT, D_CAPACITY))
        if capacity:
            self.nbytes -= index.segment_entries(capacity) * index.ENTRY
            self._memory.free(segment)
            self.descriptors.drop(r)

    def release_all(self) -> None:
        """Gives all segments back, and forgets the entries."""
        for segment in self.descriptors.read(self.descriptors.there, D_SEGMENT).tolist():
            self._memory.free(segment)
        self.descriptors.clear()
        self.nbytes = 0
        self._header[H_ROWS] = 0

    def shrink(self, rows: int) -> int:
        """Exchanges sparse segments for smaller ones, a range at a time, in the time in which about `rows` entries are
        moved. Returns how many of these are left for others."""
        if self.nbytes <= _DENSE * index.ENTRY * int(self._header[H_ROWS]):
            return rows
        there = self.descriptors.there
        counts, capacities = (self.descriptors.read(there, word) for word in (D_COUNT, D_CAPACITY))
        sparse = capacities > SPARSE * np.maximum(counts, index.FIRST_CAPACITY * (counts > 0))
        for r, count, capacity in zip(*(of[sparse].tolist() for of in (there, counts, capacities)), strict=True):
            if rows <= 0:
                break
            rows -= 1 + count + capacity // _WALKED
            if count:
                self._resize(r, count * 3 // 2)
            else:
                self.release(r)
        return rows

    def _resize(self, r: int, capacity: int) -> None:
        capacity = max(capacity, index.FIRST_CAPACITY)
        if not self.descriptors.get(r, D_CAPACITY):
            self.begun(r)
        self.descriptors.add(r)
        old, old_capacity = (self.descriptors.get(r, word) for word in (D_SEGMENT, D_CAPACITY))
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
