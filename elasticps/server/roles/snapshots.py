"""Sends ranges to joining replicas, as their tail: in pieces, and slower while workers are served."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from elasticps.kernels.hashing import HASH_END
from elasticps.server.core.operations import ChunkContent, TableRows, WaitingKeys
from elasticps.server.core.snapshot import pack, size_by_place, size_of
from elasticps.server.roles.context import Context
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.store import Table
from elasticps.store.admission import BLOCKS
from replication.chain import Member
from replication.effects import NextChunk, SnapshotRange

PIECE_BYTES = 256 << 10  # making one stops the server for a fraction of a millisecond
MOST_BYTES = 4 * PIECE_BYTES  # shares of open rounds make some intervals larger: those are cut smaller
BUSY_S = 0.5  # a server that served a worker so recently gives snapshots the smaller share
BUSY_SHARE = 1 / 40  # of this thread's time goes into cutting and sending while workers are served. A piece costs its
# receiver, and the steps that also go to the joiner, several times as much.
BUSY_BYTES_PER_S = 100e6  # and at most: faster than that it is the network that is shared
LONGEST_PAUSE_S = 0.5  # the state of a group range is sent at one instant, however long that takes
BACKLOG_BYTES = 256 << 10  # on a link: pushes queue after it, and wait for acknowledgements from there
RETRY_S = 0.002
NO_KEYS, NO_ROWS, NO_STAMPS = np.empty(0, np.int64), np.empty((0, 0), np.uint8), np.empty(0, np.uint16)
STALLED_S = 10.0  # a joiner without progress for so long is given up


@dataclass
class _Snapshot:
    """A snapshot in progress. number: in the order in which they began; low, end: hash positions of the next piece and
    of the end of the range; step: hash positions in a piece."""

    number: int
    peer: Member
    serial: int
    low: int
    end: int
    step: int

    @property
    def rank(self) -> tuple[bool, int]:
        """Order of pieces, the least first. One range after another: each step of a worker also goes to the joiners of
        ranges that have begun. But last pieces come after all others, so that ranges become level at about the same
        time, and one view serves for all."""
        return self.low + self.step >= self.end, self.number


class _Progress:
    """How far a joiner has come with a range. best: the hash position up to which it has ever had all rows; waits_s:
    loop time since which the next piece waits for the joiner, None while it waits for us."""

    __slots__ = ("best", "filling", "waits_s")

    def __init__(self, filling: tuple[Member, int]) -> None:
        self.filling = filling
        self.best = -1
        self.waits_s: float | None = None


def _waits(waiting: WaitingKeys | None) -> bool:
    """Whether a piece has keys that wait for a row, or counters."""
    return waiting is not None and (len(waiting.keys) > 0 or waiting.blocks.size > 0)


class SnapshotSender:
    """Schedules pieces of snapshots; each enters the replica's log order at the instant at which it was made."""

    def __init__(self, context: Context, links: ReplicaLinks) -> None:
        self._loop = context.loop  # for time and timers
        self._executor = executor = context.executor  # gets the pieces
        self._store = executor.store  # what a piece has: cuts and dropped tables,
        self._tables = executor.store.tables  # rows,
        self._rounds = executor.rounds  # open rounds,
        self._shards = executor.shards  # and data shards
        self._serving = context.serving  # knows who joins
        self._last_served = context.last_served  # pieces wait longer while workers are served
        self._links = links  # tell how much waits for a joiner
        links.make_way = self.make_way
        executor.handlers |= {SnapshotRange: self.start, NextChunk: self.next}
        self._width = HASH_END // self._serving.ranges  # hash positions of a range
        self._progress: dict[int, _Progress] = {}  # by range
        self._looked_s = 0.0  # when `stalled` looked last
        self._snapshots: dict[int, _Snapshot] = {}  # in progress, by range
        self._begun = 0  # how many snapshots have begun
        self._ready: set[int] = set()  # ranges whose next piece may be cut
        self._late: set[int] = set()  # ranges that wait for room on a full link
        self._timer: asyncio.TimerHandle | None = None  # for the next piece
        self._free_s = 0.0  # loop time at which the next piece may be cut
        self.sent_bytes = 0  # of all pieces

    def start(self, effect: SnapshotRange) -> None:
        """Begins a snapshot of a range; an earlier one of the range is void."""
        peer, r = effect.peer, effect.range
        size = sum(table.count_range(r) * (table.stride + 8) for table in self._tables.values())
        size += sum(
            table.lifecycle.waiting.size_of(r) for table in self._tables.values() if table.lifecycle is not None
        )
        step = -(-self._width // max(1, -(-size // PIECE_BYTES)))
        self._begun += 1
        self._snapshots[r] = _Snapshot(self._begun, peer, effect.serial, r * self._width, (r + 1) * self._width, step)
        filling = self._serving.joiner(r)
        if filling is not None and (r not in self._progress or self._progress[r].filling != filling):
            self._progress[r] = _Progress(filling)
        self._get_ready(r)

    def next(self, effect: NextChunk) -> None:
        """The joiner has installed the piece before: the next one may go."""
        r, progress = effect.range, self._progress.get(effect.range)
        snapshot = self._snapshots.get(r)
        if snapshot is None or snapshot.serial != effect.serial:
            return
        if progress is not None and snapshot.low > progress.best:
            progress.best, progress.waits_s = snapshot.low, None
        self._get_ready(r)

    def make_way(self, peer: Member) -> None:
        """Uses the room that a link to a peer has again before any push does: else pushes would take it each time."""
        late, self._late = self._late, set()
        for r in sorted(late):
            if self._loop.time() >= self._free_s and self._may_go(r):
                self._ready.discard(r)
                self._piece(r)
            elif r not in self._late:
                self._get_ready(r)

    def stalled(self) -> set[Member]:
        """Joiners without progress in some range for STALLED_S. A link that comes and goes, because the joiner cannot
        read what it gets, is no progress; time in which this process was stopped does not count."""
        now, before = self._loop.time(), self._looked_s
        self._looked_s = now
        found = set()
        for r, progress in list(self._progress.items()):
            if self._serving.joiner(r) != progress.filling:
                del self._progress[r]
            elif progress.waits_s is not None and now - before > STALLED_S / 4:
                progress.waits_s = now
            elif progress.waits_s is not None and now - progress.waits_s > STALLED_S:
                found.add(progress.filling[0])
        return found

    def _get_ready(self, r: int) -> None:
        self._late.discard(r)
        self._ready.add(r)
        self._wake(0.0)

    def _wake(self, in_s: float) -> None:
        if self._ready and self._timer is None:
            self._timer = self._loop.call_at(max(self._free_s, self._loop.time() + in_s), self._turn)

    def _turn(self) -> None:
        """Sends the piece whose turn it is."""
        self._timer, retry_s = None, 0.0
        if self._loop.time() >= self._free_s:
            r = next(filter(self._may_go, sorted(self._ready, key=lambda r: self._snapshots[r].rank)), None)
            if r is None:
                retry_s = RETRY_S
            else:
                self._ready.discard(r)
                self._piece(r)
        self._wake(retry_s)

    def _may_go(self, r: int) -> bool:
        """Whether the link to its joiner takes the next piece of a range. If the link is full, `make_way` sends it."""
        peer, progress = self._snapshots[r].peer, self._progress.get(r)
        if progress is not None and progress.waits_s is None:
            progress.waits_s = self._loop.time()
        if self._links.full(peer):
            self._ready.discard(r)
            self._late.add(r)
            return False
        return self._links.backlog(peer) <= BACKLOG_BYTES

    def _piece(self, r: int) -> None:
        snapshot, now, began = self._snapshots[r], self._loop.time(), time.thread_time()
        if snapshot.low % self._edges(r):  # a sketch has come since: the joiner counts only some keys of its block
            self._progress.pop(r, None)  # it has to come so far again
            self._executor.perform(self._executor.replica.refill, r, snapshot.serial)
            return
        first = snapshot.low == r * self._width
        while True:
            snapshot.step = self._step(r, snapshot.step)
            upto = min(snapshot.low + snapshot.step, snapshot.end)
            content = self._content(r, snapshot.low, upto)
            rows = size_by_place(content)
            if rows <= MOST_BYTES or snapshot.step == self._step(r, 1):
                break
            snapshot.step = max(1, (upto - snapshot.low) * PIECE_BYTES // rows)
        snapshot.low = upto
        last = upto == snapshot.end
        if last:
            del self._snapshots[r]
        elif rows < PIECE_BYTES // 4:
            snapshot.step *= 2
        if first:
            content = self._with_state(content, r)
        size = size_of(content)
        self.sent_bytes += size
        *contents, end = pack(content, MOST_BYTES)
        for part in contents:  # of one instant: on the link nothing comes in between
            self._executor.perform(self._executor.replica.piece, r, snapshot.serial, upto, False, part)
        self._executor.perform(self._executor.replica.piece, r, snapshot.serial, upto, last, end)
        if self._last_served.within(BUSY_S):
            pause_s = max((time.thread_time() - began) / BUSY_SHARE, size / BUSY_BYTES_PER_S)
            self._free_s = now + min(pause_s, LONGEST_PAUSE_S)

    def _step(self, r: int, step: int) -> int:
        """Hash positions of a piece, about `step`: whole blocks of a sketch, if a table has one in range r."""
        edges = self._edges(r)
        return max(1, step // edges) * edges

    def _edges(self, r: int) -> int:
        """Pieces of range r end at multiples of so many hash positions: of 1 while no table has a sketch there."""
        lifecycles = [table.lifecycle for table in self._tables.values() if table.lifecycle is not None]
        has_sketch = any(r in lifecycle.waiting.sketches for lifecycle in lifecycles)
        return self._width // BLOCKS if has_sketch else 1

    def _content(self, r: int, low: int, upto: int) -> ChunkContent:
        """An interval of hash positions of range r."""
        tables = (self._table_rows(number, table, r, low, upto) for number, table in self._tables.items())
        rows = [one for one in tables if len(one.keys) or len(one.notes) or one.floor or _waits(one.waiting)]
        rounds, cuts = self._rounds.dump(r, low, upto, self._tables), self._store.cuts
        time_s = int(self._store.times[r])
        return ChunkContent(rows, rounds._replace(groups={}), {}, int(cuts.newest[r]), int(cuts.base[r]), time_s)

    def _table_rows(self, number: int, table: Table, r: int, low: int, upto: int) -> TableRows:
        notes = table.deletions.of(r)
        if len(notes):
            hashes = table.hashes_of(np.ascontiguousarray(notes[:, 0]))
            notes = notes[(low <= hashes) & (hashes < upto)]
        rows = table.dump_stamped(r, low, upto)
        floor, lifecycle = table.deletions.floor(r), table.lifecycle
        if lifecycle is None or not lifecycle.is_decided(r):
            return TableRows(number, table.spec.to_json(), *rows, notes, floor)
        candidates, blocks = lifecycle.waiting.list_interval(r, low, upto), lifecycle.waiting.read_blocks(r, low, upto)
        sweeps = table.deletions.sweeps(r) if low == r * self._width else ()
        waiting = WaitingKeys(*candidates, low, blocks.copy(), tuple(sweeps))
        return TableRows(number, lifecycle.spec_of(r).to_json(), *rows, notes, floor, waiting)

    def _with_state(self, content: ChunkContent, r: int) -> ChunkContent:
        """Adds to the first interval of range r the state of the whole range, and every table."""
        there, dropped = {one.table: one for one in content.tables}, self._store.dropped_in(r)
        rows = [
            there.get(number) or self._table_rows(number, table, r, r * self._width, r * self._width)
            for number, table in self._tables.items()
            if number not in dropped
        ]
        rows += [TableRows(number, "", NO_KEYS, NO_ROWS, NO_STAMPS) for number in dropped]
        rounds = content.rounds._replace(groups=self._rounds.groups_of(r))
        return content._replace(tables=rows, rounds=rounds, shards=self._shards.dump(r))
