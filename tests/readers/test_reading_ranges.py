"""A reader reads ranges of many tables while they change: what it has is what there is, as plain dictionaries say."""

from __future__ import annotations

from collections import deque
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import elasticps as eps
from coordinator.core.view import ServerInfo, View
from elasticps.model.key_share import ALL_KEYS, KeyShare, share_of
from elasticps.readers.core.following import Feed, Following, OutOfOrder, Wishes
from elasticps.readers.rows import ReaderTables, codec_of
from elasticps.server.roles.range_parts import READ_BYTES, ReadTable, part_of
from elasticps.store import Store, Table
from elasticps.wire.frames import unpack_header
from elasticps.wire.range_parts import ALL_TABLES, MAX_CELLS, MAX_INTERVALS, RangePart, ReadCursor, ReadRange
from elasticps.wire.row_blocks import RowBlock
from elasticps.wire.windows import Subscribed, WindowFrame

RANGES = 4
EVERY, NONE = np.arange(RANGES), np.empty(0, np.int64)
SMALL = {
    "elasticps.server.roles.range_parts.MAX_INTERVALS": 2,
    "elasticps.readers.rows.MAX_INTERVALS": 3,
    "elasticps.server.roles.range_parts.READ_BYTES": 20_000,
    "elasticps.store.cells.ROWS_AT_ONCE": 200,
}
"""Limits of questions and answers, which are met all the time where they are so small."""
UNLISTED = 4  # a table that the reader has from elsewhere, and that the server has not listed


def there(buffers: Any) -> Any:
    """A frame as it arrives."""
    whole = b"".join(memoryview(one).cast("B") for one in buffers)
    return unpack_header(whole[:64]), np.frombuffer(whole[64:], np.uint8)


