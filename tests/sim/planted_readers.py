"""Bugs in how readers are fed, and in what they make of it: rows lost, old, never committed; false moments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticps.readers.connections import ReaderConnections
from elasticps.readers.core.following import Feed, Following
from elasticps.readers.core.moment_search import MomentSearch
from elasticps.readers.holding import Holding
from elasticps.readers.rows import ReaderTable, ReaderTables
from elasticps.server.core.journal_marks import JournalMarks
from elasticps.server.roles import range_parts
from elasticps.server.roles.readers import ReaderFeeds
from elasticps.server.roles.sent_state import SentState
from elasticps.store import cells
from elasticps.store.journal import Journal
from elasticps.store.table import Table
from elasticps.wire.frames import Header, Kind
from elasticps.wire.range_parts import ALL_TABLES, RangePart, ReadCursor
from elasticps.wire.windows import Subscribed, WindowFrame


def note_no_deletions(patch: pytest.MonkeyPatch) -> None:
    def forget(self: Table, keys: Any) -> None:
        journal, self.journal = self.journal, None
        forgets(self, keys)
        self.journal = journal

    forgets = Table.forget
    patch.setattr(Table, "forget", forget)


def show_a_push_that_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """A tail whose joiner is level sends what the joiner may lack."""

    def queue(self: ReaderFeeds, reader: Any, buffers: Any, ranges: Any) -> None:
        queues(self, reader, buffers, ranges[:0])

    queues = ReaderFeeds._queue
    patch.setattr(ReaderFeeds, "_queue", queue)


def go_on_from_a_mark_that_is_too_new(patch: pytest.MonkeyPatch) -> None:
    def find(self: JournalMarks, ranges: Any, positions: Any, seqs: Any, end: int, oldest: int) -> Any:
        return np.where(positions >= 0, end, -1)

    patch.setattr(JournalMarks, "find", find)


def ignore_the_answer_to_an_older_subscription(patch: pytest.MonkeyPatch) -> None:
    def answered(self: Following, feed: Feed, answer: Subscribed) -> bool:
        return answer.number not in (0, feed.subscribed) or answers(self, feed, answer)

    answers = Following.answered
    patch.setattr(Following, "answered", answered)


def take_any_states_for_a_moment(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MomentSearch, "_late", lambda self: set())


def take_sparse_steps_for_missing_ones_of_home_alone(patch: pytest.MonkeyPatch) -> None:
    """Which ranges a step ticks is not looked at: it counts as there when home has it."""
    patch.setattr(MomentSearch, "_expected", lambda self, worker, newest: np.zeros(len(self._owner), np.int64))


def go_on_where_a_reader_was_too_slow(patch: pytest.MonkeyPatch) -> None:
    def lose(self: ReaderFeeds, reader: Any) -> None:
        reader.cursor = self._journal.end

    patch.setattr(ReaderFeeds, "_lose", lose)


def show_other_rows_while_it_holds(patch: pytest.MonkeyPatch) -> None:
    def queue(self: Holding, feed: Feed, header: Any, body: Any) -> bool:
        return not self.held and queues(self, feed, header, body)

    queues = Holding.queue
    patch.setattr(Holding, "queue", queue)


def forget_the_rows_of_a_part_that_is_read(patch: pytest.MonkeyPatch) -> None:
    def rows(self: Following, feed: Feed, part: RangePart) -> Any:
        _, asks = reads(self, feed, part)
        return bool(part.range % 2), asks

    reads = Following.rows
    patch.setattr(Following, "rows", rows)


def digest_keys_without_their_rows(patch: pytest.MonkeyPatch) -> None:
    """A reader that was away keeps rows that have changed meanwhile."""
    patch.setattr(cells, "digests", lambda rows: np.zeros(len(rows), np.uint64))


def forget_the_rows_that_are_the_same(patch: pytest.MonkeyPatch) -> None:
    """What a reader has in cells that do not differ goes, as if an answer had all rows."""
    replaces = ReaderTable.replace
    patch.setattr(ReaderTable, "replace", lambda self, r, part: replaces(self, r, part._replace(differing=None)))


def leave_rows_of_tables_that_an_answer_leaves_out(patch: pytest.MonkeyPatch) -> None:
    """Tables that became empty while a reader was away keep their rows."""
    replaces = ReaderTables.replace
    patch.setattr(ReaderTables, "replace", lambda self, part, listed: replaces(self, part, ()))


def empty_tables_that_a_server_has_not_listed(patch: pytest.MonkeyPatch) -> None:
    """A server that does not know yet whose a table is says nothing of it: its rows go."""
    replaces = ReaderTables.replace
    patch.setattr(ReaderTables, "replace", lambda self, part, listed: replaces(self, part, sorted(self.by_id)))


def go_on_behind_a_table_that_was_read_in_part(patch: pytest.MonkeyPatch) -> None:
    def rows(self: Following, feed: Feed, part: RangePart) -> Any:
        return reads(self, feed, part._replace(end=ReadCursor(min(part.end.table + 1, ALL_TABLES.table))))

    reads = Following.rows
    patch.setattr(Following, "rows", rows)


def send_a_reader_all_shares(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(range_parts, "keys_within", lambda keys, share: keys)


def go_on_where_views_were_skipped(patch: pytest.MonkeyPatch) -> None:
    """A server that was a range's tail before, was not, and is again has left the range, and is not asked again."""

    def adopt(self: Following, view: Any) -> Any:
        self.epoch = max(self.epoch, view.epoch - 1)
        return adopts(self, view)

    adopts = Following.adopt
    patch.setattr(Following, "adopt", adopt)


