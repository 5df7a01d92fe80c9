"""Kernels of checkpoints: when rows were changed last, and rows kept aside until a writer has come by.

A row's stamp is the number of the last cut before its last change, told as the distance from a base of its range; it
lies in the upper bits of the row's index entry. `find` sees on its way whether all of a batch have the newest one, so
only the first change of a row after a cut costs anything: `touch` stamps it, and copies it before that where a writer
will want it as it was.

A record of what is kept aside: address of the next one of the range, key, stamp, row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.store.index import ENTRY, copy_out, descriptor_of, descriptors_of, first_entry, segment_of
from elasticps.store.native import (
    ADDRESS,
    D_CAPACITY,
    D_RETAINED,
    D_SEGMENT,
    H_CURSOR,
    H_LAST,
    H_RETAINED,
    H_RETAINED_FREE,
    H_RETAINED_NEXT,
    H_RETAINED_ROOM,
    H_RETAINED_SHIFT,
    H_SALT,
    H_SHIFT,
    H_STALE,
    H_STAMPS,
    H_STRIDE,
    KEYS,
    STAMP_BIT,
    WORDS,
    carray,
    copy,
    kernel,
    linked,
    load64,
    pointer,
    store64,
)

hash_key: Any = _hash_key

RECORD = 24  # bytes before the row
_S64 = np.uint64(64)


def rows_at(words: NDArray[np.int64], stride: int) -> NDArray[np.uint8]:
    """Copies of rows: uint8 [n, stride]."""
    out = np.empty((len(words), stride // 8), np.uint64)
    copy_out(words, out)
    return out.view(np.uint8)


def stamps_in(words: NDArray[np.int64]) -> NDArray[np.uint16]:
    """The stamps in words of rows."""
    return (words >> STAMP_BIT).astype(np.uint16)


@kernel
def _entry_of(key: int, hashed: np.uint64, range_bits: np.uint64, base: int, capacity: int) -> np.int64:
    """The entry of a key that has a row, in its range's segment."""
    entry = first_entry(hashed, range_bits, base, capacity)
    while load64(entry) != key:
        entry += ENTRY
    return entry


@kernel
def _keep(h: NDArray[np.int64], newest: np.int64, key: int, word: int) -> None:
    """Keeps a row aside. newest: where the address of its part's newest record lies."""
    record = h[H_RETAINED_FREE]
    if record != 0:
        h[H_RETAINED_FREE] = load64(record)
    else:
        record = h[H_RETAINED_NEXT]
        h[H_RETAINED_NEXT] += RECORD + h[H_STRIDE]
    h[H_RETAINED_ROOM] -= 1
    store64(record, load64(newest))
    store64(record + 8, key)
    store64(record + 16, word >> STAMP_BIT)
    copy(record + RECORD, word & ADDRESS, h[H_STRIDE])
    store64(newest, record)