class Tail:
    """A server that is the tail of all ranges, and what it has as plain dictionaries, by table and key."""

    def __init__(self, rng: np.random.Generator, dtype: str | None, share: KeyShare) -> None:
        self.rng, self.dtype, self.share = rng, dtype, share
        self.store = Store(RANGES)
        self.tables: dict[int, Table] = {}
        self.model: dict[int, dict[int, bytes]] = {}
        self.changed: dict[int, set[int]] = {}  # keys since the window before
        self.listed: set[int] = set()
        self.dropped: list[int] = []  # that the reader is to hear of
        self.requests = deque[ReadRange]()
        self.seq = 0
        self.answers = 0

    def create(self, number: int, dim: int) -> None:
        self.tables[number] = self.store.create(eps.TableSpec(f"t{number}", dim, eps.SGD(lr=0.1)), number)
        self.model[number], self.changed[number] = {}, set()

    def put(self, number: int, keys: Any) -> None:
        keys, table = np.unique(np.asarray(keys, np.int64)), self.tables[number]
        rows = self.rng.random((len(keys), table.spec.dim), np.float32)
        table.put(keys, rows)
        codec = codec_of(table.spec, self.dtype)
        words = codec.encode(rows) if codec.code else rows
        self.model[number].update((key, row.tobytes()) for key, row in zip(keys.tolist(), words, strict=True))
        self.changed[number].update(keys.tolist())

    def delete(self, number: int, keys: Any) -> None:
        self.tables[number].delete(np.asarray(keys, np.int64))
        for key in np.asarray(keys).tolist():
            self.model[number].pop(key, None)
            self.changed[number].add(key)

    def drop(self, number: int) -> None:
        for known in (self.tables, self.model, self.changed):
            del known[number]
        self.dropped.append(number)

    def change(self) -> None:
        """Does something to a table."""
        rng, act = self.rng, self.rng.random()
        if not self.tables or act < 0.1:
            if len(self.tables) < 12:
                self.create(int(rng.integers(5, 1 << 20)), int(rng.choice([1, 3, 8])))
            return
        number = int(rng.choice(sorted(self.tables)))
        if act < 0.15:
            self.drop(number)
        elif act < 0.4 and self.model[number]:
            had = np.array(sorted(self.model[number]))
            self.delete(number, had[rng.random(len(had)) < rng.choice([0.05, 0.9])])
        else:
            self.put(number, rng.integers(-50, 50, int(rng.integers(1, 20))))

    def window(self, number: int) -> WindowFrame:
        """What has changed since the window before."""
        new = [(number, table.spec.to_json()) for number, table in self.tables.items() if number not in self.listed]
        dropped, self.dropped, self.listed = self.dropped, [], set(self.tables)
        blocks = []
        for each, keys in self.changed.items():
            words = codec_of(self.tables[each].spec, self.dtype).words
            ours = self.own(np.array(sorted(keys), np.int64)).tolist()
            found = [key for key in ours if key in self.model[each]]
            rows = np.frombuffer(b"".join(self.model[each][key] for key in found), np.float32).reshape(-1, words)
            gone = np.array([key for key in ours if key not in self.model[each]], np.int64)
            blocks.append(RowBlock(each, np.array(found, np.int64), rows, gone, NONE))
            keys.clear()
        self.seq += 1
        return WindowFrame(1, number, self.seq, True, blocks, EVERY, EVERY * 0 + self.seq, tables=new, dropped=dropped)

    def own(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of some keys that are in the reader's share."""
        found: NDArray[np.int64] = keys[share_of(keys, self.share.of) == self.share.number]
        return found

    def answer(self) -> RangePart:
        """Answers the oldest question, by way of the wire."""
        codecs = {number: codec_of(table.spec, self.dtype) for number, table in self.tables.items()}
        tables = [ReadTable(number, self.tables[number], self.share, max(codecs[number].code, 0), codecs[number].words)
                  for number in sorted(self.listed & self.tables.keys())]  # fmt: skip
        header, body = there(self.requests.popleft().frame())
        made = part_of(tables, ReadRange.of(header, body, RANGES), 1, RANGES)
        header, body = there(made.frame())
        assert len(body) < 4 * READ_BYTES
        assert len(made.intervals) <= MAX_INTERVALS
        self.answers += 1
        return RangePart.of(header, body, RANGES)


class Follower:
    """A reader of one server."""

    def __init__(self, tail: Tail) -> None:
        one, nobody, begun = np.zeros((RANGES, 1), np.int32), np.full(RANGES, -1, np.int32), np.ones(RANGES, np.int64)
        server = ServerInfo("s0", 1, "127.0.0.1:1")
        view = View("c", 1, RANGES, 1, (server,), one, nobody, begun, "", recovery_epoch=begun)
        self.tail = tail
        self.following = Following(view, Wishes(None, tail.dtype or "", 10, tail.share))
        self.tables = ReaderTables(RANGES, tail.dtype, tail.share)
        self.filled = 0

    def connect(self) -> Feed:
        """Follows the server, which knows nothing of before: all ranges are to be read."""
        feed = self.following.connected(next(iter(self.following.tails)))
        subscription = self.following.subscribe(feed)
        self.tail.listed, self.tail.requests = set(), deque()
        for keys in self.tail.changed.values():
            keys.clear()  # nothing was noted before
        self.following.answered(feed, Subscribed(subscription.number, 1, NONE, EVERY))
        return feed

    def window(self, feed: Feed) -> None:
        frame = self.tail.window(feed.window + 1)
        self.following.window(feed, frame)
        for number, spec in frame.tables:
            self.tables.add(number, spec)
        for number in frame.dropped:
            self.tables.drop(number)
        for block in frame.blocks:
            self.tables.by_id[block.table].apply(block, self.following.counts(feed))
        self.ask(self.following.applied(feed, frame))

    def read(self, feed: Feed) -> None:
        part = self.tail.answer()
        counts, asks = self.following.rows(feed, part)
        if counts:
            self.filled += sum(len(change.keys) for _, change in self.tables.replace(part, feed.tables))
        self.ask(asks)

    def ask(self, asks: list[ReadRange]) -> None:
        for one in asks:
            described = self.tables.describe(one)
            assert sum(len(each.digests) for each in described.cells) <= MAX_CELLS
            assert len(described.cells) <= MAX_INTERVALS
            self.tail.requests.append(described)

    def rows(self, number: int, r: int) -> dict[int, bytes]:
        """The rows of a table in a range that are here."""
        table = self.tables.by_id[number]
        keys = np.sort(table.list_range(r))
        return {key: row.tobytes() for key, row in zip(keys.tolist(), table.words_of(keys), strict=True)}

    def check(self, ranges: Any) -> None:
        """What it has of ranges is what there is."""
        for number, model in self.tail.model.items():
            keys = self.tail.own(np.array(sorted(model), np.int64))
            ranges_of = self.tail.tables[number].ranges_of(keys)
            for r in ranges:
                assert self.rows(number, r) == {key: model[key] for key in keys[ranges_of == r].tolist()}
        assert self.tables.by_id.keys() - {UNLISTED} == self.tail.model.keys()


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 1 << 30), st.sampled_from([None, "float16", "int8"]),
    st.sampled_from([ALL_KEYS, KeyShare(2, 3)]), st.sampled_from([0, 3, 30]), st.booleans(),
)  # fmt: skip
def test_ranges_are_read_while_tables_come_go_and_change(
    seed: int, dtype: str | None, share: KeyShare, tables: int, small: bool
) -> None:
    limits = SMALL if small else {}
    with ExitStack() as stack:
        for name, limit in limits.items():
            stack.enter_context(patch(name, limit))
        read_while_tables_change(np.random.default_rng(seed), dtype, share, tables)


