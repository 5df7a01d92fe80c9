"""Handles PUSH at a head, FORWARD at a follower and ACK from a successor.

Each handler checks the whole frame first, and returns SLOW, or another reason to stop, while nothing has changed. From
the first change on nothing can fail.
"""

from __future__ import annotations

import numpy as np

from elasticps.model.sharding import GROUP_BITS
from elasticps.server.fast.chain import acknowledge, down_the_chain, finish, new_frame, release, successors
from elasticps.server.fast.frames import HEADER, place_blocks, read_blocks
from elasticps.server.fast.layout import (
    B_VALUES,
    BLOCK,
    BLOCKS,
    BROKEN,
    C_ADDRESS,
    C_APP,
    C_BASE,
    C_CHUNK,
    C_PEER,
    C_ROSTERED,
    C_SERIAL,
    C_SET,
    C_WORKER,
    CONNECTION,
    DONE,
    F_LEFT,
    FLUSH,
    FRAME,
    GROW,
    GROW_ARENA,
    GROW_SEGMENTS,
    H_ACKED,
    H_ACKNOWLEDGED,
    H_ARENA_SIZE,
    H_ARENA_USED,
    H_BLOCKS,
    H_BUDGET,
    H_CAREFUL,
    H_CHANGED,
    H_CLOCKS,
    H_COLUMN_COUNT,
    H_COLUMNS,
    H_CONNECTIONS,
    H_DOWN,
    H_EPOCH,
    H_FLAGS,
    H_FORWARDS,
    H_FRAMES,
    H_FREE_ENTRY_COUNT,
    H_FREE_FRAME_COUNT,
    H_INFO,
    H_INSIDE,
    H_JOINED,
    H_NOTE_COUNT,
    H_NOTES,
    H_ORDER_COUNT,
    H_ORDERS,
    H_PEERS,
    H_POSITIONS,
    H_PUSHES,
    H_PYTHON_BYTES,
    H_RANGES,
    H_RECEIVED_FORWARD,
    H_RECEIVED_PUSH,
    H_RECENT,
    H_RECENT_BYTES,
    H_REFUSED,
    H_ROOM,
    H_ROW_HINTS,
    H_ROW_MASK,
    H_ROWS_APPLIED,
    H_ROWS_PUSHED,
    H_SCRATCH,
    H_SEGMENT_COUNT,
    H_SEGMENT_SIZE,
    H_SEQ,
    H_SINCE,
    H_SIZE,
    H_STRIDE,
    H_UP,
    H_WORKER_COUNT,
    H_WORKERS,
    NOTE,
    NOTES,
    ORDER,
    P_FIRST,
    P_PYTHON,
    PEER,
    SLOW,
    SMALL_BYTES,
    T_COUNTED,
    T_FED,
    T_REPORTED,
)
from elasticps.server.fast.memory import load16, load32, load64, store64, words
from elasticps.server.fast.rows import apply, find_rows, finite, keep_inside
from elasticps.server.fast.step_records import home_of, is_record, note_record, record_size
from elasticps.store.native import kernel
from elasticps.wire.frames import ALL_RANGES, LAST, RECORD
from elasticps.wire.headers import NEVER
from replication.progress import MAX_CLOCK, MAX_PARTS, PART_BITS, PART_MASK

GROUP_MASK = (1 << GROUP_BITS) - 1
MARGIN = 64
NO_BOUND = 1 << 62  # bytes of new rows: a follower makes what its head has decided


@kernel
def worker_row(h, worker):
    """The row of the clocks that belongs to a worker, -1 if there is none."""
    workers = words(h[H_WORKERS], h[H_WORKER_COUNT])
    hint = h[H_ROW_HINTS] + 8 * (worker & h[H_ROW_MASK])
    found = load64(hint)
    if found < h[H_WORKER_COUNT] and workers[found] == worker:
        return found
    for i in range(h[H_WORKER_COUNT]):
        if workers[i] == worker:
            store64(hint, i)
            return i
    return -1


@kernel
def progress_row(h, row_at):
    """A worker's row of the clocks, by columns."""
    return words(h[H_CLOCKS] + 8 * h[H_COLUMN_COUNT] * row_at, h[H_COLUMN_COUNT])


@kernel
def room(h, nbytes, segments):
    """DONE if so many bytes and segments can be queued; else the reason to stop: FLUSH or GROW."""
    if h[H_ARENA_USED] + nbytes > h[H_ARENA_SIZE]:
        if h[H_ARENA_USED]:
            return FLUSH
        h[H_INFO], h[H_SIZE] = GROW_ARENA, nbytes
        return GROW
    if h[H_SEGMENT_COUNT] + segments > h[H_SEGMENT_SIZE]:
        if h[H_SEGMENT_COUNT]:
            return FLUSH
        h[H_INFO], h[H_SIZE] = GROW_SEGMENTS, segments
        return GROW
    return DONE


