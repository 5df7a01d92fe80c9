"""The journal of changed keys: which rows changed since some position, for readers of the rows.

A ring of words, into which whoever changes rows writes their keys, in the order of the changes: a table's id, how many
keys and how wide their rows are, the keys. It says which rows to look at, not what was done to them: a reader of the
ring looks each key up, and finds its newest row, or none. Positions count words ever written, so what is before
`oldest` has been written over.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numpy.typing import NDArray

from elasticps.kernels import compiled_once
from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.kernels.hashing import share_index as _share_index
from elasticps.model.key_share import ALL_KEYS, KeyShare
from elasticps.store import index
from elasticps.store.codec import encode_rows
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
HEAD = 2  # words before an entry's keys
ENTRY_BYTES = 1 << 20  # of the rows of an entry's keys at most, or it has one key
WIDTH_BIT = 40  # of an entry's second word: above it floats of a row, below it the number of keys
_COUNT = (1 << WIDTH_BIT) - 1
FRAME_KEYS = 1 << 14  # of one frame of a window, about: a millisecond or two,
FRAME_BYTES = 4 << 20  # and of its rows, about


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


@linked(INT, INT, INT, INT, INT, WORDS)
def list_tables(journal: int, start: int, end: int, most: int, most_bytes: int, out: NDArray[np.int64]) -> int:
    """Writes the tables of the entries from `start` on, each once as often as it follows another one, until they have
    about `most` keys, or these about so many bytes of rows as float32; returns how many. out[0] gets the position
    behind the last entry looked at."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    n, keys, size_of_rows, at = 1, 0, 0, start
    while at < end and keys < most and size_of_rows < most_bytes and n < out.shape[0]:
        table, second = load64(ring + 8 * (at % size)), load64(ring + 8 * ((at + 1) % size))
        count = second & _COUNT
        known = False
        for i in range(1, n):
            known |= out[i] == table
        if not known:
            out[n] = table
            n += 1
        keys += count
        size_of_rows += 4 * count * (second >> WIDTH_BIT)
        at += HEAD + count
    out[0] = at
    return n - 1


@linked(WORDS, INT, INT, INT, INT, WORDS, INT, INT, types.Array(types.int32, 1, "C"), WORDS)
def collect(
    h: NDArray[np.int64], journal: int, start: int, end: int, table: int, included: NDArray[np.int64], share: int,
    shares: int, seen: NDArray[np.int32], out: NDArray[np.int64],
) -> int:  # fmt: skip
    """Writes the distinct keys of a table in the entries from `start` to `end`, of ranges r where included[r] is not 0,
    and of one of so many shares, from 0; returns how many. h: the table's header; seen: scratch, of at least
    4 (end - start): by slot, which key of `out` is there. It is small, so that it stays in the nearest cache."""
    ring, size = load64(journal + 8 * J_WORDS), load64(journal + 8 * J_SIZE)
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    slots = 2
    while slots < 2 * (end - start):
        slots *= 2
    seen[:slots] = 0
    mask = np.uint64(slots - 1)
    n, at = 0, start
    while at < end:
        count = load64(ring + 8 * ((at + 1) % size)) & _COUNT
        if load64(ring + 8 * (at % size)) == table:
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
        at += HEAD + count
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


CLEARED = 1 << 40
"""Added to a table's id where an entry has ranges that were cleared instead of keys."""
NO_KEYS = np.empty(0, np.int64)


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
        h[J_WORDS], h[J_SIZE] = self._ring.ctypes.data, words
        self._seen = np.empty(0, np.int32)  # scratch of `collect`
        self._listed = np.zeros(1 << 12, np.int64)  # scratch of `list_tables`
        self._keys = np.zeros((3, 0), np.int64)  # scratch: keys, their rows, those without
        self._pool = Pool(POOL_BYTES, POOL_BYTES)  # for rows that were read, until they have left

    @property
    def address(self) -> int:
        """Where its header lies, for kernels."""
        return int(self._header.ctypes.data)

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

    def cleared(self, table: int, start: int, end: int) -> NDArray[np.int64]:
        """The ranges of which a table has lost all rows, between two positions, each once."""
        found = [keys for number, keys in self.entries(start, end) if number == table | CLEARED]
        return np.unique(np.concatenate(found)) if found else NO_KEYS

    def entries(self, start: int, end: int) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The entries between two positions, as they were noted, copied."""
        ring, at = self._ring, start
        while at < end:
            table, n = ring[at % len(ring)], int(ring[(at + 1) % len(ring)]) & _COUNT
            yield int(table), ring[(at + HEAD + np.arange(n)) % len(ring)]
            at += HEAD + n

    def tables(self, start: int, most: int = FRAME_KEYS, most_bytes: int = FRAME_BYTES) -> tuple[list[int], int]:
        """The tables of the entries from `start` on, until they have about `most` keys or so many bytes of rows, and
        the position behind."""
        found = self._listed
        n = int(list_tables(self.address, start, self.end, most, most_bytes, found))
        return found[1 : n + 1].tolist(), int(found[0])

    def read(
        self, header: NDArray[np.int64], table: int, start: int, end: int, included: NDArray[np.int64], code: int,
        words: int, share: KeyShare = ALL_KEYS,
    ) -> Changed:  # fmt: skip
        """What changed of a table between two positions, in ranges with included[r] != 0 and in a share, as it is now.
        header: the table's; code, words: of a row as it is to be, see `codec`."""
        most = end - start
        if most > self._keys.shape[1]:
            self._keys, self._seen = np.empty((3, 2 * most), np.int64), np.empty(8 * most, np.int32)
        keys, rows, gone = self._keys
        n = int(collect(header, self.address, start, end, table, included, share.ordinal, share.of, self._seen, keys))
        packed = self._pool.take(4 * n * words).view(np.float32).reshape(n, words)
        return _look_up(header, keys[:n], code, words, rows, gone, packed)


def _look_up(
    header: NDArray[np.int64], keys: NDArray[np.int64], code: int, words: int, rows: NDArray[np.int64],
    gone: NDArray[np.int64], packed: NDArray[np.float32],
) -> Changed:  # fmt: skip
    n = len(keys)
    there = int(split(header, keys, rows, gone, n, code, words, packed.ctypes.data))
    return Changed(keys[:there].copy(), packed[:there], gone[: n - there].copy())


def rows_of(header: NDArray[np.int64], keys: NDArray[np.int64], code: int, words: int) -> Changed:
    """The rows of keys [n], in a table's header, as `Journal.read` finds them; the keys stay as they are."""
    packed = np.empty((len(keys), words), np.float32)
    return _look_up(header, keys.copy(), code, words, np.empty_like(keys), np.empty_like(keys), packed)


def warm() -> None:
    """Compiles, or loads from the cache, what a server does for readers."""
    with compiled_once(__file__):
        header, journal = np.zeros(HEADER_SIZE, np.int64), Journal(8)
        descriptors, entries = np.zeros((2, DESCRIPTOR), np.int64), np.zeros((8, 2), np.int64)
        descriptors[:, D_SEGMENT], descriptors[:, D_CAPACITY] = entries.ctypes.data, 4
        header[H_DESCRIPTORS], header[H_SHIFT], header[H_DIM] = descriptors.ctypes.data, 63, 1
        journal.note(1, 1, np.zeros(1, np.int64))
        journal.tables(0, 1)
        journal.read(header, 1, 0, journal.end, np.ones(2, np.int64), 0, 1)
