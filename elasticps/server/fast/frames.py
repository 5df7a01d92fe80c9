"""Writes headers, reads blocks and queues bytes, all in raw memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.server.fast.layout import (
    B_CODE,
    B_DIM,
    B_GRADS_AT,
    B_HEADER,
    B_KEYS_AT,
    B_ROWS,
    B_TABLE,
    B_UPDATE,
    B_VALUES,
    B_VALUES_AT,
    BLOCK,
    BLOCKS,
    BROKEN,
    C_SERIAL,
    CONNECTION,
    DONE,
    H_ARENA,
    H_ARENA_USED,
    H_BLOCKS,
    H_CONNECTIONS,
    H_EPOCH,
    H_SEGMENT_COUNT,
    H_SEGMENTS,
    H_STARTS,
    H_TABLE_COUNT,
    H_TABLES,
    SEGMENT,
    SLOW,
    TABLE,
    TABLE_APP,
    TABLE_HEADER,
    TABLE_ID,
    TABLE_PUSH,
    TABLE_PUSH_WORDS,
    TABLE_UPDATE,
    TABLE_VALUES,
)
from elasticps.server.fast.memory import load16, load32, load64, store64
from elasticps.store.native import H_SALT, H_SHIFT, kernel
from elasticps.wire.frames import MAGIC, VERSION, Kind

hash_key: Any = _hash_key
Words = np.ndarray

HEADER = 64
MAGIC_AND_VERSION = MAGIC | VERSION << 32
OK, ROWS, FORWARD, ACK = int(Kind.OK), int(Kind.ROWS), int(Kind.FORWARD), int(Kind.ACK)


@kernel
def put_header(at, kind, flags, body, request, epoch, clock, worker, parts, table, items, bound, wait):
    """Writes a header; `parts` is first | part << 16. Every field fits its place."""
    store64(at, MAGIC_AND_VERSION | kind << 40 | flags << 48)
    store64(at + 8, body)
    store64(at + 16, request)
    store64(at + 24, epoch)
    store64(at + 32, clock)
    store64(at + 40, worker | parts << 32)
    store64(at + 48, table | items << 32)
    store64(at + 56, bound | wait << 32)


@kernel
def queue(h, c, chunk, offset, n):
    """Queues `n` bytes of a chunk (-1: of the arena) for connection `c`, behind all that was queued before."""
    count = h[H_SEGMENT_COUNT]
    if count:
        last = h[H_SEGMENTS] + 8 * SEGMENT * (count - 1)
        if load64(last) == c and load64(last + 8) == chunk and load64(last + 16) + load64(last + 24) == offset:
            store64(last + 24, load64(last + 24) + n)
            return
    segment = h[H_SEGMENTS] + 8 * SEGMENT * count
    store64(segment, c)
    store64(segment + 8, chunk)
    store64(segment + 16, offset)
    store64(segment + 24, n)
    h[H_SEGMENT_COUNT] = count + 1


@kernel
def allot(h, n):
    """Allocates `n` bytes of the arena and returns their offset; the caller has checked that they are free."""
    offset = h[H_ARENA_USED]
    h[H_ARENA_USED] = offset + n
    return offset


@kernel
def answer_ok(h, c, serial, request):
    """Answers OK to a request, if its connection is still open."""
    if load64(h[H_CONNECTIONS] + 8 * (c * CONNECTION + C_SERIAL)) != serial:
        return
    offset = allot(h, HEADER)
    put_header(h[H_ARENA] + offset, OK, 0, 0, request, h[H_EPOCH], 0, 0, 0, 0, 0, 0, 0)
    queue(h, c, -1, offset, HEADER)


@kernel
def find_table(h, number, app):
    """Address of a table's entry; 0 if there is none, or if another application owns it. app: 0 may use all tables."""
    for t in range(h[H_TABLE_COUNT]):
        at = h[H_TABLES] + 8 * TABLE * t
        if load64(at + 8 * TABLE_ID) == number:
            owner = load64(at + 8 * TABLE_APP)
            return at if app == 0 or owner == 0 or owner == app else 0
    return 0


@kernel
def read_blocks(h, count, at, end, app):
    """Reads the blocks between two addresses into H_BLOCKS. BROKEN if they do not fill the space exactly, SLOW if a
    block does not fit its table. app: as in `find_table`."""
    if count > BLOCKS:
        return SLOW
    b = h[H_BLOCKS]
    for _ in range(count):
        if at + 24 > end:
            return BROKEN
        rows, dim, values = load32(at + 4), load32(at + 8), load16(at + 12)
        keys = at + 24 + ((4 * values + 7) & ~7)
        grads = keys + 8 * rows
        stop = grads + 4 * rows * dim
        if stop > end or dim == 0:
            return BROKEN
        table = find_table(h, load32(at), app)
        if table == 0:
            return SLOW
        header = load64(table + 8 * TABLE_HEADER)
        update = load64(table + 8 * TABLE_UPDATE)
        if update < 0 or load64(table + 8 * TABLE_PUSH_WORDS) != dim or load64(table + 8 * TABLE_VALUES) != values:
            return SLOW
        store64(b + 8 * B_TABLE, load32(at))
        store64(b + 8 * B_HEADER, header)
        store64(b + 8 * B_UPDATE, update)
        store64(b + 8 * B_ROWS, rows)
        store64(b + 8 * B_DIM, dim)
        store64(b + 8 * B_CODE, load64(table + 8 * TABLE_PUSH))
        store64(b + 8 * B_VALUES, values)
        store64(b + 8 * B_VALUES_AT, at + 24)
        store64(b + 8 * B_KEYS_AT, keys)
        store64(b + 8 * B_GRADS_AT, grads)
        b += 8 * BLOCK
        at = (stop + 7) & ~7
    return DONE if at == end else BROKEN


@kernel
def place_blocks(h, count, positions, low, m, ranges):
    """Writes to H_STARTS where the rows of each position begin. False if a key lies outside positions low..low+m-1, or
    out of order. ranges: P."""
    b = h[H_BLOCKS]
    for i in range(count):
        header, n, keys = load64(b + 8 * B_HEADER), load64(b + 8 * B_ROWS), load64(b + 8 * B_KEYS_AT)
        salt = np.uint64(load64(header + 8 * H_SALT))
        shift = np.uint64(load64(header + 8 * H_SHIFT))
        starts = h[H_STARTS] + 8 * (ranges + 1) * i
        at = 0  # the next position whose start is to be written
        for k in range(n):
            position = positions[np.int64(hash_key(load64(keys + 8 * k), salt) >> shift)] - low
            if position < at - 1 or position >= m or position < 0:
                return False
            while at <= position:
                store64(starts + 8 * at, k)
                at += 1
        while at <= m:
            store64(starts + 8 * at, n)
            at += 1
        b += 8 * BLOCK
    return True
