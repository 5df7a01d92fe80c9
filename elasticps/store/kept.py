"""Rows kept aside while a checkpoint is being written: their memory, and how a writer gets the rows of a cut."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticps.store import native as field
from elasticps.store import stamps
from elasticps.store.cuts import Cuts
from elasticps.store.memory import Memory

_BLOCK = 1 << 20  # bytes
_FIRST_RECORDS = 64
_PART_BYTES = 256 << 10  # of rows, that a writer gets at once
_PART_ROWS = 4096


class Allowance:
    """How much all tables of a server may keep aside for one checkpoint.

    At the budget `full` is called, so that pushes wait; what is under way still fits. Beyond twice as much `burst` is
    called, which has every table stop.
    """

    def __init__(self, budget_bytes: int, full: Callable[[], None], burst: Callable[[], None]) -> None:
        self.budget_bytes = budget_bytes
        self._full, self._burst = full, burst
        self.tables: list[Kept] = []

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(kept.nbytes for kept in self.tables)

    @property
    def used_bytes(self) -> int:
        """Of rows that are kept now."""
        return sum(kept.used_bytes for kept in self.tables)

    @property
    def left_bytes(self) -> int:
        """Of the budget."""
        return max(0, self.budget_bytes - self.nbytes)

    def ask(self, nbytes: int) -> None:
        """A table is about to take so many bytes more."""
        if self.nbytes + nbytes > 2 * self.budget_bytes:
            self._burst()
        elif self.used_bytes + nbytes > self.budget_bytes:
            self._full()


class Kept:
    """Those of one table; its header has where they are. A range has `parts` parts, equal intervals of its hashes,
    which a writer gets one after the other, in ascending order."""

    def __init__(
        self, header: NDArray[np.int64], descriptors: NDArray[np.int64], counts: NDArray[np.int64], cuts: Cuts,
        memory: Memory, allowance: Allowance,
    ) -> None:  # fmt: skip
        self._header, self._descriptors, self._counts, self._cuts = header, descriptors, counts, cuts
        self._memory, self._allowance = memory, allowance
        self._stride = int(header[field.H_STRIDE])
        largest = int(counts.max())
        bits = max(largest * self._stride // _PART_BYTES, largest // _PART_ROWS).bit_length()
        self.parts = 1 << bits
        self._newest = np.zeros(len(counts) << bits, np.int64)
        self._record = stamps.RECORD + self._stride
        self._blocks: dict[int, int] = {}  # address -> bytes
        header[field.H_KEPT] = self._newest.ctypes.data
        header[field.H_KEPT_SHIFT] = header[field.H_SHIFT] - bits
        header[field.H_CURSOR] = 0
        allowance.tables.append(self)

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(self._blocks.values())

    @property
    def used_bytes(self) -> int:
        """Of rows that are kept now."""
        return self.nbytes - int(self._header[field.H_KEPT_ROOM]) * self._record

    def begin(self, ranges: NDArray[np.int64], since: int) -> None:
        """Keeps rows of some ranges from now on, those that were changed after cut `since` (0: all)."""
        self._descriptors[ranges, field.D_SINCE] = np.maximum(0, since - self._cuts.base[ranges]) if since else 0

    def keeps(self, r: int) -> bool:
        """Whether it has done so since, for a range that has been here all the time."""
        return int(self._descriptors[r, field.D_SINCE]) != field.NEVER

    def make_room(self, records: int) -> None:
        """Sees that so many rows can be kept, unless that is too much for everybody: then none are any more."""
        h = self._header
        if records <= h[field.H_KEPT_ROOM]:
            return
        spare = min(max(self.nbytes, _FIRST_RECORDS * self._record), _BLOCK, self._allowance.left_bytes)
        n = max(records, spare // self._record)
        self._allowance.ask(n * self._record)
        if not h[field.H_KEPT]:
            return
        for left in range(int(h[field.H_KEPT_NEXT]), int(h[field.H_KEPT_END]), self._record):  # of the block before
            ctypes.c_int64.from_address(left).value = int(h[field.H_KEPT_FREE])
            h[field.H_KEPT_FREE] = left
        block = self._memory.allocate(n * self._record)
        self._blocks[block] = n * self._record
        h[field.H_KEPT_NEXT], h[field.H_KEPT_END] = block, block + n * self._record
        h[field.H_KEPT_ROOM] += n

    def keys_by_part(self, r: int) -> list[NDArray[np.int64]]:
        """The keys of each part of range r."""
        keys, starts = np.empty(self._counts[r], np.int64), np.zeros(self.parts + 1, np.int64)
        stamps.list_parts(self._header, r, keys, starts)
        return np.split(keys, starts[1:-1])

    def take(
        self, r: int, part: int, keys: NDArray[np.int64], since: int, cut: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], NDArray[np.int32]]:
        """Keys, rows and stamps of a part of range r as they were when cut `cut` passed, of rows that were changed
        after cut `since` (0: all). keys: of the part, as `keys_by_part` gave them at any time since; they are written
        over. From now on nothing is kept of this part, and of those before it."""
        h, place = self._header, r * self.parts + part
        words = np.empty(len(keys), np.int64)
        n = stamps.choose(h, r, self._cuts.stamp(r, since) if since else 0, self._cuts.stamp(r, cut), keys, words)
        m = stamps.count_kept(h, place)
        all_keys, all_words = np.empty(n + m, np.int64), np.empty(n + m, np.int64)
        all_keys[:n], all_words[:n] = keys[:n], words[:n]
        stamps.list_kept(h, place, all_keys[n:], all_words[n:])
        rows = stamps.rows_at(all_words, self._stride)
        stamps.pass_part(h, place)
        return all_keys, rows, stamps.stamps_in(all_words).astype(np.int32) + np.int32(self._cuts.base[r])

    def stop(self) -> None:
        """Keeps nothing any more, and gives the memory back."""
        h = self._header
        h[[field.H_KEPT, field.H_KEPT_FREE, field.H_KEPT_NEXT, field.H_KEPT_END, field.H_KEPT_ROOM]] = 0
        self._descriptors[:, field.D_SINCE] = field.NEVER
        for block in self._blocks:
            self._memory.free(block)
        self._blocks.clear()
        if self in self._allowance.tables:
            self._allowance.tables.remove(self)
