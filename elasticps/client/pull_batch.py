"""Pulls in compiled code: one call groups the keys by server and writes the PULL frames, one takes answers apart.

Where the rows of a small answer go stands in `Landing`. Rows that fit are put there straight from the buffer they were
received into, together with every acknowledgement beside them. Whatever else was received is left to Python, frame by
frame; `tests/client/test_answers.py` holds the two against each other.
"""

from __future__ import annotations

import numpy as np

from elasticps.kernels import njit
from elasticps.kernels.hashing import hash_key
from elasticps.store.native import carray, copy, pointer
from elasticps.wire.frames import BLOCK_BYTES, HEADER_BYTES, LAST, MAGIC, VERSION, Kind
from elasticps.wire.stream import STAGING_BYTES

SMALL_BYTES = STAGING_BYTES * 3 // 4  # of the rows of a part that is received into the staging buffer, and copied
OWNERS, PUSH, PULL, FAN_OUT = 4, 1, 2, 3  # the rest of a request's number by OWNERS says whose it is
SLOTS = 256
ANSWERS = STAGING_BYTES // HEADER_BYTES  # as many as one buffer can hold
WORDS = HEADER_BYTES // 8

# A slot, int64 [L_FIELDS]: where the answer to a request lands.
(
    L_REQUEST,  # 0: nothing is expected
    L_ROWS,  # address of float32 [floats]
    L_FLOATS,
    L_ORDER,  # address of int64 [count]: which row of those each of the answer's is; 0: the same
    L_COUNT,
    L_DIM,  # 0: of several tables
    L_TABLES,  # their address, int64 [tables + 1, T_FIELDS]
    L_FIELDS,
) = range(8)
# A part of a pull, int64 [P_FIELDS]: the reader's index, -1 for nobody; its first word; its keys in `order`; the bytes
# of its body, and the floats of the answer.
(P_SERVER, P_AT, P_LOW, P_HIGH, P_BODY, P_FLOATS, P_FIELDS) = range(7)
# One table of a pull of several, int64 [T_FIELDS]: which of the pull's rows its first one is, words of a row, the
# address of float32 [rows, words], salt, id, and how many floats there are: what a last row has more is left out.
# Behind the last one a row that has only T_FIRST, the number of all rows.
(T_FIRST, T_WORDS, T_ROWS, T_SALT, T_ID, T_FLOATS, T_FIELDS) = range(7)

_PREFIX = MAGIC | VERSION << 32
_OK, _ROWS, _PULL = int(Kind.OK), int(Kind.ROWS), int(Kind.PULL)
_BLOCK_WORDS = BLOCK_BYTES // 8

# With the interpreter's lock: they take a few microseconds, and to get it back may take five milliseconds.
kernel = njit(cache=True, error_model="numpy")


@kernel
def cut_pull(  # type: ignore[no-untyped-def]
    keys, salt, shift, reader_of, only, order, parts, memory, slots, rows, dim, small,
    request, flags, epoch, clock, worker, table, wait_ms,
):  # fmt: skip
    """Writes a PULL for each server that answers for some of the keys, and what it asks for into `parts`; their number.
    The first has number `request`, the others follow; answers of up to `small` bytes are expected in `slots`."""
    words = memory.view(np.int64)
    n, servers = keys.shape[0], parts.shape[0] - 1
    parts[:, P_LOW] = 0
    if only >= 0:
        parts[only + 1, P_HIGH] = n
    else:
        readers = np.empty(n, np.int32)
        s = np.uint64(shift)
        parts[:, P_HIGH] = 0
        for i in range(n):
            reader = reader_of[hash_key(keys[i], salt) >> s] + 1
            readers[i] = reader
            parts[reader, P_HIGH] += 1
        at = 0
        for r in range(servers + 1):
            parts[r, P_LOW] = at
            at += parts[r, P_HIGH]
            parts[r, P_HIGH] = parts[r, P_LOW]
        for i in range(n):
            r = readers[i]
            order[parts[r, P_HIGH]] = i
            parts[r, P_HIGH] += 1
    count = at = 0
    for r in range(servers + 1):
        low, high = parts[r, P_LOW], parts[r, P_HIGH]
        if low == high or (only >= 0 and r != only + 1):
            continue
        parts[count, P_SERVER], parts[count, P_AT] = r - 1, at
        parts[count, P_LOW], parts[count, P_HIGH] = low, high
        parts[count, P_BODY], parts[count, P_FLOATS] = 8 * (high - low), dim * (high - low)
        count += 1
        words[at] = _PREFIX | _PULL << 40 | flags << 48
        words[at + 1] = 8 * (high - low)
        words[at + 2] = request
        words[at + 3] = epoch
        words[at + 4] = clock
        words[at + 5] = worker
        words[at + 6] = table | (high - low) << 32
        words[at + 7] = wait_ms << 32
        at += WORDS
        for j in range(low, high):
            words[at] = keys[j] if only >= 0 else keys[order[j]]
            at += 1
        slot = slots[slot_of(request)]
        if r and 4 * dim * (high - low) <= small and slot[L_REQUEST] == 0:
            slot[L_REQUEST] = request
            slot[L_ROWS], slot[L_FLOATS] = rows.ctypes.data, rows.shape[0]
            slot[L_ORDER] = 0 if only >= 0 else order.ctypes.data + 8 * low
            slot[L_COUNT], slot[L_DIM] = high - low, dim
        request += OWNERS
    return count


