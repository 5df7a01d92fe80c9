"""A push in one piece of memory: one compiled call orders the rows of all its tables by head and range, cuts them into
frames and copies them there, ready to be sent.

A large push is copied frame by frame instead, each while the one before it is on its way. Only the fields of the
headers are left for whoever sends. What must be sent again under another view is read back out of the frames.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import FRAME_BYTES, Routes, plan_ranks, take_sum
from elasticps.client.writes import Part, PushFrame, Write, refuse_large
from elasticps.kernels import njit
from elasticps.kernels.hashing import key_ranges, table_salt
from elasticps.store.native import carray, pointer
from elasticps.wire.frames import (
    BLOCK_BYTES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    Block,
    Buffer,
    read_push,
)
from elasticps.wire.pool import Pool
from replication.chain import Member, Ranges

AT_ONCE_BYTES = FRAME_BYTES // 2  # up to so many are copied before the first is sent

# One table of a push, int64 [FIELDS]; the last three are the plan's.
(
    KEYS,  # address of int64 [n]
    COUNT,  # n
    GRADS,  # address of float32 [n, dim]
    DIM,
    FLOATS,  # of a dense tensor's gradient, whose last row is short; -1 for a sparse table
    TABLE,
    SALT,
    VALUES_AT,  # where its step values begin among those of the push
    VALUES,  # how many they are
    PLANNED,  # where its part of `order` begins
    REPEATS,
    FIELDS,
) = range(12)
# One frame, int64 [F_FIELDS]. Frames stand in the order of their shares, by which they are found.
(F_SHARE, F_START, F_STOP, F_AT, F_BODY, F_ITEMS, F_NAMED, F_FIELDS) = range(8)
_TABLE = struct.Struct(f"={FIELDS}q")

kernel = njit(nogil=True, cache=True)


@kernel
def address(array):  # type: ignore[no-untyped-def]
    """Where an array's memory begins; a tenth of what asking the array itself takes."""
    return array.ctypes.data


@kernel
def _plan(tables, shift, rank_of, order, following, offsets):  # type: ignore[no-untyped-def]
    """Orders each table's keys by rank."""
    at = 0
    for t in range(tables.shape[0]):
        n = tables[t, COUNT]
        keys = carray(pointer(tables[t, KEYS]), (n,), np.int64)
        salt = np.uint64(tables[t, SALT])
        _, repeats = plan_ranks(keys, salt, shift, rank_of, order[at : at + n], following[at : at + n], offsets[t])
        tables[t, PLANNED] = at
        tables[t, REPEATS] = repeats
        at += n


@kernel
def _row_bytes(tables, offsets, start, stop):  # type: ignore[no-untyped-def]
    size = 0
    for t in range(tables.shape[0]):
        size += (offsets[t, stop] - offsets[t, start]) * (8 + 4 * tables[t, DIM])
    return size


@kernel
def _cut(tables, offsets, shares, frames):  # type: ignore[no-untyped-def]
    """Cuts every share that has rows into frames, as `cut_ranks` does. Returns their number, their bytes,
    and those of the rank that has most, if any share is cut."""
    count, at, largest = 0, 0, 0
    for s in range(shares.shape[0]):
        start, end = shares[s, 0], shares[s, 1]
        left = _row_bytes(tables, offsets, start, end)
        if left == 0:
            continue
        cut = left > FRAME_BYTES // 2
        first, aimed = count, FRAME_BYTES // 4
        while start < end:
            stop = end
            if cut and left > aimed + aimed // 2:
                stop, size = start, 0
                while stop < end:
                    more = _row_bytes(tables, offsets, stop, stop + 1)
                    largest = max(largest, more)
                    if stop > start and size + more > aimed:
                        break
                    size += more
                    stop += 1
                left -= size
            elif cut:
                for rank in range(start, end):
                    largest = max(largest, _row_bytes(tables, offsets, rank, rank + 1))
            frames[count, F_SHARE] = s
            frames[count, F_START] = start
            frames[count, F_STOP] = stop
            count += 1
            start, aimed = stop, FRAME_BYTES
        for f in range(first, count):
            named = 1 if count - first > 1 else 0
            ranks = frames[f, F_STOP] - frames[f, F_START]
            body = named * (8 + ((4 * ranks + 7) & ~7))
            items = 0
            for t in range(tables.shape[0]):
                rows = offsets[t, frames[f, F_STOP]] - offsets[t, frames[f, F_START]]
                if rows:
                    body += BLOCK_BYTES + ((4 * tables[t, VALUES] + 7) & ~7) + 8 * rows
                    body += (4 * rows * tables[t, DIM] + 7) & ~7
                    items += 1
            frames[f, F_AT] = at
            frames[f, F_BODY] = body
            frames[f, F_ITEMS] = items
            frames[f, F_NAMED] = named
            at += HEADER_BYTES + body
    return count, at, largest


