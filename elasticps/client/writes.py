"""Pushes: from a caller's arrays to frames. Copies each gradient once, in the order in which heads want it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numba import njit
from numpy.typing import NDArray

from elasticps.client.routing import PushPlan, Routes, Share, cut_ranks, take_sum
from elasticps.errors import InputError
from elasticps.wire.frames import (
    ALL_RANGES,
    LAST,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    Buffer,
    Header,
    Kind,
    block_head,
    grads_padding,
)


class Rows(Protocol):
    """One table's gradients, addressable by the positions that its plan orders."""

    dim: int

    def keys(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        """The keys at these positions."""

    def gradients(self, order: NDArray[np.int64]) -> list[Buffer]:
        """Their gradients, one after another."""


class SparseRows:
    """keys int64 [n], grads float32 [n, dim]; gradients of a key that repeats are summed in their order."""

    def __init__(self, keys: NDArray[np.int64], grads: NDArray[np.float32], following: NDArray[np.int64]) -> None:
        self._keys, self._grads, self._following = keys, grads, following
        self.dim = grads.shape[1]

    def keys(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._keys[order]

    def gradients(self, order: NDArray[np.int64]) -> list[Buffer]:
        out = np.empty((len(order), self.dim), np.float32)
        take_sum(self._grads, order, self._following, out)
        return [out.data.cast("B")]


class DenseRows:
    """A tensor's gradient, flat float32 [size], as blocks of `dim` floats; the last one is padded with zeros.

    `copy=False` lends the caller's memory to the socket.
    """

    def __init__(self, flat: NDArray[np.float32], dim: int, copy: bool) -> None:
        self._flat, self.dim, self._copy = flat, dim, copy

    def keys(self, order: NDArray[np.int64]) -> NDArray[np.int64]:
        return order

    def gradients(self, order: NDArray[np.int64]) -> list[Buffer]:
        if self._copy:
            out = np.empty((len(order), self.dim), np.float32)
            _take_blocks(self._flat, order, out)
            return [out.data.cast("B")]
        data, row, buffers = self._flat.data.cast("B"), self.dim * 4, list[Buffer]()
        for block in order.tolist():
            at = block * row
            buffers.append(data[at : at + row])
            if at + row > len(data):
                buffers.append(bytes(at + row - len(data)))
        return buffers


@njit(nogil=True, cache=True)
def _take_blocks(flat, order, out):  # type: ignore[no-untyped-def]
    dim = out.shape[1]
    for j in range(order.shape[0]):
        start = order[j] * dim
        target = out[j]
        have = min(dim, flat.shape[0] - start)
        source = flat[start : start + have]
        for d in range(have):
            target[d] = source[d]
        for d in range(have, dim):
            target[d] = np.float32(0)


@dataclass(frozen=True)
class Write:
    """One table's part of a push: what to send, in which order, with which step values (float32 [k])."""

    table_id: int
    rows: Rows
    plan: PushPlan
    step_values: NDArray[np.float32]


@dataclass(frozen=True)
class Place:
    """Where in a step a frame stands."""

    epoch: int
    clock: int
    worker: int
    first: int
    part: int
    last: bool


def check_size(writes: list[Write]) -> None:
    """InputError if a part of a step cannot be cut, between ranges, into frames that a server accepts."""
    if len(writes) > MAX_BLOCKS:
        raise InputError(
            f"a push of {len(writes)} tables is over the limit of {MAX_BLOCKS}; push them in several parts"
        )
    row_bytes = [8 + 4 * w.rows.dim for w in writes]
    if sum(len(w.plan.order) * n for w, n in zip(writes, row_bytes, strict=True)) <= MAX_BODY_BYTES // 2:
        return
    sizes = sum(np.diff(w.plan.offsets) * n for w, n in zip(writes, row_bytes, strict=True))
    largest = int(np.max(sizes))
    if largest > MAX_BODY_BYTES // 2:  # the rest is for headers, and for the cut's slack
        raise InputError(
            f"this push has {largest >> 20} MB for one of the cluster's {len(writes[0].plan.offsets) - 1} ranges, the "
            f"limit is {MAX_BODY_BYTES // 2 >> 20} MB: push in several steps, or create the cluster with more ranges"
        )


def push_frames(
    writes: list[Write], share: Share, routes: Routes, place: Place, requests: Iterator[int], kind: Kind = Kind.PUSH
) -> Iterator[tuple[int, list[Buffer]]]:
    """The frames for one head: (request, buffers), made one at a time so that sending overlaps copying.

    Raises nothing; a push without rows for this head gives one frame that only ticks.
    """
    sizes = np.zeros(share.stop - share.start, np.int64)
    for write in writes:
        counts = np.diff(write.plan.offsets[share.start : share.stop + 1])
        sizes += counts * (8 + 4 * write.rows.dim)
    cuts = cut_ranks(sizes)
    for start, stop in cuts:
        request = next(requests)
        ranges = None if len(cuts) == 1 else routes.range_at[share.start + start : share.start + stop]
        yield request, _frame(writes, share.start + start, share.start + stop, ranges, place, request, kind)


def _frame(
    writes: list[Write],
    start: int,
    stop: int,
    ranges: NDArray[np.int32] | None,
    place: Place,
    request: int,
    kind: Kind,
) -> list[Buffer]:
    buffers: list[Buffer] = []
    if ranges is not None:
        named = len(ranges).to_bytes(8, "little") + ranges.tobytes()
        buffers.append(named + b"\0" * (-len(named) % 8))
    blocks = 0
    for write in writes:
        order = write.plan.order[write.plan.offsets[start] : write.plan.offsets[stop]]
        if not len(order):
            continue
        blocks += 1
        buffers.append(block_head(write.table_id, len(order), write.rows.dim, write.step_values))
        buffers.append(write.rows.keys(order).data.cast("B"))
        buffers += write.rows.gradients(order)
        if padding := grads_padding(len(order), write.rows.dim):
            buffers.append(b"\0" * padding)
    body = sum(len(b) for b in buffers)
    flags = (LAST if place.last else 0) | (ALL_RANGES if ranges is None else 0)
    header = Header(
        kind, flags, body, request, place.epoch, place.clock, place.worker, place.first, place.part, items=blocks
    )
    return [header.pack(), *buffers]
