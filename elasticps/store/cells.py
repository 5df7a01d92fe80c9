"""Digests of small intervals of hashes, cells, by which two sides find rows in which they differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.store.codec import digests
from elasticps.store.journal import rows_of
from elasticps.store.table import Table
from elasticps.wire.range_parts import cell_count

ROWS_IN_CELL = 4  # about, or half of it: 8 bytes are sent for each cell, and all its rows if one differs
ROWS_AT_ONCE = 8192  # of which cells are sent at a time, about,
BYTES_AT_ONCE = 8 << 20  # and what they have at most, if it is not one row
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_S30, _S27 = np.uint64(30), np.uint64(27)
_M1 = np.uint64(0xBF58476D1CE4E5B9)
_MOST_SHIFT = 61


def rows_at_once(words: int) -> int:
    """How many rows of so many words are described by one list of cells."""
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE // (4 * words)))


def cells_of(table: Table, keys: NDArray[np.int64], low: int, shift: int) -> NDArray[np.int64]:
    """In which cell is each of some keys."""
    return (table.hashes_of(keys) - low) >> shift


def digest_cells(
    table: Table, keys: NDArray[np.int64], rows: NDArray[np.float32], low: int, high: int, shift: int
) -> NDArray[np.uint64]:
    """The digests of all cells from `low` to `high`, whose rows are these, [n, words] as words: uint64 [n]. The same
    keys with the same rows give the same one, in any order; others come to it once in 2^64."""
    hashes = table.hashes_of(keys)
    x = digests(np.ascontiguousarray(rows)) ^ (hashes.view(np.uint64) * _GOLDEN)
    x = (x ^ (x >> _S30)) * _M1  # so that no two rows can change places with what they have
    x ^= x >> _S27
    found = np.zeros(cell_count(low, high, shift), np.uint64)
    np.add.at(found, (hashes - low) >> shift, x)
    return found


def describe(table: Table, r: int, low: int, end: int) -> tuple[int, int, NDArray[np.uint64]] | None:
    """Describes some rows of range r from a hash on, none from `end` on, as they are in a table of words: up to which
    hash, cells of which width, as 2^shift, and their digests. None if there are no rows."""
    keys, upto = table.list_keys(r, low, rows_at_once(table.spec.dim))
    high = upto or end
    if not len(keys) or high <= low:
        return None
    found = rows_of(table.header, keys, 0, table.spec.dim)
    shift = min(max(0, ((high - low) * ROWS_IN_CELL // len(keys)).bit_length() - 1), _MOST_SHIFT)
    return high, shift, digest_cells(table, found.keys, found.rows, low, high, shift)