@kernel
def room_for_operation(h, m, blocks, slots, body, record):
    """As `room`, for an operation on m ranges with `slots` successors. Reads the number of runs from H_INFO; SLOW if
    there are too few free records of frames or entries, or they are too small."""
    if h[H_FREE_FRAME_COUNT] < 1 or h[H_FREE_ENTRY_COUNT] < slots + 1 or m > h[H_STRIDE]:
        return SLOW
    runs = h[H_INFO]
    values = 0
    b = h[H_BLOCKS]
    for _ in range(blocks):
        values += 4 * load64(b + 8 * B_VALUES) + 8
        b += 8 * BLOCK
    copied = min(body, 2 * blocks * runs * SMALL_BYTES)
    if h[H_INSIDE] == 0:
        copied += body
    if record:
        values += record_size(h)
    nbytes = slots * (HEADER + 12 * m + blocks * 28 + values + MARGIN) + copied + m * (HEADER + 24) + MARGIN
    return room(h, nbytes, slots * (3 + 3 * blocks) + 2 * blocks * runs + m + 2)


@kernel
def note(h, shard, number, worker, clock):
    """Records for Python which shard a push trains."""
    at = h[H_NOTES] + 8 * NOTE * h[H_NOTE_COUNT]
    store64(at, number)
    store64(at + 8, shard)
    store64(at + 16, worker)
    store64(at + 24, clock)
    h[H_NOTE_COUNT] += 1


@kernel
def push(h, c, at):
    """Handles a worker's part of a step: applies it, forwards it, and answers once it is committed."""
    conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * c, CONNECTION)
    flags, body, request, epoch = load16(at + 6), load64(at + 8), load64(at + 16), load64(at + 24)
    clock, steps, first, part = load64(at + 32), load32(at + 40), load16(at + 44), load16(at + 46)
    lag, blocks, bound, wait = load32(at + 48), load32(at + 52), load32(at + 56), load32(at + 60)
    worker = conn[C_WORKER]
    if h[H_CAREFUL] or flags & ~(LAST | ALL_RANGES | RECORD) or epoch < 0 or epoch > h[H_EPOCH]:
        return SLOW
    if conn[C_BASE] < 0 or conn[C_ROSTERED] == 0 or (bound and wait != conn[C_SET]):
        return SLOW
    if clock <= 0 or clock >= MAX_CLOCK or part >= MAX_PARTS - 1 or h[H_NOTE_COUNT] == NOTES or lag > clock:
        return SLOW
    expected = 0 if steps == NEVER else ((clock - steps) << PART_BITS) | first
    after = clock << PART_BITS if flags & LAST else ((clock - 1) << PART_BITS) | (part + 1)
    if expected < 0 or expected >= after:
        return SLOW
    if h[H_RECENT_BYTES] + h[H_PYTHON_BYTES] >= h[H_BUDGET]:
        return SLOW
    order = 0
    for i in range(h[H_ORDER_COUNT]):
        if load64(h[H_ORDERS] + 8 * ORDER * i) == epoch:
            order = h[H_ORDERS] + 8 * ORDER * i
    if order == 0:
        return SLOW
    headed = load64(order + 8)
    positions = words(load64(order + 24), h[H_RANGES])
    low, m, begin, end, record = 0, headed, at + HEADER, at + HEADER + body, np.int64(0)
    if flags & RECORD:
        record = end = end - record_size(h)
        if flags & LAST == 0 or not is_record(h, record, begin, clock):
            return SLOW
    if flags & ALL_RANGES == 0:
        if begin + 8 > end:
            return SLOW
        m = load64(begin)
        if m <= 0 or m > headed or begin + 8 + 4 * m > end:
            return SLOW
        named = begin + 8
        r = load32(named)
        if r >= h[H_RANGES]:
            return SLOW
        low = positions[r]
        if low < 0 or low + m > headed:
            return SLOW
        every = words(load64(order + 16), headed)
        for p in range(m):
            if load32(named + 4 * p) != every[low + p]:
                return SLOW
        begin += (8 + 4 * m + 7) & ~7
    if m == 0 or (record and (positions[home_of(h, worker)] < low or positions[home_of(h, worker)] >= low + m)):
        return SLOW
    ranges = words(load64(order + 16) + 8 * low, m)
    reason = read_blocks(h, blocks, begin, end, conn[C_APP])
    if reason:
        return SLOW  # Python says what is wrong
    row_at = worker_row(h, worker)
    if row_at < 0:
        return SLOW
    row, columns = progress_row(h, row_at), words(h[H_COLUMNS], h[H_RANGES])
    if first and clock <= load64(h[H_REFUSED] + 8 * row_at):
        return SLOW  # the answer to the last part names what was refused of all
    for p in range(m):
        column = columns[ranges[p]]
        if column == 0 or row[column] != expected:
            return SLOW  # without a column it is the first progress in the range: Python makes one
    if not place_blocks(h, blocks, positions, low, m, h[H_RANGES]):
        return SLOW
    if not finite(h, blocks):
        return SLOW
    slots = successors(h, ranges, m)
    if slots < 0:
        return SLOW
    reason = room_for_operation(h, m, blocks, slots, body, record)
    if reason:
        return reason
    reason = find_rows(h, 0, blocks, h[H_ROOM], worker, after)
    if reason:
        return reason
    # Up to here nothing changed that others can see; from here on nothing can fail.
    seq = words(h[H_SEQ], h[H_RANGES])
    for p in range(m):
        row[columns[ranges[p]]] = after
        seq[ranges[p]] += 1
    if lag and clock - lag > conn[C_BASE]:
        store64(h[H_ACKNOWLEDGED] + 8 * row_at, clock - lag)
    chunk, offset = conn[C_CHUNK], at - conn[C_ADDRESS]
    f = new_frame(h, c, conn[C_SERIAL], request, ranges, m, body, chunk, offset, worker, after, expected)
    if record:
        note_record(h, record, worker, clock)
    down_the_chain(h, c, ranges, m, blocks, worker, after, bound, wait, f, slots, record)
    h[H_PUSHES] += 1
    h[H_RECEIVED_PUSH] += body
    rows = h[H_ROWS_APPLIED]
    apply(h, 0, blocks)
    h[H_ROWS_PUSHED] += h[H_ROWS_APPLIED] - rows
    if bound and 0 <= positions[wait & GROUP_MASK & (h[H_RANGES] - 1)] - low < m:
        note(h, bound - 1, wait, worker, after >> PART_BITS)
    acknowledge(h, ranges, m, 1)
    if load64(h[H_FRAMES] + 8 * (FRAME * f + F_LEFT)) == 0:
        finish(h, f)
    return DONE


