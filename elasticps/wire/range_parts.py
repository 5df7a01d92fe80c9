"""Frames in which a reader reads a range: it asks for the rows of the range's tables from some place on, and gets those
up to another.

What is in a range has an order: tables by id, and in each the hashes of its keys. A place in that order is a
`ReadCursor`. So a question and an answer are about an interval, which has the ends of at most two tables, and all of
those between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.wire.frames import DIGESTS, Buffer, FrameError, Header, Kind, padded
from elasticps.wire.row_blocks import BodyReader, Bytes, RowBlock, read_block, write_block
from elasticps.wire.windows import framed

MAX_READ_ROWS = 1 << 16  # of one answer
MAX_CELLS = 1 << 14  # of one question or answer
MAX_INTERVALS = 64  # of tables that one describes, or has rows of


class ReadCursor(NamedTuple):
    """A place among the rows of a range. hash: with its upper 62 bits, of all ranges; 0 stands for a range's first."""

    table: int
    hash: int = 0


ALL_TABLES = ReadCursor(1 << 31)  # ids are less
_NO_CELLS = bytes(16)


def hashes_between(table: int, r: int, ranges: int, start: ReadCursor, end: ReadCursor) -> tuple[int, int]:
    """The hashes of a table in range r of so many from one cursor up to, without it, another: low, high."""
    width = HASH_END // ranges
    low, high = r * width, (r + 1) * width
    if table <= start.table:
        low = max(low, start.hash) if table == start.table else high
    if table >= end.table:
        high = min(high, end.hash) if table == end.table else low
    return low, max(low, high)


def cell_count(low: int, high: int, shift: int) -> int:
    """How many cells there are, 2^shift wide, the last one perhaps narrower."""
    return ((high - low - 1) >> shift) + 1


class TableCells(NamedTuple):
    """What a reader has of a table in the interval that it asks for: digests uint64 [n] of its cells, 2^shift wide from
    the interval's first hash on, see `store.cells`."""

    table: int
    shift: int
    digests: NDArray[np.uint64]


class ReadRange(NamedTuple):
    """READ_RANGE: about `rows` rows of a range's tables, from a cursor on, and none from `end` on. cells: of tables of
    which the reader has rows there, ascending: only those that differ are wanted."""

    request: int
    epoch: int
    range: int
    rows: int
    start: ReadCursor
    end: ReadCursor = ALL_TABLES
    cells: tuple[TableCells, ...] = ()

    def frame(self) -> list[Buffer]:
        """As it is sent."""
        header = Header(
            Kind.READ_RANGE, 0, 0, self.request, self.epoch, self.start.hash, self.range, table=self.start.table,
            items=self.rows,
        )  # fmt: skip
        if not self.cells and self.end == ALL_TABLES:
            return [header.pack()]
        numbers = [*self.end, len(self.cells)]
        for one in self.cells:
            numbers += one.table, one.shift
        parts = [np.array(numbers, np.int64).tobytes(), *(one.digests.tobytes() for one in self.cells)]
        return framed(header._replace(flags=DIGESTS), [b"".join(parts)])

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> ReadRange:
        """The inverse; FrameError."""
        r, start, reader = header.worker, ReadCursor(header.table, header.clock), BodyReader(body)
        if header.items > MAX_READ_ROWS:
            raise FrameError(f"a READ_RANGE of {header.items} rows")
        described, end = bool(header.flags & DIGESTS), ALL_TABLES
        if described:
            end = ReadCursor(*reader.take(2, np.int64).tolist())
        _check(header, ranges, start, end)
        cells = _read_cells(reader, r, ranges, start, end) if described else ()
        reader.end()
        return cls(header.request, header.epoch, r, header.items, start, end, cells)


