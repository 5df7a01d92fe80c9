"""Reading and writing sockets from compiled code: what is readable is received, handled and answered in one call.

An event loop costs a message more than handling it does: a callback into Python per buffer received, one per buffer
sent, a turn of the loop between. So the descriptors of a server's connections are in an epoll of their own, which the
loop watches as one; `turn` does everything of which Python need not know. What sockets do not take at once, and every
end of a connection, is left to Python (`server/pump.py`).

Sources: epoll(7), recv(2), sendmsg(2); the layouts of `struct epoll_event`, `msghdr` and `iovec` on Linux, 64 bits.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from numba import types

from elasticps.kernels import compiled_once, njit
from elasticps.server.fast.layout import (
    C_ADDRESS,
    C_BYTES,
    C_END,
    C_FD,
    C_HEARD,
    C_QUEUED,
    CLOSED,
    CONNECTION,
    DONE,
    FLUSH,
    H_ARENA,
    H_ARENA_USED,
    H_AT,
    H_CAREFUL,
    H_CHUNK_ADDRESSES,
    H_CONNECTIONS,
    H_EPOLL,
    H_EVENTS,
    H_INFO,
    H_MESSAGE,
    H_NOTE_COUNT,
    H_SEGMENT_COUNT,
    H_SEGMENTS,
    H_SIZE,
    H_SLOT_OF,
    H_TURN,
    IDLE,
    SEGMENT,
    WRITABLE,
)
from elasticps.server.fast.memory import load32, load64, store64, words
from elasticps.server.fast.receive import consume
from elasticps.store.native import kernel

# The kernel's structures. Only x86-64 packs an event: 4 bytes of flags, then the 8 of data, of which
# select.epoll sets the lower 4 to the descriptor.
EVENT_BYTES, EVENT_DATA = (12, 4) if platform.machine() in ("x86_64", "AMD64") else (16, 8)
EVENTS = 64  # asked for at once
VECTOR = 64  # buffers of one call
MESSAGE_BYTES = 56 + 16 * VECTOR  # a msghdr and its vector
READABLE_BIT, WRITABLE_BIT = 1, 4  # EPOLLIN, EPOLLOUT
DONT_WAIT, NO_SIGNAL = 0x40, 0x4000
AGAIN, INTERRUPTED, RESET = 11, 4, 104  # EAGAIN, EINTR, ECONNRESET
SENT_AT = 48  # so many segments leave before the next connection is looked at

_int, _long = types.int32, types.int64
_epoll_wait: Any = types.ExternalFunction("epoll_wait", _int(_int, _long, _int, _int))
_recv: Any = types.ExternalFunction("recv", _long(_int, _long, _long, _int))
_send: Any = types.ExternalFunction("send", _long(_int, _long, _long, _int))
_sendmsg: Any = types.ExternalFunction("sendmsg", _long(_int, _long, _int))
_clock: Any = types.ExternalFunction("clock_gettime", _int(_int, _long))
_errno_address: Any = types.ExternalFunction("__errno_location", _long())
MONOTONIC = 1
STOPPED_NS = 300_000_000  # between two looks at the time in a turn


@kernel
def _monotonic(h):
    """The time in nanoseconds."""
    at = h[H_MESSAGE] + 56  # the vector: what is before it says to whom a message goes, and has to stay 0
    _clock(np.int32(MONOTONIC), at)
    return load64(at) * 1_000_000_000 + load64(at + 8)


@kernel
def _segment_address(h, segment):
    """Where a segment's bytes lie."""
    if segment[1] < 0:
        return h[H_ARENA] + segment[2]
    return load64(h[H_CHUNK_ADDRESSES] + 8 * segment[1]) + segment[2]


@kernel
def _gather(h, first, count, vector):
    """Lists the segments from `first` on that go where it goes; how many, and sets H_SIZE to their bytes."""
    slot = words(h[H_SEGMENTS] + 8 * SEGMENT * first, SEGMENT)[0]
    n, total = 0, 0
    for i in range(first, count):
        segment = words(h[H_SEGMENTS] + 8 * SEGMENT * i, SEGMENT)
        if segment[0] == slot and n < VECTOR:
            store64(vector + 16 * n, _segment_address(h, segment))
            store64(vector + 16 * n + 8, segment[3])
            total += segment[3]
            n += 1
    h[H_SIZE] = total
    return n


@kernel
def _take(h, first, count, n, sent):
    """`sent` bytes of the `n` segments that `_gather` found from `first` on have left."""
    slot = words(h[H_SEGMENTS] + 8 * SEGMENT * first, SEGMENT)[0]
    for i in range(first, count):
        segment = words(h[H_SEGMENTS] + 8 * SEGMENT * i, SEGMENT)
        if segment[0] != slot:
            continue
        if n == 0 or sent < segment[3]:
            segment[2] += sent
            segment[3] -= sent
            return
        sent -= segment[3]
        segment[3] = 0
        segment[0] = -1
        n -= 1