@kernel
def _fill(tables, values, order, following, offsets, range_at, frames, memory):  # type: ignore[no-untyped-def]
    """Copies what some frames carry to their places in `memory`, all but the headers."""
    words, ints, floats = memory.view(np.int64), memory.view(np.int32), memory.view(np.float32)
    for f in range(frames.shape[0]):
        start, stop = frames[f, F_START], frames[f, F_STOP]
        at = frames[f, F_AT] + HEADER_BYTES
        if frames[f, F_NAMED]:
            words[at >> 3] = stop - start
            at += 8
            for rank in range(start, stop):
                ints[(at >> 2) + rank - start] = range_at[rank]
            if (stop - start) & 1:
                ints[(at >> 2) + stop - start] = 0
            at += (4 * (stop - start) + 7) & ~7
        for t in range(tables.shape[0]):
            low, high = offsets[t, start], offsets[t, stop]
            rows, dim, count = high - low, tables[t, DIM], tables[t, VALUES]
            if not rows:
                continue
            here = at >> 2
            ints[here] = tables[t, TABLE]
            ints[here + 1] = rows
            ints[here + 2] = dim
            ints[here + 3] = count
            words[(at >> 3) + 2] = 0
            at += BLOCK_BYTES
            if count & 1:
                floats[(at >> 2) + count] = 0
            for i in range(count):
                floats[(at >> 2) + i] = values[tables[t, VALUES_AT] + i]
            at += (4 * count + 7) & ~7
            planned = tables[t, PLANNED]
            mine = order[planned + low : planned + high]
            keys = carray(pointer(tables[t, KEYS]), (tables[t, COUNT],), np.int64)
            for j in range(rows):
                words[(at >> 3) + j] = keys[mine[j]]
            at += 8 * rows
            if (rows * dim) & 1:
                floats[(at >> 2) + rows * dim] = 0
            out = floats[at >> 2 : (at >> 2) + rows * dim].reshape((rows, dim))
            if tables[t, FLOATS] < 0:
                grads = carray(pointer(tables[t, GRADS]), (tables[t, COUNT], dim), np.float32)
                after = following[planned : planned + (tables[t, COUNT] if tables[t, REPEATS] else 0)]
                take_sum(grads, mine, after, out)
            else:
                _take_blocks(carray(pointer(tables[t, GRADS]), (tables[t, FLOATS],), np.float32), mine, out)
            at += (4 * rows * dim + 7) & ~7


@kernel
def _take_blocks(flat, order, out):  # type: ignore[no-untyped-def]
    """Rows of a dense tensor's gradient; what the last one lacks is zero."""
    dim = out.shape[1]
    for j in range(order.shape[0]):
        start = order[j] * dim
        have = min(dim, flat.shape[0] - start)
        for d in range(have):
            out[j, d] = flat[start + d]
        for d in range(have, dim):
            out[j, d] = np.float32(0)


@kernel
def _build(  # type: ignore[no-untyped-def]
    tables, values, shift, rank_of, range_at, shares, order, following, offsets, frames, memory
):
    """Plans and cuts; copies too if all of it fits into `memory`."""
    _plan(tables, shift, rank_of, order, following, offsets)
    count, size, largest = _cut(tables, offsets, shares, frames)
    if size <= memory.shape[0]:
        _fill(tables, values, order, following, offsets, range_at, frames[:count], memory)
    return count, size, largest


class PushSource(NamedTuple):
    """One table's rows of a push, as the caller has them. keys int64 [n]; grads float32 [n, dim], or flat for a dense
    tensor, whose keys are its blocks and `floats` its size; salt: as a signed number."""

    table: int
    salt: int
    dim: int
    floats: int
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    step_values: NDArray[np.float32]


