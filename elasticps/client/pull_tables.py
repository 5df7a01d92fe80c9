"""Rows of several tables in one pull: one frame for each server that answers for some of them.

Keys, and rows of the answer, are numbered one table after another; a server answers those that it has in that order.
Else it is a pull like others: each part of it is asked again by itself when servers change.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import Readers, Routes
from elasticps.client.pull_batch import (
    T_FIELDS,
    T_FIRST,
    T_SALT,
    T_WORDS,
    cut_tables,
    place_several,
)
from elasticps.client.pulls import (
    PULL_FRAME_KEYS,
    ArrayRead,
    Finish,
    Positions,
    Read,
    ReadPart,
    RowsToCome,
    Target,
)
from elasticps.client.push_batch import address
from elasticps.client.short_keys import MOST_BLOCKS, ShortKeys
from elasticps.errors import Error
from elasticps.kernels import njit
from elasticps.kernels.hashing import hash_key
from elasticps.wire.frames import ANY, BLOCK_BYTES, CODED, HEADER_BYTES, TABLES, Buffer, table_block
from elasticps.wire.headers import PullHeader

T = TypeVar("T")  # whatever tables are known by

SMALL_READ_BYTES = 64 << 10  # tensors above that are asked for by themselves
_NOTHING = np.empty(0, np.float32)
_ALL = np.empty(0, np.int64)


@njit(nogil=True, cache=True)
def _readers_of(keys, tables, shift, reader_of, positions):  # type: ignore[no-untyped-def]
    """Who answers for the keys at some positions, int32 [n]."""
    readers, s, t = np.empty(len(positions), np.int32), np.uint64(shift), 0
    for i in range(len(positions)):
        while positions[i] >= tables[t + 1, T_FIRST]:
            t += 1
        readers[i] = reader_of[hash_key(keys[positions[i]], np.uint64(tables[t, T_SALT])) >> s]
    return readers


class TablesRead(Read):
    """Rows of several tables, or blocks of tensors, of each as one of `reads` has it prepared; nobody is asked for
    these themselves."""

    def __init__(self, finish: Finish, reads: Sequence[ArrayRead]) -> None:
        first = reads[0]
        name, coded = ", ".join([read.name for read in reads]), any(read.coded for read in reads)
        keys = np.concatenate([read.keys for read in reads])
        super().__init__(finish, 0, np.uint64(0), 0, name, keys, _NOTHING, first.any_replica, coded=coded)
        self.reads = reads
        tables: list[int | np.int64] = []
        at = 0
        for read in reads:
            flat = read.flat
            tables += (at, read.dim, address(flat), read.salt.view(np.int64), read.table_id, len(flat))
            at += len(read.keys)
        self._tables = np.array([*tables, at, 0, 0, 0, 0, 0], np.int64).reshape(-1, T_FIELDS)
        self.short = next((read.short for read in reads if read.short is not None), None)

    def result(self, timeout: float | None = None) -> list[NDArray[np.float32]]:
        """Waits for all rows, and gives those of each read; `Timeout` after `timeout` seconds (default: the
        client's)."""
        self.wait(timeout)
        return [read.arrived() for read in self.reads]

    def frame_bytes(self, keys: int, servers: int) -> int:
        return 8 * keys + (HEADER_BYTES + BLOCK_BYTES * len(self.reads)) * (servers + 1)

    def cut(
        self, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        flags = TABLES | self.any_replica * ANY | self.coded * CODED
        count: int = cut_tables(
            keys, self._tables, routes.shift, readers.of, readers.only, order, cuts, memory, slots, small, request,
            flags, routes.epoch, self.clock, worker, 0 if self.bound is None else self.bound + 1, self.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        return keys_of.pull_tables(frame, {read.table_id: read.short for read in self.reads if read.short is not None})

    def frame(self, part: ReadPart, epoch: int, worker: int) -> list[Buffer]:
        keys, buffers, blocks = part.keys, list[Buffer](), 0
        for number, (low, high) in enumerate(itertools.pairwise(self._edges(part.positions))):
            if low < high:
                buffers += [table_block(self.reads[number].table_id, high - low), keys[low:high].data.cast("B")]
                blocks += 1
        header = PullHeader(
            part.request, epoch, self.clock, worker, 0, 0, self.bound, self.wait_ms, self.any_replica,
            coded=self.coded, blocks=blocks,
        )  # fmt: skip
        return [header.header(sum(map(len, buffers))).pack(), *buffers]

    def _edges(self, positions: Positions) -> list[int]:
        """Which of the rows at some positions is the first of each table; and how many they are."""
        firsts = self._tables[:, T_FIRST]
        edges: list[int] = (firsts if positions is None else np.searchsorted(positions, firsts)).tolist()
        return edges

    def floats(self, positions: Positions, offset: int, count: int) -> int:
        found = place_several(0, _ALL if positions is None else positions, self._tables, offset, count)
        return int(found) // 4

    def plan(self, part: ReadPart, routes: Routes, readers: Readers) -> list[tuple[int, NDArray[np.int64]]]:
        positions = np.arange(len(self.keys)) if part.positions is None else part.positions
        of = _readers_of(self.keys, self._tables, routes.shift, readers.of, positions)
        return [(server, np.flatnonzero(of == server)) for server in np.unique(of).tolist()]

    def target(self, positions: Positions, run: bool) -> Target:
        return _Whole(self) if positions is None else self.private(positions)

    def private(self, positions: NDArray[np.int64]) -> Target:
        words = np.repeat(self._tables[:-1, T_WORDS], np.diff(self._edges(positions)))
        ends = np.concatenate([[0], np.cumsum(words)])
        rows = np.empty(int(ends[-1]), np.float32)
        self._pieces.append((rows, positions))
        return _Private(rows, ends)

    def place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        place_several(address(rows), positions, self._tables, 0, len(positions))


class TablesPull(Generic[T]):
    """A pull of several tables and tensors in flight: `reads`, one for each of `tables`; those of tables that keep no
    rows are asked for by way of `groups`."""

    def __init__(
        self, tables: Sequence[T], reads: Sequence[ArrayRead | RowsToCome], groups: Sequence[Read],
        give_up: Callable[[Sequence[Read]], None], failed: Error | None = None,
    ) -> None:  # fmt: skip
        self._give_up = give_up  # what is still on its way: its memory is the caller's again
        self._failed = failed  # nobody could be asked
        self._tables = tables
        self._reads = reads
        self._groups = groups
        self._rows: dict[T, NDArray[np.float32]] | None = None  # when they have come: each layer asks for its own

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        kept = [read.done() for read in self._reads if not isinstance(read, ArrayRead)]
        return all(read.done() for read in self._groups) and all(kept)

    def result(self, timeout: float | None = None) -> dict[T, NDArray[np.float32]]:
        """Waits for the rows, float32 [n, dim] of each table, in the order of its keys, and float32 of the shape of
        each tensor; `Timeout` after `timeout` seconds (default: the client's) for each server's part."""
        if self._failed is not None:
            raise self._failed
        if self._rows is None:
            try:
                for group in self._groups:
                    group.wait(timeout)
                self._rows = {
                    table: read.arrived() if isinstance(read, ArrayRead) else read.result(timeout)
                    for table, read in zip(self._tables, self._reads, strict=True)
                }
            except Error:
                self._give_up(self._groups)
                raise
        return self._rows


class PartRead:
    """One read of several that were asked for together."""

    def __init__(self, read: ArrayRead, group: Read) -> None:
        self._read = read
        self._group = group

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return self._group.done()

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for it; `Timeout` after `timeout` seconds (default: the client's)."""
        self._group.wait(timeout)
        return self._read.arrived()


def in_groups(finish: Finish, reads: Sequence[ArrayRead | RowsToCome]) -> list[Read]:
    """What asks for those of these reads that somebody is to be asked for: tables and small tensors together."""
    asked = [read for read in reads if isinstance(read, ArrayRead)]
    large = [read for read in asked if read.of_tensor and read.flat.nbytes > SMALL_READ_BYTES]
    return [*together(finish, [read for read in asked if read not in large] if large else asked), *large]


def small_together(finish: Finish, reads: Sequence[ArrayRead]) -> tuple[list[Read], list[ArrayRead | PartRead]]:
    """What asks for these reads, small ones together; and what stands for each of them."""
    small = [read for read in reads if read.flat.nbytes <= SMALL_READ_BYTES]
    groups = together(finish, small)
    group_of = {id(read): group for group in groups for read in (group.reads if isinstance(group, TablesRead) else ())}
    asked: list[Read] = [*groups, *(read for read in reads if read.flat.nbytes > SMALL_READ_BYTES)]
    return asked, [PartRead(read, group_of[id(read)]) if id(read) in group_of else read for read in reads]


def together(finish: Finish, reads: Sequence[ArrayRead]) -> list[TablesRead | ArrayRead]:
    """What asks for these reads in as few frames as it takes: of more than MOST_BLOCKS tables, or PULL_FRAME_KEYS keys,
    several."""
    groups: list[TablesRead | ArrayRead] = []
    group: list[ArrayRead] = []
    keys = 0
    for read in [*reads, None]:
        n = 0 if read is None else len(read.keys)
        if group and (read is None or len(group) == MOST_BLOCKS or keys + n > PULL_FRAME_KEYS):
            groups.append(TablesRead(finish, group) if len(group) > 1 else group[0])
            group, keys = [], 0
        if read is not None:
            group.append(read)
            keys += n
    return groups


class _Whole:
    """All rows, of one server: where they belong."""

    def __init__(self, read: TablesRead) -> None:
        self._read = read

    def views(self, offset: int, count: int) -> list[memoryview]:
        views, first = [], 0
        for read in self._read.reads:
            low, high = max(offset - first, 0), min(offset + count - first, len(read.keys))
            if low < high:
                views += read.target(None, True).views(low, high - low)
            first += len(read.keys)
        return views


class _Private:
    """Rows one after another, and where each of them ends."""

    def __init__(self, rows: NDArray[np.float32], ends: NDArray[np.int64]) -> None:
        self._rows = rows
        self._ends = ends

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self._rows[self._ends[offset] : self._ends[offset + count]]
        return [part.data.cast("B")] if count else []
