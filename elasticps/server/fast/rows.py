"""Finds the rows that an operation changes, makes those that are missing, and updates them."""

from __future__ import annotations

import numpy as np

from elasticps.server.fast.frames import allot, hash_key
from elasticps.server.fast.layout import (
    B_ADMITS,
    B_CODE,
    B_DIM,
    B_FIRST,
    B_GRADS_AT,
    B_HEADER,
    B_KEYS_AT,
    B_ROWS,
    B_STALE,
    B_TABLE,
    B_UPDATE,
    B_VALUES,
    B_VALUES_AT,
    BLOCK,
    BLOCKS,
    CANDIDATES_MISSING,
    DECODED,
    DONE,
    GROW,
    GROW_ROWS,
    H_ADMITTING,
    H_APPLIED,
    H_ARENA,
    H_BLOCKS,
    H_BOUNDS,
    H_CHANGED,
    H_COUNTED,
    H_DECODED,
    H_FLAGS,
    H_INFO,
    H_INSIDE,
    H_JOURNAL,
    H_MAKING,
    H_MISSING,
    H_MISSING_COUNT,
    H_RANGES,
    H_ROOM,
    H_ROWS,
    H_ROWS_APPLIED,
    H_ROWS_SIZE,
    H_SIZE,
    KEEP,
    ROWS_MISSING,
    SLOW,
    T_QUIET,
)
from elasticps.server.fast.memory import floats, load64, matrix, store64, words
from elasticps.store import admission, index, journal, stamps, updates, usage
from elasticps.store.codec import decode_rows
from elasticps.store.native import (
    H_ADMITS,
    H_DIM,
    H_FINITE,
    H_RETAINED,
    H_RETAINED_ROOM,
    H_SALT,
    H_SHIFT,
    H_STALE,
    H_STRIDE,
    H_USAGE_FLOATS,
    HEADER_SIZE,
    copy,
    kernel,
)
from elasticps.store.native import H_ROWS as STORED
from elasticps.store.values import all_finite

INITIALISE, INDEX_BYTES = index.INITIALISE, index.GROWN_BYTES


@kernel
def keep_inside(h, blocks):
    """Copies the rows to apply to blocks behind those of the frame: of a range that is being filled here, only rows
    whose keys have arrived already. Sets H_INSIDE to the number of these blocks."""
    flags, bounds = words(h[H_FLAGS], h[H_RANGES]), words(h[H_BOUNDS], h[H_RANGES])
    b, inside = h[H_BLOCKS], 0
    for _ in range(blocks):
        table, n, row = load64(b + 8 * B_HEADER), load64(b + 8 * B_ROWS), 4 * load64(b + 8 * B_DIM)
        salt, shift = np.uint64(load64(table + 8 * H_SALT)), np.uint64(load64(table + 8 * H_SHIFT))
        keys = h[H_ARENA] + allot(h, 8 * n)
        grads = h[H_ARENA] + allot(h, (row * n + 7) & ~7)
        k = 0
        for i in range(n):
            key = load64(load64(b + 8 * B_KEYS_AT) + 8 * i)
            hashed = hash_key(key, salt)
            r = np.int64(hashed >> shift)
            if flags[r] & T_QUIET and np.int64(hashed >> np.uint64(2)) >= bounds[r]:
                continue
            store64(keys + 8 * k, key)
            copy(grads + row * k, load64(b + 8 * B_GRADS_AT) + row * i, row)
            k += 1
        if k:
            to = h[H_BLOCKS] + 8 * BLOCK * (BLOCKS + inside)
            copy(to, b, 8 * B_FIRST)
            store64(to + 8 * B_ROWS, k)
            store64(to + 8 * B_KEYS_AT, keys)
            store64(to + 8 * B_GRADS_AT, grads)
            inside += 1
        b += 8 * BLOCK
    h[H_INSIDE] = inside


@kernel
def find_rows(h, first, blocks, room, worker, clock):
    """Writes the addresses of all rows of the blocks from `first` on to H_ROWS, and makes missing rows; where a table
    has an admission policy, only those that it admits in this step of a worker, and the others get WAITS. SLOW, with
    none made, if all that are missing take more bytes than `room`; KEEP if copies of rows need memory.

    ROWS_MISSING or CANDIDATES_MISSING if that needs memory. Some rows are made then, and some keys counted, so the next
    call has to be for the same frame: it goes on from there.
    """
    if h[H_MAKING] == 0:
        reason = look_up(h, first, blocks, room)
        if reason or h[H_MAKING] == 0:
            return reason
    return make_missing(h, first, blocks, worker, clock)


