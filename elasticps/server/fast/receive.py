"""Entry point of the compiled path: one call per received buffer handles every whole frame that is usual."""

from __future__ import annotations

from typing import Any

from elasticps.kernels import compiled_once, njit
from elasticps.server.fast import chain
from elasticps.server.fast.frames import HEADER, MAGIC_AND_VERSION
from elasticps.server.fast.layout import (
    ARENA_HIGH_BYTES,
    BROKEN,
    C_ADDRESS,
    C_BYTES,
    C_CHUNK,
    C_END,
    C_EPOCH,
    C_FULL,
    C_LIMIT,
    C_PAUSED,
    C_PINNED,
    C_ROLE,
    C_SLOW,
    C_START,
    CONNECTION,
    DONE,
    FLUSH,
    H_ARENA_USED,
    H_CONNECTIONS,
    H_ENABLED,
    H_EPOCH,
    H_INFO,
    H_REFS,
    H_TURN,
    LEFT,
    PACKED_BODY,
    PAUSED,
    READ_ROOM_BYTES,
    ROLE_PEER,
    ROLE_WORKER,
    ROOM,
    SLOW,
    TURN,
)
from elasticps.server.fast.memory import load8, load16, load64, move, words
from elasticps.server.fast.operations import acknowledgement, forward, push
from elasticps.server.fast.reads import pull, read_after
from elasticps.server.fast.short_keys import write_out
from elasticps.store.native import INT, WORDS, kernel
from elasticps.wire.frames import PACKED, SHORT, Kind

PUSH, PULL, READ_AFTER = int(Kind.PUSH), int(Kind.PULL), int(Kind.READ_AFTER)
FORWARD, ACK, GET_VIEW = int(Kind.FORWARD), int(Kind.ACK), int(Kind.GET_VIEW)
MAGIC_BITS = (1 << 40) - 1


@kernel
def handle(h, c, at, role):
    """Handles one whole frame; the reason to stop, or DONE."""
    kind = load8(at + 5)
    if role == ROLE_WORKER:
        if kind == PUSH:
            return push(h, c, at)
        if kind == PULL:
            return pull(h, c, at)
        if kind == READ_AFTER:
            return read_after(h, c, at)
    elif role == ROLE_PEER:
        if kind == FORWARD:
            return forward(h, c, at)
        if kind == ACK:
            return acknowledgement(h, c, at)
        if kind == GET_VIEW and load64(at + 24) == h[H_EPOCH]:
            return DONE  # a beat: the peer has the view that is followed here
    return SLOW


@kernel
def make_room(h, conn, needed):
    """Makes room in the chunk for a frame of `needed` bytes that begins at C_START; ROOM if it cannot."""
    unused = load64(h[H_REFS] + 8 * conn[C_CHUNK]) == 0 and conn[C_PINNED] == 0
    left = conn[C_END] - conn[C_START]
    if left == 0 and unused:
        conn[C_START] = 0
        conn[C_END] = 0
    if conn[C_START] + needed <= conn[C_BYTES] and conn[C_BYTES] - conn[C_END] >= min(needed - left, READ_ROOM_BYTES):
        return DONE
    if unused and needed <= conn[C_BYTES]:
        move(conn[C_ADDRESS], conn[C_ADDRESS] + conn[C_START], left)
        conn[C_START] = 0
        conn[C_END] = left
        return DONE
    h[H_INFO] = needed
    return ROOM


# The interpreter's lock is kept: a call is short, and to get the lock back from a busy thread takes milliseconds.
@njit(cache=True, error_model="numpy", signature=(WORDS, INT, INT))
def consume(h, c, received):
    """Handles the frames of connection `c` after `received` more bytes came into its chunk; returns why it stopped."""
    conn = words(h[H_CONNECTIONS] + 8 * CONNECTION * c, CONNECTION)
    conn[C_END] += received
    needed = READ_ROOM_BYTES
    handled = 0
    while conn[C_END] - conn[C_START] >= HEADER:
        at = conn[C_ADDRESS] + conn[C_START]
        body = load64(at + 8)
        if load64(at) & MAGIC_BITS != MAGIC_AND_VERSION or body < 0 or body > conn[C_LIMIT] or body & 7:
            return BROKEN
        if conn[C_END] - conn[C_START] < HEADER + body:
            needed = HEADER + body
            break
        role = conn[C_ROLE]
        if conn[C_PAUSED] and role == ROLE_WORKER:
            return PAUSED
        if load16(at + 6) & (SHORT | PACKED) and role == ROLE_WORKER:
            kind = load8(at + 5)
            if conn[C_FULL]:
                return LEFT
            if kind == PUSH and load16(at + 6) & PACKED:
                return PACKED_BODY
            if load16(at + 6) & SHORT and kind in (PUSH, PULL):
                reason = write_out(h, conn, at)
                if reason:
                    return reason
                body = load64(at + 8)
        if h[H_ARENA_USED] > ARENA_HIGH_BYTES:
            return FLUSH
        if handled > h[H_TURN]:
            return TURN
        if conn[C_SLOW] or h[H_ENABLED] == 0:
            return SLOW
        reason = handle(h, c, at, role)
        if reason:
            return reason
        conn[C_EPOCH] = max(conn[C_EPOCH], load64(at + 24))
        conn[C_START] += HEADER + body
        handled += HEADER + body
    return make_room(h, conn, needed)


release: Any = njit(cache=True, error_model="numpy")(chain.release.py_func)  # type: ignore[attr-defined]


def warm() -> None:
    """Compiles, or loads from the cache."""
    with compiled_once(__file__):
        for function, signature in ((consume, (WORDS, INT, INT)), (release, (WORDS, INT))):
            if not function.signatures:
                function.compile(signature)
                function.disable_compile()
