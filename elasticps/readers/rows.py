"""The rows that a reader has: by table, as words of its type, found by the same hashes as at the servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from elasticps.client.inputs import checked_keys
from elasticps.errors import InputError, OtherShare
from elasticps.kernels.windows import CLEARED, GONE, KEYS_AT, ROW_WORDS, ROWS, TABLE
from elasticps.model.filters import BFloat16, Float16, Int8
from elasticps.model.key_share import ALL_KEYS, KeyShare, share_of
from elasticps.model.spec import Assign, TableSpec, Zeros
from elasticps.readers.values import TableChange
from elasticps.store import Table, index
from elasticps.store.cells import cells_of, describe, rows_at_once
from elasticps.store.codec import Codec, decode_rows
from elasticps.store.index import ROW_PREFETCH
from elasticps.store.journal import Journal, find_table, first_outside, note
from elasticps.store.layout import overwrite_found
from elasticps.store.native import H_DIM, HEADER_SIZE, INT, KEYS, WORDS, carray, copy, kernel, linked, pointer
from elasticps.wire.frames import FrameError
from elasticps.wire.range_parts import (
    MAX_CELLS,
    MAX_INTERVALS,
    RangePart,
    ReadCursor,
    ReadRange,
    TableCells,
    TableInterval,
    hashes_between,
)
from elasticps.wire.row_blocks import Blocks, LocatedBlocks, RowBlock

_FILTERS = {"float16": Float16(), "bfloat16": BFloat16(), "int8": Int8()}
_NO_KEYS = np.empty(0, np.int64)
I_NUMBER, I_HEADER, I_WORDS, I_DIM, INDEXED = range(5)
"""What compiled code has of a table: its id, its header's address, words and floats of a row."""
_NO_TABLES = np.empty((0, INDEXED), np.int64)
LISTED_ROWS = 1 << 14  # in one part of a listing


def codec_of(spec: TableSpec, dtype: str | None) -> Codec:
    """How rows of a table travel to a reader of this type, and are kept there."""
    chosen = dtype or spec.dtype
    return Codec([] if chosen == "float32" else [_FILTERS[chosen]], spec.dim)


