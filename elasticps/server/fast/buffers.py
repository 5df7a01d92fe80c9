"""Memory that is received into and sent from, and the way of queued bytes to their connections.

Fresh memory costs a page fault per 4 KiB, more than the copy of what lands there, so chunks are used again. A chunk is
referred to by Python, which its array's reference count shows, or by the compiled path's log, which counts in `refs`.
Nobody has to give bytes back.
"""

from __future__ import annotations

import ctypes
import sys
from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.requests import Asker
from elasticps.server.fast import layout as at
from elasticps.server.fast.shared import SharedArrays
from elasticps.wire.frames import Buffer, Header
from elasticps.wire.pool import UNUSED, Bytes

SMALLEST_BYTES = 64 << 10
USUAL_BYTES = 4 << 20  # larger ones are made for one frame
LOOKED_AT = 16  # chunks that are given up and may be free by now
MOST = 1 << 16


class Chunks:
    """Chunks by number. refs: int64 [MOST], frames of the compiled log in each; addresses: int64 [MOST].
    retained_bytes: the most that unused chunks may take together."""

    def __init__(self, retained_bytes: int) -> None:
        self._retained_bytes = retained_bytes
        self.arrays: list[Bytes] = []
        self.refs = np.zeros(MOST, np.int64)
        self.addresses = np.zeros(MOST, np.int64)
        self._free: list[int] = []  # numbers without an array
        self._left: deque[int] = deque()  # given up; free as soon as nobody refers to them
        self._left_bytes = 0

    def take(self, nbytes: int) -> int:
        """The number of a chunk of at least so many bytes that nobody refers to."""
        for _ in range(min(len(self._left), LOOKED_AT)):
            number = self._left.popleft()
            size = len(self.arrays[number])
            if not self.unused(number):
                self._left.append(number)
            elif nbytes <= size <= 4 * nbytes:
                self._left_bytes -= size
                return number
            elif self._left_bytes > self._retained_bytes:
                self._left_bytes -= size
                self.arrays[number] = _NONE
                self._free.append(number)
            else:
                self._left.append(number)
        array = np.empty(nbytes, np.uint8)
        if self._free:
            number = self._free.pop()
            self.arrays[number] = array
        else:
            number = len(self.arrays)
            if number == MOST:
                raise MemoryError(f"{MOST} received chunks are in use at once")
            self.arrays.append(array)
        self.addresses[number] = array.ctypes.data
        return number

    def give_up(self, number: int) -> None:
        """Ends receiving into a chunk. It is used again when nothing refers to it any more."""
        self._left.append(number)
        self._left_bytes += len(self.arrays[number])

    def unused(self, number: int) -> bool:
        """Whether nothing refers to a chunk's bytes."""
        return self.refs[number] == 0 and not self.pinned(number)

    def pinned(self, number: int) -> bool:
        """Whether Python refers to a chunk's bytes: a view, or a socket that still sends from them."""
        return sys.getrefcount(self.arrays[number]) > UNUSED


def size_for(needed: int) -> int:
    """Bytes of a chunk for frames of about this size."""
    if needed > USUAL_BYTES:
        return needed
    return min(max(1 << (4 * needed - 1).bit_length(), SMALLEST_BYTES), max(USUAL_BYTES, needed))


_NONE: Bytes = np.empty(0, np.uint8)


def int64_at(address: int, n: int) -> NDArray[np.int64]:
    """int64 [n] at an address."""
    if not n:
        return np.empty(0, np.int64)
    return np.ctypeslib.as_array((ctypes.c_int64 * n).from_address(address))


class PathConnection(Asker, Protocol):
    """A connection as the compiled path's Python side sees it. slot: its number there."""

    slot: int

    def frame(self, header: Header, body: Bytes, answered: int) -> None:
        """Handles a frame that is not usual. `answered`: of a pull, the rows that have been sent."""

    def leave(self) -> None:
        """Leaves the received bytes as they are until more is read."""

    def rest(self) -> None:
        """Pauses so that other connections have their turn."""


SENT_COPIED_BYTES = 64 << 10  # up to so many queued bytes are copied for the socket, which then needs no memory of ours


class Outbox:
    """Sends what compiled code has queued and did not send itself. slots: the connections by number; it changes as they
    come and go."""

    def __init__(self, shared: SharedArrays, chunks: Chunks, slots: Sequence[Asker | None]) -> None:
        self._shared = shared
        self._chunks = chunks
        self._slots = slots
        self._arena = -1
        self.take_arena(at.ARENA_BYTES)

    def take_arena(self, nbytes: int) -> None:
        """Gives compiled code a new arena: the old is too small, or a socket still sends from it."""
        if self._arena >= 0:
            self._chunks.give_up(self._arena)
        self._arena = self._chunks.take(max(nbytes, at.ARENA_BYTES))
        array = self._chunks.arrays[self._arena]
        f = self._shared.fields
        f[at.H_ARENA], f[at.H_ARENA_SIZE], f[at.H_ARENA_USED] = array.ctypes.data, len(array), 0

    def flush(self) -> None:
        """Hands what is queued to the connections."""
        f = self._shared.fields
        count = f[at.H_SEGMENT_COUNT]
        rows = self._shared[at.H_SEGMENTS][:count].tolist()
        f[at.H_SEGMENT_COUNT] = f[at.H_ARENA_USED] = 0
        self._hand_over(rows)
        connections = self._shared[at.H_CONNECTIONS]
        for chunk in {row[1] for row in rows if row[1] >= 0}:
            if self._chunks.pinned(chunk):  # a socket still sends from it: it must not be received over
                connections[connections[:, at.C_CHUNK] == chunk, at.C_PINNED] = 1
        if self._chunks.pinned(self._arena):
            self.take_arena(f[at.H_ARENA_SIZE])

    def _hand_over(self, rows: list[list[int]]) -> None:
        if len(rows) == 1:
            slot, chunk, offset, size = rows[0]
            connection = self._slots[slot]
            if connection is not None:
                connection.send(self._sent(chunk, offset, size))
            return
        by_slot: dict[int, list[Buffer]] = {}
        for slot, chunk, offset, size in rows:
            by_slot.setdefault(slot, []).append(self._sent(chunk, offset, size))
        for slot, buffers in by_slot.items():
            connection = self._slots[slot]
            if connection is None:
                continue
            if len(buffers) == 1:
                connection.send(buffers[0])
            else:
                connection.send_all(buffers)

    def _sent(self, chunk: int, offset: int, size: int) -> Buffer:
        if chunk >= 0:
            return self._chunks.arrays[chunk][offset : offset + size].data
        part = self._chunks.arrays[self._arena][offset : offset + size]
        return part.tobytes() if size <= SENT_COPIED_BYTES else part.data
