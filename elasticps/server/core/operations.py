"""Payloads of a range's operations. Replication hands them around; here they are cut by range and applied.

All of them are immutable: logs, sockets and the store share the same memory. RESTORE and RESTORED bring back what a
checkpoint holds: first rows, and keys that wait for one, then all other state of a range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END, group_range
from elasticps.model.policies import MAX_TIME
from elasticps.model.sharding import GROUP_BITS, ShardSpec
from elasticps.server.core.barrier_state import BarrierGroup, RangeRounds, Selecting
from elasticps.server.core.data_shards import MAX_SETS, Doing, RangeShards, ShardMark, ShardSet, Used
from elasticps.store.cuts import NO_NOTES, Notes
from elasticps.store.eviction import Sweep
from elasticps.wire.frames import MAX_RANGES, Block, FrameError, text, whole, wholes
from replication.chain import Ranges
from replication.progress import MAX_CLOCK
from replication.step_records import StepRecord, record_of


class SlicedTable(Selecting, Protocol):
    """A table, as operations need it: finds the rows of some ranges among keys in the order of ranges."""

    def first_at(self, keys: NDArray[np.int64], positions: NDArray[np.int64], position: int) -> int:
        """Index of the first key whose range stands at `position` or after it."""


class RowBlocks:
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

    def only(self, blocks: list[Block]) -> RowBlocks:
        """The same with some of its rows."""
        made = copy(self)
        made.blocks = blocks
        return made

    def part(self, ranges: Ranges, tables: Mapping[int, SlicedTable]) -> list[Block]:
        """The rows that lie in `ranges`, some of mine in the same order: slices where they are neighbours."""
        n = ranges.shape[0]
        if n == self.ranges.shape[0]:
            return self.blocks
        start, stop = int(self.positions[ranges[0]]), int(self.positions[ranges[-1]]) + 1
        if stop - start == n:
            return self._slices(start, stop, tables)
        bounds = np.zeros(len(self.positions), np.int64)
        bounds[ranges] = HASH_END
        return self.below(bounds, tables)

    def _slices(self, start: int, stop: int, tables: Mapping[int, SlicedTable]) -> list[Block]:
        blocks = []
        for table, keys, grads, values in self.blocks:
            low = tables[table].first_at(keys, self.positions, start) if start else 0
            high = len(keys) if stop == len(self.ranges) else tables[table].first_at(keys, self.positions, stop)
            if low < high:
                blocks.append(Block(table, keys[low:high], grads[low:high], values))
        return blocks

    def below(self, bounds: NDArray[np.int64], tables: Mapping[int, SlicedTable]) -> list[Block]:
        """The rows whose places are below the bounds of their ranges, int64 [P]; copies."""
        blocks = []
        for table, keys, grads, values in self.blocks:
            chosen = tables[table].select(keys, bounds)
            if len(chosen):
                blocks.append(Block(table, keys[chosen], grads[chosen], values))
        return blocks


class Contribution(RowBlocks):
    """A worker's push for a synchronous round of its application: retained until the round closes."""

    __slots__ = ("app", "clock")

    def __init__(
        self, app: str, clock: int, blocks: list[Block], ranges: Ranges, positions: NDArray[np.int64],
        mark: ShardMark | None = None,
    ) -> None:  # fmt: skip
        super().__init__(blocks, ranges, positions, mark)
        self.app = app
        self.clock = clock


class CreatedTable(NamedTuple):
    """A table of a CREATE: its id, its spec as JSON, and the application that owns it; "" if no server knows that."""

    table: int
    spec: str
    app: str = ""


class CreatedTables(NamedTuple):
    """A CREATE: tables that are made together."""

    tables: tuple[CreatedTable, ...]


class Cleared(NamedTuple):
    """A CLEAR: the table whose rows go."""

    table: int


class Dropped(NamedTuple):
    """A DROP: the table that goes."""

    table: int


class TimeMark(NamedTuple):
    """A TIME: cluster time of ranges is `seconds`, since 1970 by the median of clocks."""

    seconds: int


class ChangedPolicies(NamedTuple):
    """A POLICY: from this place of their logs on a table's ranges are under the policies of `spec`, as JSON."""

    table: int
    spec: str


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


class WaitingKeys(NamedTuple):
    """What a piece has of a table that keeps its rows' usage: candidates and their words, int64 [m] each; the sketch's
    blocks from hash `low` on, uint8 [k, width]; in the first piece the range's sweeps."""

    keys: NDArray[np.int64]
    words: NDArray[np.int64]
    low: int
    blocks: NDArray[np.uint8]
    sweeps: Sequence[Sweep] = ()


class TableRows(NamedTuple):
    """One table's rows in a piece: keys int64 [n], whole rows uint8 [n, stride], stamps uint16 [n]. spec: as JSON, ""
    if the table was dropped in this range; with the range's policies. notes: deletions in the piece's interval; floor:
    the cut from which on they are all known (`elasticps.store.cuts`). waiting: keys that wait for a row."""

    table: int
    spec: str
    keys: NDArray[np.int64]
    rows: NDArray[np.uint8]
    stamps: NDArray[np.uint16]
    notes: Notes = NO_NOTES
    floor: int = 0
    waiting: WaitingKeys | None = None


class ChunkContent(NamedTuple):
    """What a piece of a range carries: every table, also those without rows there, so that the joiner knows them all;
    and what is kept for synchronous rounds. The first one has the range's sets of shards. cut: the newest that the
    range has passed; base: what stamps count from; time: the range's, in seconds."""

    tables: list[TableRows]
    rounds: RangeRounds
    shards: RangeShards
    cut: int = 0
    base: int = 0
    time: int = 0