def _read_cells(
    reader: BodyReader, r: int, ranges: int, start: ReadCursor, end: ReadCursor
) -> tuple[TableCells, ...]:  # fmt: skip
    """Cells of tables between two cursors of a range."""
    described = reader.take(2 * reader.count(MAX_INTERVALS), np.int64).reshape(-1, 2).tolist()
    counts, before = list[int](), -1
    for table, shift in described:
        low, high = hashes_between(table, r, ranges, start, end)
        if not (before < table and low < high and 0 <= shift < 62):
            raise FrameError(f"a READ_RANGE has cells of 2^{shift} hashes of table {table} from {low} to {high}")
        counts.append(cell_count(low, high, shift))
        before = table
    if sum(counts) > MAX_CELLS:
        raise FrameError(f"a READ_RANGE has {sum(counts)} cells of at most {MAX_CELLS}")
    return tuple(
        TableCells(table, shift, reader.take(n, np.uint64).copy())
        for (table, shift), n in zip(described, counts, strict=True)
    )


class TableInterval(NamedTuple):
    """All rows of a table in a range whose hashes are in low..high-1. differing: bool [n], of cells 2^shift wide: only
    rows of these are here, in others the reader has what there is; None: all."""

    low: int
    high: int
    block: RowBlock
    shift: int = 0
    differing: NDArray[np.bool_] | None = None


class RangePart(NamedTuple):
    """RANGE_ROWS: all rows of a range from one cursor up to, without it, another, where the next ones are to be read.
    intervals: of tables that have rows there, ascending; others have none."""

    request: int
    epoch: int
    range: int
    start: ReadCursor
    end: ReadCursor
    intervals: Sequence[TableInterval]

    def frame(self) -> list[Buffer]:
        """As it is sent."""
        header = Header(
            Kind.RANGE_ROWS, 0, 0, self.request, self.epoch, self.end.hash, self.range, table=self.end.table,
            items=len(self.intervals),
        )  # fmt: skip
        parts: list[Buffer] = [np.array(self.start, np.int64).tobytes()]
        for one in self.intervals:
            if one.differing is None:
                parts.append(_NO_CELLS)
            else:
                parts.append(np.array([one.shift, len(one.differing)], np.int64).tobytes())
                parts.append(padded(np.packbits(one.differing).tobytes()))
            parts += write_block(one.block)
        return framed(header, [b"".join(parts)])

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> RangePart:
        """The inverse, views of the body; FrameError."""
        r, end, reader = header.worker, ReadCursor(header.table, header.clock), BodyReader(body)
        start = ReadCursor(*reader.take(2, np.int64).tolist())
        _check(header, ranges, start, end)
        if header.items > MAX_INTERVALS:
            raise FrameError(f"a RANGE_ROWS of {header.items} tables of at most {MAX_INTERVALS}")
        intervals, before = list[TableInterval](), -1
        for _ in range(header.items):
            shift, n = reader.take(2, np.int64).tolist()
            if not (0 <= shift < 62 and 0 <= n <= MAX_CELLS):
                raise FrameError(f"a RANGE_ROWS has {n} cells of 2^{shift} hashes")
            packed, block = reader.take((n + 7) // 8), read_block(reader, ranges)
            low, high = hashes_between(block.table, r, ranges, start, end)
            if not (before < block.table and low < high):
                raise FrameError(f"a RANGE_ROWS has rows of table {block.table} from {low} to {high}")
            before, differing = block.table, None
            if n:
                if n != cell_count(low, high, shift):
                    raise FrameError(f"a RANGE_ROWS has {n} cells of 2^{shift} hashes from {low} to {high}")
                differing = np.unpackbits(packed, count=n).astype(np.bool_)
            intervals.append(TableInterval(low, high, block, shift, differing))
        reader.end()
        return cls(header.request, header.epoch, r, start, end, intervals)


def _check(header: Header, ranges: int, start: ReadCursor, end: ReadCursor) -> None:
    """Raises FrameError unless there is such a range, and one cursor comes before the other."""
    cursors = all(0 <= one.table <= ALL_TABLES.table and 0 <= one.hash <= HASH_END for one in (start, end))
    if header.worker >= ranges or not cursors or not start < end <= ALL_TABLES:
        text = f"range {header.worker} of {ranges}, from {tuple(start)} to {tuple(end)}"
        raise FrameError(f"a {Kind(header.kind).name} of {text}")
