"""The compiled side of chain replication: logs operations, forwards them to successors, acknowledges to predecessors.

Takes the same steps as `replication.core`, in the same order and with the same bytes; `tests/server/test_fast.py`
compares the two. The entries here are the *recent* ones: younger than every entry that Python has logged for the same
successor.
"""

from __future__ import annotations

from elasticps.server.fast.frames import ACK, FORWARD, HEADER, allot, answer_ok, put_header, queue
from elasticps.server.fast.layout import (
    B_DIM,
    B_GRADS_AT,
    B_KEYS_AT,
    B_ROWS,
    B_TABLE,
    B_VALUES,
    B_VALUES_AT,
    BLOCK,
    C_ADDRESS,
    C_CHUNK,
    C_PINNED,
    CONNECTION,
    E_COUNT,
    E_FRAME,
    E_NEXT,
    E_NUMBER,
    ENTRY,
    F_AFTER,
    F_BEFORE,
    F_BYTES,
    F_CAME,
    F_CHUNK,
    F_CONNECTION,
    F_COUNT,
    F_LEFT,
    F_OFFSET,
    F_REQUEST,
    F_SERIAL,
    F_WORKER,
    FRAME,
    H_ACKED,
    H_ARENA,
    H_BLOCKS,
    H_BOUNDS,
    H_CONNECTIONS,
    H_DOWN,
    H_ENTRIES,
    H_ENTRY_RANGES,
    H_ENTRY_SEQS,
    H_EPOCH,
    H_FLAGS,
    H_FRAME_RANGES,
    H_FRAMES,
    H_FREE_ENTRIES,
    H_FREE_ENTRY_COUNT,
    H_FREE_FRAME_COUNT,
    H_FREE_FRAMES,
    H_INFO,
    H_INSIDE,
    H_NOW,
    H_NUMBER,
    H_PEERS,
    H_PUSHES,
    H_RANGES,
    H_RECENT,
    H_RECENT_BYTES,
    H_REFS,
    H_SAMPLE,
    H_SEQ,
    H_SLOTS,
    H_STARTS,
    H_STRIDE,
    H_UP,
    H_WAITED,
    H_WAITED_COUNT,
    P_CONNECTION,
    P_FIRST,
    P_LAST,
    PEER,
    SLOTS,
    SMALL_BYTES,
    T_COUNTED,
    T_FED,
    T_QUIET,
    T_SYNCED,
    T_WAITS,
    WAITED,
)
from elasticps.server.fast.memory import load32, load64, store32, store64, words
from elasticps.server.fast.step_records import home_of, record_size
from elasticps.store.native import copy, kernel
from elasticps.wire.frames import RECORD


@kernel
def successors(h, ranges, m):
    """Writes the successors of ranges [m] to H_SLOTS, each once, in ascending order; returns how many, or -1 if Python
    has to handle the frame. Sets H_INFO to the number of runs of neighbouring ranges with the same successor, and
    H_INSIDE to 0 if some range is being filled here, else to -1."""
    down, flags, found = words(h[H_DOWN], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES]), words(h[H_SLOTS], SLOTS)
    count = 0
    last = -1
    before = -1
    runs = 0
    h[H_INSIDE] = -1
    for p in range(m):
        r = ranges[p]
        if flags[r] & T_QUIET:
            if load64(h[H_BOUNDS] + 8 * r) == 0:
                return -1  # nothing of it is here: no correct peer forwards to it
            h[H_INSIDE] = 0
        kind = down[r] << 1 | (flags[r] & T_SYNCED != 0)
        runs += kind != before
        before = kind
        if flags[r] & (T_WAITS | T_SYNCED) == 0 or down[r] == last:
            continue
        last = down[r]
        i = 0
        while i < count and found[i] < last:
            i += 1
        if i < count and found[i] == last:
            continue
        if count == SLOTS:
            return -1
        for j in range(count, i, -1):
            found[j] = found[j - 1]
        found[i] = last
        count += 1
    h[H_INFO] = runs
    return count


