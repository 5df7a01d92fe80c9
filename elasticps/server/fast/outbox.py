"""What compiled code has queued, and did not send itself, on its way to the connections."""

from __future__ import annotations

from collections.abc import Sequence

from elasticps.server.core.asker import Asker
from elasticps.server.fast import layout as at
from elasticps.server.fast.chunks import Chunks
from elasticps.server.fast.shared import Shared
from elasticps.wire.frames import Buffer

SENT_COPIED_BYTES = 64 << 10  # up to so many queued bytes are copied for the socket, which then needs no memory of ours


class Outbox:
    """slots: the connections by number; it changes as they come and go."""

    def __init__(self, shared: Shared, chunks: Chunks, slots: Sequence[Asker | None]) -> None:
        self._shared = shared
        self._chunks = chunks
        self._slots = slots
        self._arena = -1
        self.take_arena(at.ARENA_BYTES)

    def take_arena(self, nbytes: int) -> None:
        """Has compiled code write into new memory: the old is too small, or a socket still sends from it."""
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
