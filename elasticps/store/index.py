"""Kernels over the hash index and whole rows: find, insert, list, read, digest.

Every range has its own open-addressing segment of (key, row address) entries, 16 bytes each, so that listing, dropping
or growing a range touches that range only. An entry with address 0 is empty, which leaves all of int64 to keys. An
address has 48 bits; above them stands the row's stamp (`elasticps.store.stamps`).

A key's first entry comes from the 32 hash bits below the range's, times an odd number that depends on the capacity
(so that keys arriving in one segment's order do not fill another from the front), scaled to the capacity by a
multiply-high: capacities need not be powers of two, so they grow by half and the load stays between 0.53 and 0.8.
Probes run on into a short tail behind the segment, whose last entry is always empty: no wrap-around to check.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.store.native import (
    ADDRESS,
    D_CAPACITY,
    D_COUNT,
    D_SEGMENT,
    DESCRIPTOR,
    H_ASIDE,
    H_CONSTANTS,
    H_DESCRIPTORS,
    H_DIM,
    H_DTYPE,
    H_END,
    H_FREE,
    H_HIGH,
    H_LAST,
    H_LOW,
    H_NEED,
    H_NEXT,
    H_ROWS,
    H_SALT,
    H_SCRATCH,
    H_SHIFT,
    H_SLOTS_AT,
    H_STALE,
    H_STAMP,
    H_STAMPS,
    H_STRIDE,
    H_UNSWEPT,
    H_USAGE_AT,
    INT,
    KEYS,
    MATRIX,
    NEED_SLAB,
    STAMP_BIT,
    WORDS,
    carray,
    copy,
    inlined,
    kernel,
    linked,
    load64,
    pointer,
    prefetch,
    store64,
    template,
)
from elasticps.store.range_map import place_of
from elasticps.store.values import absent_weights, blank_row, initial_weights, unpack, write_weights

hash_key: Any = _hash_key  # numba integers, which are no np.int64 to a type checker

ENTRY = 16  # bytes
GROWN_BYTES = 48  # that a row takes in a segment which grows: a share of the old one and of the new one
INDEX_PREFETCH = 16  # keys between an index prefetch and its use
ROW_PREFETCH = 10  # rows between a row prefetch and its use
PREFETCH_LINES = 4  # of a row; the hardware fetches what follows
READ_LINES = 1  # of a row that is only read: more of them measured slower
FIRST_CAPACITY = 4
INITIALISE, TAKE_VALUES, LEAVE_BLANK = 0, 1, 2  # what `insert` writes into the weights of new rows

_S32, _S64 = np.uint64(32), np.uint64(64)
_LOW32 = np.uint64(0xFFFFFFFF)
_ODD = np.uint64(0x9E3779B1)
_ONE = np.uint64(1)


def segment_entries(capacity: int) -> int:
    """Entries that a segment of this capacity takes in memory, its tail counted."""
    return capacity + min(capacity, 32)


@kernel
def row_limit(capacity: int) -> int:
    """Rows at which a segment of this capacity must grow: a load of 0.8."""
    return capacity * 4 // 5


@inlined
def descriptors_of(h: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ranges' descriptors, flat: see `descriptor_of`."""
    found: NDArray[np.int64] = carray(pointer(h[H_DESCRIPTORS]), (DESCRIPTOR * (h[H_LAST] + 1),), np.int64)
    return found


@inlined
def descriptor_of(descriptors: NDArray[np.int64], last: int, r: int | np.int64) -> int:
    """Where range r's descriptor begins. last: H_LAST."""
    return place_of(descriptors, last, DESCRIPTOR, r)


@kernel
def segment_of(h: NDArray[np.int64], r: int | np.int64) -> tuple[int, int]:
    """Address and capacity of range r's segment."""
    descriptors = descriptors_of(h)
    at = descriptor_of(descriptors, h[H_LAST], r)
    return descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]


@kernel
def first_entry(hashed: np.uint64, range_bits: np.uint64, base: int, capacity: int) -> np.int64:
    """Address of the entry where the probe for a hash starts."""
    cap = np.uint64(capacity)
    spread = (((hashed << range_bits) >> _S32) * ((cap * _ODD) | _ONE)) & _LOW32
    return base + np.int64((spread * cap) >> _S32) * ENTRY


@inlined
def _start(key: int, salt: np.uint64, shift: np.uint64, descriptors: NDArray[np.int64], last: int) -> np.int64:
    hashed = hash_key(key, salt)
    at = descriptor_of(descriptors, last, np.int64(hashed >> shift))
    return first_entry(hashed, _S64 - shift, descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY])