@linked(WORDS, WORDS, KEYS, INT, INT, WORDS)
def gather_words(
    h: NDArray[np.int64], initial: NDArray[np.int64], keys: NDArray[np.int64], code: int, target: int,
    rows: NDArray[np.int64],
) -> None:  # fmt: skip
    """The rows of keys [n] as float32 at `target`: decoded from words in a table with header `h`; of keys without a
    row as a table with header `initial`, which is empty, has them. rows: scratch."""
    n, dim, words = keys.shape[0], initial[H_DIM], h[H_DIM]
    if index.find(h, keys, rows):
        _gather_missing(initial, keys, target, rows)
    for i in range(n + ROW_PREFETCH):
        if i < n and rows[i]:
            index.prefetch_row(rows[i], (4 * words + 63) // 64)
        at = i - ROW_PREFETCH
        if at >= 0 and rows[at]:
            decode_rows(code, rows[at], 1, dim, target + 4 * dim * at, words)


@linked(WORDS, WORDS, KEYS, INT, WORDS)
def gather_floats(
    h: NDArray[np.int64], initial: NDArray[np.int64], keys: NDArray[np.int64], target: int, rows: NDArray[np.int64]
) -> None:
    """The same of rows that are kept as float32, of a table whose initial rows are rounded to two bytes."""
    index.gather_to(h, keys, target, rows)
    _gather_missing(initial, keys, target, rows)


@kernel
def _gather_missing(initial: NDArray[np.int64], keys: NDArray[np.int64], target: int, rows: NDArray[np.int64]) -> None:
    """The rows of those keys whose row was not found, as the empty table with header `initial` has them."""
    missing = 0
    for i in range(keys.shape[0]):
        missing += rows[i] == 0
    if missing:
        some, positions = np.empty(missing, np.int64), np.empty(missing, np.int64)
        n: Any = 0
        for i in range(keys.shape[0]):
            if rows[i] == 0:
                some[n] = keys[i]
                positions[n] = i
                n += 1
        dim = initial[H_DIM]
        out, scratch = np.empty(missing * dim, np.float32), np.empty(missing, np.int64)
        index.gather_to(initial, some, out.ctypes.data, scratch)
        for j in range(missing):
            copy(target + 4 * dim * positions[j], out.ctypes.data + 4 * dim * j, 4 * dim)


@linked(INT, types.Array(types.int64, 2, "C"), types.Array(types.int64, 2, "C"), INT, WORDS, WORDS)
def overwrite_blocks(
    body: int, layout: NDArray[np.int64], tables: NDArray[np.int64], journal: int, rows: NDArray[np.int64],
    left: NDArray[np.int64],
) -> int:  # fmt: skip
    """Takes the rows of those blocks of a WINDOW's body, at an address, that have nothing else, and whose keys all have
    a row here already, and notes their keys in a journal, if there is one. layout: int64 [n, BLOCK]; tables: int64
    [k, INDEXED]; rows: scratch, as many as a block has. Returns how many rows; left[0] is how many blocks are left,
    their indices follow."""
    done, likely, remaining = 0, 0, 0
    for b in range(layout.shape[0]):
        n, at = layout[b, ROWS], body + 8 * layout[b, KEYS_AT]
        found = find_table(tables, layout[b, TABLE], likely)  # blocks come in the order in which servers list tables
        likely = max(found, 0)
        if (
            found >= 0
            and n
            and layout[b, GONE] + layout[b, CLEARED] == 0
            and tables[likely, I_WORDS] == layout[b, ROW_WORDS]
        ):
            h = carray(pointer(tables[likely, I_HEADER]), (HEADER_SIZE,), np.int64)
            keys = carray(pointer(at), (n,), np.int64)
            values = carray(pointer(at + 8 * n), (n, tables[likely, I_WORDS]), np.float32)
            if overwrite_found(h, keys, values, rows):
                if journal:
                    note(journal, layout[b, TABLE], tables[likely, I_DIM], at, n)
                done += n
                continue
        remaining += 1
        left[remaining] = b
    left[0] = remaining
    return done


class ReaderTable:
    """The rows of one table. Not thread-safe."""

    def __init__(
        self, spec: TableSpec, number: int, ranges: int, dtype: str | None, share: KeyShare = ALL_KEYS
    ) -> None:
        self.spec = spec  # as the servers have it
        self.number = number  # by which they know it
        self.codec = codec_of(spec, dtype)
        self.share = share.for_shape(spec.shape)  # of its keys
        plain = self.codec.code == 0
        stored = replace(_bare(spec), dtype="float32", shape=None)
        if not plain:
            stored = replace(stored, dim=self.codec.words, init=Zeros())
        self._rows = Table(stored, number, ranges)
        self._scratch = np.empty(64, np.int64)  # addresses of a window's rows
        # What keys without a row read as; None where `_rows` says so itself.
        self._initial = (
            None if plain and spec.dtype == "float32" else Table(replace(_bare(spec), shape=None), number, 2)
        )

    @property
    def stored(self) -> Table:
        """The rows as they are kept, as words."""
        return self._rows

    @property
    def rows(self) -> int:
        """Rows that are here."""
        return self._rows.rows

    @property
    def nbytes(self) -> int:
        """Bytes that they take, index included."""
        return self._rows.nbytes

    def owned_keys(self, keys: object) -> NDArray[np.int64]:
        """Keys to read, as int64 [n]. InputError for what are none; OtherShare for a key of another share."""
        checked, share = checked_keys(self.spec.name, keys), self.share
        if not share.whole and (at := first_outside(checked, share.ordinal, share.of)) >= 0:
            other = KeyShare(int(share_of(checked[at : at + 1], share.of)[0]), share.of)
            raise OtherShare(
                f"key {checked[at]} of table {self.spec.name!r} is in share {other}, and this reader has {share}: ask "
                "a reader of that share; elasticps.share_of says which one has a key",
                other.number,
            )
        return checked

    def gather(self, keys: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """The rows of keys [n] into out [n, dim]."""
        if self._initial is None:
            self._rows.gather(keys, out)
            return
        rows = np.empty(len(keys), np.int64)
        if self.codec.code == 0:
            gather_floats(self._rows.header, self._initial.header, keys, out.ctypes.data, rows)
        else:
            gather_words(self._rows.header, self._initial.header, keys, self.codec.code, out.ctypes.data, rows)

    def pull(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of keys [n], float32 [n, dim]."""
        rows = np.empty((len(keys), self.spec.dim), np.float32)
        self.gather(keys, rows)
        return rows

    def pull_whole(self) -> NDArray[np.float32]:
        """All of a tensor, in its shape. InputError for a table."""
        spec = self.spec
        if spec.shape is None:
            raise InputError(f"{spec.name!r} is a table: pull keys of it, int64 [n]")
        return self.pull(np.arange(spec.blocks, dtype=np.int64)).reshape(-1)[: spec.size].reshape(spec.shape)

    def apply(self, block: RowBlock, counts: NDArray[np.bool_] | None) -> TableChange:
        """Takes rows as they are now. counts: of which ranges, bool [P], None for all."""
        keys, rows, gone, cleared = block.keys, block.rows, block.gone, block.cleared
        self._check(block)
        if counts is not None:
            chosen = counts[self._rows.ranges_of(keys)]
            keys, rows = keys[chosen], rows[chosen]
            gone, cleared = gone[counts[self._rows.ranges_of(gone)]], cleared[counts[cleared]]
        lost = [self._rows.range_keys(r) for r in cleared.tolist()]
        for r in cleared.tolist():
            self._rows.drop_range(r)
        return self._change(keys, rows, gone, lost)

    def replace(self, r: int, part: TableInterval) -> TableChange:
        """Takes all rows of an interval of range r, or of those cells in it that differ: others there are gone."""
        block, differing = part.block, part.differing
        self._check(block)
        gone, here = _NO_KEYS, self._rows.count_range(r)
        if not here and len(block.keys):
            self._rows.reserve(r, len(block.keys))  # it would grow in several steps
        if here and (differing is None or differing.any()):
            gone = self._rows.list_words(r, part.low, part.high)[0]
            if differing is not None:
                gone = gone[differing[cells_of(self._rows, gone, part.low, part.shift)]]
            if len(block.keys):
                gone = np.setdiff1d(gone, block.keys, assume_unique=True)
        return self._change(block.keys, block.rows, gone, [])

    def _check(self, block: RowBlock) -> None:
        if len(block.keys) and block.rows.shape[1] != self.codec.words:
            raise FrameError(
                f"rows of {block.rows.shape[1]} words of table {self.spec.name!r}, which have {self.codec.words}"
            )

    def _change(
        self, keys: NDArray[np.int64], rows: NDArray[np.float32], gone: NDArray[np.int64], lost: list[NDArray[np.int64]]
    ) -> TableChange:
        if len(gone):
            gone = gone[~self._rows.missing(gone)]
            self._rows.delete(gone)
        if len(keys):
            self._put(keys, rows)
        if lost:
            gone = np.setdiff1d(np.concatenate([gone, *lost]), keys)
        return TableChange(self.spec.name, self.spec, False, False, gone, keys, rows)

    def _put(self, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        if len(keys) > len(self._scratch):
            self._scratch = np.empty(2 * len(keys), np.int64)
        if not overwrite_found(self._rows.header, keys, rows, self._scratch):
            self._rows.put(keys, rows)

    def words_of(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """The rows of keys that have one, as they are kept: [n, words], a copy."""
        words = np.empty((len(keys), self.codec.words), np.float32)
        self._rows.gather(keys, words)
        return words

    def decoded(self, change: TableChange) -> TableChange:
        """A change with its rows as float32, and its keys, copied: for those that get it later."""
        return change._replace(rows=self.decode(change.rows), keys=change.keys.copy())

    def decode(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Words as float32 [n, dim], a copy."""
        return self.codec.decode(rows) if self.codec.code else rows.copy()

    def list_range(self, r: int) -> NDArray[np.int64]:
        """Keys of a range."""
        return self._rows.range_keys(r)

    def erase(self, r: int) -> None:
        """Forgets a range."""
        self._rows.drop_range(r)

    def close(self) -> None:
        """Gives the memory back."""
        self._rows.close()


class GatheredTable(NamedTuple):
    """What a pull wants of one table."""

    table: ReaderTable
    keys: NDArray[np.int64]


def _bare(spec: TableSpec) -> TableSpec:
    """The table without its optimizer, filters and policies."""
    return TableSpec(spec.name, spec.dim, Assign(), spec.init, spec.dtype)


def _listed(table: ReaderTable, new: bool, keys: NDArray[np.int64], words: NDArray[np.float32]) -> TableChange:
    return TableChange(table.spec.name, table.spec, new, False, keys[:0], keys, table.decode(words))


class ReaderTables:
    """All tables of a reader, by id."""

    def __init__(self, ranges: int, dtype: str | None, share: KeyShare = ALL_KEYS) -> None:
        self.ranges = ranges
        self._dtype = dtype
        self._share = share
        self._index = _NO_TABLES  # of all tables, for compiled code: I_…
        self._scratch = np.empty(64, np.int64)  # addresses of a block's rows
        self.by_id: dict[int, ReaderTable] = {}
        self.by_name: dict[str, ReaderTable] = {}

    def add(self, number: int, text: str) -> TableChange | None:
        """A server has this table; None if it is known."""
        if number in self.by_id:
            return None
        spec = TableSpec.from_json(text)
        table = self.by_id[number] = ReaderTable(spec, number, self.ranges, self._dtype, self._share)
        before = self.by_name.get(spec.name)
        if before is None or before.number < number:
            self.by_name[spec.name] = table
        self._list_headers()
        return TableChange(spec.name, spec, True, False, _NO_KEYS, _NO_KEYS, np.empty((0, spec.dim), np.float32))

    def drop(self, number: int) -> TableChange | None:
        """A table is gone; None if it is not known."""
        table = self.by_id.pop(number, None)
        if table is None:
            return None
        self._list_headers()
        spec = table.spec
        if self.by_name.get(spec.name) is table:
            del self.by_name[spec.name]
        table.close()
        return TableChange(spec.name, spec, False, True, _NO_KEYS, _NO_KEYS, np.empty((0, spec.dim), np.float32))

    def _list_headers(self) -> None:
        found = [
            (number, table.stored.header.ctypes.data, table.codec.words, table.spec.dim)
            for number, table in self.by_id.items()
        ]
        self._index = np.array(found, np.int64).reshape(-1, INDEXED)

    def overwrite(self, blocks: Blocks, journal: Journal | None) -> tuple[int, Sequence[RowBlock]]:
        """Takes rows of blocks whose keys all have a row here already, which is most of them in most windows, and notes
        the keys in a journal. Returns how many rows, and the blocks that are left."""
        if not isinstance(blocks, LocatedBlocks):
            return 0, blocks
        if not len(blocks):
            return 0, ()
        layout = blocks.layout
        if (most := int(layout[:, ROWS].max())) > len(self._scratch):
            self._scratch = np.empty(2 * most, np.int64)
        left = np.empty(1 + len(layout), np.int64)
        address = 0 if journal is None else journal.address
        done = int(overwrite_blocks(blocks.address, layout, self._index, address, self._scratch, left))
        return done, [blocks.block(i) for i in left[1 : 1 + left[0]].tolist()]

    def listing(self) -> list[Callable[[], TableChange]]:
        """All rows that are here, in parts. Each is copied in the reader's type now, and becomes float32 when its turn
        comes."""
        found = list[Callable[[], TableChange]]()
        for table in self.by_name.values():
            new = True
            for r in range(self.ranges):
                keys = table.list_range(r)
                for start in range(0, len(keys), LISTED_ROWS):
                    some = keys[start : start + LISTED_ROWS]
                    found.append(partial(_listed, table, new, some, table.words_of(some)))
                    new = False
            if new:
                found.append(partial(_listed, table, True, _NO_KEYS, np.empty((0, table.codec.words), np.float32)))
        return found

    def describe(self, request: ReadRange) -> ReadRange:
        """A request for rows of a range, with digests of those that are here: up to where as many are described as may
        be at a time."""
        r, start, end = request.range, request.start, request.end
        cells, room, digests = list[TableCells](), 1.0, 0
        for number in sorted(self.by_id):
            stored = self.by_id[number].stored
            rows = stored.count_range(r)
            low, high = hashes_between(number, r, self.ranges, start, end) if rows else (0, 0)
            if low == high:
                continue
            room -= rows / rows_at_once(stored.spec.dim)
            if cells and (room < 0 or len(cells) == MAX_INTERVALS or digests + rows > MAX_CELLS):
                end = ReadCursor(number, low)
                break
            found = describe(stored, r, low, high)
            if found is None:
                continue
            upto, shift, described = found
            if len(described) > MAX_CELLS:
                continue
            cells.append(TableCells(number, shift, described))
            digests += len(described)
            if upto < high:
                end = ReadCursor(number, upto)
                break
        return request._replace(end=end, cells=tuple(cells))

    def replace(self, part: RangePart, listed: Iterable[int]) -> Iterator[tuple[ReaderTable, TableChange]]:
        """Takes a part of a range, which has all rows of these tables there; which tables have changed, and how."""
        r, found = part.range, set[int]()
        for one in part.intervals:
            found.add(one.block.table)
            if (table := self.by_id.get(one.block.table)) is not None:
                yield table, table.replace(r, one)
        for number in listed:
            table = self.by_id.get(number)
            if table is None or number in found or not table.stored.count_range(r):
                continue
            low, high = hashes_between(number, r, self.ranges, part.start, part.end)
            if low < high:
                none = RowBlock(number, _NO_KEYS, np.empty((0, table.codec.words), np.float32), _NO_KEYS, _NO_KEYS)
                yield table, table.replace(r, TableInterval(low, high, none))

    def close(self) -> None:
        """Forgets all."""
        for number in list(self.by_id):
            self.drop(number)
