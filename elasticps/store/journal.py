"""The journal of changed keys: which rows changed since some position, for readers of the rows.

A ring of words, into which whoever changes rows writes their keys, in the order of the changes: a table's id, how many
keys and how wide their rows are, the keys. It says which rows to look at, not what was done to them: a reader of the
ring looks each key up, and finds its newest row, or none. Positions count words ever written, so what is before
`oldest` has been written over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from elasticps.kernels import compiled_once
from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.kernels.hashing import share_index as _share_index
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.store import index
from elasticps.store.codec import Codec, encode_rows
from elasticps.store.native import (
    D_CAPACITY,
    D_SEGMENT,
    DESCRIPTOR,
    H_DESCRIPTORS,
    H_DIM,
    H_DTYPE,
    H_SALT,
    H_SHIFT,
    HEADER_SIZE,
    INT,
    KEYS,
    WORDS,
    carray,
    copy,
    kernel,
    linked,
    load64,
    pointer,
    prefetch,
    store64,
)
from elasticps.store.values import unpack
from elasticps.wire.pool import Pool

hash_key: Any = _hash_key
share_index: Any = _share_index

J_WORDS, J_SIZE, J_END, J_OLDEST, J_FIELDS = range(5)
"""Of a journal's header: the ring's address and size, the positions behind the newest entry and of the oldest."""
POOL_BYTES = 8 << 20
ROOM = 128 << 10  # bytes; memory for blocks is taken in multiples of it
HEAD = 2  # words before an entry's keys
ENTRY_BYTES = 1 << 20  # of the rows of an entry's keys at most, or it has one key
WIDTH_BIT = 40  # of an entry's second word: above it floats of a row, below it the number of keys
_COUNT = (1 << WIDTH_BIT) - 1
FRAME_BYTES = 4 << 20  # of the rows of one frame of a window, about
CLEARED = 1 << 40
"""Added to a table's id where an entry has ranges that were cleared instead of keys."""

T_NUMBER, T_HEADER, T_CODE, T_WORDS, T_SHARE, T_SHARES, T_NAMED, T_KEYS, T_RANGES, T_FIRST, T_LAST, TABLE = range(12)
"""Of a table that a reader follows: its id, its header's address, how rows are encoded and their words, see `codec`,
the share of its keys. The rest is of one window: HAS_… if it has a block there, keys (as noted at first, then each
once), ranges that were cleared, and where its first and last entry with keys are."""
HAS_KEYS, HAS_CLEARED = 1, 2
BLOCK_HEAD = 3  # words of a block before its keys, see `wire.windows`
_TABLES = types.Array(types.int64, 2, "C")
_SCRATCH = types.Array(types.int64, 2, "C")
_BODY = types.Array(types.uint8, 1, "C")


@kernel
def _copy_in(journal: int, position: int, source: int, n: int) -> None:
    """Copies n words to a position of the ring, around its end if need be."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    at = position % size
    first = min(n, size - at)
    copy(ring + 8 * at, source, 8 * first)
    copy(ring, source + 8 * first, 8 * (n - first))


@kernel
def note(journal: int, table: int, width: int, keys_at: int, n: int) -> None:
    """Adds keys [n] of a table with rows of so many floats, at an address: in several entries, so that whoever reads
    the ring can stop after any megabyte of rows."""
    most, done = max(1, ENTRY_BYTES // (4 * width)), 0
    while done < n:
        count = min(n - done, most)
        _note_entry(journal, table, width, keys_at + 8 * done, count)
        done += count


@kernel
def _note_entry(journal: int, table: int, width: int, keys_at: int, n: int) -> None:
    """Adds an entry. If it is larger than the ring, nothing older or of it can be read."""
    size, end = load64(journal + 8 * J_SIZE), load64(journal + 8 * J_END)
    store64(journal + 8 * J_END, end + HEAD + n)
    if HEAD + n > size:
        store64(journal + 8 * J_OLDEST, end + HEAD + n)
        return
    ring = load64(journal + 8 * J_WORDS)
    store64(ring + 8 * (end % size), table)
    store64(ring + 8 * ((end + 1) % size), n | width << WIDTH_BIT)
    _copy_in(journal, end + HEAD, keys_at, n)


@linked(INT, INT, INT, KEYS)
def note_keys(journal: int, table: int, width: int, keys: NDArray[np.int64]) -> None:
    """`note`, of an array."""
    note(journal, table, width, keys.ctypes.data, keys.shape[0])


@linked(INT, INT, INT, INT, INT)
def find_limit(journal: int, start: int, end: int, most: int, most_bytes: int) -> int:
    """The position behind the entries from `start` on that have about `most` keys, or these about so many bytes of rows
    as float32; at most `end`."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    keys, size_of_rows, at = 0, 0, start
    while at < end and keys < most and size_of_rows < most_bytes:
        second = load64(ring + 8 * ((at + 1) % size))
        count = second & _COUNT
        keys += count
        size_of_rows += 4 * count * (second >> WIDTH_BIT)
        at += HEAD + count
    return at


