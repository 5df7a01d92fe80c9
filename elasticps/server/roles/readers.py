"""Feeds readers: windows of committed changes of the ranges tailed here, and rows of ranges that a reader has to read.

Keys of changed rows are noted in a journal as operations are applied, while readers are attached (`store.journal`). For
each reader a cursor says how far it has come there. A window has each key once that was noted since, with its newest
row, or that it has none. A reader that is too slow stops at its credit; when the journal is written over before it
goes on, it is told to read its ranges again, part by part, as it asks for them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core import fields
from elasticps.model.filters import BFloat16, Float16, Int8
from elasticps.server.core.journal_marks import JournalMarks
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.fast import layout as at
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.store import Table
from elasticps.store.codec import Codec
from elasticps.store.intervals import HASH_END
from elasticps.store.journal import CLEARED, Changed, Journal
from elasticps.wire.frames import Buffer, FrameError, Header, Kind
from elasticps.wire.windows import Progresses, RangeRows, ReadRange, RowBlock, Subscribe, Subscribed, WindowFrame
from replication.chain import Ranges
from replication.messages import Seqs
from replication.step_records import StepRecord, home_range

log = fields.logger(__name__)

JOURNAL_WORDS = 1 << 21  # 16 MB of keys: about as many pushes as a failover takes
KEYS_AT_ONCE = 1 << 14  # of one frame of a window; about a millisecond or two
CREDIT_BYTES = 8 << 20  # of windows that a reader has not acknowledged
READ_BYTES = 256 << 10  # of rows, about, in one answer to READ_RANGE
MOST_READS = 8  # READ_RANGEs of a reader that wait
SHARE = 4  # one part in so many of this server's time goes to readers, at most
IDLE_S = 0.25  # a reader hears at least so often how new its state is
MARK_S = 0.01
JOURNAL_REST_S = 30.0  # the journal goes on for so long without readers: one may come back
NO_RANGES = np.empty(0, np.int64)
_WORKER_IDS = 1 << 31  # above are those of workers' deletions

_FILTERS = {"float16": Float16(), "bfloat16": BFloat16(), "int8": Int8()}


class _Unshown(NamedTuple):
    """A frame whose rows must not be shown before all replicas of ranges have them. seqs: of these then."""

    buffers: list[Buffer]
    ranges: Ranges
    seqs: Seqs


class _Reader:
    """A connection of a reader."""

    def __init__(self, connection: Connection, ranges: int) -> None:
        self.connection = connection
        self.wants: Subscribe | None = None  # what it asked for last
        self.cursor = 0  # of the journal
        self.lost = True  # the journal was written over before the cursor, or it has asked for nothing yet
        self.ranges = NO_RANGES  # that it follows here, ascending
        self.wanted = np.zeros(ranges, np.int64)  # 1 for these
        self.seqs = np.full(ranges, -1, np.int64)  # of the windows so far
        self.workers = NO_RANGES  # in the order of `progress`
        self.progress = np.zeros((0, 0), np.int64)  # [workers, ranges], of the windows so far
        self.records: dict[int, int] = {}  # by worker, the newest step whose record it has
        self.tables: dict[int, Codec] = {}  # that it knows of
        self.unowned: set[int] = set()  # tables whose application was not known when they were listed
        self.listed = -1, -1  # how many tables there were when they were listed
        self.number = 0  # of the newest window
        self.in_flight: deque[tuple[int, int]] = deque()  # numbers and bytes of windows that it has not applied
        self.bytes_in_flight = 0
        self.unshown: deque[_Unshown] = deque()
        self.reads: deque[ReadRange] = deque()  # that wait for their turn
        self.next_s = 0.0  # when its next window is due
        self.sent_s = 0.0  # when the newest one was made
        self.fine_until_s = 0.0  # a window after each change until then

    def acknowledge(self, number: int) -> None:
        """It has applied the windows up to this one."""
        while self.in_flight and self.in_flight[0][0] <= number:
            self.bytes_in_flight -= self.in_flight.popleft()[1]


class ReaderFeeds:
    """All readers of this server. attached: how many; windows, bytes: sent ever."""

    def __init__(self, context: Context, wall: Callable[[], float], journal_words: int = JOURNAL_WORDS) -> None:
        self._loop = context.loop
        self._wall = wall  # seconds since 1970
        self._serving, self._held, self._path = context.serving, context.held, context.path
        self._executor, self._store = context.executor, context.executor.store
        self._replica = context.executor.replica
        self._registered = context.registered
        self._journal_words = journal_words
        self._journal: Journal | None = None  # while readers are there
        self._marks = JournalMarks()
        self._marked_s = self._left_s = 0.0  # when a mark was added; when the last reader left
        self._readers: dict[Connection, _Reader] = {}
        self._timer: object | None = None  # of the next turn
        self._due_s = 0.0  # when that is
        self._free_s = 0.0  # the share of time for readers is spent until then
        self.windows = self.bytes = 0
        self.handlers: dict[int, Handler] = {
            Kind.SUBSCRIBE: self._subscribe, Kind.WINDOW_ACK: self._acknowledged, Kind.READ_RANGE: self._read,
        }  # fmt: skip

    @property
    def attached(self) -> int:
        """Readers that are connected."""
        return len(self._readers)

    # --- readers come and go ----------------------------------------------------------------------------------------

    def add(self, connection: Connection) -> None:
        """A reader has said HELLO. From now on changed keys are noted."""
        self._readers[connection] = _Reader(connection, self._serving.ranges)
        if self._journal is None:
            self._journal = Journal(self._journal_words)
            self._keep(self._journal)
            self._mark()

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        if self._readers.pop(connection, None) is not None and not self._readers:
            self._left_s = self._loop.time()

    def tick(self) -> None:
        """Called a few times a second: ends the journal when no reader comes back."""
        if self._journal is not None and not self._readers:
            self._mark_when_due()
            if self._loop.time() - self._left_s > JOURNAL_REST_S:
                self._journal = None
                self._keep(None)
                self._marks.clear()

    def _keep(self, journal: Journal | None) -> None:
        self._store.keep_journal(journal)
        self._path.h[at.H_JOURNAL] = 0 if journal is None else journal.address

    def _mark_when_due(self) -> None:
        if self._loop.time() - self._marked_s >= MARK_S:
            self._mark()

    def _mark(self) -> None:
        assert self._journal is not None
        self._marked_s = self._loop.time()
        self._marks.add(self._journal.end, self._replica.seq, np.flatnonzero(self._replica.filled))

    # --- what readers say -------------------------------------------------------------------------------------------

    def _subscribe(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        reader, journal = self._readers[connection], self._journal
        assert journal is not None
        wants = Subscribe.of(header, body, self._serving.ranges)
        self._check_tables(reader, wants)
        here = np.isin(wants.ranges, self._serving.tailed)
        ranges, positions, origins = wants.ranges[here], wants.positions[here], wants.origins[here]
        view, seqs = self._serving.view, self._replica.seq[ranges]
        assert view is not None
        cursors = self._marks.find(ranges, positions, seqs, journal.end, journal.oldest)
        same = view.recovery_epoch[ranges] == origins
        cursors[~same] = -1
        kept = np.isin(ranges, reader.ranges) & (positions >= 0) & same
        if reader.lost:
            kept[:] = False
        going_on = kept | (cursors >= 0)
        # Ranges that it follows already go on where they are; a cursor further back shows some rows once more.
        oldest = [reader.cursor] if kept.any() else []
        oldest += cursors[going_on & ~kept].tolist()
        reader.cursor = min(oldest, default=journal.end)
        reader.wants, reader.lost, reader.ranges = wants, False, np.sort(ranges)
        reader.wanted[:] = 0
        reader.wanted[ranges] = 1
        reader.seqs[:] = -1
        reader.workers, reader.progress, reader.records = NO_RANGES, np.zeros((0, 0), np.int64), {}
        reader.reads.clear()
        now = self._loop.time()
        reader.fine_until_s, reader.next_s, reader.sent_s = now + wants.fine_ms / 1e3, now, 0.0
        answer = Subscribed(wants.number, self._serving.epoch, ranges[going_on], ranges[~going_on])
        reader.unshown.append(_Unshown(answer.frame(), NO_RANGES, NO_RANGES))
        self._show(reader)
        self._wake(now)

    def _check_tables(self, reader: _Reader, wants: Subscribe) -> None:
        before = reader.wants
        if before is not None and (before.tables, before.dtype) != (wants.tables, wants.dtype):
            raise FrameError("a reader follows the same tables, in the same type, as long as it is connected")

    def _acknowledged(self, connection: Connection, header: Header, body: Body) -> None:
        self._readers[connection].acknowledge(header.request)
        self._wake(self._readers[connection].next_s)

    def _read(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        reader, request = self._readers[connection], ReadRange.of(header, self._serving.ranges)
        if len(reader.reads) >= MOST_READS:
            raise FrameError(f"more than {MOST_READS} READ_RANGEs of a reader wait")
        if reader.wanted[request.range] == 0 or request.epoch < self._serving.tail_since:
            text = f"server {self._serving.me.name} does not answer for range {request.range} to this reader"
            raise RequestError("stale-view", text, epoch=self._serving.epoch)
        reader.reads.append(request)
        self._wake(self._loop.time())

    # --- turns ------------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Something was applied or acknowledged: windows that waited for that may go, and those after each change."""
        if not self._readers:
            return
        now = self._loop.time()
        for reader in list(self._readers.values()):
            if reader.unshown:
                self._show(reader)
            if reader.fine_until_s > now and self._may_make(reader):
                self._make(reader, now)

    def adopted(self) -> None:
        """The server follows another view: readers go on with the ranges that are still tailed here."""
        for reader in self._readers.values():
            left = np.setdiff1d(reader.ranges, self._serving.tailed)
            if len(left):
                reader.ranges = np.setdiff1d(reader.ranges, left)
                reader.wanted[left] = 0
                reader.workers, reader.progress = NO_RANGES, np.zeros((0, 0), np.int64)
                if any(len(np.intersect1d(frame.ranges, left)) for frame in reader.unshown):
                    # That will never be shown, and is not to be: the reader begins again with what it has.
                    reader.connection.transport.abort()

    def _wake(self, when_s: float) -> None:
        """Has a turn happen at that time, or earlier."""
        when_s = max(when_s, self._free_s)
        if self._timer is not None and self._due_s <= when_s:
            return
        if self._timer is not None:
            self._timer.cancel()  # type: ignore[attr-defined]
        self._due_s = when_s
        self._timer = self._loop.call_at(when_s, self._turn)

    def _turn(self) -> None:
        """Makes what is due: a frame for each reader."""
        self._timer, began, now = None, time.thread_time(), self._loop.time()
        if self._journal is None or not self._readers:
            return
        self._mark_when_due()
        for reader in list(self._readers.values()):
            try:
                self._serve(reader, now)
            except Exception as error:
                reader.connection.fail(error)
        self._free_s = now + (time.thread_time() - began) * (SHARE - 1)
        due = [reader.next_s for reader in self._readers.values() if self._may_make(reader)]
        if any(reader.reads for reader in self._readers.values()):
            due.append(now)
        if due:
            self._wake(min(due))
        if self._timer is None:
            self._wake(now + IDLE_S)  # for marks

    def _serve(self, reader: _Reader, now: float) -> None:
        if reader.unshown:
            self._show(reader)
        if self._may_make(reader) and reader.next_s <= now:
            self._make(reader, now)
        if reader.reads and not reader.connection.full:
            self._answer(reader, reader.reads.popleft())

    def _may_make(self, reader: _Reader) -> bool:
        return reader.wants is not None and not reader.lost and reader.bytes_in_flight < CREDIT_BYTES

    def _make(self, reader: _Reader, now: float) -> None:
        """Makes the next frame of a reader's windows, if there is anything to say."""
        journal, wants = self._journal, reader.wants
        assert journal is not None
        assert wants is not None
        if reader.cursor < journal.oldest:
            self._lose(reader)
            return
        new, dropped = self._list_tables(reader)
        tables, behind = journal.tables(reader.cursor, KEYS_AT_ONCE)
        complete = behind == journal.end
        seqs = self._replica.seq[reader.ranges]
        news = bool(tables or new or dropped) or not np.array_equal(seqs, reader.seqs[reader.ranges])
        every_s = wants.every_ms / 1e3
        if not news and now - reader.sent_s < max(IDLE_S, every_s):
            reader.next_s = now + every_s
            return
        blocks = [one for one in self._blocks(reader, journal, tables, behind) if one.nbytes > 32]
        reader.cursor, reader.number = behind, reader.number + 1
        frame = WindowFrame(
            self._serving.epoch, reader.number, int(self._wall() * 1e6), complete, blocks, tables=new, dropped=dropped
        )
        if complete:
            frame = self._with_state(reader, frame, seqs)
        reader.sent_s, reader.next_s = now, now + every_s if complete else now
        self._send(reader, frame.frame(), seqs)

    def _lose(self, reader: _Reader) -> None:
        """A reader was too slow: it has to read all its ranges again."""
        log.info("reader too slow", peer=reader.connection.peer, ranges=len(reader.ranges))
        reader.lost = True
        answer = Subscribed(0, self._serving.epoch, NO_RANGES, reader.ranges)
        reader.unshown.append(_Unshown(answer.frame(), NO_RANGES, NO_RANGES))
        self._show(reader)
        assert self._journal is not None
        reader.cursor, reader.lost = self._journal.end, False
        reader.seqs[:] = -1

    def _list_tables(self, reader: _Reader) -> tuple[list[tuple[int, str]], list[int]]:
        """Tables that are new to a reader, and those that it knows and that are gone."""
        store, wants = self._store, reader.wants
        assert wants is not None
        count = len(store.live), len(store.dropped)
        if count == reader.listed:
            return [], []
        app, unowned = reader.connection.app, set[int]()
        new = list[tuple[int, str]]()
        for number, table in store.live.items():
            if not table.app:
                unowned.add(number)
            known = number in reader.tables or (wants.tables is not None and table.spec.name not in wants.tables)
            if table.app == app and not known:
                new.append((number, table.spec.to_json()))
                reader.tables[number] = _codec(table, wants.dtype)
                if number in reader.unowned:  # changes of it were left out
                    for r in reader.ranges.tolist():
                        self._store.note_changed(number, table.range_keys(r))
        first = reader.listed == (-1, -1)
        gone = [number for number in (store.dropped if first else reader.tables) if number not in store.live]
        for number in gone:
            reader.tables.pop(number, None)
        reader.unowned = unowned
        if not unowned:
            reader.listed = count
        return new, gone

    def _blocks(self, reader: _Reader, journal: Journal, tables: list[int], behind: int) -> Iterator[RowBlock]:
        cleared = {number & ~CLEARED for number in tables if number & CLEARED}
        for number in dict.fromkeys(number & ~CLEARED for number in tables):
            codec, table = reader.tables.get(number), self._store.live.get(number)
            if codec is None or table is None:
                continue
            found = journal.read(
                table.header, number, reader.cursor, behind, reader.wanted, max(codec.code, 0), codec.words
            )
            empty = journal.cleared(number, reader.cursor, behind) if number in cleared else NO_RANGES
            yield _block(number, found, empty[reader.wanted[empty] == 1])

    def _with_state(self, reader: _Reader, frame: WindowFrame, seqs: Seqs) -> WindowFrame:
        """Adds how far ranges and workers have come, as far as that has changed."""
        moved = reader.ranges[seqs != reader.seqs[reader.ranges]]
        reader.seqs[reader.ranges] = seqs
        clocks = self._replica.clocks
        used, columns = clocks.used, clocks.columns[reader.ranges]
        foreign = {w.id for w in self._serving.workers.values() if w.app != reader.connection.app}
        chosen = [
            i for i, worker in enumerate(clocks.workers[:used].tolist()) if 0 < worker < _WORKER_IDS
            and worker not in foreign
        ]  # fmt: skip
        workers = clocks.workers[chosen]
        progress = (
            clocks.matrix[np.ix_(np.array(chosen, np.int64), columns)]
            if len(chosen)
            else np.zeros((0, len(columns)), np.int64)
        )
        before = np.zeros_like(progress)
        if np.array_equal(workers, reader.workers) and reader.progress.shape == progress.shape:
            before = reader.progress
        reader.workers, reader.progress = workers, progress
        runs = Progresses.between(workers, reader.ranges, before, progress)
        return frame._replace(
            ranges=moved, positions=self._replica.seq[moved], progress=runs, records=self._records(reader, workers)
        )

    def _records(self, reader: _Reader, workers: NDArray[np.int64]) -> list[tuple[int, StepRecord]]:
        """Records of workers' sparse steps that a reader does not have, of homes that it follows here."""
        found = list[tuple[int, StepRecord]]()
        for worker in workers.tolist():
            if reader.wanted[home_range(worker, self._serving.ranges)]:
                have = reader.records.get(worker, 0)
                fresh = [(worker, record) for record in self._replica.records.of(worker) if record.clock > have]
                if fresh:
                    reader.records[worker] = fresh[-1][1].clock
                    found += fresh
        return found

    def _send(self, reader: _Reader, buffers: list[Buffer], seqs: Seqs) -> None:
        size = sum(len(memoryview(one).cast("B")) for one in buffers)
        reader.in_flight.append((reader.number, size))
        reader.bytes_in_flight += size
        self.windows += 1
        self.bytes += size
        self._queue(reader, buffers, reader.ranges, seqs)

    def _queue(self, reader: _Reader, buffers: list[Buffer], ranges: Ranges, seqs: Seqs) -> None:
        """Sends rows of these ranges when they may be shown: a tail whose joiner is level waits for that."""
        late = self._replica.waiting[ranges] & (self._replica.acked[ranges] < seqs)
        reader.unshown.append(_Unshown(buffers, ranges[late], seqs[late]))
        self._show(reader)

    def _show(self, reader: _Reader) -> None:
        """Sends what waits, in order, as far as it may be shown."""
        acked = self._replica.acked
        while reader.unshown and not (acked[reader.unshown[0].ranges] < reader.unshown[0].seqs).any():
            reader.connection.send_all(reader.unshown.popleft().buffers)

    # --- rows of a range --------------------------------------------------------------------------------------------

    def _answer(self, reader: _Reader, request: ReadRange) -> None:
        """Sends a part of a range: as many rows as asked for, and as fit."""
        table, r = self._store.live.get(request.table), request.range
        wants = reader.wants
        assert wants is not None
        codec = reader.tables.get(request.table)
        width = HASH_END // self._serving.ranges
        low, end = max(request.place, r * width), (r + 1) * width
        seqs = self._replica.seq[[r]]
        if table is None or codec is None or table.app != reader.connection.app:
            block = RowBlock(request.table, NO_RANGES, np.empty((0, 0), np.float32), NO_RANGES, NO_RANGES)
            answer = RangeRows(request.request, self._serving.epoch, r, low, end, 0, block, missing=True)
        else:
            most = max(1, min(request.rows, READ_BYTES // (8 + 4 * codec.words)))
            keys, behind = table.list_keys(r, low, most)
            found = Journal.look_up(
                table.header, keys, max(codec.code, 0), codec.words, np.empty_like(keys), np.empty_like(keys)
            )
            block = _block(request.table, found, NO_RANGES)
            answer = RangeRows(request.request, self._serving.epoch, r, low, behind or end, behind, block)
        self._queue(reader, answer.frame(), np.array([r]), seqs)


def _block(number: int, found: Changed, cleared: Ranges) -> RowBlock:
    return RowBlock(number, found.keys, found.rows, found.gone, cleared)


def _codec(table: Table, dtype: str) -> Codec:
    """How rows of a table travel."""
    chosen = dtype or table.spec.dtype
    return Codec([] if chosen == "float32" else [_FILTERS[chosen]], table.spec.dim)
