"""Answers to READ_RANGE, of servers and of relays: all rows of an interval of a range, or those that a reader does not
have as they are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from elasticps.model.key_share import KeyShare
from elasticps.store import Table
from elasticps.store.cells import cells_of, digest_cells, rows_at_once
from elasticps.store.journal import keys_within, rows_of
from elasticps.wire.range_parts import (
    MAX_INTERVALS,
    MAX_READ_ROWS,
    RangePart,
    ReadCursor,
    ReadRange,
    TableCells,
    TableInterval,
    hashes_between,
)
from elasticps.wire.row_blocks import RowBlock

READ_BYTES = 256 << 10  # of rows, about, in one answer
COMPARED = 4  # lists of cells are compared with so many times the rows that they describe, at most
_NONE = np.empty(0, np.int64)


class ReadTable(NamedTuple):
    """A table of which rows are read: its id, the share of its keys, and how rows are to be: code and words, see
    `codec`."""

    number: int
    table: Table
    share: KeyShare
    code: int
    words: int


class _AnswerRoom:
    """What else an answer may have: rows, bytes, and of the rows that are compared a part of what is allowed."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.nbytes = READ_BYTES
        self.compared = 1.0

    def most_rows(self, words: int) -> int:
        """How many rows of a table there may be; at least one."""
        return max(1, min(self.rows, self.nbytes // (8 + 4 * words)))

    def take(self, block: RowBlock) -> None:
        """These rows are in the answer."""
        self.rows -= len(block.keys)
        self.nbytes -= block.nbytes

    @property
    def over(self) -> bool:
        """Whether there is none left."""
        return self.rows <= 0 or self.nbytes <= 0


def part_of(tables: Iterable[ReadTable], request: ReadRange, epoch: int, ranges: int) -> RangePart:
    """As many rows as asked for, and as fit. tables: all that the reader knows of here, ascending."""
    r, start, end, room = request.range, request.start, request.end, _AnswerRoom(request.rows)
    described, found = {one.table: one for one in request.cells}, list[TableInterval]()
    for one in tables:
        if not one.table.count_range(r):
            continue
        low, high = hashes_between(one.number, r, ranges, start, request.end)
        if low == high:
            continue
        cells, part = described.get(one.number), None
        full = bool(found) and (room.over or len(found) == MAX_INTERVALS)  # the first has a row at least
        if cells is not None and not full:
            part = _differing_rows(one, r, low, high, cells, room)
        if full or (found and cells is not None and part is None):  # it is the first one next time
            end = ReadCursor(one.number, low)
            break
        part = part or _all_rows(one, r, low, high, room)
        found.append(part)
        room.take(part.block)
        if part.high < high:
            end = ReadCursor(one.number, part.high)
            break
    return RangePart(request.request, epoch, r, start, end, found)


def _all_rows(one: ReadTable, r: int, low: int, high: int, room: _AnswerRoom) -> TableInterval:
    """All rows of an interval of hashes that begins with `low`, of at most as many as there is room for, about."""
    most = min(room.most_rows(one.words) * one.share.of, MAX_READ_ROWS)
    keys, place = one.table.list_keys(r, low, most)
    upto = min(place or high, high)
    if upto == high:
        keys = keys[one.table.hashes_of(keys) < high]
    found = rows_of(one.table.header, keys_within(keys, one.share), one.code, one.words)
    return TableInterval(low, upto, RowBlock(one.number, found.keys, found.rows, found.gone, _NONE))


def _differing_rows(
    one: ReadTable, r: int, low: int, high: int, cells: TableCells, room: _AnswerRoom
) -> TableInterval | None:  # fmt: skip
    """Rows of cells that are others than the reader's, of at most as many as there is room for, about. None if that is
    not possible, or too much is to be compared."""
    keys = keys_within(one.table.list_words(r, low, high)[0], one.share)
    room.compared -= len(keys) / (COMPARED * rows_at_once(one.words))
    if room.compared < 0:
        return None
    found, most = rows_of(one.table.header, keys, one.code, one.words), room.most_rows(one.words)
    differing = digest_cells(one.table, found.keys, found.rows, low, high, cells.shift) != cells.digests
    own = cells_of(one.table, found.keys, low, cells.shift)
    chosen = differing[own]
    upto = np.cumsum(np.bincount(own[chosen], minlength=len(differing)))  # rows of each cell and of those before
    count = max(int(np.searchsorted(upto, most, "right")), 1)
    if upto[count - 1] > 2 * most:
        return None  # in one cell
    if count < len(differing):
        differing, high = differing[:count], low + (count << cells.shift)
        chosen &= own < count
    block = RowBlock(one.number, found.keys[chosen], found.rows[chosen], found.gone, _NONE)
    return TableInterval(low, high, block, cells.shift, differing)