@kernel
def look_up(h, first, blocks, room):
    """The part of `find_rows` that changes nothing. Sets H_MAKING if rows are missing."""
    total = 0
    begin = h[H_BLOCKS] + 8 * BLOCK * first
    b = begin
    for _ in range(blocks):
        store64(b + 8 * B_FIRST, total)
        total += load64(b + 8 * B_ROWS)
        b += 8 * BLOCK
    if total > h[H_ROWS_SIZE]:
        h[H_INFO], h[H_SIZE] = GROW_ROWS, total
        return GROW
    b = begin
    needed = stale = 0
    for i in range(blocks):
        n = load64(b + 8 * B_ROWS)
        header = words(load64(b + 8 * B_HEADER), HEADER_SIZE)
        keys, rows = words(load64(b + 8 * B_KEYS_AT), n), words(h[H_ROWS] + 8 * load64(b + 8 * B_FIRST), n)
        missing = index.find(header, keys, rows)
        if header[H_USAGE_FLOATS] > 2:
            return SLOW  # Python takes scores
        store64(b + 8 * B_ADMITS, 1 if missing and header[H_ADMITS] else 0)
        needed += missing * (header[H_STRIDE] + INDEX_BYTES)
        store64(b + 8 * B_STALE, header[H_STALE])
        stale += header[H_STALE]  # of all blocks, for several may be of this table
        if header[H_STALE] and header[H_RETAINED] and stale > header[H_RETAINED_ROOM]:
            h[H_INFO], h[H_SIZE] = first + i, stale
            return KEEP
        b += 8 * BLOCK
    if needed > room:
        return SLOW
    if needed:
        h[H_MAKING], h[H_ADMITTING] = 1, 0
    return DONE


@kernel
def make_missing(h, first, blocks, worker, clock):
    """Makes the missing rows of the blocks from the one on that H_MAKING names; see `find_rows`."""
    begin = h[H_BLOCKS] + 8 * BLOCK * first
    for i in range(h[H_MAKING] - 1, blocks):
        b = begin + 8 * BLOCK * i
        n = load64(b + 8 * B_ROWS)
        header = words(load64(b + 8 * B_HEADER), HEADER_SIZE)
        keys = words(load64(b + 8 * B_KEYS_AT), n)
        rows = words(h[H_ROWS] + 8 * load64(b + 8 * B_FIRST), n)
        h[H_MAKING], h[H_INFO] = i + 1, first + i
        if load64(b + 8 * B_ADMITS):
            if h[H_ADMITTING] == 0 and comes_again(begin, i):
                index.find(header, keys, rows)  # an earlier block has made some
            reason = make_admitted(h, header, keys, rows, worker, clock)
            if reason:
                return reason
        elif make(h, header, keys, rows) < n:
            return ROWS_MISSING
    h[H_MAKING] = 0
    return DONE


@kernel
def make(h, header, keys, rows):
    """Makes the rows of keys [n] that are missing; returns n, or less if that needs memory."""
    before = header[STORED]
    done = index.insert(header, keys, matrix(h[H_ROWS], 0, 0), INITIALISE, rows, 0)
    # As many as were made, of what was there before the frame: it is not refused while it waits for memory.
    h[H_ROOM] -= (header[STORED] - before) * (header[H_STRIDE] + INDEX_BYTES)
    return done


