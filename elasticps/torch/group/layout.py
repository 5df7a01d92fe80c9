"""Where the gradients of one step lie in the memory that ranks share. Pure: every rank comes to the same.

Dense gradients are one row of floats, tensor after tensor, which passes by in chunks: each rank copies its own chunk
into one of two slots, and each sums a share of the chunk into the result. So memory is one model, not one for each
rank. Rows lie there as they are, and beside them room for each rank's share of the sums.
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


class Target(NamedTuple):
    """What can be pushed. floats: of a tensor; dim: of a table's row. The other is 0."""

    floats: int
    dim: int


class Place(NamedTuple):
    """Some rows of a table: `n` keys int64 at byte `keys`, rows float32 [n, dim] at byte `rows`."""

    keys: int
    rows: int
    n: int
    dim: int


@dataclass(frozen=True)
class Table:
    """What the ranks have of one table. number: among the targets; given: by rank; sums: by the rank that sums."""

    number: int
    given: tuple[Place, ...]
    sums: tuple[Place, ...]


@dataclass(frozen=True)
class Layout:
    """The memory of one step, `nbytes` in all.

    tensors: numbers of the targets of which at least one rank has a gradient
    starts   of each of them, its first float; floats: of all
    chunk    floats that pass at once; slots: of the two, by rank, the byte where it begins
    result   the byte at which the sums begin
    """

    tensors: tuple[int, ...]
    starts: tuple[int, ...]
    floats: int
    chunk: int
    slots: tuple[tuple[int, ...], tuple[int, ...]]
    result: int
    tables: tuple[Table, ...]
    nbytes: int

    def chunks(self) -> Iterator[tuple[int, int]]:
        """First and last float of each."""
        for start in range(0, self.floats, max(1, self.chunk)):
            yield start, min(start + self.chunk, self.floats)


def layout(targets: Sequence[Target], given: Sequence[NDArray[np.int64]], chunk: int = CHUNK) -> Layout:
    """given: of each rank, for each target, how many keys it has of a table, and anything but ABSENT for a tensor of
    which it has a gradient."""
    used = 0

    def room(nbytes: int) -> int:
        nonlocal used
        start, used = used, used + -(-nbytes // _LINE) * _LINE
        return start

    held = [number for number in range(len(targets)) if any(each[number] != ABSENT for each in given)]
    tensors = tuple(number for number in held if targets[number].floats)
    sizes = [targets[number].floats for number in tensors]
    starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    floats = sum(sizes)
    chunk = min(chunk, floats)
    slots = [tuple(room(4 * chunk) for _ in given) for _ in range(2)]
    result = room(4 * floats)

    def place(count: int, dim: int) -> Place:
        return Place(room(8 * count), room(4 * count * dim), count, dim)

    tables = []
    for number in held:
        if dim := targets[number].dim:
            counts = [max(0, int(each[number])) for each in given]
            mine = tuple(place(count, dim) for count in counts)
            tables.append(Table(number, mine, tuple(place(sum(counts), dim) for _ in given)))
    return Layout(tensors, starts, floats, chunk, (slots[0], slots[1]), result, tuple(tables), used)


def copy_range(
    values: Sequence[NDArray[np.float32] | None], layout: Layout, start: int, stop: int, out: NDArray[np.float32]
) -> None:
    """Copies floats `start` … `stop` - 1 of the row of tensors to `out`; zeros for a tensor that is None. values: of
    each of the layout's tensors, flat."""
    ends = [*layout.starts[1:], layout.floats]
    for value, first, end in zip(values, layout.starts, ends, strict=True):
        low, high = max(first, start), min(end, stop)
        if low < high:
            out[low - start : high - start] = 0.0 if value is None else value[low - first : high - first]