@kernel
def forward(h, c, at):
    """Handles a push that a predecessor forwards: applies it and forwards it down the chain."""
    body, epoch, after, worker = load64(at + 8), load64(at + 24), load64(at + 32), load32(at + 40)
    m, blocks, bound, wait = load32(at + 48), load32(at + 52), load32(at + 56), load32(at + 60)
    conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * c, CONNECTION)
    flags, end, record = load16(at + 6), at + HEADER + body, np.int64(0)
    if h[H_CAREFUL] or load16(at + 46) or flags & ~RECORD or epoch < 0 or epoch > h[H_EPOCH] or worker == 0:
        return SLOW
    if conn[C_PEER] < 0:  # as the predecessor of a head
        return SLOW
    if m == 0 or m > h[H_RANGES] or after <= 0 or h[H_NOTE_COUNT] == NOTES:
        return SLOW
    names = (4 * m + 7) & ~7
    if flags & RECORD:
        record = end = end - record_size(h)
        if after & PART_MASK or not is_record(h, record, at + HEADER, after >> PART_BITS):
            return SLOW
    if at + HEADER + names + 8 * m > end:
        return SLOW
    row_at = worker_row(h, worker)
    if row_at < 0:
        return SLOW
    row, columns = progress_row(h, row_at), words(h[H_COLUMNS], h[H_RANGES])
    named, numbers = at + HEADER, at + HEADER + names
    ranges, positions = words(h[H_SCRATCH], m), words(h[H_POSITIONS], h[H_RANGES])
    up, seq, since = words(h[H_UP], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES]), words(h[H_SINCE], h[H_RANGES])
    count = 0
    before = np.int64(-1)
    while count < m:
        r = load32(named + 4 * count)
        if r >= h[H_RANGES] or positions[r] >= 0 or up[r] != conn[C_PEER] or since[r] > epoch:
            break
        column = columns[r]
        if column == 0 or load64(numbers + 8 * count) != seq[r] + 1 or (count and row[column] != before):
            break
        before = row[column]
        ranges[count] = r
        positions[r] = count
        count += 1
    reason = SLOW
    if count == m and (record == 0 or positions[home_of(h, worker)] >= 0):
        reason = checked_forward(h, numbers + 8 * m, end, blocks, positions, ranges, m, body, worker, after, record)
    group = positions[wait & GROUP_MASK & (h[H_RANGES] - 1)]
    for p in range(count):
        positions[ranges[p]] = -1
    if reason:
        return SLOW if reason == BROKEN else reason
    # Up to here nothing changed; from here on nothing can fail.
    inside = h[H_INSIDE]
    slots = successors(h, ranges, m)
    for p in range(m):
        row[columns[ranges[p]]] = after
        seq[ranges[p]] += 1
    chunk, offset = conn[C_CHUNK], at - conn[C_ADDRESS]
    f = new_frame(h, -1, 0, 0, ranges, m, body, chunk, offset, worker, after, before)
    if record:
        note_record(h, record, worker, after >> PART_BITS)
    down_the_chain(h, c, ranges, m, blocks, worker, after, bound, wait, f, slots, record)
    h[H_FORWARDS] += 1
    h[H_RECEIVED_FORWARD] += body
    if inside < 0:
        apply(h, 0, blocks)
    else:
        apply(h, BLOCKS, inside)
    if bound and group >= 0:
        note(h, bound - 1, wait, worker, after >> PART_BITS)
    acknowledge(h, ranges, m, 1)
    if load64(h[H_FRAMES] + 8 * (FRAME * f + F_LEFT)) == 0:
        finish(h, f)
    return DONE