@kernel
def make_admitted(h, header, keys, rows, worker, clock):
    """Counts the pushes of those keys [n] of a block that have no row, and makes the rows of those that get one. They
    are collected first: which they are no processor can guess, and each step would pay for that again."""
    size = 8 * h[H_ROWS_SIZE]
    indices = words(h[H_MISSING], keys.shape[0])
    if h[H_ADMITTING] == 0:
        m = 0
        for i in range(keys.shape[0]):
            indices[m] = i
            m += 1 if rows[i] == 0 else 0
        h[H_MISSING_COUNT] = m
    m = h[H_MISSING_COUNT]
    missing, new = words(h[H_MISSING] + size, m), words(h[H_MISSING] + 2 * size, m)
    counts = floats(h[H_COUNTED], m)
    if h[H_ADMITTING] == 0:
        h[H_ADMITTING] = 1
        for j in range(m):
            missing[j] = keys[indices[j]]
            new[j] = 0
    if h[H_ADMITTING] <= m:
        candidates = admission.candidates_of(header)
        before = candidates[STORED]
        h[H_ADMITTING] = 1 + admission.admit(header, missing, new, worker, clock, h[H_ADMITTING] - 1, counts)
        h[H_ROOM] -= (candidates[STORED] - before) * INDEX_BYTES
        if h[H_ADMITTING] <= m:
            return CANDIDATES_MISSING
        admission.remove_admitted(header, missing, new)
        for j in range(m):
            rows[indices[j]] = new[j]
    else:  # Python has made the rest
        for j in range(m):
            new[j] = rows[indices[j]]
    done = make(h, header, missing, new)
    for j in range(m):
        rows[indices[j]] = new[j]
    if done < m:
        return ROWS_MISSING
    usage.begin(header, missing, new, counts)
    h[H_ADMITTING] = 0
    return DONE


@kernel
def comes_again(begin, i):
    """Whether a block before block i is of the same table."""
    table = load64(begin + 8 * (BLOCK * i + B_TABLE))
    found = False
    for j in range(i):
        found |= load64(begin + 8 * (BLOCK * j + B_TABLE)) == table
    return found


@kernel
def finite(h, blocks):
    """Whether all gradients are finite, in blocks of tables that ask for that."""
    b = h[H_BLOCKS]
    for _ in range(blocks):
        if load64(load64(b + 8 * B_HEADER) + 8 * H_FINITE):
            n, step = load64(b + 8 * B_ROWS), rows_at_once(b)
            for first in range(0, n, step):
                k = min(step, n - first)
                if not all_finite(gradients(h, b, first, k), k * load64(load64(b + 8 * B_HEADER) + 8 * H_DIM)):
                    return False
        b += 8 * BLOCK
    return True


@kernel
def rows_at_once(b):
    """How many rows of a block are handled at once: all, unless they have to be decoded."""
    if load64(b + 8 * B_CODE) == 0:
        return max(load64(b + 8 * B_ROWS), 1)
    return DECODED // load64(load64(b + 8 * B_HEADER) + 8 * H_DIM)


@kernel
def gradients(h, b, first, count):
    """Address of the gradients of at most `rows_at_once` rows, float32 [count, dim]; valid until the next call."""
    code, width = load64(b + 8 * B_CODE), load64(b + 8 * B_DIM)
    at = load64(b + 8 * B_GRADS_AT) + 4 * width * first
    if code == 0:
        return at
    decode_rows(code, at, count, load64(load64(b + 8 * B_HEADER) + 8 * H_DIM), h[H_DECODED], width)
    return h[H_DECODED]


@kernel
def apply(h, first, blocks):
    """Runs the optimizers on the rows found."""
    b = h[H_BLOCKS] + 8 * BLOCK * first
    for _ in range(blocks):
        n, step, update = load64(b + 8 * B_ROWS), rows_at_once(b), load64(b + 8 * B_UPDATE)
        header = words(load64(b + 8 * B_HEADER), HEADER_SIZE)
        v = floats(load64(b + 8 * B_VALUES_AT), load64(b + 8 * B_VALUES))
        keys_at, rows_at = load64(b + 8 * B_KEYS_AT), h[H_ROWS] + 8 * load64(b + 8 * B_FIRST)
        if load64(b + 8 * B_STALE):
            stamps.touch(header, words(keys_at, n), words(rows_at, n))
        if load64(b + 8 * B_ADMITS):
            admission.spare(header, words(rows_at, n))
        for first in range(0, n, step):
            k = min(step, n - first)
            keys, rows = words(keys_at + 8 * first, k), words(rows_at + 8 * first, k)
            grads = matrix(gradients(h, b, first, k), k, header[H_DIM])
            updates.apply(update, header, keys, grads, v, rows, updates.USED)
        if h[H_JOURNAL] and n:
            journal.note(h[H_JOURNAL], load64(b + 8 * B_TABLE), header[H_DIM], keys_at, n)
        h[H_ROWS_APPLIED] += n
        b += 8 * BLOCK
    h[H_APPLIED] += 1
    h[H_CHANGED] += 1
