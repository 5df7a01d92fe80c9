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
from itertools import islice
from typing import NamedTuple

import numpy as np

from coordinator.core import fields
from elasticps.model.filters import BFloat16, Float16, Int8
from elasticps.server.core.journal_marks import KEYS_AT_ONCE
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.change_journal import ChangeJournal
from elasticps.server.roles.context import Context
from elasticps.server.roles.range_parts import ReadTable, part_of
from elasticps.server.roles.sent_state import SentState
from elasticps.store import Table
from elasticps.store.codec import Codec
from elasticps.store.journal import T_KEYS, Journal, followed_tables
from elasticps.wire.frames import Buffer, FrameError, Header, Kind
from elasticps.wire.range_parts import ReadRange
from elasticps.wire.windows import MOST_STRETCH, Subscribe, Subscribed, window_frame
from replication.chain import Ranges
from replication.messages import Seqs

log = fields.logger(__name__)

JOURNAL_WORDS = 1 << 21  # 16 MB of keys: about as many pushes as a failover takes
MOST_REPEATS = 4  # times KEYS_AT_ONCE of the journal in a frame if most keys are there again and again
CREDIT_BYTES = 8 << 20  # of windows that a reader has not acknowledged
MOST_READS = 8  # READ_RANGEs of a reader that wait
SHARE = 4  # one part in so many of this server's time goes to readers, at most,
WINDOW_SHARE = 100  # and of windows one in so many, while they are stretched for that
TIMER_S = 0.001  # timers of the loop are no finer: what is due so soon is made now, not by a turn of its own
IDLE_S = 0.25  # a reader hears at least so often how new its state is
NO_RANGES = np.empty(0, np.int64)
_WORKER_IDS = 1 << 31  # above are those of workers' deletions

_FILTERS = {"float16": Float16(), "bfloat16": BFloat16(), "int8": Int8()}


class UnshownFrame(NamedTuple):
    """A frame whose rows must not be shown before all replicas of ranges have them. seqs: of these then."""

    buffers: list[Buffer]
    ranges: Ranges
    seqs: Seqs


class Outflow:
    """Windows on their way to a reader, numbered from 1."""

    def __init__(self) -> None:
        self.number = 0  # of the newest
        self.bytes = 0  # of those that it has not applied
        self.shown_s: float | None = None  # when the newest one that it has applied was made
        self.repeats = 1.0  # how often a key of the newest frame stood in the journal, about
        self._windows: deque[tuple[int, int, float]] = deque()  # numbers and bytes of these, and when they were made
        self.unshown: deque[UnshownFrame] = deque()  # frames that may not leave yet

    def add(self, nbytes: int, now_s: float) -> None:
        """A window of the newest number leaves."""
        self._windows.append((self.number, nbytes, now_s))
        self.bytes += nbytes

    def acknowledge(self, number: int) -> None:
        """It has applied the windows up to this one."""
        while self._windows and self._windows[0][0] <= number:
            _, nbytes, self.shown_s = self._windows.popleft()
            self.bytes -= nbytes


class AttachedReader:
    """A connection of a reader."""

    def __init__(self, connection: Connection, name: str, context: Context) -> None:
        ranges = context.serving.ranges
        self.connection = connection
        self.name = name
        self.wants: Subscribe | None = None  # its newest SUBSCRIBE
        self.cursor = 0  # of the journal
        self.lost = True  # the journal was written over before the cursor, or there was no SUBSCRIBE yet
        self.ranges = NO_RANGES  # that it follows here, ascending
        self.follows = np.zeros(ranges, np.int64)  # 1 for these
        self.sent = SentState(context, connection.app)  # what it has
        self.flow = Outflow()
        self.reads: deque[ReadRange] = deque()  # that wait for their turn
        self.next_s = 0.0  # when its next window is due
        self.sent_s = 0.0  # when the newest one was made
        self.spent_s = 0.0  # this server's time that the frames of the newest one took
        self.quiet = False  # nothing is to be said before something changes, or IDLE_S is over
        self.fine_until_s = 0.0  # a window after each change until then

    @property
    def may_get_more(self) -> bool:
        """Whether a window may be made for it."""
        return self.wants is not None and not self.lost and self.flow.bytes < CREDIT_BYTES


