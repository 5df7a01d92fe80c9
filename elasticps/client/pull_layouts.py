"""What a pull asks of a server, how its frames are laid out, and where the rows that come belong.

`PullLayout` is that of a table's rows (`ROWS`); the others say what differs: blocks of a dense tensor (`BLOCKS`), and
rows of several tables in one frame for each server (`SeveralTables`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import Readers, Routes, place_rows, plan_pull
from elasticps.client.pull_batch import (
    T_FIELDS,
    T_FIRST,
    T_SALT,
    T_WORDS,
    cut_pull,
    cut_tables,
    place_several,
)
from elasticps.client.push_batch import address
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.kernels import njit
from elasticps.kernels.hashing import hash_key
from elasticps.store.codec import Codec
from elasticps.wire.frames import (
    ANY,
    BLOCK_BYTES,
    CODED,
    DIGESTS,
    HEADER_BYTES,
    SLOTS,
    TABLES,
    USAGE,
    Buffer,
    table_block,
)
from elasticps.wire.headers import PullHeader

Positions = NDArray[np.int64] | None  # where keys stand among the pull's own; None: they are all of them
Floats = NDArray[np.float32]
_ALL = np.empty(0, np.int64)


@dataclass(slots=True)
class Query:
    """What a pull asks of one table. dim: floats of a row as it travels; any_replica: committed or not, from whichever
    copy; slots: the optimizer's state instead of weights; coded: as the table's pull filters make them; digests: of
    rows instead of rows; usage: when rows were used last, how often, and their score."""

    table_id: int
    salt: np.uint64
    dim: int
    name: str
    any_replica: bool = False
    slots: bool = False
    coded: bool = False
    digests: bool = False
    usage: bool = False

    @property
    def flags(self) -> int:
        """Those of the PULL header."""
        content = self.slots * SLOTS | self.coded * CODED | self.digests * DIGESTS | self.usage * USAGE
        return self.any_replica * ANY | content


class DecodedRows:
    """Decodes what filters have made of rows, or of a tensor's blocks. out: takes the floats, float32 of the shape that
    was asked for; what the last block has too much is left out. where: which of the rows each of `out` is; None: they
    are the same."""

    def __init__(self, codec: Codec, out: Floats, where: NDArray[np.int64] | None = None) -> None:
        self._codec = codec
        self._out = out
        self._where = where
        self._done = False

    def rows(self, words: Floats) -> Floats:
        """The floats that words [n, words of a row] stand for; decodes them once."""
        if not self._done:
            rows = self._codec.decode(words)
            if self._where is not None:
                rows = rows[self._where]
            self._out.reshape(-1)[:] = rows.reshape(-1)[: self._out.size]
            self._done = True
        return self._out


class Pull(Protocol):
    """What a layout has to know of a `ServerPull`."""

    query: Query
    keys: NDArray[np.int64]
    value: Floats
    short: Short | None
    read_at: int
    wait_ms: int

    @property
    def layout(self) -> PullLayout: ...
    def separate(self, rows: Floats, positions: NDArray[np.int64]) -> None: ...


class PartOfPull(Protocol):
    """What a layout has to know of a `PullPart`."""

    positions: Positions
    count: int
    request: int

    @property
    def pull(self) -> Pull: ...
    @property
    def keys(self) -> NDArray[np.int64]: ...


class AnswerTarget(Protocol):
    """Where the rows of one answer go."""

    def views(self, offset: int, count: int) -> list[memoryview]:
        """Writable bytes for `count` rows from row `offset` on."""


class RowsTarget:
    """Rows one after another: float32 [n, dim]."""

    def __init__(self, rows: Floats) -> None:
        self.rows = rows

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self.rows[offset : offset + count]
        return [part.data.cast("B")] if count else []


class BlocksTarget:
    """Rows that are blocks of a dense tensor: `keys` says which; the last block's padding is thrown away."""

    def __init__(self, flat: Floats, keys: NDArray[np.int64], dim: int) -> None:
        self._bytes = flat.data.cast("B")
        self._keys = keys
        self._row_bytes = dim * 4

    def views(self, offset: int, count: int) -> list[memoryview]:
        row, size, views = self._row_bytes, len(self._bytes), []
        for key in self._keys[offset : offset + count].tolist():
            at = key * row
            views.append(self._bytes[at : min(at + row, size)])
            if at + row > size:
                views.append(memoryview(bytearray(at + row - size)))
        return views


