"""Rows in the order of one view, as frames for this view and every later one: there they are cut at other places, but a
range's bytes stay what they were. For what the caller lends, for initial values, and for what is sent again; what is
sent first is made by `push_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import FRAME_BYTES, PushPlan, Routes, cut_ranks
from elasticps.errors import InputError
from elasticps.wire.frames import MAX_BLOCKS, MAX_BODY_BYTES, Buffer, block_head, grads_padding
from replication.chain import Member, Ranges

Runs = list[tuple[int, int]]


class Rows(Protocol):
    """One table's rows of a part, ordered by rank."""

    dim: int
    keys: NDArray[np.int64]

    def gradients(self, start: int, stop: int) -> list[Buffer]:
        """The gradients of rows `start`..`stop`, one after another."""

    def complete(self) -> None:
        """Copies what has not been asked for yet; the caller's arrays may change from now on."""


class LentRows:
    """The same without a copy: the caller lends its memory until the step is committed."""

    def __init__(self, flat: NDArray[np.float32], dim: int, plan: PushPlan) -> None:
        self.keys, self.dim = plan.order, dim
        self._bytes = flat.data.cast("B") if flat.size else memoryview(b"")

    def gradients(self, start: int, stop: int) -> list[Buffer]:
        data, row, buffers = self._bytes, self.dim * 4, list[Buffer]()
        for block in self.keys[start:stop].tolist():
            at = block * row
            buffers.append(data[at : at + row])
            if at + row > len(data):
                buffers.append(bytes(at + row - len(data)))
        return buffers

    def complete(self) -> None:
        pass


@dataclass(frozen=True)
class Write:
    """One table's part of a push: its rows, where each rank's begin (int64 [P + 1]), the step values (float32 [k])."""

    table_id: int
    rows: Rows
    offsets: NDArray[np.int64]
    step_values: NDArray[np.float32]

    @property
    def row_bytes(self) -> int:
        return 8 + 4 * self.rows.dim


def check_size(writes: list[Write]) -> None:
    """InputError if a part of a step cannot be cut, between ranges, into frames that a server accepts."""
    if len(writes) > MAX_BLOCKS:
        raise InputError(
            f"a push of {len(writes)} tables is over the limit of {MAX_BLOCKS}; push them in several parts"
        )
    if sum(len(w.rows.keys) * w.row_bytes for w in writes) <= MAX_BODY_BYTES // 2:
        return
    largest = int(np.max(sum(np.diff(w.offsets) * w.row_bytes for w in writes)))
    if largest > MAX_BODY_BYTES // 2:  # the rest is for headers, and for the cut's slack
        refuse_large(largest, len(writes[0].offsets) - 1)


def refuse_large(largest: int, ranges: int) -> NoReturn:
    """A range has so many bytes of one push."""
    raise InputError(
        f"this push has {largest >> 20} MB for one of the cluster's {ranges} ranges, the limit is "
        f"{MAX_BODY_BYTES // 2 >> 20} MB: push in several steps, or create the cluster with more ranges"
    )


class PushFrame(NamedTuple):
    """A PUSH frame without its header: the ranges that it names (None: all that the receiver heads), the number of
    blocks, and the buffers of the body; or `frame`, the body behind room for the header."""

    ranges: Ranges | None
    items: int
    buffers: list[Buffer]
    frame: memoryview | None = None


