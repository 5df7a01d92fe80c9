"""Expands shortened keys in place, so that all later code sees whole frames only.

The word in front of the keys says how they were shortened (`elasticps.wire.packing`). Key lists that later frames refer
to lie in memory of the connection, at places that the worker chooses; they end with the connection.
"""

from __future__ import annotations

import numpy as np

from elasticps.server.fast.frames import HEADER
from elasticps.server.fast.layout import (
    BLOCK,
    BLOCKS,
    C_ADDRESS,
    C_BYTES,
    C_END,
    C_LIMIT,
    C_LISTS,
    C_START,
    DONE,
    H_BLOCKS,
    H_INFO,
    LISTS,
    UNREADABLE,
    WIDER,
)
from elasticps.server.fast.memory import load8, load16, load32, load64, move, store64
from elasticps.server.fast.step_records import record_size
from elasticps.store.native import kernel
from elasticps.wire.frames import ALL_RANGES, MAX_DIM, RECORD, SHORT, TABLES, Kind
from elasticps.wire.packing import DELTA, KEEP, KNOWN, LIST_KEYS

PULL = int(Kind.PULL)
B_AT, B_WORD, B_KEYS_BYTES, B_STOP, B_N = range(5)  # of a block, in the memory of `read_blocks`


@kernel
def keys_bytes(word, n):
    """Bytes that n keys take on the wire; -1 if the word is invalid."""
    how, place, coded = word & 0xFF, word >> 8 & 0xFFFFFF, word >> 32 & 0xFFFFFFFF
    if how & (KEEP | KNOWN) and place + n > LIST_KEYS:
        return -1
    if how == KNOWN:
        return 0
    if how == KEEP:
        return 8 * n
    if how & ~KEEP == DELTA and coded <= 8 * n:
        return (coded + 7) & ~7
    return -1


@kernel
def write_keys(lists, word, source, n, target):
    """Expands n keys from `source` to `target`, which is not above it; False if they are invalid."""
    how, coded = word & 0xFF, word >> 32 & 0xFFFFFFFF
    if how == KNOWN:
        move(target, lists + 8 * (word >> 8 & 0xFFFFFF), 8 * n)
        return True
    if how & DELTA == 0:
        move(target, source, 8 * n)
        return True
    end = target + 8 * n
    at = end - coded  # none takes more than 8 bytes, so what is written never overtakes what is read
    move(at, source, coded)
    key = np.uint64(0)
    for i in range(n):
        value, shift = np.uint64(0), 0
        more = True
        while more:
            if at == end or shift > 49:
                return False
            byte = load8(at)
            value |= np.uint64(byte & 127) << np.uint64(shift)
            more = byte > 127
            shift += 7
            at += 1
        if end - at > 8 * (n - i - 1):
            return False
        key += (value >> np.uint64(1)) ^ (np.uint64(0) - (value & np.uint64(1)))
        store64(target + 8 * i, np.int64(key))
    return at == end


@kernel
def keep_keys(lists, word, keys, n):
    """Stores the keys in the connection's lists, if the worker asks for it."""
    if word & KEEP:
        move(lists + 8 * (word >> 8 & 0xFFFFFF), keys, 8 * n)


@kernel
def write_out(h, conn, at):
    """Expands the keys of the frame at the front, which is whole."""
    body = load64(at + 8)
    if conn[C_LISTS] == 0:
        return LISTS
    if load8(at + 5) == PULL and load16(at + 6) & TABLES == 0:
        reason = write_out_pull(h, conn, at, body)
    else:
        reason = write_out_blocks(h, conn, at, body)
    if reason == DONE:
        store64(at, load64(at) & ~(SHORT << 48))
    return reason


@kernel
def grow(h, conn, at, body, more):
    """DONE if a frame's body can grow by `more` bytes; else the reason to stop."""
    if body + more > conn[C_LIMIT]:
        return UNREADABLE
    if conn[C_END] + more > conn[C_BYTES]:
        h[H_INFO] = conn[C_END] - conn[C_START] + more
        return WIDER
    return DONE