@kernel
def new_frame(h, connection, serial, request, ranges, m, nbytes, chunk, offset, worker, after, before):
    """Allocates a frame record and fills it in; the caller has checked that one is free."""
    h[H_FREE_FRAME_COUNT] -= 1
    f = load64(h[H_FREE_FRAMES] + 8 * h[H_FREE_FRAME_COUNT])
    at = h[H_FRAMES] + 8 * FRAME * f
    store64(at + 8 * F_CONNECTION, connection)
    store64(at + 8 * F_SERIAL, serial)
    store64(at + 8 * F_REQUEST, request)
    store64(at + 8 * F_LEFT, 0)
    store64(at + 8 * F_BYTES, nbytes)
    store64(at + 8 * F_CHUNK, chunk)
    store64(at + 8 * F_OFFSET, offset)
    store64(at + 8 * F_WORKER, worker)
    store64(at + 8 * F_AFTER, after)
    store64(at + 8 * F_BEFORE, before)
    store64(at + 8 * F_COUNT, m)
    store64(at + 8 * F_CAME, h[H_NOW] if h[H_PUSHES] & (h[H_SAMPLE] - 1) == 0 else 0)
    named = h[H_FRAME_RANGES] + 4 * h[H_STRIDE] * f
    for p in range(m):
        store32(named + 4 * p, ranges[p])
    refs = h[H_REFS] + 8 * chunk
    store64(refs, load64(refs) + 1)
    h[H_RECENT_BYTES] += nbytes
    return f


@kernel
def free_frame(h, f):
    """Frees a frame record, and its reference to the chunk that the frame lies in."""
    at = h[H_FRAMES] + 8 * FRAME * f
    refs = h[H_REFS] + 8 * load64(at + 8 * F_CHUNK)
    store64(refs, load64(refs) - 1)
    h[H_RECENT_BYTES] -= load64(at + 8 * F_BYTES)
    store64(h[H_FREE_FRAMES] + 8 * h[H_FREE_FRAME_COUNT], f)
    h[H_FREE_FRAME_COUNT] += 1


@kernel
def finish(h, f):
    """Answers the sender of a frame that all successors have acknowledged, and frees its record."""
    at = h[H_FRAMES] + 8 * FRAME * f
    c = load64(at + 8 * F_CONNECTION)
    if c >= 0:
        answer_ok(h, c, load64(at + 8 * F_SERIAL), load64(at + 8 * F_REQUEST))
        waited(h, load64(at + 8 * F_CAME))
    free_frame(h, f)


@kernel
def waited(h, came):
    """Records how long a push waited, if it is one of those measured."""
    if came and h[H_WAITED_COUNT] < WAITED:
        store64(h[H_WAITED] + 8 * h[H_WAITED_COUNT], h[H_NOW] - came)
        h[H_WAITED_COUNT] += 1


@kernel
def log_entry(h, slot, f, ranges, m):
    """Logs the ranges of a frame that wait for a successor's acknowledgement, as the newest entry of that successor."""
    down, flags, seq = words(h[H_DOWN], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES])
    h[H_FREE_ENTRY_COUNT] -= 1
    e = load64(h[H_FREE_ENTRIES] + 8 * h[H_FREE_ENTRY_COUNT])
    named, seqs = h[H_ENTRY_RANGES] + 4 * h[H_STRIDE] * e, h[H_ENTRY_SEQS] + 8 * h[H_STRIDE] * e
    k = 0
    for p in range(m):
        r = ranges[p]
        if down[r] == slot and flags[r] & T_WAITS:
            store32(named + 4 * k, r)
            store64(seqs + 8 * k, seq[r])
            k += 1
    if k == 0:
        h[H_FREE_ENTRY_COUNT] += 1
        return
    h[H_NUMBER] += 1
    at = h[H_ENTRIES] + 8 * ENTRY * e
    store64(at + 8 * E_FRAME, f)
    store64(at + 8 * E_COUNT, k)
    store64(at + 8 * E_NEXT, -1)
    store64(at + 8 * E_NUMBER, h[H_NUMBER])
    peer = h[H_PEERS] + 8 * PEER * slot
    last = load64(peer + 8 * P_LAST)
    if last < 0:
        store64(peer + 8 * P_FIRST, e)
    else:
        store64(h[H_ENTRIES] + 8 * (ENTRY * last + E_NEXT), e)
    store64(peer + 8 * P_LAST, e)
    left = h[H_FRAMES] + 8 * (FRAME * f + F_LEFT)
    store64(left, load64(left) + 1)
    h[H_RECENT] += 1