@template
def _find(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64], last: int) -> int:
    salt, shift, newest = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT]), h[H_STAMP]
    descriptors = descriptors_of(h)
    n, next_line = keys.shape[0], h[H_USAGE_AT] != 0
    for i in range(min(n, INDEX_PREFETCH)):
        entry = _start(keys[i], salt, shift, descriptors, last)
        prefetch(entry)
        if next_line:
            prefetch(entry + 64)
        rows[i] = entry
    missing = differences = 0
    for i in range(n):
        if i + INDEX_PREFETCH < n:
            following = _start(keys[i + INDEX_PREFETCH], salt, shift, descriptors, last)
            prefetch(following)
            if next_line:
                prefetch(following + 64)
            rows[i + INDEX_PREFETCH] = following
        entry = rows[i]
        key = keys[i]
        row = load64(entry + 8)
        while load64(entry) != key and row != 0:
            entry += ENTRY
            row = load64(entry + 8)
        rows[i] = row & ADDRESS
        missing += row == 0
        differences |= row ^ newest
    h[H_STALE] = n if differences >> STAMP_BIT else 0
    return missing


@linked(WORDS, KEYS, WORDS)
def find(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    """Writes the address of every key's row, 0 where there is none, and how many there are none of. Sets H_STALE.

    `rows` holds first entries on their way from prefetch to probe. In tables that keep usage, whose keys come and go,
    many searches find nothing, which takes them to the next line.
    """
    if h[H_LAST] < 0:  # a constant, so that no key's descriptor is searched for
        return _find(h, keys, rows, -1)
    return _find(h, keys, rows, h[H_LAST])


@kernel
def _give_back(h: NDArray[np.int64], row: int) -> None:
    """Takes a row's memory, for the next row unless it lies in the slab that is being emptied."""
    if h[H_LOW] <= row < h[H_HIGH]:
        store64(row, h[H_ASIDE])
        h[H_ASIDE] = row
    else:
        store64(row, h[H_FREE])
        h[H_FREE] = row


@kernel
def sweep(h: NDArray[np.int64], most: int) -> int:
    """Sorts so many free rows by whether they lie in the slab that is being emptied; how many it were."""
    n = 0
    while n < most and h[H_UNSWEPT] != 0:
        row = h[H_UNSWEPT]
        h[H_UNSWEPT] = load64(row)
        _give_back(h, row)
        n += 1
    return n


@kernel
def _take_outside(h: NDArray[np.int64]) -> int:
    """Memory for one row, or 0; not in the slab that is being emptied."""
    while h[H_FREE] == 0 and h[H_UNSWEPT] != 0:
        sweep(h, 1)
    row = h[H_FREE]
    if row != 0:
        h[H_FREE] = load64(row)
    elif h[H_NEXT] + h[H_STRIDE] <= h[H_END]:
        row = h[H_NEXT]
        h[H_NEXT] += h[H_STRIDE]
    return row


@kernel
def keep_slab(h: NDArray[np.int64]) -> None:
    """The slab is not emptied any more: there is no room elsewhere, so no row is free but its own."""
    h[H_LOW] = h[H_HIGH] = 0
    h[H_FREE] = h[H_ASIDE]
    h[H_ASIDE] = 0


@kernel
def _take_row(h: NDArray[np.int64]) -> int:
    """Memory for one row, or 0."""
    row = _take_outside(h)
    if row == 0 and h[H_ASIDE] != 0:
        keep_slab(h)
        row = _take_outside(h)
    return row


@kernel
def move_out(h: NDArray[np.int64], r: int) -> bool:
    """Moves range r's rows out of the slab that is being emptied. False if there is no room elsewhere."""
    base, capacity = segment_of(h, r)
    for i in range(capacity + min(capacity, 32)):
        word = load64(base + i * ENTRY + 8)
        row = word & ADDRESS
        if row != 0 and h[H_LOW] <= row < h[H_HIGH]:
            to = _take_outside(h)
            if to == 0:
                return False
            copy(to, row, h[H_STRIDE])
            store64(base + i * ENTRY + 8, word & ~ADDRESS | to)
            _give_back(h, row)
    return True


@linked(WORDS, KEYS, MATRIX, INT, WORDS, INT)
def insert(
    h: NDArray[np.int64],
    keys: NDArray[np.int64],
    values: NDArray[np.float32],
    mode: int,
    rows: NDArray[np.int64],
    start: int,
) -> int:
    """Adds the keys that `find` missed (rows[i] = 0), from `start` on, and completes `rows`.

    Returns the index to go on from: n when done, else after what H_NEED asks for. Of equal keys the first counts.
    """
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    descriptors = descriptors_of(h)
    stamps = carray(pointer(h[H_STAMPS]), (1 << (64 - h[H_SHIFT]),), np.int64)
    for i in range(start, keys.shape[0]):
        if rows[i] != 0:
            continue
        key = keys[i]
        hashed = hash_key(key, salt)
        r = np.int64(hashed >> shift)
        at = descriptor_of(descriptors, h[H_LAST], r)
        base, capacity = descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]
        entry = first_entry(hashed, _S64 - shift, base, capacity)
        row = load64(entry + 8)
        while load64(entry) != key and row != 0:
            entry += ENTRY
            row = load64(entry + 8)
        if row == 0:
            last = base + (capacity + min(capacity, 32) - 1) * ENTRY
            if descriptors[at + D_COUNT] >= row_limit(capacity) or entry >= last:
                h[H_NEED] = r
                return i
            row = _take_row(h)
            if row == 0:
                h[H_NEED] = NEED_SLAB
                return i
            store64(entry, key)
            store64(entry + 8, row | stamps[r] << STAMP_BIT)
            descriptors[at + D_COUNT] += 1
            h[H_ROWS] += 1
            if mode != LEAVE_BLANK:
                blank_row(h, row)
            if mode == TAKE_VALUES:
                write_weights(h, row, values[i])
            elif mode == INITIALISE:
                _initialise(h, key, row)
        rows[i] = row & ADDRESS
    return keys.shape[0]