@kernel
def _collect(
    journal: int, start: int, table: NDArray[np.int64], links: NDArray[np.int64], included: NDArray[np.int64],
    seen: NDArray[np.int32], out: NDArray[np.int64],
) -> int:  # fmt: skip
    """Writes the distinct keys of the entries of a table (T_…), of its share and of ranges r with included[r] != 0;
    returns how many. links: see `_mention`; seen: scratch, of at least 4 T_KEYS: by slot, which key of `out` is there.
    It is as small as these need, so that it stays in the nearest cache."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    h = carray(pointer(table[T_HEADER]), (HEADER_SIZE,), np.int64)
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    share, shares = table[T_SHARE], table[T_SHARES]
    slots = 2
    while slots < 2 * table[T_KEYS]:
        slots *= 2
    seen[:slots] = 0
    mask = np.uint64(slots - 1)
    n, at = 0, table[T_FIRST]
    while at >= 0:
        count = load64(ring + 8 * ((at + 1) % size)) & _COUNT
        place = (at + HEAD) % size
        for _ in range(count):
            key = load64(ring + 8 * place)
            place += 1
            if place == size:
                place = 0
            hashed = hash_key(key, salt)
            if included[np.int64(hashed >> shift)] == 0 or (shares > 1 and share_index(key, shares) != share):
                continue
            slot = np.int64(hashed & mask)
            while seen[slot] != 0 and out[seen[slot] - 1] != key:
                slot = np.int64((np.uint64(slot) + np.uint64(1)) & mask)
            if seen[slot] == 0:
                out[n] = key
                n += 1
                seen[slot] = n
        at = links[at - start]
    return n


@linked(WORDS, WORDS, WORDS, WORDS, INT, INT, INT, INT)
def split(
    h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64], gone: NDArray[np.int64], n: int, code: int,
    words: int, target: int,
) -> int:  # fmt: skip
    """Looks up keys [n]: those with a row come first in `keys`, in their order, their rows as words at `target`; the
    others go to `gone`. Returns how many have a row. rows: scratch."""
    index.find(h, keys[:n], rows[:n])
    dim, dtype = h[H_DIM], h[H_DTYPE]
    row = np.empty(dim, np.float32)
    there = absent = 0
    lines = min((4 * dim + 63) // 64, index.PREFETCH_LINES)
    for i in range(n):
        if i + index.ROW_PREFETCH < n:
            for line in range(lines):
                prefetch(rows[i + index.ROW_PREFETCH] + 64 * line)
        if rows[i] == 0:
            gone[absent] = keys[i]
            absent += 1
            continue
        keys[there] = keys[i]
        at = target + 4 * words * there
        there += 1
        if code == 0 and dtype == 0:
            copy(at, rows[i], 4 * dim)
        elif code == 0:
            unpack(rows[i], carray(pointer(at), (dim,), np.float32), dtype)
        elif dtype == 0:
            encode_rows(code, rows[i], 1, dim, at, words)
        else:
            unpack(rows[i], row, dtype)
            encode_rows(code, row.ctypes.data, 1, dim, at, words)
    return there


@kernel
def find_table(tables: NDArray[np.int64], number: int, likely: int) -> int:
    """Index of the row of a matrix that begins with a table's id, or -1. likely: where it is looked for first."""
    n, at = tables.shape[0], likely
    for _ in range(n):
        if tables[at, 0] == number:
            return at
        at = at + 1 if at + 1 < n else 0
    return -1