@kernel
def release(h, slot):
    """Drops a successor's entries that `acked` covers, oldest first, and finishes frames that wait for no other."""
    acked = words(h[H_ACKED], h[H_RANGES])
    peer = h[H_PEERS] + 8 * PEER * slot
    while True:
        e = load64(peer + 8 * P_FIRST)
        if e < 0:
            return
        at = h[H_ENTRIES] + 8 * ENTRY * e
        named, seqs = h[H_ENTRY_RANGES] + 4 * h[H_STRIDE] * e, h[H_ENTRY_SEQS] + 8 * h[H_STRIDE] * e
        for p in range(load64(at + 8 * E_COUNT)):
            if acked[load32(named + 4 * p)] < load64(seqs + 8 * p):
                return
        following = load64(at + 8 * E_NEXT)
        store64(peer + 8 * P_FIRST, following)
        if following < 0:
            store64(peer + 8 * P_LAST, -1)
        store64(h[H_FREE_ENTRIES] + 8 * h[H_FREE_ENTRY_COUNT], e)
        h[H_FREE_ENTRY_COUNT] += 1
        h[H_RECENT] -= 1
        f = load64(at + 8 * E_FRAME)
        left = h[H_FRAMES] + 8 * (FRAME * f + F_LEFT)
        store64(left, load64(left) - 1)
        if load64(left) == 0:
            finish(h, f)


@kernel
def block_bytes(b, rows):
    """Bytes that `rows` rows of a block take in a body."""
    values, dim = load64(b + 8 * B_VALUES), load64(b + 8 * B_DIM)
    return 24 + ((4 * values + 7) & ~7) + 8 * rows + ((4 * rows * dim + 7) & ~7)


@kernel
def forward(h, slot, source, ranges, m, blocks, worker, after, bound, wait, record):
    """Sends a successor the part of the frame at hand, received on connection `source`, that lies in its ranges.
    record: where the record of its step is, 0 for none; it goes where the worker's home range does."""
    down, flags, seq = words(h[H_DOWN], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES])
    to = load64(h[H_PEERS] + 8 * (PEER * slot + P_CONNECTION))
    if to < 0:
        return
    k = 0
    for p in range(m):
        k += down[ranges[p]] == slot and flags[ranges[p]] & T_SYNCED != 0
    if k == 0:
        return
    if record:
        home = home_of(h, worker)
        if down[home] != slot or flags[home] & T_SYNCED == 0:
            record = 0
    whole = k == m
    names = (4 * k + 7) & ~7
    size, items = names + 8 * k, 0
    if record:
        size += record_size(h)
    b, starts = h[H_BLOCKS], h[H_STARTS]
    for _ in range(blocks):
        n = load64(b + 8 * B_ROWS)
        if not whole:
            n = 0
            for p in range(m):
                if down[ranges[p]] == slot and flags[ranges[p]] & T_SYNCED:
                    n += load64(starts + 8 * p + 8) - load64(starts + 8 * p)
        if n or whole:
            items += 1
            size += block_bytes(b, n)
        b += 8 * BLOCK
        starts += 8 * (h[H_RANGES] + 1)
    offset = allot(h, HEADER + names + 8 * k)
    at = h[H_ARENA] + offset
    put_header(at, FORWARD, RECORD if record else 0, size, 0, h[H_EPOCH], after, worker, 0, k, items, bound, wait)
    store64(at + HEADER + names - 8, 0)
    q = 0
    for p in range(m):
        r = ranges[p]
        if down[r] == slot and flags[r] & T_SYNCED:
            store32(at + HEADER + 4 * q, r)
            store64(at + HEADER + names + 8 * q, seq[r])
            q += 1
    queue(h, to, -1, offset, HEADER + names + 8 * k)
    b, starts = h[H_BLOCKS], h[H_STARTS]
    for _ in range(blocks):
        forward_block(h, to, slot, source, ranges, m, b, starts, whole)
        b += 8 * BLOCK
        starts += 8 * (h[H_RANGES] + 1)
    if record:
        send_slice(h, to, source, record, record_size(h))


@kernel
def forward_block(h, to, slot, source, ranges, m, b, starts, whole):
    """Sends a successor its part of one block: the header, then the keys of its ranges, then their gradients. `whole`:
    all ranges of the frame are the successor's."""
    down, flags = words(h[H_DOWN], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES])
    n = load64(b + 8 * B_ROWS)
    if not whole:
        n = 0
        for p in range(m):
            if down[ranges[p]] == slot and flags[ranges[p]] & T_SYNCED:
                n += load64(starts + 8 * p + 8) - load64(starts + 8 * p)
        if n == 0:
            return
    count, dim = load64(b + 8 * B_VALUES), load64(b + 8 * B_DIM)
    values = (4 * count + 7) & ~7
    offset = allot(h, 24 + values)
    at = h[H_ARENA] + offset
    store64(at, load64(b + 8 * B_TABLE) | n << 32)
    store64(at + 8, dim | count << 32)
    store64(at + 16, 0)
    if count:
        store64(at + 24 + values - 8, 0)
        copy(at + 24, load64(b + 8 * B_VALUES_AT), 4 * count)
    queue(h, to, -1, offset, 24 + values)
    for width, begin in ((8, load64(b + 8 * B_KEYS_AT)), (4 * dim, load64(b + 8 * B_GRADS_AT))):
        p = 0
        while p < m:
            if not whole and (down[ranges[p]] != slot or flags[ranges[p]] & T_SYNCED == 0):
                p += 1
                continue
            q = p + 1
            while q < m and (whole or (down[ranges[q]] == slot and flags[ranges[q]] & T_SYNCED)):
                q += 1
            low, high = load64(starts + 8 * p), load64(starts + 8 * q)
            p = q
            if low < high:
                send_slice(h, to, source, begin + width * low, width * (high - low))
    if (n * dim) & 1:
        offset = allot(h, 4)
        store32(h[H_ARENA] + offset, 0)
        queue(h, to, -1, offset, 4)


