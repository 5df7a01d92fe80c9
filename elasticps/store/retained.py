"""Rows kept aside while a checkpoint is being written: their memory, and how a writer gets the rows of a cut."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.store import native as field
from elasticps.store import stamps
from elasticps.store.cuts import PassedCuts
from elasticps.store.memory import Allocator
from elasticps.store.range_map import RangeMap

_FIELDS = [
    field.H_RETAINED, field.H_RETAINED_FREE, field.H_RETAINED_NEXT, field.H_RETAINED_END, field.H_RETAINED_ROOM,
]  # fmt: skip
_BLOCK = 1 << 20  # bytes
_FIRST_RECORDS = 64
_PART_BYTES = 128 << 10  # of rows, that a writer gets at once
_PART_ROWS = 4096
_NO_RECORDS = np.empty(0, np.int64)


class Allowance:
    """The memory that all tables of a server may use to retain rows for one checkpoint.

    At the budget `full` is called, so that pushes wait; what is under way still fits. Beyond twice as much `burst` is
    called, which has every table stop.
    """

    def __init__(self, budget_bytes: int, full: Callable[[], None], burst: Callable[[], None]) -> None:
        self.budget_bytes = budget_bytes
        self.ranges: set[int] = set()  # of which rows have been retained since `RetainedRows.begin`
        self._full, self._burst = full, burst
        self.tables: list[RetainedRows] = []

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(retained.nbytes for retained in self.tables)

    @property
    def used_bytes(self) -> int:
        """Bytes of rows that are retained now."""
        return sum(retained.used_bytes for retained in self.tables)

    @property
    def left_bytes(self) -> int:
        """Bytes of the budget that are left."""
        return max(0, self.budget_bytes - self.nbytes)

    def ask(self, nbytes: int) -> None:
        """Notes that a table is about to take so many bytes more."""
        if self.nbytes + nbytes > 2 * self.budget_bytes:
            self._burst()
        elif self.used_bytes + nbytes > self.budget_bytes:
            self._full()


class Listed(NamedTuple):
    """Keys of a range, grouped by part: those of a part lie from starts[part] up to starts[part + 1]."""

    range: int
    since: int
    keys: NDArray[np.int64]
    starts: NDArray[np.int64]

    def keys_of(self, part: int, end: int) -> NDArray[np.int64]:
        """The keys of the parts from `part` up to `end`."""
        return self.keys[self.starts[part] : self.starts[end]]

    def end(self, part: int, rows: int) -> int:
        """The part up to which, from `part` on, there are about so many rows; one part at least."""
        fitting = int(np.searchsorted(self.starts, self.starts[part] + rows, "right")) - 1
        return max(part + 1, min(fitting, len(self.starts) - 1))


class RetainedRows:
    """The retained rows of one table; its header says where they are. A range has `parts` parts, equal intervals of its
    hashes, which a writer gets one after the other, in ascending order."""

    def __init__(
        self, header: NDArray[np.int64], descriptors: RangeMap, cuts: PassedCuts, memory: Allocator,
        allowance: Allowance,
    ) -> None:  # fmt: skip
        self._header, self._descriptors, self._cuts = header, descriptors, cuts
        self._memory, self._allowance = memory, allowance
        self._stride = int(header[field.H_STRIDE])
        largest = int(descriptors.words[:, field.D_COUNT].max())
        bits = max(largest * self._stride // _PART_BYTES, largest // _PART_ROWS).bit_length()
        self.parts = 1 << bits
        self.rows_at_once = max(1, min(_PART_BYTES // self._stride, _PART_ROWS))  # about, that a writer should take
        self._of: dict[int, NDArray[np.int64]] = {}  # by range with rows: since which stamp, newest record of each part
        self._record = stamps.RECORD + self._stride
        self._blocks: dict[int, int] = {}  # address -> bytes
        header[field.H_RETAINED] = 1
        header[field.H_RETAINED_SHIFT] = header[field.H_SHIFT] - bits
        header[field.H_CURSOR] = 0
        allowance.tables.append(self)

    @property
    def nbytes(self) -> int:
        """Memory taken."""
        return sum(self._blocks.values())

    @property
    def used_bytes(self) -> int:
        """Of rows that are kept now."""
        return self.nbytes - int(self._header[field.H_RETAINED_ROOM]) * self._record

    def begin(self, ranges: NDArray[np.int64], since: int) -> None:
        """Retains rows of some ranges from now on: those changed after cut `since` (0: all)."""
        self._allowance.ranges.update(ranges.tolist())
        with_rows = np.intersect1d(ranges, self._descriptors.there)
        new = [r for r in with_rows.tolist() if r not in self._of]
        self._of.update(zip(new, np.zeros((len(new), 1 + self.parts), np.int64), strict=True))
        for r in with_rows.tolist():
            self._of[r][0] = self._cuts.stamp(r, since) if since else 0
            self._descriptors.set(r, field.D_RETAINED, self._of[r].ctypes.data)

    def end(self, ranges: NDArray[np.int64]) -> None:
        """Retains no more rows of some ranges: they pass a later cut, or are not here any more."""
        self._allowance.ranges.difference_update(ranges.tolist())
        for r in np.intersect1d(ranges, self._descriptors.there).tolist():
            self._descriptors.set(r, field.D_RETAINED, 0)

    def keeps(self, r: int) -> bool:
        """Whether it has retained rows of a range all the time since `begin`."""
        return r in self._allowance.ranges

    def make_room(self, records: int) -> None:
        """Makes room to retain so many rows. If all tables together take too much, nothing is retained any more."""
        h = self._header
        if records <= h[field.H_RETAINED_ROOM]:
            return
        spare = min(max(self.nbytes, _FIRST_RECORDS * self._record), _BLOCK, self._allowance.left_bytes)
        n = max(records, spare // self._record)
        self._allowance.ask(n * self._record)
        if not h[field.H_RETAINED]:
            return
        # What is left of the block before is given back as records.
        for left in range(int(h[field.H_RETAINED_NEXT]), int(h[field.H_RETAINED_END]), self._record):
            ctypes.c_int64.from_address(left).value = int(h[field.H_RETAINED_FREE])
            h[field.H_RETAINED_FREE] = left
        block = self._memory.allocate(n * self._record)
        self._blocks[block] = n * self._record
        h[field.H_RETAINED_NEXT], h[field.H_RETAINED_END] = block, block + n * self._record
        h[field.H_RETAINED_ROOM] += n

    def list_range(self, r: int, since: int) -> Listed:
        """Lists the keys of range r whose rows were changed after cut `since` (0: all)."""
        keys, starts = np.empty(self._descriptors.get(r, field.D_COUNT), np.int64), np.zeros(self.parts + 1, np.int64)
        stamps.list_parts(self._header, r, self._cuts.stamp(r, since) if since else 0, keys, starts)
        return Listed(r, since, keys, starts)

    def most(self, listed: Listed, part: int, end: int) -> int:
        """An upper bound of the rows in the parts from `part` up to `end`."""
        return len(listed.keys_of(part, end)) + int(stamps.count_retained(self._newest(listed.range, part, end)))

    def _newest(self, r: int, part: int, end: int) -> NDArray[np.int64]:
        """The newest record of each of some parts; of a range that had no rows there are none."""
        return self._of[r][1 + part : 1 + end] if r in self._of else _NO_RECORDS

    def take(self, listed: Listed, part: int, end: int, cut: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Keys of the parts from `part` up to `end`, and words of their rows as they were when cut `cut` passed: valid
        until anything else happens to the table. listed: the range at any time since; it is written over. From now on
        nothing is kept of these parts, and of those before them."""
        h, r, m = self._header, listed.range, self.most(listed, part, end)
        keys, words, some = np.empty(m, np.int64), np.empty(m, np.int64), listed.keys_of(part, end)
        since = self._cuts.stamp(r, listed.since) if listed.since else 0
        n = stamps.choose(h, r, since, self._cuts.stamp(r, cut), some, words)
        keys[:n] = some[:n]
        m += n - len(some)
        stamps.pass_parts(h, self._newest(r, part, end), r * self.parts + end, keys[n:], words[n:])
        return keys[:m], words[:m]

    def base(self, r: int) -> int:
        """The cut from which stamps of range r count."""
        return int(self._cuts.base[r])

    def stop(self) -> None:
        """Retains nothing any more, and gives the memory back."""
        h = self._header
        h[_FIELDS] = 0
        self._descriptors.words[:, field.D_RETAINED] = 0
        self._of.clear()
        for block in self._blocks:
            self._memory.free(block)
        self._blocks.clear()
        if self in self._allowance.tables:
            self._allowance.tables.remove(self)