@kernel
def _mention(journal: int, start: int, end: int, tables: NDArray[np.int64], links: NDArray[np.int64]) -> None:
    """Finds the entries of each table: sets T_NAMED, T_KEYS to how many keys its entries have, T_FIRST and T_LAST. Of
    an entry with keys, links[its position - start] is the position of the table's next one, or -1."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    tables[:, T_NAMED] = tables[:, T_KEYS] = 0
    tables[:, T_FIRST] = -1
    likely, at = 0, start
    while at < end:
        number, count = load64(ring + 8 * (at % size)), load64(ring + 8 * ((at + 1) % size)) & _COUNT
        found = find_table(tables, number & ~CLEARED, likely)  # they come in about the same order in each step
        likely = max(found, 0)
        if found < 0:
            at += HEAD + count
            continue
        if number & CLEARED:
            tables[likely, T_NAMED] |= HAS_CLEARED
        else:
            if tables[likely, T_FIRST] < 0:
                tables[likely, T_FIRST] = at
            else:
                links[tables[likely, T_LAST] - start] = at
            links[at - start] = -1
            tables[likely, T_LAST] = at
            tables[likely, T_NAMED] |= HAS_KEYS
            tables[likely, T_KEYS] += count
        at += HEAD + count


@kernel
def _cleared(
    journal: int, start: int, end: int, table: int, included: NDArray[np.int64], empty: NDArray[np.bool_]
) -> int:
    """Marks in `empty` the ranges, of those included, of which a table has lost all rows; returns how many."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    at, n = start, 0
    empty[:] = False
    while at < end:
        count = load64(ring + 8 * ((at + 1) % size)) & _COUNT
        if load64(ring + 8 * (at % size)) == table | CLEARED:
            for i in range(at + HEAD, at + HEAD + count):
                r = load64(ring + 8 * (i % size))
                n += included[r] != 0 and not empty[r]
                empty[r] |= included[r] != 0
        at += HEAD + count
    return n