class Packer:
    """Makes parts; keeps what they need on the way for the next. One at a time: until a part is complete."""

    def __init__(self, pool: Pool) -> None:
        self.serial = 0
        self._pool = pool
        self._order = self._following = np.empty(0, np.int64)
        self._room = 0, 0  # ranges and tables for which there is room
        self._tables = np.empty((0, FIELDS), np.int64)
        self._table_bytes = memoryview(b"")
        self._values = np.empty(0, np.float32)
        self._offsets = np.empty((0, 0), np.int64)
        self._frames = np.empty((0, F_FIELDS), np.int64)

    def pack(self, sources: list[PushSource], routes: Routes) -> PackedPart:
        """A part of these tables. InputError if it cannot be cut into frames that a server accepts."""
        self.serial += 1
        heads, ranges = len(routes.bounds), len(routes.rank_of)
        each = (BLOCK_BYTES + 8 + 4) * heads
        bound, keys, floats = HEADER_BYTES * heads, 0, 0
        for source in sources:
            n, values = len(source.keys), len(source.step_values)
            bound += n * (8 + 4 * source.dim) + each + 4 * values * heads
            keys += n
            floats += values
        if keys > len(self._order) or floats > len(self._values) or self._room != (ranges, len(sources)):
            self._grow(len(sources), keys, floats, ranges)
        at = place = 0
        for table, salt, dim, size, own_keys, grads, step_values in sources:
            k = len(step_values)
            self._values[at : at + k] = step_values
            _TABLE.pack_into(
                self._table_bytes, place, address(own_keys), len(own_keys), address(grads), dim, size, table, salt, at,
                k, 0, 0,
            )  # fmt: skip
            at += k
            place += _TABLE.size
        memory = self._pool.take(bound + -bound % 8) if bound <= AT_ONCE_BYTES else _NOTHING
        made, size, largest = _build(
            self._tables, self._values, routes.shift, routes.rank_of, routes.range_at, routes.bounds,
            self._order, self._following, self._offsets, self._frames, memory,
        )  # fmt: skip
        if largest > MAX_BODY_BYTES // 2:  # the rest is for headers, and for the cut's slack
            refuse_large(largest, ranges)
        if size <= len(memory):
            return PackedPart(self, sources, routes, self._frames[:made].tolist(), memory, made)
        return PackedPart(self, sources, routes, self._frames[:made].tolist(), self._pool.take(size), 0)

    def fill(self, part: PackedPart, first: int, stop: int) -> None:
        """Copies the content of some of a part's frames."""
        if part.serial != self.serial:
            raise RuntimeError("a push was left half copied")
        _fill(
            self._tables, self._values, self._order, self._following, self._offsets,
            part.routes.range_at, self._frames[first:stop], part.memory,
        )  # fmt: skip

    def _grow(self, tables: int, keys: int, floats: int, ranges: int) -> None:
        if len(self._order) < keys:
            self._order, self._following = np.empty(2 * keys, np.int64), np.empty(2 * keys, np.int64)
        if len(self._values) < floats:
            self._values = np.empty(2 * floats, np.float32)
        self._room = ranges, tables
        self._tables = np.empty((tables, FIELDS), np.int64)
        self._table_bytes = self._tables.data.cast("B") if tables else memoryview(b"")
        self._offsets = np.empty((tables, ranges + 1), np.int64)
        self._frames = np.empty((ranges + 1, F_FIELDS), np.int64)


_NOTHING = np.empty(0, np.uint8)
_NOBODY: list[PushSource] = []


