"""What the operations of a range carry. Replication hands it around; here it is cut by range and applied.

All of it is immutable: logs, sockets and the store share the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.barrier_state import RangeRounds
from elasticps.server.core.data_shards_state import RangeShards, ShardMark
from elasticps.store import Table
from elasticps.store.deletions import NO_NOTES, Notes
from elasticps.store.intervals import PLACES
from elasticps.wire.frames import Block
from replication.chain import Ranges


class Content:
    """Blocks of a PUSH, INIT, LOAD or DELETE: rows of tables, their keys in the order of `ranges`.

    positions: int64 [P], where a range stands in `ranges`, -1 for those that are not in it. mark: the shard that the
    step trains.
    """

    __slots__ = ("blocks", "mark", "positions", "ranges")

    def __init__(
        self, blocks: list[Block], ranges: Ranges, positions: NDArray[np.int64], mark: ShardMark | None = None
    ) -> None:
        self.blocks = blocks
        self.ranges = ranges
        self.positions = positions
        self.mark = mark

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return sum(block.keys.nbytes + block.grads.nbytes for block in self.blocks)

    def only(self, blocks: list[Block]) -> Content:
        """The same with some of its rows."""
        made = copy(self)
        made.blocks = blocks
        return made

    def part(self, ranges: Ranges, tables: Mapping[int, Table]) -> list[Block]:
        """The rows that lie in `ranges`, some of mine in the same order: slices where they are neighbours."""
        n = ranges.shape[0]
        if n == self.ranges.shape[0]:
            return self.blocks
        start, stop = int(self.positions[ranges[0]]), int(self.positions[ranges[-1]]) + 1
        if stop - start == n:
            return self._slices(start, stop, tables)
        bounds = np.zeros(len(self.positions), np.int64)
        bounds[ranges] = PLACES
        return self.below(bounds, tables)

    def _slices(self, start: int, stop: int, tables: Mapping[int, Table]) -> list[Block]:
        blocks = []
        for table, keys, grads, values in self.blocks:
            low = tables[table].first_at(keys, self.positions, start) if start else 0
            high = len(keys) if stop == len(self.ranges) else tables[table].first_at(keys, self.positions, stop)
            if low < high:
                blocks.append(Block(table, keys[low:high], grads[low:high], values))
        return blocks

    def below(self, bounds: NDArray[np.int64], tables: Mapping[int, Table]) -> list[Block]:
        """The rows whose places are below the bounds of their ranges, int64 [P]; copies."""
        blocks = []
        for table, keys, grads, values in self.blocks:
            chosen = tables[table].select(keys, bounds)
            if len(chosen):
                blocks.append(Block(table, keys[chosen], grads[chosen], values))
        return blocks


class Contribution(Content):
    """What a worker pushes for a synchronous round of its application: kept until the round is closed."""

    __slots__ = ("app", "clock")

    def __init__(
        self, app: str, clock: int, blocks: list[Block], ranges: Ranges, positions: NDArray[np.int64],
        mark: ShardMark | None = None,
    ) -> None:  # fmt: skip
        super().__init__(blocks, ranges, positions, mark)
        self.app = app
        self.clock = clock


class RoundStep(NamedTuple):
    """BARRIER_JOIN, LEAVE, DECISION or CLOSE: workers become members, by the roster of version `clock`; one is none any
    more; a round is made of `workers`; it closes."""

    app: str
    clock: int
    workers: tuple[int, ...]


class NewTable(NamedTuple):
    """A table of a CREATE: its id, its spec as JSON, and the application that owns it; "" if no server knows that."""

    table: int
    spec: str
    app: str = ""


class NewTables(NamedTuple):
    """A CREATE: tables that are made together."""

    tables: tuple[NewTable, ...]


class Cleared(NamedTuple):
    """A CLEAR: the table whose rows go."""

    table: int


class Dropped(NamedTuple):
    """A DROP: the table that goes."""

    table: int


class AuditMark(NamedTuple):
    """An AUDIT: every replica notes the digest of a part of its ranges at this place of their logs, under `id`."""

    id: int
    part: int = 0
    parts: int = 1


class CutMark(NamedTuple):
    """A CUT: at this place of their logs ranges are as checkpoint `number` has them. since: the cut that the checkpoint
    adds to, 0 if it is a full one; writer, incarnation: the server that logged this, and writes the ranges to `url`."""

    number: int
    since: int
    writer: str
    incarnation: int
    url: str


class TableRows(NamedTuple):
    """One table's rows in a piece: keys int64 [n], whole rows uint8 [n, stride], stamps uint16 [n]. spec: as JSON, ""
    if the table was dropped in this range. notes: deletions in the piece's interval; floor: the cut from which
    on they are all known (`elasticps.store.deletions`)."""

    table: int
    spec: str
    keys: NDArray[np.int64]
    rows: NDArray[np.uint8]
    stamps: NDArray[np.uint16]
    notes: Notes = NO_NOTES
    floor: int = 0


class ChunkContent(NamedTuple):
    """What a piece of a range carries: every table, also those without rows there, so that the joiner knows them all;
    and what is kept for synchronous rounds. The first one has the range's sets of shards. cut: the newest that the
    range has passed; base: what stamps count from."""

    tables: list[TableRows]
    rounds: RangeRounds
    shards: RangeShards
    cut: int = 0
    base: int = 0


def positions_of(ranges: Ranges, count: int) -> NDArray[np.int64]:
    """Where each of `count` ranges stands in `ranges`, -1 for those that do not: int64 [count]."""
    positions = np.full(count, -1, np.int64)
    positions[ranges] = np.arange(len(ranges))
    return positions