@kernel
def move_rest(conn, at, more):
    """Moves all received bytes from address `at` on by `more`."""
    move(at + more, at, conn[C_ADDRESS] + conn[C_END] - at)
    conn[C_END] += more


@kernel
def write_out_pull(h, conn, at, body):
    n, keys, end = load32(at + 52), at + HEADER, at + HEADER + body
    if body < 8:
        return UNREADABLE
    word = load64(keys)
    size = keys_bytes(word, n)
    if size < 0 or 8 + size != body:
        return UNREADABLE
    more = 8 * n - body
    reason = grow(h, conn, at, body, more)
    if reason:
        return reason
    if more > 0:
        move_rest(conn, end, more)
    if not write_keys(conn[C_LISTS], word, keys + 8, n, keys):
        return UNREADABLE
    if more < 0:
        move_rest(conn, end, more)
    keep_keys(conn[C_LISTS], word, keys, n)
    store64(at + 8, 8 * n)
    return DONE


@kernel
def write_out_blocks(h, conn, at, body):
    """Expands a push, or a pull of several tables. Each block moves as far as those before it have grown, the last one
    first; what stands behind them, as a record, moves with what follows the frame."""
    blocks, p, end = load32(at + 52), at + HEADER, at + HEADER + body
    if load8(at + 5) != PULL and load16(at + 6) & RECORD:
        end -= record_size(h)
    if blocks > BLOCKS or p > end:
        return UNREADABLE
    if load8(at + 5) != PULL and load16(at + 6) & ALL_RANGES == 0:
        if p + 8 > end or load64(p) < 0 or load64(p) > body:
            return UNREADABLE
        p += (8 + 4 * load64(p) + 7) & ~7
    more = 0
    b = h[H_BLOCKS]
    for _ in range(blocks):
        if p + 24 > end:
            return UNREADABLE
        n, dim, word = load32(p + 4), load32(p + 8), load64(p + 16)
        keys = p + 24 + ((4 * load16(p + 12) + 7) & ~7)
        size = keys_bytes(word, n) if word else 8 * n
        if size < 0 or dim > MAX_DIM:
            return UNREADABLE
        stop = (keys + size + 4 * n * dim + 7) & ~7
        if stop > end:
            return UNREADABLE
        store64(b + 8 * B_AT, p)
        store64(b + 8 * B_WORD, word)
        store64(b + 8 * B_KEYS_BYTES, size)
        store64(b + 8 * B_STOP, stop)
        more += 8 * n - size
        p = stop
        b += 8 * BLOCK
    if p != end:
        return UNREADABLE
    reason = grow(h, conn, at, body, more)
    if reason:
        return reason
    move_rest(conn, end, more)
    left = more
    for _ in range(blocks):
        b -= 8 * BLOCK
        p, word, size, stop = load64(b), load64(b + 8 * B_WORD), load64(b + 8 * B_KEYS_BYTES), load64(b + 8 * B_STOP)
        n, keys = load32(p + 4), p + 24 + ((4 * load16(p + 12) + 7) & ~7)
        move(keys + size + left, keys + size, stop - keys - size)
        left -= 8 * n - size
        if word == 0:
            move(keys + left, keys, 8 * n)
        elif not write_keys(conn[C_LISTS], word, keys, n, keys + left):
            return UNREADABLE
        move(p + left, p, keys - p)
        store64(p + left + 16, 0)
        store64(b + 8 * B_AT, p + left)
    for _ in range(blocks):
        p, word = load64(b), load64(b + 8 * B_WORD)
        keep_keys(conn[C_LISTS], word, p + 24 + ((4 * load16(p + 12) + 7) & ~7), load32(p + 4))
        b += 8 * BLOCK
    store64(at + 8, body + more)
    return DONE