@kernel
def send_slice(h, to, source, begin, n):
    """Queues bytes of the received frame: copied into the arena if they are few, else as a reference to the chunk."""
    if n <= SMALL_BYTES:
        offset = allot(h, n)
        copy(h[H_ARENA] + offset, begin, n)
        queue(h, to, -1, offset, n)
    else:
        connection = h[H_CONNECTIONS] + 8 * CONNECTION * source
        queue(h, to, load64(connection + 8 * C_CHUNK), begin - load64(connection + 8 * C_ADDRESS), n)


@kernel
def down_the_chain(h, source, ranges, m, blocks, worker, after, bound, wait, f, slots, record):
    """Forwards the frame at hand, logs it, and commits the ranges where no acknowledgement is needed."""
    found = words(h[H_SLOTS], SLOTS)
    for i in range(slots):
        forward(h, found[i], source, ranges, m, blocks, worker, after, bound, wait, record)
    for i in range(slots):
        log_entry(h, found[i], f, ranges, m)
    if slots and load64(h[H_FRAMES] + 8 * (FRAME * f + F_LEFT)) == 0:
        # The log holds no reference to what a joiner is sent while it is filled. The chunk is pinned instead, until
        # the sender has looked whether a socket still needs the bytes.
        store64(h[H_CONNECTIONS] + 8 * (CONNECTION * source + C_PINNED), 1)
    flags, seq, acked = words(h[H_FLAGS], h[H_RANGES]), words(h[H_SEQ], h[H_RANGES]), words(h[H_ACKED], h[H_RANGES])
    for p in range(m):
        if flags[ranges[p]] & T_WAITS == 0:
            acked[ranges[p]] = seq[ranges[p]]


@kernel
def acknowledge(h, ranges, m, of):
    """Acknowledges to the predecessors how far ranges [m] are committed. `of` selects ranges: 0 all, 1 those that wait
    for no successor, 2 those whose joiner's acknowledgements count, 3 those without a joiner."""
    up, flags = words(h[H_UP], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES])
    last = -1
    while True:  # the predecessors, in ascending order
        to = -1
        for p in range(m):
            r = ranges[p]
            if up[r] > last and (to < 0 or up[r] < to) and is_selected(flags[r], of):
                to = up[r]
        if to < 0:
            return
        last = to
        send_ack(h, to, ranges, m, of)


@kernel
def is_selected(flags, of):
    """Whether `of` selects a range with these flags; see `acknowledge`."""
    if of == 1:
        return flags & (T_WAITS | T_QUIET) == 0
    if of == 2:
        return flags & (T_FED | T_COUNTED) == (T_FED | T_COUNTED)
    if of == 3:
        return flags & T_FED == 0
    return True


@kernel
def send_ack(h, slot, ranges, m, of):
    """Sends one ACK, for the selected ranges of one predecessor."""
    to = load64(h[H_PEERS] + 8 * (PEER * slot + P_CONNECTION))
    if to < 0:
        return
    up, flags, acked = words(h[H_UP], h[H_RANGES]), words(h[H_FLAGS], h[H_RANGES]), words(h[H_ACKED], h[H_RANGES])
    k = 0
    for p in range(m):
        k += up[ranges[p]] == slot and is_selected(flags[ranges[p]], of)
    names = (4 * k + 7) & ~7
    offset = allot(h, HEADER + names + 8 * k)
    at = h[H_ARENA] + offset
    put_header(at, ACK, 0, names + 8 * k, 0, h[H_EPOCH], 0, 0, 0, k, 0, 0, 0)
    store64(at + HEADER + names - 8, 0)
    q = 0
    for p in range(m):
        r = ranges[p]
        if up[r] == slot and is_selected(flags[r], of):
            store32(at + HEADER + 4 * q, r)
            store64(at + HEADER + names + 8 * q, acked[r])
            q += 1
    queue(h, to, -1, offset, HEADER + names + 8 * k)
