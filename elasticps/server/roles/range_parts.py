"""Answers to READ_RANGE, of servers and of relays: all rows of an interval of a range's hashes."""

from __future__ import annotations

import numpy as np

from elasticps.model.key_share import KeyShare
from elasticps.store import Table
from elasticps.store.intervals import HASH_END
from elasticps.store.journal import Journal, keys_within
from elasticps.wire.windows import MAX_READ_ROWS, RangePart, ReadRange, RowBlock

READ_BYTES = 256 << 10  # of rows, about, in one answer
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
    keys, place = table.list_keys(r, low, min(most * share.of, MAX_READ_ROWS))
    keys = keys_within(keys, share)
    found = Journal.look_up(table.header, keys, code, words, np.empty_like(keys), np.empty_like(keys))
    block = RowBlock(request.table, found.keys, found.rows, found.gone, _NONE)
    return RangePart(request.request, epoch, r, low, max(low, place or end), place, block)