@linked(WORDS, KEYS, WORDS)
def touch(h: NDArray[np.int64], keys: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
    """The rows of keys are about to change, where they have one (rows[i] > 0): stamps them. There is room to keep
    H_STALE of them aside."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    parts_bits = shift - np.uint64(h[H_RETAINED_SHIFT])
    descriptors = descriptors_of(h)
    stamps = carray(pointer(h[H_STAMPS]), (1 << (64 - h[H_SHIFT]),), np.int64)
    for i in range(keys.shape[0]):
        if rows[i] <= 0:
            continue
        hashed = hash_key(keys[i], salt)
        r = np.int64(hashed >> shift)
        at = descriptor_of(descriptors, h[H_LAST], r)
        entry = _entry_of(keys[i], hashed, _S64 - shift, descriptors[at + D_SEGMENT], descriptors[at + D_CAPACITY])
        word = load64(entry + 8)
        stamp = word >> STAMP_BIT
        now = stamps[r]
        if stamp == now:
            continue
        retained = descriptors[at + D_RETAINED] if h[H_RETAINED] != 0 else 0
        if retained != 0 and stamp >= load64(retained):
            part = np.int64(hashed >> np.uint64(h[H_RETAINED_SHIFT]))
            if part >= h[H_CURSOR]:
                _keep(h, retained + 8 + 8 * (part - (r << np.int64(parts_bits))), keys[i], word)
        store64(entry + 8, word & ADDRESS | now << STAMP_BIT)
    h[H_STALE] = 0


@kernel
def set_stamps(h: NDArray[np.int64], keys: NDArray[np.int64], stamps: NDArray[np.uint16]) -> None:
    """Gives the rows of keys, all of which have one, these stamps."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_SHIFT])
    for i in range(keys.shape[0]):
        hashed = hash_key(keys[i], salt)
        base, capacity = segment_of(h, np.int64(hashed >> shift))
        entry = _entry_of(keys[i], hashed, _S64 - shift, base, capacity)
        store64(entry + 8, load64(entry + 8) & ADDRESS | np.int64(stamps[i]) << STAMP_BIT)


@kernel
def clear_stamps(h: NDArray[np.int64], r: int) -> None:
    """Gives all rows of range r stamp 0."""
    base, capacity = segment_of(h, r)
    for i in range(capacity + min(capacity, 32)):
        store64(base + i * ENTRY + 8, load64(base + i * ENTRY + 8) & ADDRESS)


@kernel
def list_parts(h: NDArray[np.int64], r: int, since: int, keys: NDArray[np.int64], starts: NDArray[np.int64]) -> None:
    """Writes those of range r's keys whose rows have stamp `since` or a newer one, so that those of each part stand
    together, from starts[part] up to starts[part + 1]. starts: int64 [parts + 1], zeros at first."""
    salt, shift = np.uint64(h[H_SALT]), np.uint64(h[H_RETAINED_SHIFT])
    base, capacity = segment_of(h, r)
    parts = starts.shape[0] - 1
    first, entries = r * parts, capacity + min(capacity, 32)
    for i in range(entries):
        word = load64(base + i * ENTRY + 8)
        if word != 0 and word >> STAMP_BIT >= since:
            starts[np.int64(hash_key(load64(base + i * ENTRY), salt) >> shift) - first + 1] += 1
    for part in range(parts):
        starts[part + 1] += starts[part]
    for i in range(entries):
        word = load64(base + i * ENTRY + 8)
        if word != 0 and word >> STAMP_BIT >= since:
            key = load64(base + i * ENTRY)
            part = np.int64(hash_key(key, salt) >> shift) - first
            keys[starts[part]] = key
            starts[part] += 1
    for part in range(parts, 0, -1):
        starts[part] = starts[part - 1]
    starts[0] = 0


@kernel
def choose(
    h: NDArray[np.int64], r: int, since: int, before: int, keys: NDArray[np.int64], words: NDArray[np.int64]
) -> int:
    """Keeps of keys of range r those that have a row whose stamp is in since..before-1, in place, and writes the words
    of their rows; how many."""
    salt = np.uint64(h[H_SALT])
    base, capacity = segment_of(h, r)
    n = 0
    for i in range(keys.shape[0]):
        key = keys[i]
        entry = first_entry(hash_key(key, salt), _S64 - np.uint64(h[H_SHIFT]), base, capacity)
        word = load64(entry + 8)
        while load64(entry) != key and word != 0:
            entry += ENTRY
            word = load64(entry + 8)
        if word != 0 and since <= word >> STAMP_BIT < before:
            keys[n] = key
            words[n] = word
            n += 1
    return n


@kernel
def count_retained(newest: NDArray[np.int64]) -> int:
    """Rows that are kept aside of some parts. newest: the newest record of each."""
    n = 0
    for part in range(newest.shape[0]):
        record = newest[part]
        while record != 0:
            n += 1
            record = load64(record)
    return n


@kernel
def pass_parts(
    h: NDArray[np.int64], newest: NDArray[np.int64], end: int, keys: NDArray[np.int64], words: NDArray[np.int64]
) -> None:
    """Parts before `end` are being written: writes the keys of what is kept aside of them, and the words of the copies,
    which stay what they are until the next row is kept: their memory serves that. newest: as for `count_retained`."""
    n = 0
    for part in range(newest.shape[0]):
        record = newest[part]
        while record != 0:
            following = load64(record)
            keys[n] = load64(record + 8)
            words[n] = record + RECORD | load64(record + 16) << STAMP_BIT
            n += 1
            store64(record, h[H_RETAINED_FREE])
            h[H_RETAINED_FREE] = record
            h[H_RETAINED_ROOM] += 1
            record = following
        newest[part] = 0
    h[H_CURSOR] = end