class ReaderFeeds:
    """All readers of this server. attached: how many; windows, bytes: sent ever; changes: keeps the journal of changed
    keys."""

    def __init__(self, context: Context, wall: Callable[[], float], journal_words: int = JOURNAL_WORDS) -> None:
        self._context, self._loop = context, context.loop
        self._wall = wall  # seconds since 1970
        self._serving = context.serving
        self._store, self._replica = context.executor.store, context.executor.replica
        self.changes = ChangeJournal(context, journal_words)
        self._readers: dict[Connection, AttachedReader] = {}
        self._waiting: set[AttachedReader] = set()  # those for which a change may have something be sent at once
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

    def describe(self) -> list[dict[str, object]]:
        """The fields of AttachedReader in admin.proto, of each."""
        now_s = self._loop.time()
        return [
            {
                "name": one.name, "app": one.connection.app, "unread_bytes": one.flow.bytes,
                "age_s": -1.0 if one.flow.shown_s is None else now_s - one.flow.shown_s,
            }
            for one in self._readers.values()
        ]  # fmt: skip

    @property
    def _journal(self) -> Journal:
        """Of changed keys; there is one while there are readers."""
        assert self.changes.journal is not None
        return self.changes.journal

    # --- readers come and go ----------------------------------------------------------------------------------------

    def add(self, connection: Connection, name: str) -> None:
        """A reader has said HELLO. From now on changed keys are noted."""
        self._readers[connection] = AttachedReader(connection, name, self._context)
        self.changes.begin()

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self._waiting.discard(self._readers.pop(connection, None))

    def tick(self) -> None:
        """Called a few times a second: ends the journal when no reader comes back."""
        self.changes.tick(bool(self._readers))

    # --- what readers say -------------------------------------------------------------------------------------------

    def _subscribe(self, connection: Connection, header: Header, body: Body) -> None:
        if self._context.held.wait_for_view(connection, header, body):
            return
        reader, journal = self._readers[connection], self._journal
        wants = Subscribe.of(header, body, self._serving.ranges)
        self._check_tables(reader, wants)
        here = np.isin(wants.ranges, self._serving.tailed)
        ranges, positions, origins = wants.ranges[here], wants.positions[here], wants.origins[here]
        view = self._serving.view
        assert view is not None
        cursors = self.changes.find(ranges, positions)
        same = view.recovery_epoch[ranges] == origins
        cursors[~same] = -1
        followed = np.isin(ranges, reader.ranges) & (positions >= 0) & same
        if reader.lost:
            followed[:] = False
        going_on = followed | (cursors >= 0)
        # Ranges that it follows already go on where they are; a cursor further back shows some rows once more.
        oldest = [reader.cursor] if followed.any() else []
        oldest += cursors[going_on & ~followed].tolist()
        reader.cursor = min(oldest, default=journal.end)
        reader.wants, reader.lost, reader.ranges = wants, False, np.sort(ranges)
        reader.follows[:] = 0
        reader.follows[ranges] = 1
        reader.sent.begin_again()
        reader.reads.clear()
        now = self._loop.time()
        reader.fine_until_s, reader.next_s, reader.sent_s = now + wants.fine_ms / 1e3, now, 0.0
        if wants.fine_ms:
            self._waiting.add(reader)
        answer = Subscribed(wants.number, self._serving.epoch, ranges[going_on], ranges[~going_on])
        reader.flow.unshown.append(UnshownFrame(answer.frame(), NO_RANGES, NO_RANGES))
        self._show(reader)
        self._wake(now)

    def _check_tables(self, reader: AttachedReader, wants: Subscribe) -> None:
        before = reader.wants
        if before is not None and (before.tables, before.dtype, before.share) != (
            wants.tables, wants.dtype, wants.share,
        ):  # fmt: skip
            raise FrameError("a reader follows the same share of the same tables, in one type, while it is connected")

    def _acknowledged(self, connection: Connection, header: Header, body: Body) -> None:
        self._readers[connection].flow.acknowledge(header.clock)
        self._wake(self._readers[connection].next_s)

    def _read(self, connection: Connection, header: Header, body: Body) -> None:
        if self._context.held.wait_for_view(connection, header, body):
            return
        reader, request = self._readers[connection], ReadRange.of(header, body, self._serving.ranges)
        if len(reader.reads) >= MOST_READS:
            raise FrameError(f"more than {MOST_READS} READ_RANGEs of a reader wait")
        if reader.follows[request.range] == 0 or request.epoch < self._serving.tail_since:
            text = f"server {self._serving.me.name} does not answer for range {request.range} to this reader"
            raise RequestError("stale-view", text, epoch=self._serving.epoch)
        reader.reads.append(request)
        self._wake(self._loop.time())

    # --- turns ------------------------------------------------------------------------------------------------------

    def changed(self) -> None:
        """Something was applied or acknowledged: windows that waited for that may go, and those after each change."""
        if not self._waiting:
            return
        now = self._loop.time()
        for reader in list(self._waiting):
            if reader.flow.unshown:
                self._show(reader)
            if reader.fine_until_s > now and reader.may_get_more:
                self._make_fine(reader, now)
            elif reader.quiet and reader.wants is not None:
                reader.quiet, reader.next_s = False, max(now, reader.sent_s + reader.wants.every_ms / 1e3)
                self._wake(reader.next_s)
            if not (reader.flow.unshown or reader.fine_until_s > now or reader.quiet):
                self._waiting.discard(reader)

    def _make_fine(self, reader: AttachedReader, now: float) -> None:
        """Makes the window of a change, or has one of several changes be made when there is time for readers again."""
        if now < self._free_s:
            reader.next_s = now
            self._wake(now)
            return
        began = time.thread_time()
        self._make(reader, now)
        self._rest(now, began)

    def _rest(self, now: float, began: float) -> None:
        """Leaves the server its share of time after work for readers. began: this thread's time before that work."""
        self._free_s = now + (time.thread_time() - began) * (SHARE - 1)

    def adopted(self) -> None:
        """The server follows another view: readers go on with the ranges that are still tailed here."""
        for reader in self._readers.values():
            left = np.setdiff1d(reader.ranges, self._serving.tailed)
            if len(left):
                reader.ranges = np.setdiff1d(reader.ranges, left)
                reader.follows[left] = 0
                reader.sent.forget_progress()
                if any(len(np.intersect1d(frame.ranges, left)) for frame in reader.flow.unshown):
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
        if not self._readers:
            return
        self.changes.tick(used=True)
        for reader in list(self._readers.values()):
            try:
                self._serve(reader, now)
            except Exception as error:
                reader.connection.fail(error)
        self._rest(now, began)
        due = [reader.next_s for reader in self._readers.values() if reader.may_get_more]
        if any(reader.reads for reader in self._readers.values()):
            due.append(now)
        if due:
            self._wake(min(due))
        if self._timer is None:
            self._wake(now + IDLE_S)  # for marks

    def _serve(self, reader: AttachedReader, now: float) -> None:
        if reader.flow.unshown:
            self._show(reader)
        if reader.may_get_more and reader.next_s <= now + TIMER_S:
            began = time.thread_time()
            self._make(reader, now)
            self._stretch(reader, time.thread_time() - began)
        if reader.reads and not reader.connection.full:
            self._answer(reader, reader.reads.popleft())

    def _stretch(self, reader: AttachedReader, spent_s: float) -> None:
        """Has the next window come later if windows take more than their share of this server's time. What a window
        costs apart from its rows is the same for one that is longer, and rows that change often are in fewer."""
        assert reader.wants is not None
        reader.spent_s += spent_s
        if reader.next_s > reader.sent_s:  # it was the window's last frame
            every_s, enough_s = reader.wants.every_ms / 1e3, WINDOW_SHARE * len(self._readers) * reader.spent_s
            reader.next_s = max(reader.next_s, reader.sent_s + min(enough_s, MOST_STRETCH * every_s))
            reader.spent_s = 0.0

    def _make(self, reader: AttachedReader, now: float) -> None:
        """Makes the next frame of a reader's windows, if there is anything to say."""
        journal, wants = self._journal, reader.wants
        assert wants is not None
        if reader.cursor < journal.oldest:
            self._lose(reader)
            return
        new, dropped = self._list_tables(reader)
        every_s = wants.every_ms / 1e3
        same = reader.cursor == journal.end and not new and not dropped and reader.sent.all_of(reader.ranges)
        if same and now + TIMER_S - reader.sent_s < max(IDLE_S, every_s):
            reader.next_s, reader.quiet = reader.sent_s + max(IDLE_S, every_s), True
            self._waiting.add(reader)
            return
        upto = journal.limit(reader.cursor, int(KEYS_AT_ONCE * reader.flow.repeats))
        blocks, written = journal.read(reader.cursor, upto, reader.sent.followed, reader.follows)
        keys = int(reader.sent.followed[:, T_KEYS].sum())
        reader.flow.repeats = min(max(1.0, (upto - reader.cursor) / max(1, keys)), MOST_REPEATS)
        complete = upto == journal.end
        state = reader.sent.write_changes(reader.ranges, reader.follows) if complete else None
        reader.cursor, reader.flow.number = upto, reader.flow.number + 1
        reader.sent_s, reader.next_s = now, now + every_s if complete else now
        time_us = int(self._wall() * 1e6)
        frame = window_frame(self._serving.epoch, reader.flow.number, time_us, state, blocks, written, new, dropped)
        self._send(reader, frame)

    def _lose(self, reader: AttachedReader) -> None:
        """A reader was too slow: it has to read all its ranges again."""
        log.info("reader too slow", peer=reader.connection.peer, ranges=len(reader.ranges))
        self._have_ranges_read(reader)

    def _have_ranges_read(self, reader: AttachedReader) -> None:
        """Has a reader compare all its ranges with what is here, from the next window on."""
        reader.lost = True
        answer = Subscribed(0, self._serving.epoch, NO_RANGES, reader.ranges)
        reader.flow.unshown.append(UnshownFrame(answer.frame(), NO_RANGES, NO_RANGES))
        self._show(reader)
        reader.cursor, reader.lost = self._journal.end, False
        reader.sent.seqs[:] = -1

    def _list_tables(self, reader: AttachedReader) -> tuple[list[tuple[int, str]], list[int]]:
        """Tables that are new to a reader, and those that it knows and that are gone."""
        store, wants = self._store, reader.wants
        assert wants is not None
        count = len(store.live), len(store.dropped)
        if count == reader.sent.listed:
            return [], []
        app, unowned, late = reader.connection.app, set[int](), False
        new = list[tuple[int, str]]()
        for number, table in store.live.items():
            if not table.app:
                unowned.add(number)
            known = number in reader.sent.tables or (wants.tables is not None and table.spec.name not in wants.tables)
            if table.app == app and not known:
                new.append((number, table.spec.to_json()))
                reader.sent.tables[number] = _codec(table, wants.dtype)
                late |= number in reader.sent.unowned
        # Also tables that came and went since the listing before: another server may have named them meanwhile.
        gone = list(islice(store.dropped, reader.sent.dropped, None))
        reader.sent.dropped = len(store.dropped)
        for number in gone:
            reader.sent.tables.pop(number, None)
        reader.sent.unowned = unowned
        reader.sent.followed = followed_tables(
            (number, store.live[number].header, codec, wants.share.for_shape(store.live[number].spec.shape))
            for number, codec in reader.sent.tables.items()
        )
        if not unowned:
            reader.sent.listed = count
        if late:  # changes were left out, of rows that the reader may have from another server
            self._have_ranges_read(reader)
        return new, gone

    def _send(self, reader: AttachedReader, buffers: list[Buffer]) -> None:
        size = sum(map(len, buffers))
        reader.flow.add(size, self._loop.time())
        self.windows += 1
        self.bytes += size
        self._queue(reader, buffers, reader.ranges)

    def _queue(self, reader: AttachedReader, buffers: list[Buffer], ranges: Ranges) -> None:
        """Sends rows of these ranges when they may be shown: a tail whose joiner is level waits for that."""
        replica, late = self._replica, NO_RANGES
        if replica.guarded:
            late = ranges[replica.waiting[ranges] & (replica.acked[ranges] < replica.seq[ranges])]
        reader.flow.unshown.append(UnshownFrame(buffers, late, replica.seq[late]))
        self._show(reader)

    def _show(self, reader: AttachedReader) -> None:
        """Sends what waits, in order, as far as it may be shown."""
        acked, unshown = self._replica.acked, reader.flow.unshown
        while unshown and not (len(unshown[0].ranges) and (acked[unshown[0].ranges] < unshown[0].seqs).any()):
            reader.connection.send_all(unshown.popleft().buffers)
        if unshown:
            self._waiting.add(reader)

    # --- rows of a range --------------------------------------------------------------------------------------------

    def _answer(self, reader: AttachedReader, request: ReadRange) -> None:
        """Sends a part of a range: as many rows as asked for, and as fit, of the tables that the reader knows."""
        answer = part_of(self._readable(reader), request, self._serving.epoch, self._serving.ranges)
        self._queue(reader, answer.frame(), np.array([request.range]))

    def _readable(self, reader: AttachedReader) -> Iterator[ReadTable]:
        wants = reader.wants
        assert wants is not None
        for number, codec in sorted(reader.sent.tables.items()):
            table = self._store.live.get(number)
            if table is not None and table.app == reader.connection.app:
                share = wants.share.for_shape(table.spec.shape)
                yield ReadTable(number, table, share, max(codec.code, 0), codec.words)


def _codec(table: Table, dtype: str) -> Codec:
    """How rows of a table travel."""
    chosen = dtype or table.spec.dtype
    return Codec([] if chosen == "float32" else [_FILTERS[chosen]], table.spec.dim)