@kernel
def cut_tables(  # type: ignore[no-untyped-def]
    keys, tables, shift, reader_of, only, order, parts, memory, slots, small,
    request, flags, epoch, clock, worker, wait_ms,
):  # fmt: skip
    """The same for several tables, `keys` of one after another; `order` is by server, and then as they are."""
    words, ints = memory.view(np.int64), memory.view(np.uint32)
    n, servers = keys.shape[0], parts.shape[0] - 1
    parts[:, P_LOW] = 0
    if only >= 0:
        parts[only + 1, P_HIGH] = n
    else:
        readers = np.empty(n, np.int32)
        s = np.uint64(shift)
        parts[:, P_HIGH] = 0
        for t in range(tables.shape[0] - 1):
            salt = np.uint64(tables[t, T_SALT])
            for i in range(tables[t, T_FIRST], tables[t + 1, T_FIRST]):
                reader = reader_of[hash_key(keys[i], salt) >> s] + 1
                readers[i] = reader
                parts[reader, P_HIGH] += 1
        at = 0
        for r in range(servers + 1):
            parts[r, P_LOW] = at
            at += parts[r, P_HIGH]
            parts[r, P_HIGH] = parts[r, P_LOW]
        for i in range(n):
            r = readers[i]
            order[parts[r, P_HIGH]] = i
            parts[r, P_HIGH] += 1
    count = at = 0
    for r in range(servers + 1):
        low, high = parts[r, P_LOW], parts[r, P_HIGH]
        if low == high or (only >= 0 and r != only + 1):
            continue
        first, blocks, floats = at, 0, 0
        at += WORDS
        j, t = low, 0
        while j < high:
            row = j if only >= 0 else order[j]
            while row >= tables[t + 1, T_FIRST]:
                t += 1
            block = at
            at += _BLOCK_WORDS
            while row < tables[t + 1, T_FIRST]:
                words[at] = keys[row]
                at += 1
                j += 1
                if j == high:
                    break
                row = j if only >= 0 else order[j]
            rows = at - block - _BLOCK_WORDS
            ints[2 * block], ints[2 * block + 1] = tables[t, T_ID], rows
            words[block + 1] = words[block + 2] = 0
            blocks += 1
            floats += rows * tables[t, T_WORDS]
        body = 8 * (at - first - WORDS)
        parts[count, P_SERVER], parts[count, P_AT] = r - 1, first
        parts[count, P_LOW], parts[count, P_HIGH] = low, high
        parts[count, P_BODY], parts[count, P_FLOATS] = body, floats
        count += 1
        words[first] = _PREFIX | _PULL << 40 | flags << 48
        words[first + 1] = body
        words[first + 2] = request
        words[first + 3] = epoch
        words[first + 4] = clock
        words[first + 5] = worker
        words[first + 6] = blocks << 32
        words[first + 7] = wait_ms << 32
        slot = slots[slot_of(request)]
        if r and 4 * floats <= small and slot[L_REQUEST] == 0:
            slot[L_REQUEST] = request
            slot[L_ROWS] = slot[L_FLOATS] = slot[L_DIM] = 0
            slot[L_ORDER] = 0 if only >= 0 else order.ctypes.data + 8 * low
            slot[L_COUNT], slot[L_TABLES] = high - low, tables.ctypes.data
        request += OWNERS
    return count