class PullLayout:
    """Rows of one table, or of the optimizer's state: keys int64 [n] -> value float32 [n, dim]. Other layouts say what
    differs. Stateless; each method is given the pull."""

    def frame_bytes(self, pull: Pull, keys: int, servers: int) -> int:
        """Memory for frames that ask so many servers for so many keys."""
        return 8 * keys + HEADER_BYTES * (servers + 1)

    def cut(
        self, pull: Pull, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        """Writes its frames; see `cut_pull`."""
        query = pull.query
        count: int = cut_pull(
            keys, query.salt, routes.shift, readers.of, readers.only, order, cuts, memory, slots,
            pull.value.reshape(-1), query.dim, small, request, query.flags, routes.epoch, pull.read_at, worker,
            query.table_id, pull.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, pull: Pull, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        """A frame with shorter keys."""
        return (frame,) if pull.short is None else keys_of.pull(frame, pull.short)

    def frame(self, part: PartOfPull, epoch: int, worker: int) -> list[Buffer]:
        """The frame of a part."""
        pull, query = part.pull, part.pull.query
        header = PullHeader(
            part.request, epoch, pull.read_at, worker, query.table_id, part.count, pull.wait_ms,
            query.any_replica, query.slots, query.coded, query.digests, usage=query.usage,
        )  # fmt: skip
        return [header.header().pack(), part.keys.data.cast("B")]

    def floats(self, pull: Pull, positions: Positions, offset: int, count: int) -> int:
        """Of `count` rows from the one on that has number `offset` of those at `positions`."""
        return count * pull.query.dim

    def plan(
        self, pull: Pull, part: PartOfPull, routes: Routes, readers: Readers
    ) -> list[tuple[int, NDArray[np.int64]]]:
        """Who answers for a part's keys, as `plan_pull` says it."""
        return plan_pull(part.keys, pull.query.salt, routes, readers)

    def target(self, pull: Pull, positions: Positions, run: bool) -> AnswerTarget:
        """Where the rows of a large part go; run: they lie one after another."""
        if positions is None:
            return RowsTarget(pull.value)
        if run:
            return RowsTarget(pull.value[positions[0] : positions[-1] + 1])
        return self.private(pull, positions)

    def private(self, pull: Pull, positions: NDArray[np.int64]) -> AnswerTarget:
        """An array of its own for the rows at these positions."""
        rows = np.empty((len(positions), pull.query.dim), np.float32)
        pull.separate(rows.reshape(-1), positions)
        return RowsTarget(rows)

    def place(self, pull: Pull, rows: Floats, positions: NDArray[np.int64]) -> None:
        """Copies n rows, float32 one after another, to their positions, int64 [n], in the order of the keys."""
        place_rows(rows.reshape(-1, pull.query.dim), positions, pull.value)


class Blocks(PullLayout):
    """A whole dense tensor, float32 of its shape; the keys are its blocks."""

    def target(self, pull: Pull, positions: Positions, run: bool) -> AnswerTarget:
        return BlocksTarget(pull.value.reshape(-1), pull.keys if positions is None else positions, pull.query.dim)

    def place(self, pull: Pull, rows: Floats, positions: NDArray[np.int64]) -> None:
        dim, flat = pull.query.dim, pull.value.reshape(-1)
        for row, block in zip(rows.reshape(-1, dim), positions.tolist(), strict=True):
            here = flat[block * dim : (block + 1) * dim]
            here[:] = row[: len(here)]


ROWS, BLOCKS = PullLayout(), Blocks()


@njit(nogil=True, cache=True)
def _readers_of(keys, tables, shift, reader_of, positions):  # type: ignore[no-untyped-def]
    """Who answers for the keys at some positions, int32 [n]."""
    readers, s, t = np.empty(len(positions), np.int32), np.uint64(shift), 0
    for i in range(len(positions)):
        while positions[i] >= tables[t + 1, T_FIRST]:
            t += 1
        readers[i] = reader_of[hash_key(keys[positions[i]], np.uint64(tables[t, T_SALT])) >> s]
    return readers


class SeveralTables(PullLayout):
    """Rows of several tables, or blocks of tensors: of each those that one of `members` asks for. The members
    themselves are not sent."""

    def __init__(self, members: Sequence[Pull]) -> None:
        self.members = members
        tables: list[int | np.int64] = []
        at = 0
        for pull in members:
            flat, query = pull.value.reshape(-1), pull.query
            tables += (at, query.dim, address(flat), query.salt.view(np.int64), query.table_id, len(flat))
            at += len(pull.keys)
        self._tables = np.array([*tables, at, 0, 0, 0, 0, 0], np.int64).reshape(-1, T_FIELDS)

    def frame_bytes(self, pull: Pull, keys: int, servers: int) -> int:
        return 8 * keys + (HEADER_BYTES + BLOCK_BYTES * len(self.members)) * (servers + 1)

    def cut(
        self, pull: Pull, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        count: int = cut_tables(
            keys, self._tables, routes.shift, readers.of, readers.only, order, cuts, memory, slots, small, request,
            TABLES | pull.query.flags, routes.epoch, pull.read_at, worker, pull.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, pull: Pull, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        return keys_of.pull_tables(frame, {m.query.table_id: m.short for m in self.members if m.short is not None})

    def frame(self, part: PartOfPull, epoch: int, worker: int) -> list[Buffer]:
        pull, keys, buffers, blocks = part.pull, part.keys, list[Buffer](), 0
        for number, (low, high) in enumerate(itertools.pairwise(self._edges(part.positions))):
            if low < high:
                table = self.members[number].query.table_id
                buffers += [table_block(table, high - low), keys[low:high].data.cast("B")]
                blocks += 1
        header = PullHeader(
            part.request, epoch, pull.read_at, worker, 0, 0, pull.wait_ms, pull.query.any_replica,
            coded=pull.query.coded, blocks=blocks,
        )  # fmt: skip
        return [header.header(sum(map(len, buffers))).pack(), *buffers]

    def _edges(self, positions: Positions) -> list[int]:
        """Which of the rows at some positions is the first of each table; and how many they are."""
        firsts = self._tables[:, T_FIRST]
        edges: list[int] = (firsts if positions is None else np.searchsorted(positions, firsts)).tolist()
        return edges

    def floats(self, pull: Pull, positions: Positions, offset: int, count: int) -> int:
        found = place_several(0, _ALL if positions is None else positions, self._tables, offset, count)
        return int(found) // 4

    def plan(
        self, pull: Pull, part: PartOfPull, routes: Routes, readers: Readers
    ) -> list[tuple[int, NDArray[np.int64]]]:
        positions = np.arange(len(pull.keys)) if part.positions is None else part.positions
        of = _readers_of(pull.keys, self._tables, routes.shift, readers.of, positions)
        return [(server, np.flatnonzero(of == server)) for server in np.unique(of).tolist()]

    def target(self, pull: Pull, positions: Positions, run: bool) -> AnswerTarget:
        return _Whole(self.members) if positions is None else self.private(pull, positions)

    def private(self, pull: Pull, positions: NDArray[np.int64]) -> AnswerTarget:
        words = np.repeat(self._tables[:-1, T_WORDS], np.diff(self._edges(positions)))
        ends = np.concatenate([[0], np.cumsum(words)])
        rows = np.empty(int(ends[-1]), np.float32)
        pull.separate(rows, positions)
        return _Private(rows, ends)

    def place(self, pull: Pull, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        place_several(address(rows), positions, self._tables, 0, len(positions))


class _Whole:
    """All rows, of one server: where they belong."""

    def __init__(self, members: Sequence[Pull]) -> None:
        self._members = members

    def views(self, offset: int, count: int) -> list[memoryview]:
        views, first = [], 0
        for pull in self._members:
            low, high = max(offset - first, 0), min(offset + count - first, len(pull.keys))
            if low < high:
                views += pull.layout.target(pull, None, True).views(low, high - low)
            first += len(pull.keys)
        return views


class _Private:
    """Rows one after another, and where each of them ends."""

    def __init__(self, rows: NDArray[np.float32], ends: NDArray[np.int64]) -> None:
        self._rows = rows
        self._ends = ends

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self._rows[self._ends[offset] : self._ends[offset + count]]
        return [part.data.cast("B")] if count else []
