"""What a server sends a reader that comes back: all that it lacks, deletions among that, and no range again."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticps.model.spec import SGD, TableSpec
from elasticps.readers.rows import ReaderTables
from elasticps.server.roles import readers
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from elasticps.wire.range_parts import RangePart, ReadCursor, ReadRange
from elasticps.wire.windows import MOST_STRETCH, Subscribe, Subscribed, WindowFrame
from tests.fuzz.core import APPS, CLUSTER, HONEST, OWN, TABLE, Core, Wire, watched
from tests.fuzz.corpus import RANGES

MINE = np.arange(OWN)


class FakeReader:
    """A reader that notes what it is sent. positions: int64 [OWN], of its ranges."""

    def __init__(self, core: Core, positions: NDArray[np.int64], every_ms: int = 1) -> None:
        self.positions = positions.copy()
        self.gone = np.empty(0, np.int64)
        self.keys = np.empty(0, np.int64)
        self.answers: list[Subscribed] = []
        self.dropped: list[int] = []
        self.tables: list[int] = []
        self.parts: list[RangePart] = []
        self.wire = Wire(core, reads=True, keeps=True)
        self._core = core
        view = core.server.serving.view
        assert view is not None
        self.wire.feed(json_frame(Kind.HELLO, {"cluster": CLUSTER, "reader": "r0", "app": APPS[HONEST]}), 1 << 20)
        wants = Subscribe(1, view.epoch, MINE, positions, view.recovery_epoch[:OWN], None, "", every_ms)
        self.wire.feed(b"".join(bytes(memoryview(one).cast("B")) for one in wants.frame()), 1 << 20)
        self.listen()

    def ask(self, request: ReadRange) -> None:
        """Asks for a part of a range."""
        self.wire.feed(b"".join(bytes(memoryview(one).cast("B")) for one in request.frame()), 1 << 20)

    def listen(self) -> None:
        """Takes what has come."""
        self._core.pass_time(0.5)
        data, at = self.wire.written, 0
        while at < len(data):
            header = unpack_header(data, at)
            body = np.frombuffer(bytes(data[at + HEADER_BYTES : at + HEADER_BYTES + header.body]), np.uint8)
            at += HEADER_BYTES + header.body
            if header.kind == Kind.SUBSCRIBED:
                self.answers.append(Subscribed.of(header, body, RANGES))
            elif header.kind == Kind.WINDOW:
                self._window(WindowFrame.of(header, body, RANGES))
            elif header.kind == Kind.RANGE_ROWS:
                self.parts.append(RangePart.of(header, body, RANGES))
        data.clear()

    def _window(self, frame: WindowFrame) -> None:
        self.positions[frame.ranges] = frame.positions
        self.dropped += frame.dropped
        self.tables += [number for number, _ in frame.tables]
        for block in frame.blocks:
            self.keys = np.union1d(np.setdiff1d(self.keys, block.gone), block.keys)
            self.gone = np.union1d(self.gone, block.gone)


def alone() -> Iterator[Core]:
    """A server that has its own ranges only."""
    with watched():
        made = Core(Random(1), {}, compiled=True)
        made.server.adopt(made.next_view(alone=True))
        made.settle()
        yield made


def delete(core: Core, keys: NDArray[np.int64]) -> None:
    """Rows are deleted, and the honest worker, who knows that, goes on."""
    core.server.store.tables[TABLE].delete(keys)
    core.honest._model[np.isin(core.honest._keys, keys)] = 0
    core.honest.work()


def test_deletions_of_the_time_in_which_a_reader_was_away_are_sent() -> None:
    for core in alone():
        first = FakeReader(core, np.full(OWN, -1))
        assert first.answers[0].unknown.tolist() == MINE.tolist()
        for _ in range(30):
            core.honest.work()
            first.listen()
        first.wire.abort()
        core.settle()
        delete(core, gone := np.sort(first.keys)[:10])
        assert len(gone) == 10
        second = FakeReader(core, first.positions)
        assert second.answers[0].continued.tolist() == MINE.tolist()
        again = np.intersect1d(gone, second.keys)  # the worker has pushed to them since
        assert set(second.gone.tolist()) == set(gone.tolist()) - set(again.tolist())
        assert len(second.gone)


def test_a_table_that_came_and_went_between_two_windows_is_said_to_be_dropped() -> None:
    """Another server may have named it, and be gone."""
    for core in alone():
        reader = FakeReader(core, np.full(OWN, -1))
        store, number = core.server.store, max(core.server.store.tables) + 1
        store.create(TableSpec("brief", 4, SGD(lr=0.1)), number, APPS[HONEST])
        store.drop(number, MINE, np.zeros(OWN, np.int64))
        reader.listen()
        assert reader.dropped == [number]
        reader.listen()
        assert reader.dropped == [number]


def test_rows_that_went_before_a_server_knew_a_table_s_owner_are_gone() -> None:
    """The reader has the table from another server, this one has it from a copy that names no owner, and leaves it out
    until it knows that. What was deleted meanwhile is gone at the reader, too."""
    for core in alone():
        reader, store, had = FakeReader(core, np.full(OWN, -1)), core.server.store, ReaderTables(RANGES, None)
        spec, number = TableSpec("late", 4, SGD(lr=0.1)), max(store.tables) + 1
        table = store.create(spec, number)
        had.add(number, spec.to_json())
        keys = np.arange(200)
        keys = keys[table.ranges_of(keys) < OWN]
        for each in (table, had.by_id[number].stored):
            each.put(keys, np.ones((len(keys), 4), np.float32))
        reader.listen()
        assert number not in reader.tables
        table.delete(keys[:7])
        store.note_changed(number, keys[:7])
        reader.listen()
        store.belong({number: APPS[HONEST]})
        reader.listen()
        assert number in reader.tables
        assert (reader.answers[-1].number, reader.answers[-1].unknown.tolist()) == (0, MINE.tolist())
        for r in MINE.tolist():
            reader.ask(had.describe(ReadRange(1 + r, core.server.serving.epoch, r, 8192, ReadCursor(0))))
            reader.listen()
            assert reader.parts[-1].range == r
            assert list(had.replace(reader.parts[-1], reader.tables))
        assert had.by_id[number].rows == table.rows == len(keys) - 7
        assert had.by_id[number].pull(keys).any(axis=1).tolist() == [False] * 7 + [True] * (len(keys) - 7)


def windows_of(core: Core, monkeypatch: pytest.MonkeyPatch, cost_s: float, every_s: float, count: int) -> list[float]:
    """When windows of one of `count` readers are made while pushes come every 5 ms and each window takes `cost_s`."""
    spent, made, makes = [0.0], list[float](), readers.ReaderFeeds._make

    def make(self: readers.ReaderFeeds, reader: Any, now: float) -> None:
        number = reader.flow.number
        makes(self, reader, now)
        if reader.flow.number > number:
            spent[0] += cost_s
            if reader is next(iter(self._readers.values())):
                made.append(now)

    attached = [FakeReader(core, np.full(OWN, -1), round(1e3 * every_s)) for _ in range(count)]
    with monkeypatch.context() as patch:
        patch.setattr(readers.ReaderFeeds, "_make", make)
        patch.setattr(readers, "time", SimpleNamespace(thread_time=lambda: spent[0]))
        for _ in range(400):
            core.honest.work()
            core.pass_time(0.005)
            for reader in attached:
                reader.wire.written.clear()
    for reader in attached:
        reader.wire.abort()
    core.settle()
    return made


@pytest.mark.parametrize(
    ("cost_s", "count", "gap_s"),
    [
        (0.0, 1, 0.1),
        (0.0005, 1, 0.1),
        (0.0015, 1, 0.15),
        (0.001, 2, 0.2),
        (0.0025, 1, 0.25),
        (0.02, 1, 0.3),
        (0.02, 2, 0.3),
    ],
)
def test_a_busy_server_s_windows_come_later_and_never_later_than_three_times_every(
    monkeypatch: pytest.MonkeyPatch, cost_s: float, count: int, gap_s: float
) -> None:
    """All windows together take a hundredth of its time, unless they would come later than that for it."""
    every_s, step_s = 0.1, 0.005
    for core in alone():
        made = windows_of(core, monkeypatch, cost_s, every_s, count)
        gaps = np.diff(made)[1:]
        assert len(gaps) > 4
        assert gap_s <= MOST_STRETCH * every_s
        assert gaps.min() > gap_s - 1.5 * readers.TIMER_S
        assert gaps.max() < gap_s + step_s + readers.TIMER_S