def read_while_tables_change(rng: np.random.Generator, dtype: str | None, share: KeyShare, tables: int) -> None:
    tail = Tail(rng, dtype, share)
    for number in rng.choice(np.arange(5, 200), tables, replace=False).tolist():
        tail.create(number, int(rng.choice([1, 3, 40])))
        if rows := int(rng.choice([0, 0, 1, 5, 400, 5000])):
            tail.put(number, rng.integers(-(2**62), 2**62, rows))
    follower = Follower(tail)
    follower.tables.add(UNLISTED, eps.TableSpec("elsewhere", 2, eps.SGD(lr=0.1)).to_json())
    elsewhere = RowBlock(UNLISTED, np.arange(20), rng.random((20, follower.tables.by_id[UNLISTED].codec.words),
                         np.float32), NONE, NONE)  # fmt: skip
    follower.tables.by_id[UNLISTED].apply(elsewhere, None)
    for _ in range(3):  # from nothing; again, with most of it here; and with rows that changed meanwhile
        feed = follower.connect()
        follower.window(feed)
        until = 200
        while not follower.following.filled:
            until -= 1
            if until > 0 and rng.random() < 0.5:
                tail.change()
            if rng.random() < 0.3:
                follower.window(feed)
                follower.check(np.flatnonzero(follower.following.have >= 0).tolist())
            elif tail.requests:
                follower.read(feed)
        follower.window(feed)
        follower.check(range(RANGES))
        assert follower.tables.by_id[UNLISTED].rows == 20  # nobody has read it: nobody can say that it is empty
        for _ in range(int(rng.integers(0, 20))):
            tail.change()


def many_tables(tables: int, rows: int, dim: int = 8) -> tuple[Tail, Follower]:
    """A reader that has read all of so many tables."""
    tail = Tail(np.random.default_rng(1), None, ALL_KEYS)
    for i in range(tables):
        tail.create(10 + i, dim)
        if rows:
            tail.put(10 + i, np.arange(rows))
    follower = Follower(tail)
    fill(follower)
    return tail, follower


def fill(follower: Follower) -> None:
    feed = follower.connect()
    follower.window(feed)
    while follower.tail.requests:
        follower.read(feed)
    follower.check(range(RANGES))


@pytest.mark.parametrize("tables", [1, 30, 1000])
def test_empty_tables_cost_no_questions(tables: int) -> None:
    assert many_tables(tables, 0)[0].answers == RANGES


def test_questions_are_as_many_as_rows_need_whatever_the_tables() -> None:
    tail, follower = many_tables(50, 100)
    assert tail.answers == RANGES
    tail.answers, before = 0, follower.filled
    fill(follower)
    assert tail.answers == RANGES
    assert follower.filled == before  # it had all of them
    for number in tail.tables:
        tail.put(number, [5])
    fill(follower)
    assert before < follower.filled < before + 50 * 8  # a row of each table, and others of its cell
    tail, follower = many_tables(2 * MAX_INTERVALS + 1, 100, 1)
    assert tail.answers == 3 * RANGES


def test_of_tables_that_an_answer_leaves_out_nothing_is_there() -> None:
    tail, follower = many_tables(3, 100)
    for number in (10, 12):
        tail.delete(number, np.arange(100))
    fill(follower)
    assert sum(table.rows for table in follower.tables.by_id.values()) == 100


def test_tables_that_a_server_has_not_listed_stay_as_they_are() -> None:
    follower = many_tables(3, 100)[1]
    follower.tables.add(UNLISTED, eps.TableSpec("elsewhere", 2, eps.SGD(lr=0.1)).to_json())
    rows = np.ones((20, 2), np.float32)
    follower.tables.by_id[UNLISTED].apply(RowBlock(UNLISTED, np.arange(20), rows, NONE, NONE), None)
    fill(follower)
    assert follower.tables.by_id[UNLISTED].rows == 20


def test_an_answer_goes_on_however_few_rows_are_wanted() -> None:
    tail = many_tables(3, 100)[0]
    tail.listed = set(tail.tables)
    start, seen = ReadCursor(0), 0
    while start < ALL_TABLES:
        tail.requests.append(ReadRange(1, 1, 0, 0, start))
        part = tail.answer()
        assert start < part.end
        start, seen = part.end, seen + sum(len(one.block.keys) for one in part.intervals)
    assert seen == sum(table.count_range(0) for table in tail.tables.values())


def test_a_table_that_goes_while_it_is_read_leaves_nothing() -> None:
    """The next question goes on within it: it goes on with the tables behind."""
    tail = Tail(np.random.default_rng(1), None, ALL_KEYS)
    for number in (10, 11, 12):
        tail.create(number, 64)
        tail.put(number, np.arange(10_000))
    follower = Follower(tail)
    feed = follower.connect()
    follower.window(feed)
    follower.read(feed)
    assert any(one.start.hash > 0 and one.start.table == 10 for one in tail.requests)
    tail.drop(10)
    follower.read(feed)
    follower.read(feed)
    follower.window(feed)
    while tail.requests:
        follower.read(feed)
    follower.check(range(RANGES))


def test_an_answer_to_another_question_ends_the_connection() -> None:
    tail, follower = many_tables(3, 10)
    before: RangePart | None = None
    for change in ({"range": 3}, {"start": ReadCursor(11)}, {}):
        feed = follower.connect()
        follower.window(feed)
        part = tail.answer()
        assert (part.range, part.start, part.end) == (0, ReadCursor(0), ALL_TABLES)
        if before is not None:  # of the connection before: nobody has asked here
            assert follower.following.rows(feed, before) == (False, [])
        before = part
        if change:
            with pytest.raises(OutOfOrder, match="another part"):
                follower.following.rows(feed, part._replace(**change))
        else:
            assert follower.following.rows(feed, part)[0]