@kernel
def _initialise(h: NDArray[np.int64], key: int, row: int) -> None:
    at = row if h[H_DTYPE] == 0 else h[H_SCRATCH]
    w = carray(pointer(at), (h[H_DIM],), np.float32)
    initial_weights(h, key, w)
    if h[H_DTYPE] != 0:
        write_weights(h, row, w)


@kernel
def regrow(h: NDArray[np.int64], r: int, segment: int, capacity: int) -> bool:
    """Moves the entries of range r, which has a descriptor, to a new segment. False if one found no place, and r keeps
    its old segment."""
    salt, range_bits = np.uint64(h[H_SALT]), _S64 - np.uint64(h[H_SHIFT])
    descriptors = descriptors_of(h)
    entries = capacity + min(capacity, 32)
    for i in range(2 * entries):
        store64(segment + i * 8, 0)
    last = segment + (entries - 1) * ENTRY
    old, old_capacity = segment_of(h, r)
    for i in range(old_capacity + min(old_capacity, 32)):
        row = load64(old + i * ENTRY + 8)
        if row == 0:
            continue
        key = load64(old + i * ENTRY)
        entry = first_entry(hash_key(key, salt), range_bits, segment, capacity)
        while load64(entry + 8) != 0:
            entry += ENTRY
        if entry >= last:
            return False
        store64(entry, key)
        store64(entry + 8, row)
    at = descriptor_of(descriptors, h[H_LAST], r)
    descriptors[at + D_SEGMENT] = segment
    descriptors[at + D_CAPACITY] = capacity
    return True