@linked(INT, INT, INT, _TABLES, WORDS, _SCRATCH, types.Array(types.int32, 1, "C"), _BODY)
def write_changes(
    journal: int, start: int, end: int, tables: NDArray[np.int64], included: NDArray[np.int64],
    scratch: NDArray[np.int64], seen: NDArray[np.int32], body: NDArray[np.uint8],
) -> int:  # fmt: skip
    """Writes the blocks of a WINDOW: of each of these tables (T_…) the distinct keys of the entries between two
    positions, in ranges r with included[r] != 0 and in the table's share, with their rows as they are now, or as keys
    that have none. tables: int64 [k, TABLE]. scratch: int64 [3, n], seen: int32 [4 n], n >= end - start. Returns how
    many words the blocks have; if more than `body` holds, nothing was written, and they may be fewer. T_NAMED is left
    for tables that have a block."""
    _mention(journal, start, end, tables, scratch[1])
    empty = np.empty(included.shape[0], np.bool_)
    need, n = 0, 0
    for t in range(tables.shape[0]):
        tables[t, T_RANGES] = 0
        if tables[t, T_NAMED] & HAS_CLEARED:
            tables[t, T_RANGES] = _cleared(journal, start, end, tables[t, T_NUMBER], included, empty)
        if tables[t, T_NAMED] & HAS_KEYS:
            tables[t, T_KEYS] = _collect(journal, start, tables[t], scratch[1], included, seen, scratch[0, n:])
            n += tables[t, T_KEYS]
        if tables[t, T_KEYS] + tables[t, T_RANGES] == 0:
            tables[t, T_NAMED] = 0
        else:
            need += (
                BLOCK_HEAD + tables[t, T_KEYS] + tables[t, T_RANGES] + (tables[t, T_KEYS] * tables[t, T_WORDS] + 1) // 2
            )
    if 8 * need > body.shape[0]:
        return need
    begin: Any = np.int64(body.ctypes.data)
    at, done = begin, 0
    for t in range(tables.shape[0]):
        if tables[t, T_NAMED] == 0:
            continue
        n, cleared, words = tables[t, T_KEYS], tables[t, T_RANGES], tables[t, T_WORDS]
        keys, gone = scratch[0, done : done + n], scratch[2, :n]
        done += n
        target = at + 8 * (BLOCK_HEAD + n + cleared)
        there = 0
        if n:
            h = carray(pointer(tables[t, T_HEADER]), (HEADER_SIZE,), np.int64)
            there = split(h, keys, scratch[1, :n], gone, n, tables[t, T_CODE], words, target)
        store64(at, tables[t, T_NUMBER] | there << 32)
        store64(at + 8, words | (n - there) << 32)
        store64(at + 16, cleared)
        copy(at + 8 * BLOCK_HEAD, keys.ctypes.data, 8 * there)
        copy(at + 8 * (BLOCK_HEAD + there), gone.ctypes.data, 8 * (n - there))
        if cleared:
            _cleared(journal, start, end, tables[t, T_NUMBER], included, empty)
            place = at + 8 * (BLOCK_HEAD + n)
            for r in range(empty.shape[0]):
                if empty[r]:
                    store64(place, r)
                    place += 8
        at = target + 4 * there * words
        if there * words & 1:
            carray(pointer(at), (1,), np.int32)[0] = 0
            at += 4
    return (at - begin) >> 3


@linked(KEYS, INT, INT, WORDS)
def select_share(keys: NDArray[np.int64], share: int, shares: int, out: NDArray[np.int64]) -> int:
    """Writes those of keys [n] that are in a share, from 0, in their order; returns how many."""
    n = 0
    for i in range(keys.shape[0]):
        out[n] = keys[i]
        if share_index(keys[i], shares) == share:
            n += 1
    return n


@linked(KEYS, INT, INT)
def first_outside(keys: NDArray[np.int64], share: int, shares: int) -> int:
    """Index of the first key that is in another share, or -1."""
    for i in range(keys.shape[0]):
        if share_index(keys[i], shares) != share:
            return i
    return -1


def keys_within(keys: NDArray[np.int64], share: KeyShare) -> NDArray[np.int64]:
    """Those of keys [n] that are in a share."""
    if share.whole:
        return keys
    out = np.empty(len(keys), np.int64)
    return out[: select_share(keys, share.ordinal, share.of, out)]


class Changed(NamedTuple):
    """Keys of one table that may have changed: int64 [n] with a row, their rows as words float32 [n, words], and keys
    int64 [k] that have none."""

    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    gone: NDArray[np.int64]


