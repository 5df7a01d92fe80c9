"""A reader that feeds readers: from its own rows, in the frames in which servers feed it.

For those behind it a relay is a cluster of one server that is the tail of every range. It keeps a journal of the keys
that its windows have brought, and makes windows of it as a server does; rows are sent as they are kept, in the relay's
type. Sequence numbers, clocks and times are those of the servers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from elasticps.readers.reader import Reader
from elasticps.server.core.journal_marks import KEYS_AT_ONCE, JournalMarks
from elasticps.server.roles.range_parts import ReadTable, part_of
from elasticps.store.codec import Codec
from elasticps.store.journal import Journal, followed_tables
from elasticps.wire.frames import Buffer, FrameError, Header, Kind
from elasticps.wire.range_parts import ReadRange
from elasticps.wire.windows import Progresses, Subscribe, Subscribed, WindowState, window_frame
from replication.step_records import StepRecord, record_of

JOURNAL_WORDS = 1 << 21
CREDIT_BYTES = 8 << 20
IDLE_S = 0.25
_NONE = np.empty(0, np.int64)


class Relay:
    """The journal of one reader, for all that it feeds."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.journal = Journal(JOURNAL_WORDS)
        self.marks = JournalMarks()
        reader.keep_journal(self.journal)

    def mark(self) -> None:
        """Notes how far ranges are at the journal's end; under the reader's lock."""
        have = self.reader.positions
        self.marks.add(self.journal.end, have, have >= 0)