@kernel
def send_segments(h):
    """Sends what is queued, each connection's in one call; what its socket does not take stays queued, for Python."""
    count = h[H_SEGMENT_COUNT]
    message = h[H_MESSAGE]
    vector = message + 56
    remaining = 0
    first = 0
    while first < count:
        segment = words(h[H_SEGMENTS] + 8 * SEGMENT * first, SEGMENT)
        slot = segment[0]
        if slot < 0:
            first += 1
            continue
        conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * slot, CONNECTION)
        if conn[C_FD] >= 0 and conn[C_QUEUED] == 0:
            n = _gather(h, first, count, vector)
            fd = np.int32(conn[C_FD])
            if n == 1:
                sent = _send(fd, load64(vector), load64(vector + 8), np.int32(DONT_WAIT | NO_SIGNAL))
            else:
                store64(message + 16, vector)
                store64(message + 24, n)
                sent = _sendmsg(fd, message, np.int32(DONT_WAIT | NO_SIGNAL))
            if sent < 0:
                sent = 0  # whatever it is: Python sends again, and sees it
            if sent < h[H_SIZE]:
                conn[C_QUEUED] = 1  # keeps the order: until Python has sent the rest, all goes through it
            _take(h, first, count, n, sent)
            if segment[0] < 0 or sent > 0:
                continue  # more may go to the same one; of a part that was sent the rest is looked at again
        if remaining != first:
            to = words(h[H_SEGMENTS] + 8 * SEGMENT * remaining, SEGMENT)
            for j in range(SEGMENT):
                to[j] = segment[j]
            segment[0] = -1
        remaining += 1
        first += 1
    h[H_SEGMENT_COUNT] = remaining
    if remaining == 0:
        h[H_ARENA_USED] = 0


def _turn(h):
    """Handles what the sockets have, up to about H_TURN bytes. IDLE when that was all; else what Python has to do for
    the connection H_AT, after which it calls again: WRITABLE, CLOSED (H_INFO: errno, 0 for an orderly end), or what
    `receive.consume` stopped for."""
    now = _monotonic(h)
    left = h[H_TURN]
    n = _epoll_wait(np.int32(h[H_EPOLL]), h[H_EVENTS], np.int32(EVENTS), np.int32(0))
    for i in range(n):
        event = h[H_EVENTS] + EVENT_BYTES * i
        bits = load32(event)
        slot = load64(h[H_SLOT_OF] + 8 * load32(event + EVENT_DATA))
        h[H_AT] = slot
        conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * slot, CONNECTION)
        if bits & WRITABLE_BIT:
            send_segments(h)
            return WRITABLE
        if bits & READABLE_BIT == 0:  # broken while nothing is read from it
            send_segments(h)
            h[H_INFO] = RESET
            return CLOSED
        while True:
            room = conn[C_BYTES] - conn[C_END]
            received = _recv(np.int32(conn[C_FD]), conn[C_ADDRESS] + conn[C_END], room, np.int32(DONT_WAIT))
            if received <= 0:
                error = load32(_errno_address()) if received < 0 else 0
                if error in (AGAIN, INTERRUPTED):
                    break
                send_segments(h)
                h[H_INFO] = error
                return CLOSED
            conn[C_HEARD] = now
            left -= received
            if _monotonic(h) - now > STOPPED_NS:
                h[H_CAREFUL] = 1  # we were stopped: Python says what is to become of pushes
            reason = consume(h, slot, received)
            while reason == FLUSH:
                send_segments(h)
                if h[H_SEGMENT_COUNT]:
                    return FLUSH
                reason = consume(h, slot, 0)
            if reason != DONE or h[H_NOTE_COUNT]:
                send_segments(h)
                h[H_AT] = slot
                return reason
            if received < room or left < 0:
                break
            send_segments(h)
            if h[H_SEGMENT_COUNT]:  # of the chunk that is received into, perhaps
                return DONE
        if h[H_SEGMENT_COUNT] > SENT_AT:
            send_segments(h)
        if left < 0:
            break
    send_segments(h)
    return IDLE


_compile: Any = njit(cache=True, error_model="numpy")
turn = _compile(_turn)


def warm() -> None:
    """Compiles, or loads from the cache."""
    with compiled_once(__file__):
        if not turn.signatures:
            turn.compile((types.Array(types.int64, 1, "C"),))
            turn.disable_compile()
