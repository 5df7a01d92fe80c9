"""Handles PULL: answers in chunks, each gathered when there is room for it, from the rows as they are then. Keeps what
READ_AFTER says, which is the body of its frame, until a pull has seen it."""

from __future__ import annotations

from typing import Any

import numpy as np

from elasticps.kernels.hashing import hash_key as _hash_key
from elasticps.server.fast.frames import HEADER, ROWS, allot, find_table, put_header, queue
from elasticps.server.fast.layout import (
    B_CODE,
    B_DIM,
    B_HEADER,
    B_KEYS_AT,
    B_ROWS,
    BLOCK,
    BLOCKS,
    C_AFTER,
    C_AFTER_AT,
    C_AFTER_EPOCH,
    C_AFTER_ROOM,
    C_ANSWERED,
    C_APP,
    C_BASE,
    C_WORKER,
    CONNECTION,
    DECODED,
    DONE,
    FLUSH,
    GROW,
    GROW_ROWS,
    H_ACKED,
    H_ARENA,
    H_BLOCKS,
    H_CHUNK,
    H_COLUMNS,
    H_CONNECTIONS,
    H_DECODED,
    H_EPOCH,
    H_FLAGS,
    H_FULL_SINCE,
    H_GUARDED,
    H_HELD,
    H_HELD_COUNT,
    H_INFO,
    H_PULLS,
    H_RANGES,
    H_RECEIVED_PULL,
    H_ROWS,
    H_ROWS_PULLED,
    H_ROWS_SIZE,
    H_SEQ,
    H_SIZE,
    H_TAIL_SINCE,
    H_TAILED,
    H_TAILED_COUNT,
    SLOW,
    T_COUNTED,
    TABLE_HEADER,
    TABLE_PULL,
    TABLE_PULL_WORDS,
)
from elasticps.server.fast.memory import load16, load32, load64, store32, store64, words
from elasticps.server.fast.operations import progress_row, room, worker_row
from elasticps.store.codec import encode_rows
from elasticps.store.index import gather_to
from elasticps.store.native import H_DIM, H_SALT, H_SHIFT, HEADER_SIZE, copy, kernel
from elasticps.wire.frames import ANY, CODED, LAST, TABLES
from replication.progress import PART_BITS

hash_key: Any = _hash_key


@kernel
def reached(h, worker, base, address, count):
    """The clock up to which all steps of a worker are applied in the ranges at an address."""
    row_at = worker_row(h, worker)
    if row_at < 0 or count == 0:
        return base
    row, columns, ranges = progress_row(h, row_at), words(h[H_COLUMNS], h[H_RANGES]), words(address, count)
    least = row[columns[ranges[0]]]
    for i in range(1, count):
        least = min(least, row[columns[ranges[i]]])
    return max(base, least >> PART_BITS)


@kernel
def read_after(h, c, at):
    """Handles a READ_AFTER, if there is room for what it says."""
    conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * c, CONNECTION)
    body, n = load64(at + 8), load32(at + 52)
    if body > conn[C_AFTER_ROOM] or n > h[H_RANGES] or body != ((4 * n + 7) & ~7) + 8 * n or load64(at + 24) < 0:
        return SLOW
    for i in range(n):
        if load32(at + HEADER + 4 * i) >= h[H_RANGES]:
            return SLOW
    copy(conn[C_AFTER_AT], at + HEADER, body)
    conn[C_AFTER] = n
    conn[C_AFTER_EPOCH] = load64(at + 24)
    return DONE


@kernel
def has_steps(h, conn):
    """Whether all steps that READ_AFTER named are applied here."""
    n, worker = conn[C_AFTER], worker_row(h, conn[C_WORKER])
    if worker < 0:
        return False
    row, columns = progress_row(h, worker), words(h[H_COLUMNS], h[H_RANGES])
    named = conn[C_AFTER_AT]
    progress = named + ((4 * n + 7) & ~7)
    lacking = 0
    for i in range(n):
        lacking += row[columns[load32(named + 4 * i)]] < load64(progress + 8 * i)
    return lacking == 0


@kernel
def unshown(h, blocks):
    """Whether some key lies in a range with operations that its joiner, the next tail, may lack."""
    flags, seq, acked = words(h[H_FLAGS], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES]), words(h[H_ACKED], h[H_RANGES])
    b = h[H_BLOCKS]
    for _ in range(blocks):
        header, n, keys = load64(b + 8 * B_HEADER), load64(b + 8 * B_ROWS), load64(b + 8 * B_KEYS_AT)
        salt, shift = np.uint64(load64(header + 8 * H_SALT)), np.uint64(load64(header + 8 * H_SHIFT))
        for i in range(n):
            r = np.int64(hash_key(load64(keys + 8 * i), salt) >> shift)
            if flags[r] & T_COUNTED and acked[r] < seq[r]:
                return True
        b += 8 * BLOCK
    return False


@kernel
def note_keys(h, b, number, app, coded, n, keys):
    """Records n keys of a table at an address; SLOW if compiled code cannot read this table for this application."""
    entry = find_table(h, number, app)
    if entry == 0:
        return SLOW
    header = load64(entry + 8 * TABLE_HEADER)
    code, width = 0, load64(header + 8 * H_DIM)
    if coded:
        code, width = load64(entry + 8 * TABLE_PULL), load64(entry + 8 * TABLE_PULL_WORDS)
    if code < 0:
        return SLOW
    store64(b + 8 * B_HEADER, header)
    store64(b + 8 * B_ROWS, n)
    store64(b + 8 * B_DIM, width)
    store64(b + 8 * B_CODE, code)
    store64(b + 8 * B_KEYS_AT, keys)
    return DONE


