"""Cuts the ranges that this server, as their tail, sends to joining replicas: piece by piece, not too fast."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import numpy as np

from elasticps.server.core.operations import ChunkContent, TableRows
from elasticps.server.core.snapshot import pack, size_by_place, size_of
from elasticps.server.roles.context import Context
from elasticps.server.roles.replica_links import ReplicaLinks
from elasticps.store import Table
from elasticps.store.intervals import HASH_END
from replication.chain import Member
from replication.effects import NextChunk, SnapshotRange

PIECE_BYTES = 256 << 10  # cutting one stops the server for a fraction of a millisecond
MOST_BYTES = 4 * PIECE_BYTES  # what is kept for synchronous rounds makes some intervals larger: those are cut anew
BUSY_S = 0.5  # a server that served a worker so recently gives snapshots the smaller share
BUSY_SHARE = 1 / 40  # of this thread's time goes into cutting and sending while workers are served. A piece costs its
# receiver, and the steps that also go to the joiner, several times as much.
BUSY_BYTES_PER_S = 100e6  # and at most: faster than that it is the network that is shared
LONGEST_PAUSE_S = 0.5  # after the state of a group range, which is of one instant however long it takes
USUAL_BYTES_PER_S = 20e6  # what this comes to with several servers on two cores; for forecasts
BACKLOG_BYTES = 256 << 10  # on a link: what workers push goes behind it, and may have to be acknowledged from there
RETRY_S = 0.002
NO_KEYS, NO_ROWS, NO_STAMPS = np.empty(0, np.int64), np.empty((0, 0), np.uint8), np.empty(0, np.uint16)
STALLED_S = 10.0  # a joiner that has got no further for so long is given up


@dataclass
class _Cut:
    """A snapshot in progress, by the order in which they began: the next piece begins at place `low`, the range ends at
    `end`."""

    number: int
    peer: Member
    serial: int
    low: int
    end: int
    step: int

    @property
    def rank(self) -> tuple[bool, int]:
        """Whose piece is next: one range after another, for each step also goes to the joiners of those that have
        begun; but last pieces after all others, so that ranges are level at about the same time, and one view serves
        for all."""
        return self.low + self.step >= self.end, self.number


class _Progress:
    """How far a joiner has come with a range. `best`: the place up to which it has ever had all; waits_s: loop time
    since when it is the joiner that the next one waits for, None if it is us."""

    __slots__ = ("best", "filling", "waits_s")

    def __init__(self, filling: tuple[Member, int]) -> None:
        self.filling = filling
        self.best = -1
        self.waits_s: float | None = None


class SnapshotSender:
    """Schedules chunks; each goes to the replica at the instant at which it was cut."""

    def __init__(self, context: Context, links: ReplicaLinks) -> None:
        self._loop = context.loop
        self._executor = executor = context.executor
        self._store = executor.store
        self._tables = executor.store.tables
        self._rounds = executor.rounds
        self._shards = executor.shards
        self._serving = context.serving
        self._last_served = context.last_served
        self._links = links
        links.make_way = self.make_way
        executor.handlers |= {SnapshotRange: self.start, NextChunk: self.next}
        self._width = HASH_END // self._serving.ranges
        self._progress: dict[int, _Progress] = {}
        self._looked_s = 0.0
        self._cuts: dict[int, _Cut] = {}
        self._begun = 0
        self._ready: set[int] = set()  # ranges whose next piece may be cut
        self._late: set[int] = set()  # ranges that wait for room on a full link
        self._timer: asyncio.TimerHandle | None = None
        self._free_s = 0.0  # loop time at which the next piece may be cut
        self.sent_bytes = 0

    def start(self, effect: SnapshotRange) -> None:
        """A snapshot of a range begins; an earlier one of the range is void."""
        peer, r = effect.peer, effect.range
        size = sum(table.count_range(r) * (table.stride + 8) for table in self._tables.values())
        step = -(-self._width // max(1, -(-size // PIECE_BYTES)))
        self._begun += 1
        self._cuts[r] = _Cut(self._begun, peer, effect.serial, r * self._width, (r + 1) * self._width, step)
        filling = self._serving.joiner(r)
        if filling is not None and (r not in self._progress or self._progress[r].filling != filling):
            self._progress[r] = _Progress(filling)
        self._get_ready(r)

    def next(self, effect: NextChunk) -> None:
        """The chunk before is in place."""
        r, progress = effect.range, self._progress.get(effect.range)
        cut = self._cuts.get(r)
        if cut is None or cut.serial != effect.serial:
            return
        if progress is not None and cut.low > progress.best:
            progress.best, progress.waits_s = cut.low, None
        self._get_ready(r)

    def make_way(self, peer: Member) -> None:
        """The link to a peer has room again, before any push takes it: else pushes would, each time."""
        late, self._late = self._late, set()
        for r in sorted(late):
            if self._loop.time() >= self._free_s and self._may_go(r):
                self._ready.discard(r)
                self._piece(r)
            elif r not in self._late:
                self._get_ready(r)

    def stalled(self) -> set[Member]:
        """Joiners that have got no further with some range for STALLED_S. A link that comes and goes, because the
        joiner cannot read what it gets, is no progress; nor does it count that we were stopped."""
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
        """Cuts the piece whose turn it is."""
        self._timer, retry_s = None, 0.0
        if self._loop.time() >= self._free_s:
            r = next(filter(self._may_go, sorted(self._ready, key=lambda r: self._cuts[r].rank)), None)
            if r is None:
                retry_s = RETRY_S
            else:
                self._ready.discard(r)
                self._piece(r)
        self._wake(retry_s)

    def _may_go(self, r: int) -> bool:
        """Whether the link to its joiner takes the next piece of a range; it is late if that will tell when it does."""
        peer, progress = self._cuts[r].peer, self._progress.get(r)
        if progress is not None and progress.waits_s is None:
            progress.waits_s = self._loop.time()
        if self._links.full(peer):
            self._ready.discard(r)
            self._late.add(r)
            return False
        return self._links.backlog(peer) <= BACKLOG_BYTES

    def _piece(self, r: int) -> None:
        cut, now, began = self._cuts[r], self._loop.time(), time.thread_time()
        first = cut.low == r * self._width
        while True:
            upto = min(cut.low + cut.step, cut.end)
            content = self._content(r, cut.low, upto)
            rows = size_by_place(content)
            if rows <= MOST_BYTES or upto == cut.low + 1:
                break
            cut.step = max(1, (upto - cut.low) * PIECE_BYTES // rows)
        cut.low = upto
        last = upto == cut.end
        if last:
            del self._cuts[r]
        elif rows < PIECE_BYTES // 4:
            cut.step *= 2
        if first:
            content = self._with_state(content, r)
        size = size_of(content)
        self.sent_bytes += size
        *contents, end = pack(content, MOST_BYTES)
        for part in contents:  # of one instant: on the link nothing comes in between
            self._executor.perform(self._executor.replica.piece, r, cut.serial, upto, False, part)
        self._executor.perform(self._executor.replica.piece, r, cut.serial, upto, last, end)
        if self._last_served.within(BUSY_S):
            pause_s = max((time.thread_time() - began) / BUSY_SHARE, size / BUSY_BYTES_PER_S)
            self._free_s = now + min(pause_s, LONGEST_PAUSE_S)

    def _content(self, r: int, low: int, upto: int) -> ChunkContent:
        """An interval of range r."""
        tables = (self._table_rows(number, table, r, low, upto) for number, table in self._tables.items())
        rows = [one for one in tables if len(one.keys) or len(one.notes) or one.floor]
        kept, cuts = self._rounds.dump(r, low, upto, self._tables), self._store.cuts
        return ChunkContent(rows, kept._replace(groups={}), {}, int(cuts.newest[r]), int(cuts.base[r]))

    def _table_rows(self, number: int, table: Table, r: int, low: int, upto: int) -> TableRows:
        notes = table.deletions.of(r)
        if len(notes):
            places = table.hashes_of(np.ascontiguousarray(notes[:, 0]))
            notes = notes[(low <= places) & (places < upto)]
        rows = table.dump_stamped(r, low, upto)
        return TableRows(number, table.spec.to_json(), *rows, notes, int(table.deletions.floor[r]))

    def _with_state(self, content: ChunkContent, r: int) -> ChunkContent:
        """The first interval of range r, with what belongs to the range as a whole, and every table."""
        there, dropped = {one.table: one for one in content.tables}, self._store.dropped_in(r)
        rows = [
            there.get(number) or self._table_rows(number, table, r, 0, 0)
            for number, table in self._tables.items()
            if number not in dropped
        ]
        rows += [TableRows(number, "", NO_KEYS, NO_ROWS, NO_STAMPS) for number in dropped]
        rounds = content.rounds._replace(groups=self._rounds.groups_of(r))
        return content._replace(tables=rows, rounds=rounds, shards=self._shards.dump(r))