@kernel
def slot_of(request):  # type: ignore[no-untyped-def]
    """The number of a request's slot."""
    return request // OWNERS % SLOTS


@kernel
def take_answers(staging, start, end, slots, answered):  # type: ignore[no-untyped-def]
    """Takes the usual frames from `start` on out of received bytes: puts rows in place, and notes the requests that are
    answered now. Returns (where the first frame stands that is left, how many requests, the newest epoch at which a
    push was answered)."""
    words = staging.view(np.int64)
    count = epoch = 0
    while end - start >= HEADER_BYTES:
        at = start >> 3
        first, body, request = words[at], words[at + 1], words[at + 2]
        kind = first >> 40 & 0xFF
        if first & 0xFFFFFFFFFF != _PREFIX:
            break
        if kind == _OK and body == 0 and request % OWNERS == PUSH:
            answered[count] = request
            count += 1
            epoch = max(epoch, words[at + 3])
            start += HEADER_BYTES
            continue
        slot = slots[slot_of(request)]
        if kind != _ROWS or slot[L_REQUEST] != request:
            break
        offset, rows, dim = words[at + 4], words[at + 6] >> 32 & 0xFFFFFFFF, slot[L_DIM]
        if not 0 <= offset <= slot[L_COUNT] - rows or start + HEADER_BYTES + body > end:
            break
        data = 4 * dim * rows if dim else _place_several(0, slot, offset, rows)
        if body != data + (data & 7):
            break
        source = staging.ctypes.data + start + HEADER_BYTES
        if dim:
            _place(source, slot, offset, rows)
        else:
            _place_several(source, slot, offset, rows)
        if first >> 48 & LAST:
            slot[L_REQUEST] = 0
            answered[count] = request
            count += 1
        start += HEADER_BYTES + body
    return start, count, epoch


@kernel
def _place(source, slot, offset, rows):  # type: ignore[no-untyped-def]
    """Copies rows from an address to where they belong; what a dense tensor's last one has too much is left out."""
    dim, target, end = slot[L_DIM], slot[L_ROWS], slot[L_FLOATS]
    if slot[L_ORDER] == 0:
        first = offset * dim
        copy(target + 4 * first, source, 4 * min(rows * dim, end - first))
        return
    order = carray(pointer(slot[L_ORDER]), (slot[L_COUNT],), np.int64)
    for j in range(offset, offset + rows):
        first = order[j] * dim
        copy(target + 4 * first, source, 4 * min(dim, end - first))
        source += 4 * dim


@kernel
def _place_several(source, slot, offset, rows):  # type: ignore[no-untyped-def]
    """Copies rows of several tables from an address (0: does not) to where they belong; returns their bytes."""
    count = slot[L_COUNT]
    order = carray(pointer(slot[L_ORDER]), (count if slot[L_ORDER] else 0,), np.int64)
    return place_several(source, order, carray(pointer(slot[L_TABLES]), (1 << 20, T_FIELDS), np.int64), offset, rows)


@kernel
def place_several(source, order, tables, offset, rows):  # type: ignore[no-untyped-def]
    """The same for rows `offset` and on, of those that `order` says; of all if it is empty."""
    begin, t = source, 0
    for j in range(offset, offset + rows):
        row = order[j] if order.shape[0] else j
        while row >= tables[t + 1, T_FIRST]:
            t += 1
        size = 4 * tables[t, T_WORDS]
        if begin:
            at = size * (row - tables[t, T_FIRST])
            copy(tables[t, T_ROWS] + at, source, min(size, 4 * tables[t, T_FLOATS] - at))
        source += size
    return source - begin


class Landing:
    """Where the rows of small answers land, by request. Whoever expects some keeps their memory until they have come,
    or are forgotten."""

    def __init__(self) -> None:
        self.slots = np.zeros((SLOTS, L_FIELDS), np.int64)
        self._fields = self.slots.reshape(-1).data

    def forget(self, request: int) -> None:
        """Nothing lands for this request any more."""
        at = L_FIELDS * (request // OWNERS % SLOTS)
        if self._fields[at] == request:
            self._fields[at] = 0

    def clear(self) -> None:
        """Nothing lands any more."""
        self.slots[:] = 0