class Part:
    """One part of a step: the rows of all its tables, in the order of `routes`."""

    def __init__(self, writes: list[Write], routes: Routes) -> None:
        self.writes = writes
        self._routes = routes

    @property
    def nbytes(self) -> int:
        """Of its rows."""
        return sum(int(write.offsets[-1]) * write.row_bytes for write in self.writes)

    def touches(self, ranges: Ranges) -> bool:
        """Whether it has a row in any of these ranges."""
        ranks = self._routes.rank_of[ranges]
        return any(bool((w.offsets[ranks] < w.offsets[ranks + 1]).any()) for w in self.writes)

    def heads(self, epoch: int) -> list[Member] | None:
        """The heads, in the view of that epoch, of ranges that it has rows for; None if it was made for another."""
        routes = self._routes
        if routes.epoch != epoch:
            return None
        return [
            head
            for head, share in zip(routes.heads, routes.shares, strict=True)
            if any(write.offsets[share.start] < write.offsets[share.stop] for write in self.writes)
        ]

    def with_values(self, values: Callable[[int], NDArray[np.float32] | None]) -> Part:
        """The same rows with other step values, by table's id; without those of tables that have none."""
        given = [(write, values(write.table_id)) for write in self.writes]
        return Part([replace(write, step_values=k) for write, k in given if k is not None], self._routes)

    def complete(self) -> None:
        """Makes the part independent of the caller's arrays, except those that are lent."""
        for write in self.writes:
            write.rows.complete()

    def whole(self, server: int, routes: Routes) -> Iterator[PushFrame]:
        """What a server, by its index in the view of `routes`, gets of the part: frames that together tick all that
        it heads. They are made one at a time; without rows for the server it is one frame."""
        share = routes.share_of[server]
        start, stop = share.start, share.stop
        if routes is not self._routes:
            yield from self._replanned(routes.range_at[start:stop], named=False)
            return
        size = 0
        for write in self.writes:
            size += int(write.offsets[stop] - write.offsets[start]) * write.row_bytes
        if size <= FRAME_BYTES // 2:
            yield self._frame(None, [(start, stop)])
            return
        sizes = np.zeros(stop - start, np.int64)
        for write in self.writes:
            sizes += np.diff(write.offsets[start : stop + 1]) * write.row_bytes
        cuts = cut_ranks(sizes)
        for a, b in cuts:
            ranges = None if len(cuts) == 1 else routes.range_at[start + a : start + b]
            yield self._frame(ranges, [(start + a, start + b)])

    def named(self, ranges: Ranges) -> Iterator[PushFrame]:
        """What the head of `ranges`, ordered by chain, gets for these and no others."""
        return self._replanned(ranges, named=True)

    def _replanned(self, ranges: Ranges, named: bool) -> Iterator[PushFrame]:
        """Frames for ranges in any order; `named`: also if one frame holds all of them."""
        ranks = self._routes.rank_of[ranges]
        sizes = np.zeros(len(ranks), np.int64)
        for write in self.writes:
            sizes += (write.offsets[ranks + 1] - write.offsets[ranks]) * write.row_bytes
        cuts = cut_ranks(sizes)
        for a, b in cuts:
            alone = len(cuts) == 1 and not named
            yield self._frame(None if alone else ranges[a:b], runs_of(ranks[a:b]))

    def _frame(self, ranges: Ranges | None, runs: Runs) -> PushFrame:
        buffers: list[Buffer] = [] if ranges is None else [named_ranges(ranges)]
        blocks = 0
        for write in self.writes:
            offsets, rows = write.offsets, write.rows
            spans = [(int(offsets[a]), int(offsets[b])) for a, b in runs]
            count = sum(b - a for a, b in spans)
            if not count:
                continue
            blocks += 1
            buffers.append(block_head(write.table_id, count, rows.dim, write.step_values))
            keys = rows.keys.data.cast("B")
            buffers += [keys[8 * a : 8 * b] for a, b in spans if a < b]
            for a, b in spans:
                if a < b:
                    buffers += rows.gradients(a, b)
            if padding := grads_padding(count, rows.dim):
                buffers.append(b"\0" * padding)
        return PushFrame(ranges, blocks, buffers)


def runs_of(ranks: NDArray[np.int64]) -> Runs:
    """Consecutive numbers as (start, stop): [4, 5, 6, 9] gives [(4, 7), (9, 10)]."""
    if not len(ranks):
        return []
    edges = np.flatnonzero(np.diff(ranks) != 1) + 1
    starts = ranks[np.concatenate([[0], edges])]
    stops = ranks[np.concatenate([edges - 1, [len(ranks) - 1]])] + 1
    return list(zip(starts.tolist(), stops.tolist(), strict=True))


def named_ranges(ranges: Ranges) -> bytes:
    """How a PUSH names the ranges that it ticks."""
    named = len(ranges).to_bytes(8, "little") + ranges.astype("<i4").tobytes()
    return named + b"\0" * (-len(named) % 8)
