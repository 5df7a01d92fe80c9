"""Where the gradients of one step lie in the memory that ranks share. Pure: every rank computes the same layout.

Each rank has a region of its own, of `room` bytes, so that it can write its gradients before it knows those of others.
Behind the regions are the sums. Dense gradients are one row of floats, tensor after tensor, which passes by in
chunks: each rank copies its own chunk into one of two slots, and each sums a share of the chunk into the result. So
memory is one model, not one for each rank. Rows lie there as they are, and the sums of each rank's share of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 20  # floats of each rank that are under way at once
_LINE = 64  # bytes; what two ranks write does not meet in one cache line
ABSENT = -1


class GradientSize(NamedTuple):
    """The size of a gradient. floats: of a tensor; dim: of a table's row. The other is 0."""

    floats: int
    dim: int


class Place(NamedTuple):
    """Some rows of a table: `n` keys int64 at byte `keys`, rows float32 [n, dim] at byte `rows`."""

    keys: int
    rows: int
    n: int
    dim: int


class Region(NamedTuple):
    """The memory of one rank: its rows of each table, by number; two slots for floats; the byte at which it ends."""

    tables: dict[int, Place]
    slots: tuple[int, int]
    end: int


@dataclass(frozen=True)
class Layout:
    """The memory of one step, `nbytes` in all.

    tensors  numbers of the tensors that have a gradient at one rank at least
    starts   of each of them, its first float; floats: of all
    chunk    floats that pass at once
    regions  by rank
    result   the byte at which the sums of floats begin
    sums     of each table, by number, and each rank: where its share of the sums lies
    """

    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    floats: int
    chunk: int
    regions: tuple[Region, ...]
    result: int
    sums: dict[int, tuple[Place, ...]]
    nbytes: int

    def chunks(self) -> Iterator[tuple[int, int]]:
        """The first float of each chunk, and the float after its last."""
        for start in range(0, self.floats, max(1, self.chunk)):
            yield start, min(start + self.chunk, self.floats)


class _Room:
    def __init__(self, start: int) -> None:
        self.end = start

    def bytes(self, count: int) -> int:
        start, self.end = self.end, self.end + -(-count // _LINE) * _LINE
        return start

    def rows(self, n: int, dim: int) -> Place:
        return Place(self.bytes(8 * n), self.bytes(4 * n * dim), n, dim)


def tensors_of(targets: Sequence[GradientSize], has: NDArray[np.int64]) -> tuple[int, ...]:
    """The numbers of the tensors that have a gradient at a rank."""
    return tuple(number for number, target in enumerate(targets) if target.floats and has[number] != ABSENT)


def region(targets: Sequence[GradientSize], has: NDArray[np.int64], floats: int, start: int) -> Region:
    """The region of one rank, from byte `start` on. has: for each target, how many keys it has of a table, and anything
    but ABSENT for a tensor of which it has a gradient. floats: that pass at once."""
    room = _Room(start)
    tables = {
        number: room.rows(int(has[number]), target.dim)
        for number, target in enumerate(targets)
        if target.dim and has[number] > 0
    }
    return Region(tables, (room.bytes(4 * floats), room.bytes(4 * floats)), room.end)


def layout(targets: Sequence[GradientSize], given: Sequence[NDArray[np.int64]], chunk: int, room: int) -> Layout:
    """The memory of one step. given: what each rank has, as for `region`. A rank that needs more than `room` bytes
    begins where others end: see `room_for`."""
    tensors = tuple(sorted({number for has in given for number in tensors_of(targets, has)}))
    sizes = [targets[number].floats for number in tensors]
    floats = sum(sizes)
    chunk = min(chunk, floats)
    regions = tuple(region(targets, has, chunk, rank * room) for rank, has in enumerate(given))
    rest = _Room(len(given) * room)
    result = rest.bytes(4 * floats)
    sums = {}
    for number, target in enumerate(targets):
        if target.dim and any(has[number] != ABSENT for has in given):
            total = sum(max(0, int(has[number])) for has in given)
            sums[number] = tuple(rest.rows(total, target.dim) for _ in given)
    starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    return Layout(tensors, starts, floats, chunk, regions, result, sums, rest.end)


def room_for(targets: Sequence[GradientSize], given: Sequence[NDArray[np.int64]], chunk: int) -> int:
    """Bytes of a region that are enough for all ranks, and half of that more for the next step."""
    plan = layout(targets, given, chunk, 0)
    most = max(each.end for each in plan.regions)
    return -(-(most + most // 2) // _LINE) * _LINE


def fits(plan: Layout, room: int, nbytes: int) -> bool:
    """Whether every rank's region has room, and the memory of so many bytes has it for the sums."""
    return all(each.end <= (rank + 1) * room for rank, each in enumerate(plan.regions)) and plan.nbytes <= nbytes


def copy_range(
    values: Sequence[NDArray[np.float32] | None],
    sizes: Sequence[int],
    start: int,
    stop: int,
    out: NDArray[np.float32],
) -> None:
    """Copies floats `start` … `stop` - 1 of a row of tensors to `out`; zeros for a tensor that is None. values: flat,
    of these sizes."""
    first = 0
    for value, size in zip(values, sizes, strict=True):
        low, high = max(first, start), min(first + size, stop)
        if low < high:
            out[low - start : high - start] = 0.0 if value is None else value[low - first : high - first]
        first += size