@kernel
def checked_forward(h, begin, end, blocks, positions, ranges, m, body, worker, after, record):
    """DONE if the blocks of a FORWARD are valid, and there is room for all that follows from them."""
    reason = read_blocks(h, blocks, begin, end, 0)
    if reason:
        return reason
    if not place_blocks(h, blocks, positions, 0, m, h[H_RANGES]):
        return SLOW
    slots = successors(h, ranges, m)
    if slots < 0:
        return SLOW
    reason = room_for_operation(h, m, blocks, slots, body, record)
    if reason:
        return reason
    if h[H_INSIDE] < 0:
        return find_rows(h, 0, blocks, NO_BOUND, worker, after)  # its head has decided
    used = h[H_ARENA_USED]
    keep_inside(h, blocks)
    reason = find_rows(h, BLOCKS, h[H_INSIDE], NO_BOUND, worker, after)
    if reason:
        h[H_ARENA_USED] = used
    return reason


@kernel
def acknowledgement(h, c, at):
    """Handles an ACK: a successor, or a joiner, has everything up to the sequence numbers that it names."""
    body, epoch, m = load64(at + 8), load64(at + 24), load32(at + 48)
    slot = load64(h[H_CONNECTIONS] + 8 * (CONNECTION * c + C_PEER))
    if h[H_CAREFUL] or epoch < 0 or epoch > h[H_EPOCH] or m == 0 or m > h[H_RANGES]:
        return SLOW
    names = (4 * m + 7) & ~7
    if names + 8 * m != body or slot < 0 or load64(h[H_PEERS] + 8 * (PEER * slot + P_PYTHON)):
        return SLOW
    reason = room(h, 2 * m * (HEADER + 24) + HEADER * (h[H_RECENT] + 1) + MARGIN, 2 * m + h[H_RECENT] + 2)
    if reason:
        return reason
    named, numbers = at + HEADER, at + HEADER + names
    down, seq, acked = words(h[H_DOWN], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES]), words(h[H_ACKED], h[H_RANGES])
    since, flags = words(h[H_SINCE], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES])
    joined, ranges = words(h[H_JOINED], h[H_RANGES]), words(h[H_SCRATCH], m)
    counted = others = 0
    for p in range(m):
        r = load32(named + 4 * p)
        if r >= h[H_RANGES] or down[r] != slot or since[r] > epoch or load64(numbers + 8 * p) > seq[r]:
            return SLOW
        if flags[r] & T_FED == 0:
            others += 1
        elif flags[r] & T_COUNTED:
            counted += 1
            if flags[r] & T_REPORTED == 0:
                return SLOW
        ranges[p] = r
    for p in range(m):
        r, number = ranges[p], load64(numbers + 8 * p)
        if flags[r] & T_FED:
            joined[r] = max(joined[r], number)
            number = joined[r]
        if flags[r] & T_FED == 0 or flags[r] & T_COUNTED:
            acked[r] = max(acked[r], number)
    if counted:
        acknowledge(h, ranges, m, 2)
    if others:
        acknowledge(h, ranges, m, 3)
    if (counted or others) and load64(h[H_PEERS] + 8 * (PEER * slot + P_FIRST)) >= 0:
        release(h, slot)
    h[H_CHANGED] += 1
    return DONE
