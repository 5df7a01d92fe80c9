"""Pulls in compiled code: one call groups the keys by server and writes the PULL frames, one takes answers apart.

Where the rows of a small answer go stands in `Landing`. Rows that fit are put there straight from the buffer they were
received into, together with every acknowledgement beside them. Whatever else was received is left to Python, frame by
frame; `tests/client/test_answers.py` holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from elasticps.hashing import hash_key
from elasticps.kernels import njit
from elasticps.store.native import carray, copy, pointer
from elasticps.wire.assembler import STAGING_BYTES
from elasticps.wire.frames import HEADER_BYTES, LAST, MAGIC, VERSION, Kind

SMALL_BYTES = STAGING_BYTES // 2  # of the rows of a part that is received into the staging buffer, and copied
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
    L_DIM,
    L_FIELDS,
) = range(7)
# A part of a pull, int64 [P_FIELDS]: the reader's index, -1 for nobody; its first word; its keys in `order`.
(P_SERVER, P_AT, P_LOW, P_HIGH, P_FIELDS) = range(5)

_PREFIX = MAGIC | VERSION << 32
_OK, _ROWS, _PULL = int(Kind.OK), int(Kind.ROWS), int(Kind.PULL)

# With the interpreter's lock: they take a few microseconds, and to get it back may take five milliseconds.
kernel = cast(Callable[[Any], Any], njit(cache=True, error_model="numpy"))


@kernel
def cut_pull(  # type: ignore[no-untyped-def]
    keys, salt, shift, reader_of, only, order, parts, memory, slots, rows, dim, small,
    request, flags, epoch, clock, worker, table, bound, wait_ms,
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
        count += 1
        words[at] = _PREFIX | _PULL << 40 | flags << 48
        words[at + 1] = 8 * (high - low)
        words[at + 2] = request
        words[at + 3] = epoch
        words[at + 4] = clock
        words[at + 5] = worker
        words[at + 6] = table | (high - low) << 32
        words[at + 7] = bound | wait_ms << 32
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
def slot_of(request):  # type: ignore[no-untyped-def]
    """The number of a request's slot."""
    return request // OWNERS % SLOTS


@kernel
def take_answers(staging, start, end, slots, answered):  # type: ignore[no-untyped-def]
    """Takes the usual frames from `start` on out of received bytes: puts rows in place, and notes the requests that are
    answered now. Returns (where the first frame stands that is left, how many requests)."""
    words = staging.view(np.int64)
    count = 0
    while end - start >= HEADER_BYTES:
        at = start >> 3
        first, body, request = words[at], words[at + 1], words[at + 2]
        kind = first >> 40 & 0xFF
        if first & 0xFFFFFFFFFF != _PREFIX:
            break
        if kind == _OK and body == 0 and request % OWNERS == PUSH:
            answered[count] = request
            count += 1
            start += HEADER_BYTES
            continue
        slot = slots[slot_of(request)]
        if kind != _ROWS or slot[L_REQUEST] != request:
            break
        offset, rows, dim = words[at + 4], words[at + 6] >> 32 & 0xFFFFFFFF, slot[L_DIM]
        data = 4 * dim * rows
        if not 0 <= offset <= slot[L_COUNT] - rows or body != data + (data & 7) or start + HEADER_BYTES + body > end:
            break
        _place(staging.ctypes.data + start + HEADER_BYTES, slot, offset, rows)
        if first >> 48 & LAST:
            slot[L_REQUEST] = 0
            answered[count] = request
            count += 1
        start += HEADER_BYTES + body
    return start, count


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
