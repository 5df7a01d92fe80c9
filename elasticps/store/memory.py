"""Memory outside Python's heap, by address: for row slabs and index segments.

Large blocks are mappings of their own on huge pages: fewer TLB misses, and a killed server's memory is freed twenty
times sooner. Small ones share chunks, so that a store of a thousand small tensors stays small.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_left, bisect_right, insort

_ALIGN = 64
LARGE = 1 << 21  # a huge page
_FIRST_CHUNK, _LAST_CHUNK = 1 << 16, 1 << 25


class Allocator:
    """Allocator of 64-byte aligned blocks: best fit in shared chunks, neighbours joined when freed.

    It serves growth, not the hot path: calls cost microseconds, and what they return never moves.

    with_holes: ids of tables in whose blocks rows were dropped. Tables enter themselves, and a look at what could be
    given back is at these alone.
    """

    def __init__(self) -> None:
        self.with_holes: set[int] = set()
        self._mappings: dict[int, tuple[mmap.mmap, int]] = {}  # address -> mapping, bytes
        self._used: dict[int, int] = {}  # address -> bytes, blocks in chunks
        self._free: dict[int, int] = {}
        self._starts: list[int] = []  # of free blocks, by address
        self._sizes: list[tuple[int, int]] = []  # (bytes, address) of free blocks, smallest first
        self._chunk_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes mapped."""
        return sum(size for _, size in self._mappings.values())

    def allocate(self, nbytes: int, own_bytes: int = LARGE) -> int:
        """Address of a new block. Its content is undefined. own_bytes: from which size on it is a mapping of its own,
        which goes back to the system when it is freed."""
        nbytes = -(-nbytes // _ALIGN) * _ALIGN
        if nbytes >= own_bytes:
            return self._map(nbytes)
        at = bisect_left(self._sizes, (nbytes, 0))
        if at == len(self._sizes):
            chunk = max(min(self._chunk_bytes, _LAST_CHUNK), _FIRST_CHUNK, -(-nbytes // _FIRST_CHUNK) * _FIRST_CHUNK)
            self._add_free(self._map(chunk), chunk)
            self._chunk_bytes += chunk
            at = bisect_left(self._sizes, (nbytes, 0))
        size, address = self._sizes[at]
        self._remove_free(address)
        if size > nbytes:
            self._add_free(address + nbytes, size - nbytes)
        self._used[address] = nbytes
        return address

    def free(self, address: int) -> None:
        """Takes a block back; a mapping without blocks goes back to the system."""
        size = self._used.pop(address, 0)
        if not size:
            self._unmap(address)
            return
        at = bisect_left(self._starts, address)
        # Blocks of different mappings never join, even if the system put the mappings side by side.
        if at < len(self._starts) and self._starts[at] == address + size and address + size not in self._mappings:
            size += self._remove_free(address + size)
        if at and address not in self._mappings:
            before = self._starts[at - 1]
            if before + self._free[before] == address:
                size += self._remove_free(before)
                address = before
        if address in self._mappings and self._mappings[address][1] == size:
            self._chunk_bytes -= size
            self._unmap(address)
        else:
            self._add_free(address, size)

    def trim(self) -> None:
        """Hands huge pages that lie in free blocks back to the system; the blocks can be taken as before."""
        mappings = sorted(self._mappings)
        for address, size in self._free.items():
            low, high = -(-address // LARGE) * LARGE, (address + size) // LARGE * LARGE
            if low < high:
                base = mappings[bisect_right(mappings, address) - 1]
                self._mappings[base][0].madvise(mmap.MADV_DONTNEED, low - base, high - low)

    def _map(self, nbytes: int) -> int:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= LARGE:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        self._mappings[address] = mapping, nbytes
        return address

    def _unmap(self, address: int) -> None:
        mapping, _ = self._mappings.pop(address)
        mapping.close()

    def _add_free(self, address: int, size: int) -> None:
        self._free[address] = size
        insort(self._starts, address)
        insort(self._sizes, (size, address))

    def _remove_free(self, address: int) -> int:
        size = self._free.pop(address)
        del self._starts[bisect_left(self._starts, address)]
        del self._sizes[bisect_left(self._sizes, (size, address))]
        return size