def positions_of(ranges: Ranges, count: int) -> NDArray[np.int64]:
    """Where each of `count` ranges stands in `ranges`, -1 for those that do not: int64 [count]."""
    positions = np.full(count, -1, np.int64)
    positions[ranges] = np.arange(len(ranges))
    return positions


_MAX = 1 << 62
_MAX_WORKER = (1 << 32) - 1
MAX_NAME = 255


class RestoredRows(NamedTuple):
    """A RESTORE: rows of a table in one range, in the place of those with equal keys. keys int64 [n], rows uint8
    [n, stride]."""

    table: int
    keys: NDArray[np.int64]
    rows: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of keys and rows."""
        return self.keys.nbytes + self.rows.nbytes


class RestoredKeys(NamedTuple):
    """A RESTORE, too: keys of a table that wait for a row in one range, and their words, int64 [n] each, in the place
    of equal keys; and the range's sketch, uint8 [blocks, width], none if it stays as it is."""

    table: int
    keys: NDArray[np.int64]
    words: NDArray[np.int64]
    sketch: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, words and sketch."""
        return self.keys.nbytes + self.words.nbytes + self.sketch.nbytes


class RestoredState(NamedTuple):
    """A RESTORED: a range has all its rows, as they were at `cut`. workers, progress: its vector clocks; closed: each
    application's last synchronous round; groups, shards: of the applications whose group range it is, as a manifest has
    them; time: cluster time in seconds, 0 where no table keeps usage; records: (worker, clock, committed, ranges)
    of sparse steps, of workers whose home this is."""

    cut: int
    workers: tuple[int, ...]
    progress: tuple[int, ...]
    closed: Mapping[str, int]
    groups: Sequence[Mapping[str, Any]]
    shards: Sequence[Mapping[str, Any]]
    time: int = 0
    records: Sequence[tuple[int, int, int, Sequence[int]]] = ()

    def document(self) -> dict[str, Any]:
        """As JSON."""
        document = self._asdict()
        for name in ("time", "records"):
            if not document[name]:
                del document[name]
        return document

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> RestoredState:
        """From JSON. FrameError for what it cannot be."""
        workers, progress = wholes(document.get("workers"), _MAX_WORKER, 1), wholes(document.get("progress"), _MAX)
        if len(workers) != len(progress) or any(b <= a for a, b in pairwise(workers)):
            raise FrameError("a RESTORED has clocks of nobody")
        closed, groups, shards = (document.get(name) for name in ("closed", "groups", "shards"))
        if not isinstance(closed, dict) or not isinstance(groups, list) or not isinstance(shards, list):
            raise FrameError("a RESTORED has no rounds or shards")
        time = whole(document.get("time", 0), MAX_TIME)
        try:
            records = tuple(
                (whole(worker, _MAX_WORKER, 1), whole(clock, MAX_CLOCK - 1, 1), whole(committed, clock - 1),
                 wholes(ranges, MAX_RANGES - 1))
                for worker, clock, committed, ranges in document.get("records", ())
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise FrameError(f"a RESTORED's records of steps cannot be read: {error!r}") from None
        found = cls(whole(document.get("cut"), _MAX), workers, progress, closed, groups, shards, time, records)
        found.rounds()
        found.sets(2)
        return found

    def clocks(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(workers, progress), sorted by worker: int64 [n] each."""
        return np.array(self.workers, np.int64), np.array(self.progress, np.int64)

    def step_records(self, ranges: int) -> list[tuple[int, StepRecord]]:
        """(worker, record), in a cluster of so many ranges."""
        numbers = np.arange(ranges)
        return [
            (worker, record_of(clock, committed, np.isin(numbers, ticked)))
            for worker, clock, committed, ticked in self.records
        ]

    def rounds(self) -> RangeRounds:
        """What is closed, and the groups: without members, since nobody who was one is there any more."""
        try:
            closed = {text(app, MAX_NAME): whole(clock, _MAX) for app, clock in self.closed.items()}
            groups = {
                text(one["app"], MAX_NAME): BarrierGroup(
                    {}, whole(one["decided"], _MAX), wholes(list(one["workers"]), _MAX_WORKER, 1),
                    {whole(worker, _MAX_WORKER, 1): whole(clock, _MAX) for worker, clock in one["last"]},
                )
                for one in self.groups
            }  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a RESTORED's rounds cannot be read: {error!r}") from None
        return RangeRounds(closed, groups, [])

    def sets(self, ranges: int) -> RangeShards:
        """Sets of shards, numbered as a cluster with so many ranges does."""
        found: RangeShards = {}
        try:
            for number, one in enumerate(self.shards, 1):
                app, name = text(one["app"], MAX_NAME), text(one["name"], MAX_NAME)
                samples, size, epochs, seed = one["spec"]
                cut = whole(samples, _MAX), whole(size, _MAX), whole(epochs, _MAX)
                spec = ShardSpec(*cut, None if seed is None else whole(seed, (1 << 64) - 1))
                if not spec.possible or number > MAX_SETS:
                    raise FrameError(f"there can be no shards like {spec}")
                upcoming, done = whole(one["upcoming"], spec.total), whole(one["done"], spec.total)
                made = ShardSet(number << GROUP_BITS | group_range(app, ranges), spec, upcoming, done)
                for shard, worker, clock in (wholes(each, _MAX) for each in one["returned"]):
                    made.returned[shard] = Used(worker, clock)
                for worker, shard, clock, before, at in (wholes(each, _MAX) for each in one["doing"]):
                    made.doing.setdefault(worker, {})[shard] = Doing(clock, Used(before, at))
                found.setdefault(app, {})[name] = made
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"a RESTORED's shards cannot be read: {error!r}") from None
        return found