@kernel
def note_tables(h, count, at, end, app, coded):
    """Records the blocks of a pull of several tables; SLOW if they do not fill the space between the addresses."""
    if count > BLOCKS:
        return SLOW
    b = h[H_BLOCKS]
    for _ in range(count):
        if at + 24 > end:
            return SLOW
        n, keys = load32(at + 4), at + 24
        if load32(at + 8) or load16(at + 12) or keys + 8 * n > end or note_keys(h, b, load32(at), app, coded, n, keys):
            return SLOW
        b += 8 * BLOCK
        at = keys + 8 * n
    return DONE if at == end else SLOW


@kernel
def next_rows(h, block, done, left):
    """How many rows of a block, after the first `done`, fit in `left` bytes of a frame; at least 1 if it is empty."""
    b = h[H_BLOCKS] + 8 * BLOCK * block
    fits = max(left, 0) // (4 * load64(b + 8 * B_DIM))
    if left == h[H_CHUNK]:
        fits = max(fits, 1)
    return min(load64(b + 8 * B_ROWS) - done, fits)


@kernel
def measure(h, blocks, done):
    """Rows, and their bytes, of the next frame of an answer of which `done` rows have been sent."""
    rows = size = 0
    b = h[H_BLOCKS]
    for i in range(blocks):
        n = load64(b + 8 * B_ROWS)
        skip = min(done, n)
        done -= skip
        if skip < n:
            k = next_rows(h, i, skip, h[H_CHUNK] - size)
            rows += k
            size += 4 * k * load64(b + 8 * B_DIM)
            if skip + k < n:
                break
        b += 8 * BLOCK
    return rows, size


@kernel
def show(h, table, code, keys, n, target, width):
    """Writes n rows of a table, encoded by its filters, `width` words each."""
    dim = table[H_DIM]
    if code == 0:
        gather_to(table, words(keys, n), target, words(h[H_ROWS], n))
        return
    step = DECODED // dim
    for first in range(0, n, step):
        k = min(step, n - first)
        gather_to(table, words(keys + 8 * first, k), h[H_DECODED], words(h[H_ROWS], k))
        encode_rows(code, h[H_DECODED], k, dim, target + 4 * width * first, width)


@kernel
def show_rows(h, blocks, done, k, target):
    """Writes `k` rows of the recorded blocks, after the first `done`."""
    b = h[H_BLOCKS]
    for _ in range(blocks):
        n, width = load64(b + 8 * B_ROWS), load64(b + 8 * B_DIM)
        skip = min(done, n)
        done -= skip
        some = min(k, n - skip)
        if some:
            table = words(load64(b + 8 * B_HEADER), HEADER_SIZE)
            show(h, table, load64(b + 8 * B_CODE), load64(b + 8 * B_KEYS_AT) + 8 * skip, some, target, width)
            target += 4 * width * some
            k -= some
        b += 8 * BLOCK


@kernel
def pull(h, c, at):
    """Handles a worker's pull, or the rest of one that has been answered in part."""
    flags, body, request, epoch, clock = (
        load16(at + 6),
        load64(at + 8),
        load64(at + 16),
        load64(at + 24),
        load64(at + 32),
    )
    number, n, bound = load32(at + 48), load32(at + 52), load32(at + 56)
    conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * c, CONNECTION)
    if flags & ~(ANY | CODED | TABLES) or bound or epoch > h[H_EPOCH] or load32(at + 40) != conn[C_WORKER]:
        return SLOW
    if epoch < (h[H_FULL_SINCE] if flags & ANY else h[H_TAIL_SINCE]):
        return SLOW
    if clock and conn[C_ANSWERED] == 0:
        if flags & ANY:
            have = reached(h, conn[C_WORKER], conn[C_BASE], h[H_HELD], h[H_HELD_COUNT])
        else:
            have = reached(h, conn[C_WORKER], conn[C_BASE], h[H_TAILED], h[H_TAILED_COUNT])
        if have < clock:
            return SLOW
    if conn[C_AFTER] and conn[C_ANSWERED] == 0:
        if not has_steps(h, conn):
            return SLOW
        conn[C_AFTER] = 0
    blocks, coded = 1, flags & CODED
    if flags & TABLES:
        blocks = n
        if note_tables(h, n, at + HEADER, at + HEADER + body, conn[C_APP], coded):
            return SLOW
        n = 0
        for i in range(blocks):
            n += load64(h[H_BLOCKS] + 8 * (BLOCK * i + B_ROWS))
    elif 8 * n != body or note_keys(h, h[H_BLOCKS], number, conn[C_APP], coded, n, at + HEADER):
        return SLOW
    if h[H_GUARDED] and flags & ANY == 0 and unshown(h, blocks):
        return SLOW
    done = conn[C_ANSWERED]
    k, data = measure(h, blocks, done)
    size = (data + 7) & ~7
    reason = room(h, HEADER + size, 1)
    if reason:
        return reason
    if k > h[H_ROWS_SIZE]:
        h[H_INFO], h[H_SIZE] = GROW_ROWS, k
        return GROW
    offset = allot(h, HEADER + size)
    to = h[H_ARENA] + offset
    last = done + k == n
    put_header(to, ROWS, LAST if last else 0, size, request, epoch, done, 0, 0, 0, k, 0, 0)
    show_rows(h, blocks, done, k, to + HEADER)
    if size > data:
        store32(to + HEADER + size - 4, 0)
    queue(h, c, -1, offset, HEADER + size)
    if not last:
        conn[C_ANSWERED] = done + k
        return FLUSH
    conn[C_ANSWERED] = 0
    h[H_PULLS] += 1
    h[H_ROWS_PULLED] += n
    h[H_RECEIVED_PULL] += body
    return DONE
