"""Reads one server's part of a checkpoint from its tables and ranges, a part at a time. No I/O.

Rows come from the store as they were when the cut passed, whatever changes between two parts
(`elasticps.store.retained`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from mmap import mmap
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint.range_usage import NO_KEYS, RangeUsage
from elasticps.checkpoint.rows import Bytes, RowFile
from elasticps.kernels.hashing import HASH_END
from elasticps.server.core.operations import CutMark
from elasticps.store import Store, Table
from elasticps.store.retained import Allowance, RetainedRows
from replication.chain import Ranges

FILE_BYTES = 16 << 20


class Lost(Exception):
    """The rows of the cut are not here any more; says why."""


class Finished(NamedTuple):
    """A file that is full, or a table's last one. number: counts the table's files."""

    table: int
    number: int
    file: RowFile


class _State(NamedTuple):
    """Of a table at the cut: ranges that are written whole, keys that were deleted after `since` in others, and the
    usage of a table that keeps it."""

    whole: set[int]
    keys: Mapping[int, NDArray[np.int64]]
    usages: dict[int, RangeUsage]


class Scan:
    """ranges: those that have passed the cut, and are written here; scanned, total: rows, about; nbytes: of what was
    found; copied: bytes of what waited for rows at the cut."""

    def __init__(self, store: Store, mark: CutMark, allowance: Allowance) -> None:
        self.mark = mark
        self.ranges: list[int] = []
        self.scanned = 0
        self.total = self.nbytes = self.copied = 0
        self._store = store
        self._allowance = allowance
        self._states: dict[int, _State] = {}
        self._spare: list[Bytes] = []  # memory of files that are written

    def copied_bytes(self, ranges: Ranges) -> int:
        """Bytes that `add` copies: what waits for a row in these ranges."""
        lifecycles = [table.lifecycle for table in self._store.live.values() if table.lifecycle is not None]
        return sum(lifecycle.waiting.size_of(ranges) for lifecycle in lifecycles)

    def add(self, ranges: Ranges) -> None:
        """These pass the cut now: from here on their rows are kept aside before they change."""
        self.copied += self.copied_bytes(ranges)
        self.ranges = sorted({*self.ranges, *ranges.tolist()})
        for number, table in self._store.live.items():
            if table.retained is None:
                table.keep(self._allowance)
                self._begin(number, table, np.array(self.ranges, np.int64))
            else:
                self._begin(number, table, ranges)

    def _begin(self, number: int, table: Table, ranges: Ranges) -> None:
        since, notes = self.mark.since, table.deletions
        whole = ranges if since == 0 else ranges[notes.floors(ranges) > since]
        parts = {r: notes.between(r, since, self.mark.number) for r in notes.ranges() & {*ranges.tolist()} if since}
        usages = self._usages(table, ranges, {*whole.tolist()})
        known = self._states.setdefault(number, _State(set(), {}, {}))
        self._states[number] = _State(
            known.whole | {*whole.tolist()}, {**known.keys, **parts}, {**known.usages, **usages}
        )
        assert table.retained is not None
        table.retained.begin(ranges, since)
        table.retained.begin(whole, 0)

    def _usages(self, table: Table, ranges: Ranges, whole: set[int]) -> dict[int, RangeUsage]:
        """What waits for a row in each range, copied; and the sweeps since the cut before, where that counts."""
        if table.lifecycle is None:
            return {}
        found, waiting = {}, table.lifecycle.waiting
        for r in ranges.tolist():
            keys, words = waiting.list_interval(r, 0, HASH_END)
            sketch, time = waiting.read_blocks(r, 0, HASH_END).copy(), int(self._store.times[r])
            between = self.mark.since, self.mark.number
            sweeps = () if r in whole else table.deletions.swept_between(r, *between)
            found[r] = RangeUsage(keys, words, sketch, time, sweeps)
        return found

    def run(self) -> Iterator[Finished | None]:
        """Goes on by a part at a time, when all ranges have passed the cut. A table that is dropped is left out. Raises
        Lost. Two files use one memory, so the next one is not begun before the one before the last is given back."""
        tables = [(number, table) for number, table in self._store.live.items() if table.retained is not None]
        self.total = sum(table.count_range(r) for _, table in tables for r in self.ranges)
        for number, table in tables:
            files, file = 0, None
            for r in self.ranges:
                state = self._states[number]
                full, keys, usage = r in state.whole, state.keys.get(r, NO_KEYS), state.usages.pop(r, None)
                if file is not None and file.usage_bytes > FILE_BYTES:
                    yield Finished(number, files, file)
                    files, file = files + 1, None
                part, listed, before_range = 0, None, self.scanned
                while (retained := self._retained_of(table, r)) is not None:
                    listed = listed or retained.list_range(r, 0 if full else self.mark.since)
                    if part == retained.parts:
                        break
                    end = listed.end(part, retained.rows_at_once)
                    if file is not None and file.room < retained.most(listed, part, end):
                        yield Finished(number, files, file)
                        files, file = files + 1, None
                        continue  # rows may have changed meanwhile
                    file = file or RowFile(table.spec, self._memory())
                    before = file.nbytes
                    taken = retained.take(listed, part, end, self.mark.number)
                    file.add_words(r, *taken, retained.base(r), keys, full=full, usage=usage)
                    self.nbytes += file.nbytes - before
                    self.scanned += len(listed.keys_of(part, end))
                    part, keys, usage = end, NO_KEYS, None
                    yield None
                self.scanned = before_range + table.count_range(r)  # rows that are older than an increment, too
            if file is not None and not table.dropped:
                yield Finished(number, files, file)
            table.keep(None)

    def _memory(self) -> Bytes:
        """Where a file's rows go: taken from the system at most twice, for what it gives is slow to touch first."""
        return self._spare.pop() if self._spare else np.frombuffer(mmap(-1, FILE_BYTES), np.uint8)

    def written(self, file: RowFile) -> None:
        """Takes back the memory of a file that has been written."""
        self._spare.append(file.memory)

    def _retained_of(self, table: Table, r: int) -> RetainedRows | None:
        """None if the table was dropped."""
        if table.dropped:
            return None
        if table.retained is None or not table.retained.keeps(r):
            raise Lost(f"range {r} is not held any more as cut {self.mark.number} found it")
        return table.retained

    def stop(self) -> None:
        """Ends the retention of rows."""
        for table in self._store.tables.values():
            table.keep(None)