class PackedPart:
    """One part of a step, as frames for the heads of `routes`. `memory`, uint8, holds them one after another."""

    __slots__ = (
        "_done",
        "_next",
        "_packer",
        "_part",
        "_rows",
        "_sent",
        "_view",
        "memory",
        "routes",
        "serial",
        "sources",
    )

    def __init__(
        self,
        packer: Packer,
        sources: list[PushSource],
        routes: Routes,
        frames: list[list[int]],
        memory: NDArray[np.uint8],
        done: int,
    ) -> None:
        self.serial = packer.serial
        self.sources = sources  # the caller's arrays, until all is copied
        self.routes = routes
        self.memory = memory
        self._rows = frames
        self._view = memory.data
        self._packer = packer
        self._done = done  # frames copied
        self._sent = [False] * len(frames)
        self._next = 0  # the frame after the last one that was sent
        self._part: Part | None = None

    def complete(self) -> None:
        """Copies what has not been asked for yet; the caller's arrays may change from now on."""
        if self._done < len(self._rows):
            self._copy(len(self._rows))
        self.sources = _NOBODY

    def _copy(self, stop: int) -> None:
        if self._done < stop:
            self._packer.fill(self, self._done, stop)
            self._done = stop

    @property
    def nbytes(self) -> int:
        """Of its frames."""
        return len(self.memory)

    def touches(self, ranges: Ranges) -> bool:
        """Whether it may have a row in any of these ranges."""
        ranks = self.routes.rank_of[ranges]
        low, high = int(ranks.min()), int(ranks.max())
        return any(f[F_ITEMS] and f[F_START] <= high and low < f[F_STOP] for f in self._rows)

    def heads(self, epoch: int) -> list[Member] | None:
        """The heads, in the view of that epoch, of ranges that it has rows for; None if it was made for another."""
        heads = self.routes.heads
        return [heads[f[F_SHARE]] for f in self._rows] if self.routes.epoch == epoch else None

    def whole(self, server: int, routes: Routes) -> Iterator[PushFrame]:
        """What a server, by its index in the view of `routes`, gets of the part; see `Part.whole`."""
        if routes is not self.routes:
            yield from self._unpacked().whole(server, routes)
            return
        share = routes.share_index[server]
        first = self._first(share)
        if first == len(self._rows) or self._rows[first][F_SHARE] != share:
            yield PushFrame(None, 0, [])
        for i in range(first, len(self._rows)):
            f = self._rows[i]
            if f[F_SHARE] != share:
                return
            self._copy(i + 1)
            at, end = f[F_AT], f[F_AT] + HEADER_BYTES + f[F_BODY]
            ranges = routes.range_at[f[F_START] : f[F_STOP]] if f[F_NAMED] else None
            if self._sent[i]:  # the first header may still be on its way
                yield PushFrame(ranges, f[F_ITEMS], [self._view[at + HEADER_BYTES : end]])
            else:
                self._sent[i] = True
                yield PushFrame(ranges, f[F_ITEMS], [], self._view[at:end])

    def ready(self, server: int, routes: Routes) -> PushFrame | None:
        """The same, if it is one frame that has not been sent."""
        if routes is not self.routes:
            return None
        share, i = routes.share_index[server], self._next
        if i == len(self._rows) or self._rows[i][F_SHARE] != share:  # mostly it is, as they are asked for in turn
            i = self._first(share)
            if i == len(self._rows) or self._rows[i][F_SHARE] != share:
                return None
        f = self._rows[i]
        if f[F_NAMED] or i >= self._done or self._sent[i]:
            return None
        self._sent[i], self._next = True, i + 1
        at = f[F_AT]
        return PushFrame(None, f[F_ITEMS], [], self._view[at : at + HEADER_BYTES + f[F_BODY]])

    def _first(self, share: int) -> int:
        """The number of a share's first frame, or where that would stand: a share without rows has none."""
        return bisect_left(self._rows, [share])

    def named(self, ranges: Ranges) -> Iterator[PushFrame]:
        """What the head of `ranges`, ordered by chain, gets for these and no others."""
        return self._unpacked().named(ranges)

    def writes(self) -> list[Write]:
        """Its tables by rank, as views of the frames."""
        self._copy(len(self._rows))
        pieces: dict[int, list[Block]] = {}
        for f in self._rows:
            body = self.memory[f[F_AT] + HEADER_BYTES : f[F_AT] + HEADER_BYTES + f[F_BODY]]
            for block in read_push(not f[F_NAMED], f[F_ITEMS], body)[1]:
                pieces.setdefault(block.table, []).append(block)
        writes, ranks = [], np.arange(len(self.routes.rank_of) + 1)
        for table, blocks in pieces.items():
            rows = PackedRows(blocks)
            home = np.empty(len(rows.keys), np.int32)
            key_ranges(rows.keys, table_salt(table), self.routes.shift, home)
            offsets = np.searchsorted(self.routes.rank_of[home], ranks).astype(np.int64)
            writes.append(Write(table, rows, offsets, blocks[0].step_values))
        return writes

    def with_values(self, values: Callable[[int], NDArray[np.float32] | None]) -> Part:
        """As `Part.with_values`."""
        return self._unpacked().with_values(values)

    def _unpacked(self) -> Part:
        if self._part is None:
            self._part = Part(self.writes(), self.routes)
        return self._part


class PackedRows:
    """One table's rows in rank order, in the pieces that stand in frames."""

    def __init__(self, pieces: list[Block]) -> None:
        self.dim = pieces[0].grads.shape[1]
        self.keys = np.concatenate([block.keys for block in pieces])
        self._pieces = [block.grads for block in pieces]

    def gradients(self, start: int, stop: int) -> list[Buffer]:
        buffers: list[Buffer] = []
        at = 0
        for rows in self._pieces:
            low, high = max(start - at, 0), min(stop - at, len(rows))
            if low < high:
                buffers.append(rows[low:high].data.cast("B"))
            at += len(rows)
        return buffers

    def complete(self) -> None:
        """The rows are copies already."""