@kernel
def free_rows(h: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """Gives rows' memory back to the table, the first of `rows` to be taken first."""
    for i in range(rows.shape[0] - 1, -1, -1):
        _give_back(h, rows[i] & ADDRESS)
    h[H_ROWS] -= rows.shape[0]


@kernel
def close_gap(gap: int | np.int64, salt: np.uint64, range_bits: np.uint64, base: int, capacity: int) -> None:
    """Empties an entry. Entries behind it move up into the gap, unless that would bring them before their first entry:
    so probes never meet a gap, and nothing marks where a key was."""
    entry = gap + ENTRY
    word = load64(entry + 8)
    while word != 0:
        key = load64(entry)
        if first_entry(hash_key(key, salt), range_bits, base, capacity) <= gap:
            store64(gap, key)
            store64(gap + 8, word)
            gap = entry
        entry += ENTRY
        word = load64(entry + 8)
    store64(gap, 0)
    store64(gap + 8, 0)


@kernel
def remove(h: NDArray[np.int64], keys: NDArray[np.int64]) -> int:
    """Forgets the rows of keys, those that have one; returns how many."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    range_bits = _S64 - np.uint64(h[H_SHIFT])
    descriptors = descriptors_of(h)
    removed = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        hashed = hash_key(key, salt)
        at = descriptor_of(descriptors, h[H_LAST], np.int64(hashed >> shift))
        base, capacity = descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY]
        gap = first_entry(hashed, range_bits, base, capacity)
        row = load64(gap + 8)
        while load64(gap) != key and row != 0:
            gap += ENTRY
            row = load64(gap + 8)
        if row == 0:
            continue
        _give_back(h, row & ADDRESS)
        h[H_ROWS] -= 1
        descriptors[at + D_COUNT] -= 1
        removed += 1
        close_gap(gap, salt, range_bits, base, capacity)
    return removed


@kernel
def copy_slots(h: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.float32]) -> None:
    """Copies the slots of rows into out, float32 [n, slot_floats]; those of a new row where there is none (0)."""
    fill = carray(pointer(h[H_CONSTANTS]), (1,), np.float32)[0]
    for i in range(out.shape[0]):
        if rows[i] == 0:
            out[i] = fill
        else:
            bytes_of_slots = 4 * out.shape[1]
            copy(out.ctypes.data + i * bytes_of_slots, rows[i] + h[H_SLOTS_AT], bytes_of_slots)


@kernel
def prefetch_row(row: int, lines: int) -> None:
    """Has so many cache lines of a row fetched, from its address on, before it is read."""
    for line in range(lines):
        prefetch(row + line * 64)


@kernel
def copy_out(rows: NDArray[np.int64], out: NDArray[np.uint64]) -> None:
    """Copies whole rows: out uint64 [n, stride / 8]. rows: addresses, or words."""
    words = out.shape[1]
    for i in range(rows.shape[0]):
        if i + ROW_PREFETCH < rows.shape[0]:
            prefetch_row(rows[i + ROW_PREFETCH] & ADDRESS, min((words + 7) // 8, PREFETCH_LINES))
        copy(out.ctypes.data + i * words * 8, rows[i] & ADDRESS, words * 8)


@kernel
def copy_in(rows: NDArray[np.int64], data: NDArray[np.uint64]) -> None:
    """Overwrites whole rows: data uint64 [n, stride / 8]."""
    size = 8 * data.shape[1]
    for i in range(rows.shape[0]):
        copy(rows[i], data.ctypes.data + i * size, size)


@kernel
def digest(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> np.uint64:
    """Sum over rows of a hash of key, stamp and bytes, so that order does not matter. rows: their words.

    Four lanes of multiply and rotate per row (the shape of xxHash64) hide the multiplier's latency.
    """
    words = h[H_STRIDE] // 8
    total = np.uint64(0)
    k, m, left, right = _GOLDEN, _PRIME, np.uint64(31), np.uint64(33)
    for i in range(keys.shape[0]):
        if i + ROW_PREFETCH < rows.shape[0]:
            prefetch_row(rows[i + ROW_PREFETCH] & ADDRESS, min((words + 7) // 8, PREFETCH_LINES))
        w = carray(pointer(rows[i] & ADDRESS), (words,), np.uint64)
        a = hash_key(keys[i], k + np.uint64(rows[i] >> STAMP_BIT))
        b, c, d = a + k, a ^ m, a - m
        j = 0
        while j + 4 <= words:
            a = (((a ^ w[j]) * m) << left) | (((a ^ w[j]) * m) >> right)
            b = (((b ^ w[j + 1]) * m) << left) | (((b ^ w[j + 1]) * m) >> right)
            c = (((c ^ w[j + 2]) * m) << left) | (((c ^ w[j + 2]) * m) >> right)
            d = (((d ^ w[j + 3]) * m) << left) | (((d ^ w[j + 3]) * m) >> right)
            j += 4
        while j < words:
            a = (((a ^ w[j]) * m) << left) | (((a ^ w[j]) * m) >> right)
            j += 1
        a = hash_key(np.int64(a), b)
        c = hash_key(np.int64(c), d)
        total += hash_key(np.int64(a), c)
    return total


_GOLDEN, _PRIME = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x9FB21C651E98DF25)


@kernel
def gather(h: NDArray[np.int64], keys: NDArray[np.int64], out: NDArray[np.float32], rows: NDArray[np.int64]) -> None:
    """Reads the weights of every key as float32 [n, dim]; absent keys read as f(seed, key). `rows` is scratch."""
    gather_to(h, keys, out.ctypes.data, rows)


@linked(WORDS, KEYS, INT, WORDS)
def gather_to(h: NDArray[np.int64], keys: NDArray[np.int64], target: int, rows: NDArray[np.int64]) -> None:
    """`gather`, to an address."""
    find(h, keys, rows)
    n, dim, dtype = keys.shape[0], h[H_DIM], h[H_DTYPE]
    lines = READ_LINES
    for i in range(min(n, ROW_PREFETCH)):
        prefetch_row(rows[i], lines)
    for i in range(n):
        if i + ROW_PREFETCH < n:
            prefetch_row(rows[i + ROW_PREFETCH], lines)
        w = carray(pointer(target + i * dim * 4), (dim,), np.float32)
        if rows[i] == 0:
            absent_weights(h, keys[i], w)
        elif dtype == 0:
            source = carray(pointer(rows[i]), (dim,), np.float32)
            for j in range(dim):
                w[j] = source[j]
        else:
            unpack(rows[i], w, dtype)