def send_progress_of_those_who_were_there_first(patch: pytest.MonkeyPatch) -> None:
    """Where the clocks have workers is not looked up again when workers, or the clocks' rows, are others."""

    def find(self: SentState, ranges: Any) -> Any:
        if len(self.workers) and self.progress.shape[1] == len(ranges):
            return np.empty(0, np.int64)
        return finds(self, ranges)

    finds = SentState._find_workers
    patch.setattr(SentState, "_find_workers", find)


def lose_deletions_on_reconnect(patch: pytest.MonkeyPatch) -> None:
    """What went while a reader was away, or before it followed this server, is not sent."""

    def make(self: ReaderFeeds, reader: Any, now: float) -> None:
        away = reader.cursor < reader.__dict__.setdefault("_first_end", self._journal.end)
        patch.setattr(Journal, "read", read if away else reads)
        makes(self, reader, now)

    def read(self: Journal, start: int, end: int, tables: Any, included: Any) -> Any:
        count, written = reads(self, start, end, tables, included)
        header = Header(Kind.WINDOW, items=count)
        window = WindowFrame.of(header, np.frombuffer(written, np.uint8), len(included))
        blocks = [block._replace(gone=block.gone[:0]) for block in window.blocks]
        return count, window._replace(blocks=blocks).frame()[1]

    makes, reads = ReaderFeeds._make, Journal.read
    patch.setattr(ReaderFeeds, "_make", make)


def take_windows_of_servers_that_are_no_tails(patch: pytest.MonkeyPatch) -> None:
    """A window counts although its server has not answered for the range, or is its tail no more."""
    patch.setattr(Following, "counts", lambda self, feed: None)

    def leave(self: Following, feed: Feed, ranges: Any) -> None:
        if len(ranges):
            feed.confirmed = False

    patch.setattr(Following, "_leave", leave)


def keep_marks_of_before_a_filling(patch: pytest.MonkeyPatch) -> None:
    """A server that lost a range and got it back counts marks of before: it has not noted what changed meanwhile."""
    patch.setattr(JournalMarks, "forget", lambda self, ranges: None)


def go_on_across_a_range_that_began_again(patch: pytest.MonkeyPatch) -> None:
    """The origin of a range, the epoch of its recovery, is not compared."""

    def adopt(self: Following, view: Any) -> Any:
        begun = view.recovery_epoch
        self._origins = begun.copy()
        return adopts(self, view)

    adopts = Following.adopt
    patch.setattr(Following, "adopt", adopt)


def apply_a_window_after_a_newer_one(patch: pytest.MonkeyPatch) -> None:
    """Every third window is handled behind the one that follows it."""

    def handle(self: ReaderConnections, feed: Feed, header: Any, body: Any) -> None:
        waiting = self.__dict__.setdefault("_late", {})
        if header.kind == Kind.WINDOW and header.clock % 3 == 1 and feed not in waiting:
            waiting[feed] = (header, body.copy())
            return
        handles(self, feed, header, body)
        if header.kind == Kind.WINDOW and feed in waiting:
            handles(self, feed, *waiting.pop(feed))

    def window(self: Following, feed: Feed, frame: Any) -> None:
        feed.window = frame.number - 1
        windows(self, feed, frame)

    handles, windows = ReaderConnections.handle, Following.window
    patch.setattr(ReaderConnections, "handle", handle)
    patch.setattr(Following, "window", window)