class Journal:
    """A ring of so many words."""

    def __init__(self, words: int) -> None:
        self._ring = np.zeros(words, np.int64)  # the entries
        h = self._header = np.zeros(J_FIELDS, np.int64)  # J_…
        self.address = int(h.ctypes.data)  # where it lies, for kernels
        h[J_WORDS], h[J_SIZE] = self._ring.ctypes.data, words
        self._seen = np.empty(0, np.int32)  # scratch of `collect`
        self._keys = np.zeros((3, 0), np.int64)  # scratch: keys, their rows, those without
        self._room = ROOM  # bytes that the next blocks probably fit in
        self._pool = Pool(POOL_BYTES, POOL_BYTES)  # for rows that were read, until they have left

    @property
    def end(self) -> int:
        """The position behind the newest entry."""
        return int(self._header[J_END])

    @property
    def oldest(self) -> int:
        """The first position that has not been written over; an entry may have begun before it."""
        return max(int(self._header[J_OLDEST]), self.end - len(self._ring))

    def note(self, table: int, width: int, keys: NDArray[np.int64]) -> None:
        """Adds keys of a table whose rows have so many floats."""
        if len(keys):
            note_keys(self.address, table, width, np.ascontiguousarray(keys, np.int64))

    def note_cleared(self, table: int, ranges: NDArray[np.int64]) -> None:
        """Adds that a table has lost all rows of some ranges."""
        note_keys(self.address, table | CLEARED, 1, np.ascontiguousarray(ranges, np.int64))

    def entries(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The entries between two positions, as they were noted, copied."""
        ring, at = self._ring, start
        while at < end:
            table, n = ring[at % len(ring)], int(ring[(at + 1) % len(ring)]) & _COUNT
            yield int(table), ring[(at + HEAD + np.arange(n)) % len(ring)]
            at += HEAD + n

    def limit(self, start: int, most: int, most_bytes: int = FRAME_BYTES) -> int:
        """The position behind the entries from `start` on that have about `most` keys or so many bytes of rows, or the
        end."""
        return int(find_limit(self.address, start, self.end, most, most_bytes))

    def read(
        self, start: int, end: int, tables: NDArray[np.int64], included: NDArray[np.int64]
    ) -> tuple[int, memoryview]:  # fmt: skip
        """What changed of tables [k, TABLE], see `followed_tables`, between two positions, in ranges with included[r]
        != 0, as it is now: the blocks of a WINDOW, and how many."""
        most = end - start
        if most > self._keys.shape[1]:
            self._keys, self._seen = np.empty((3, 2 * most), np.int64), np.empty(8 * most, np.int32)
        while True:
            body = self._pool.take(self._room)
            used = 8 * int(write_changes(self.address, start, end, tables, included, self._keys, self._seen, body))
            self._room = ROOM * (1 + (used + used // 2) // ROOM)  # windows differ, and to try again costs more
            if used <= len(body):
                return int(np.count_nonzero(tables[:, T_NAMED])), body[:used].data


def followed_tables(tables: Iterable[tuple[int, NDArray[np.int64], Codec, KeyShare]]) -> NDArray[np.int64]:
    """What `Journal.read` has to know of tables: their ids, headers, which must stay where they are, how rows are
    encoded, and the share of keys: int64 [k, TABLE]."""
    found = [
        (number, h.ctypes.data, max(codec.code, 0), codec.words, share.ordinal, share.of, *(TABLE - T_NAMED) * (0,))
        for number, h, codec, share in tables
    ]
    return np.array(found, np.int64).reshape(-1, TABLE)


def rows_of(header: NDArray[np.int64], keys: NDArray[np.int64], code: int, words: int) -> Changed:
    """The rows of keys [n], in a table's header, as `Journal.read` finds them; the keys stay as they are."""
    n, keys, packed = len(keys), keys.copy(), np.empty((len(keys), words), np.float32)
    gone = np.empty_like(keys)
    there = int(split(header, keys, np.empty_like(keys), gone, n, code, words, packed.ctypes.data))
    return Changed(keys[:there], packed[:there], gone[: n - there])


def warm() -> None:
    """Compiles, or loads from the cache, what a server does for readers."""
    with compiled_once(__file__):
        header, journal = np.zeros(HEADER_SIZE, np.int64), Journal(8)
        descriptors, entries = np.zeros((2, DESCRIPTOR), np.int64), np.zeros((8, 2), np.int64)
        descriptors[:, D_SEGMENT], descriptors[:, D_CAPACITY] = entries.ctypes.data, 4
        header[H_DESCRIPTORS], header[H_SHIFT], header[H_DIM] = descriptors.ctypes.data, 63, 1
        journal.note(1, 1, np.zeros(1, np.int64))
        tables = followed_tables([(1, header, Codec([], 1), ALL_KEYS)])
        journal.read(0, journal.limit(0, 1), tables, np.ones(2, np.int64))
