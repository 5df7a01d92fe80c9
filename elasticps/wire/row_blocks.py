"""Rows of a table as they travel to readers: blocks of a frame, and what reads a frame's body part by part."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.frames import MAX_BODY_BYTES, MAX_DIM, Buffer, FrameError

Bytes = NDArray[np.uint8]
Ints = NDArray[np.int64]

BLOCK_HEAD = struct.Struct("<IIIIII")  # table, rows, words of a row, keys that are gone, ranges that were cleared, 0


class BodyReader:
    """Reads a body from its begin on, never beyond its end."""

    def __init__(self, body: Bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, count: int, dtype: type[np.generic] = np.uint8) -> NDArray[Any]:
        """So many numbers, and the padding behind them."""
        nbytes = count * np.dtype(dtype).itemsize
        if count < 0 or nbytes > len(self._body) - self._at:
            raise FrameError(f"{count} numbers at byte {self._at} do not fit in a body of {len(self._body)} bytes")
        found = self._body[self._at : self._at + nbytes].view(dtype)
        self._at += nbytes + (-nbytes & 7)
        return found

    def count(self, most: int) -> int:
        """A number that says how many of something follow."""
        n = int(self.take(1, np.int64)[0])
        if not 0 <= n <= most:
            raise FrameError(f"a frame announces {n} of what there can be {most}")
        return n

    def end(self) -> None:
        """Nothing is left."""
        if self._at != len(self._body):
            raise FrameError(f"{len(self._body) - self._at} bytes are left of a body of {len(self._body)}")


class RowBlock(NamedTuple):
    """Rows of one table as they are: keys int64 [n], rows float32 [n, words] as words; gone int64 [k]: keys without a
    row; cleared int64 [c]: ranges that lost all rows before."""

    table: int
    keys: Ints
    rows: NDArray[np.float32]
    gone: Ints
    cleared: Ints

    @property
    def nbytes(self) -> int:
        """About what it takes on the wire."""
        return BLOCK_HEAD.size + self.keys.nbytes + self.rows.nbytes + self.gone.nbytes + self.cleared.nbytes + 8


def write_block(block: RowBlock) -> list[Buffer]:
    """A block as it is sent."""
    n, words = block.rows.shape
    counts = BLOCK_HEAD.pack(block.table, n, words, len(block.gone), len(block.cleared), 0)
    parts: list[Buffer] = [
        b"".join((counts, block.keys.tobytes(), block.gone.tobytes(), block.cleared.tobytes()))
    ]  # one buffer: a socket takes few faster
    if block.rows.size:
        parts.append(np.ascontiguousarray(block.rows).data.cast("B"))
        if block.rows.nbytes & 7:
            parts.append(b"\0" * 4)
    return parts


def read_block(reader: BodyReader, ranges: int) -> RowBlock:
    """The inverse, views of the body; FrameError."""
    table, n, words, gone, cleared, _ = BLOCK_HEAD.unpack(reader.take(BLOCK_HEAD.size).tobytes())
    if words > MAX_DIM or cleared > ranges or n * max(words, 1) * 4 > MAX_BODY_BYTES:
        raise FrameError(f"a block of {n} rows of {words} words, {cleared} ranges cleared")
    keys, absent, empty = (reader.take(count, np.int64) for count in (n, gone, cleared))
    if cleared and (empty.min() < 0 or empty.max() >= ranges):
        raise FrameError("a block clears a range that there is not")
    return RowBlock(table, keys, reader.take(n * words, np.float32).reshape(n, words), absent, empty)


class LocatedBlocks:
    """The blocks of a WINDOW, where they are in its body: layout int64 [n, BLOCK], see `kernels.windows`."""

    def __init__(self, body: Bytes, layout: Ints) -> None:
        self.layout = layout
        self._body = body
        self._words = body.view(np.int64)

    @property
    def address(self) -> int:
        """Where the body lies."""
        return int(self._body.ctypes.data)

    def __len__(self) -> int:
        return len(self.layout)

    def __iter__(self) -> Iterator[RowBlock]:
        return map(self.block, range(len(self)))

    def block(self, index: int) -> RowBlock:
        """One of them, as views of the body."""
        table, n, width, gone, cleared, at = self.layout[index].tolist()
        absent = at + n
        empty = absent + gone
        rows = 8 * (empty + cleared)
        return RowBlock(
            table, self._words[at:absent],
            self._body[rows : rows + 4 * n * width].view(np.float32).reshape(n, width), self._words[absent:empty],
            self._words[empty : empty + cleared],
        )  # fmt: skip


Blocks: TypeAlias = Sequence[RowBlock] | LocatedBlocks