class RelayFeed:
    """One reader that is fed, by a thread of its own. send: sends buffers, from any thread, one call at a time."""

    def __init__(self, relay: Relay, send: Callable[[list[Buffer]], None]) -> None:
        self._relay, self._reader = relay, relay.reader
        self._send_bytes = send
        self._sending = threading.Lock()  # of the order of frames; taken before the reader's lock, and held longer
        self._changed = threading.Event()  # the reader has applied something, or this feed ends
        self._ended = False
        self._wants: Subscribe | None = None
        self._cursor = self._number = self._acknowledged = 0
        self._in_flight: deque[tuple[int, int]] = deque()  # numbers and bytes of windows
        self._seqs = _NONE  # as told, of all ranges
        self._progress: dict[int, NDArray[np.int64]] = {}
        self._records: dict[int, int] = {}  # by worker, the newest step whose record was sent
        self._tables: set[int] = set()  # that it knows of

    def frame(self, header: Header, body: NDArray[np.uint8]) -> None:
        """Handles what the reader says. FrameError for what it cannot say."""
        if header.kind == Kind.SUBSCRIBE:
            self._subscribe(Subscribe.of(header, body, self._reader.ranges))
        elif header.kind == Kind.WINDOW_ACK:
            self._acknowledged = max(self._acknowledged, header.clock)
            self._changed.set()
        elif header.kind == Kind.READ_RANGE:
            self._read(ReadRange.of(header, body, self._reader.ranges))
        elif header.kind != Kind.GET_VIEW:
            raise FrameError(f"{Kind(header.kind).name} is nothing that a reader says to a relay")

    def close(self) -> None:
        """Ends the thread."""
        self._ended = True
        self._changed.set()
        self._reader.unhook(self._changed.set)

    def _subscribe(self, wants: Subscribe) -> None:
        ours = self._reader.spec.dtype or ""
        if wants.dtype != ours:
            raise FrameError(f"this relay keeps rows as {ours or 'the tables have them'}: ask for the same dtype")
        if not self._reader.spec.share.includes(wants.share):
            raise FrameError(f"this relay has share {self._reader.spec.share} of all keys: ask for the same")
        relay, first = self._relay, self._wants is None
        with self._sending:
            with self._reader.lock:
                have = self._reader.positions[wants.ranges]
                oldest = relay.journal.oldest
                cursors = relay.marks.find(wants.ranges, wants.positions, have, relay.journal.end, oldest)
                if not first:  # it goes on where it is
                    cursors = np.where(wants.positions >= 0, self._cursor, -1)
                going_on = cursors >= 0
                self._cursor = min(cursors[going_on].tolist(), default=relay.journal.end)
                self._seqs, self._progress, self._records = np.full(self._reader.ranges, -1, np.int64), {}, {}
                self._wants = wants
                answer = Subscribed(wants.number, wants.epoch, wants.ranges[going_on], wants.ranges[~going_on])
            self._send_bytes(answer.frame())
        if first:
            self._reader.hook(self._changed.set)
            threading.Thread(target=self._run, name="elasticps-relay", daemon=True).start()
        self._changed.set()

    def _run(self) -> None:
        try:
            while not self._ended:
                assert self._wants is not None
                self._changed.wait(IDLE_S)
                self._changed.clear()
                while self._window():
                    pass
                if not self._wants.fine_ms:
                    threading.Event().wait(self._wants.every_ms / 1e3)
        except OSError:  # the connection has ended
            self._ended = True

    def _window(self) -> bool:
        """Sends a window, if there is room for it; whether more of it is to follow."""
        if self._ended:
            return False
        while self._in_flight and self._in_flight[0][0] <= self._acknowledged:
            self._in_flight.popleft()
        if sum(nbytes for _, nbytes in self._in_flight) > CREDIT_BYTES:
            return False
        with self._sending:
            with self._reader.lock:
                buffers, more = self._make()
            self._send_bytes(buffers)  # without the reader's lock: the other end may be slow
        return more

    def _make(self) -> tuple[list[Buffer], bool]:
        """The next frame of a window, and whether more follow. Under the reader's lock, which no peer holds up."""
        relay, reader, wants = self._relay, self._reader, self._wants
        assert wants is not None
        journal, before = relay.journal, list[Buffer]()
        if self._cursor < journal.oldest:
            self._cursor = journal.end
            self._seqs[:] = -1
            before = Subscribed(0, wants.epoch, _NONE, wants.ranges).frame()
        upto, new = journal.limit(self._cursor, KEYS_AT_ONCE), list[tuple[int, str]]()
        self._number += 1
        here = {table.number: table for table in reader.table_rows.values()}
        names = wants.tables
        for number, table in here.items():
            if number not in self._tables and (names is None or table.spec.name in names):
                new.append((number, table.spec.to_json()))
                self._tables.add(number)
        dropped = sorted(self._tables - here.keys())
        self._tables -= set(dropped)
        followed = followed_tables(
            (number, here[number].stored.header, Codec([], here[number].stored.spec.dim),
             wants.share.for_shape(here[number].spec.shape))
            for number in self._tables
        )  # fmt: skip
        blocks, written = journal.read(self._cursor, upto, followed, np.ones(reader.ranges, np.int64))
        self._cursor = upto
        # While this reader reads a range, or has half of a window, its rows are of no moment.
        complete = upto == journal.end and reader.exact
        if complete:
            relay.mark()
        state = self._write_state() if complete else None
        buffers = window_frame(
            wants.epoch, self._number, reader.oldest_us, state, blocks, written, new, dropped
        )  # fmt: skip
        self._in_flight.append((self._number, sum(map(len, buffers))))
        return before + buffers, upto < journal.end

    def _write_state(self) -> WindowState:
        reader = self._reader
        have, clocks = reader.positions, reader.clocks
        moved = np.flatnonzero((have != self._seqs) & (have >= 0))
        self._seqs = have
        both = sorted(clocks.progress.keys() | self._progress.keys())
        nothing = np.zeros(reader.ranges, np.int64)
        tables = [np.array([of.get(w, nothing) for w in both]).reshape(len(both), reader.ranges)
                  for of in (self._progress, clocks.progress)]  # fmt: skip
        runs = Progresses.between(np.array(both, np.int64), np.arange(reader.ranges), *tables)
        self._progress = {worker: row.copy() for worker, row in clocks.progress.items()}
        records = list[tuple[int, StepRecord]]()
        for worker, mine in clocks.records.items():
            for clock in sorted(clock for clock in mine if clock > self._records.get(worker, 0)):
                ticked = np.zeros(reader.ranges, np.bool_)
                ticked[mine[clock]] = True
                records.append((worker, record_of(clock, clocks.committed.get(worker, 0), ticked)))
                self._records[worker] = clock
        return WindowState.of(moved, have[moved], runs, records)

    def _read(self, request: ReadRange) -> None:
        reader, wants = self._reader, self._wants
        if wants is None:
            raise FrameError("READ_RANGE came before SUBSCRIBE")
        with self._sending:
            with reader.lock:
                here = {table.number: table for table in reader.table_rows.values()}
                tables = (
                    ReadTable(number, here[number].stored, wants.share.for_shape(here[number].spec.shape), 0,
                              here[number].stored.spec.dim)
                    for number in sorted(self._tables & here.keys())
                )  # fmt: skip
                part = part_of(tables, request, request.epoch, reader.ranges)
            self._send_bytes(part.frame())
