"""Answers to READ_RANGE, of servers and of relays: all rows of an interval of a range's hashes, or those that a reader
does not have as they are."""

from __future__ import annotations

import numpy as np

from elasticps.model.key_share import KeyShare
from elasticps.store import Table
from elasticps.store.cells import cells_of, digest_cells, rows_at_once
from elasticps.store.intervals import HASH_END
from elasticps.store.journal import keys_within, rows_of
from elasticps.wire.row_blocks import RowBlock
from elasticps.wire.windows import MAX_READ_ROWS, RangePart, ReadRange

READ_BYTES = 256 << 10  # of rows, about, in one answer
COMPARED = 4  # a list of cells is compared with so many times the rows that it describes, at most
_NONE = np.empty(0, np.int64)


def missing_part(request: ReadRange, epoch: int, ranges: int) -> RangePart:
    """Says that there is no such table."""
    width, r = HASH_END // ranges, request.range
    block = RowBlock(request.table, _NONE, np.empty((0, 0), np.float32), _NONE, _NONE)
    low = max(request.place, r * width)
    return RangePart(request.request, epoch, r, low, max(low, (r + 1) * width), 0, block, missing=True)


def part_of(table: Table, request: ReadRange, epoch: int, share: KeyShare, code: int, words: int) -> RangePart:
    """As many rows as asked for, and as fit, of a share. code, words: of a row as it is to be, see `codec`."""
    width, r = HASH_END // table.ranges, request.range
    low, end = max(request.place, r * width), (r + 1) * width
    most = max(1, min(request.rows, READ_BYTES // (8 + 4 * words)))
    part = _differing_part(table, request, epoch, share, code, words, most, end)
    if part is not None:
        return part
    keys, place = table.list_keys(r, low, min(most * share.of, MAX_READ_ROWS))
    found = rows_of(table.header, keys_within(keys, share), code, words)
    block = RowBlock(request.table, found.keys, found.rows, found.gone, _NONE)
    return RangePart(request.request, epoch, r, low, max(low, place or end), place, block)


def _differing_part(
    table: Table, request: ReadRange, epoch: int, share: KeyShare, code: int, words: int, most: int, end: int
) -> RangePart | None:
    """Rows of cells that are others than the reader's, about `most`; None if all rows are to be sent."""
    cells, r, low = request.cells, request.range, request.place
    if cells is None:
        return None
    keys = keys_within(table.list_words(r, low, cells.high)[0], share)
    if len(keys) > COMPARED * rows_at_once(words):
        return None
    found, high = rows_of(table.header, keys, code, words), cells.high
    differing = digest_cells(table, found.keys, found.rows, low, high, cells.shift) != cells.digests
    own = cells_of(table, found.keys, low, cells.shift)
    chosen = differing[own]
    upto = np.cumsum(np.bincount(own[chosen], minlength=len(differing)))  # rows of each cell and of those before
    count = max(int(np.searchsorted(upto, most, "right")), 1)
    if upto[count - 1] > 2 * most:
        return None  # in one cell
    if count < len(differing):
        differing, high = differing[:count], low + (count << cells.shift)
        chosen &= own < count
    block = RowBlock(request.table, found.keys[chosen], found.rows[chosen], found.gone, _NONE)
    place = high if high < end else 0
    return RangePart(request.request, epoch, r, low, high, place, block, shift=cells.shift, differing=differing)
