"""Samples which keys workers ask for most, only while an operator looks.

Compiled code handles frames, and no Python sees them. But what a connection received last still lies in its chunk. So a
few hundred times a second the first frame there is read, unless it was read before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.frequent_keys import Sketch
from elasticps.server.fast import layout as at
from elasticps.server.fast.frames import MAGIC_AND_VERSION
from elasticps.server.fast.path import FastPath
from elasticps.store import Store
from elasticps.wire.frames import ALL_RANGES, HEADER_BYTES, PACKED, RECORD, FrameError, Kind, read_push
from replication.step_records import record_bytes

TICK_S = 0.004
MOST_S = 60.0
CAPACITY = 1024  # keys counted of a table
MOST_KEYS = 1 << 14  # looked at of a frame
MOST_TABLES = 64
SHOWN = 20
_WORDS = HEADER_BYTES // 8
_MAGIC = (1 << 40) - 1

Keys = NDArray[np.int64]


class HotKeys:
    """The counts of one look."""

    def __init__(self, path: FastPath, store: Store, ranges: int) -> None:
        self._path = path
        self._store = store
        self._sketches: dict[int, Sketch] = {}
        self._ranges = np.zeros(ranges, np.int64)
        self._frames = {Kind.PULL: 0, Kind.PUSH: 0}
        self._seen: dict[int, int] = {}  # by connection, the request that was read last

    async def look(self, seconds: float, clock: Callable[[], float]) -> None:
        """Samples for `seconds`."""
        until = clock() + min(seconds, MOST_S)
        while clock() < until:
            for table, keys in self.sample():
                self._count(table, keys)
            await asyncio.sleep(TICK_S)

    def sample(self) -> Iterator[tuple[int, Keys]]:
        """Reads new frames: tables, with copies of the keys in them."""
        chunks, connections = self._path.chunks.arrays, self._path.connections
        for number in np.flatnonzero(connections[:, at.C_ROLE] == at.ROLE_WORKER).tolist():
            chunk, end = (int(connections[number, field]) for field in (at.C_CHUNK, at.C_END))
            if 0 <= chunk < len(chunks):
                yield from self._first(number, chunks[chunk], end)

    def _first(self, connection: int, chunk: NDArray[np.uint8], end: int) -> list[tuple[int, Keys]]:
        """Reads the frame at the start of a chunk. end: bytes received since the chunk was emptied, 0 if none."""
        if len(chunk) < HEADER_BYTES:
            return []
        words = chunk[: len(chunk) & -8].view(np.int64)
        first, body, request = words[:3].tolist()
        whole = 0 <= body <= len(chunk) - HEADER_BYTES and (not end or HEADER_BYTES + body <= end)
        if first & _MAGIC != MAGIC_AND_VERSION or not whole or self._seen.get(connection) == request:
            return []
        kind, flags, items = first >> 40 & 0xFF, first >> 48 & 0xFFFF, int(words[6]) >> 32
        if kind == Kind.PULL and body == 8 * items:
            found = [(int(words[6]) & 0xFFFFFFFF, words[_WORDS : _WORDS + min(items, MOST_KEYS)].copy())]
        elif kind == Kind.PUSH and not flags & PACKED:
            try:
                end = HEADER_BYTES + body - record_bytes(len(self._ranges)) * bool(flags & RECORD)
                _, blocks = read_push(bool(flags & ALL_RANGES), items, chunk[HEADER_BYTES : max(end, HEADER_BYTES)])
            except (FrameError, ValueError):  # it is being received, over what was there
                return []
            found = [(block.table, block.keys[:MOST_KEYS].copy()) for block in blocks]
        else:
            return []
        self._seen[connection] = request
        self._frames[Kind(kind)] += 1
        return found

    def _count(self, number: int, keys: Keys) -> None:
        table = self._store.live.get(number)
        if table is None or not len(keys) or (number not in self._sketches and len(self._sketches) == MOST_TABLES):
            return
        self._sketches.setdefault(number, Sketch(CAPACITY)).add(keys)
        self._ranges += np.bincount(table.ranges_of(keys), minlength=len(self._ranges))

    def found(self) -> dict[str, Any]:
        """The result: counts of frames, ranges, and tables with their most frequent keys."""
        busy = np.argsort(-self._ranges, kind="stable")[:SHOWN]
        busy = busy[self._ranges[busy] > 0]
        tables = []
        for number, sketch in sorted(self._sketches.items(), key=lambda item: -item[1].total):
            if (table := self._store.live.get(number)) is not None:
                top = sketch.top(SHOWN)
                tables.append({
                    "id": number, "name": f"{table.app}/{table.spec.name}", "sampled": sketch.total,
                    "lost": sketch.lost, "keys": [each.key for each in top], "counts": [each.least for each in top],
                })  # fmt: skip
        return {
            "pulls": self._frames[Kind.PULL], "pushes": self._frames[Kind.PUSH],
            "sampled": int(self._ranges.sum()), "ranges": busy.tolist(), "range_counts": self._ranges[busy].tolist(),
            "tables": tables,
        }  # fmt: skip
