"""What a server sends a reader that comes back: all that it lacks, deletions among that, and no range again."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
from numpy.typing import NDArray

from elasticps.model.spec import SGD, TableSpec
from elasticps.wire.frames import HEADER_BYTES, Kind, json_frame, unpack_header
from elasticps.wire.windows import Subscribe, Subscribed, WindowFrame
from tests.fuzz.core import APPS, CLUSTER, HONEST, OWN, TABLE, Core, Wire, watched
from tests.fuzz.corpus import RANGES

MINE = np.arange(OWN)


class FakeReader:
    """A reader that notes what it is sent. positions: int64 [OWN], of its ranges."""

    def __init__(self, core: Core, positions: NDArray[np.int64]) -> None:
        self.positions = positions.copy()
        self.gone = np.empty(0, np.int64)
        self.keys = np.empty(0, np.int64)
        self.answers: list[Subscribed] = []
        self.dropped: list[int] = []
        self.wire = Wire(core, reads=True, keeps=True)
        self._core = core
        view = core.server.serving.view
        assert view is not None
        self.wire.feed(json_frame(Kind.HELLO, {"cluster": CLUSTER, "reader": "r0", "app": APPS[HONEST]}), 1 << 20)
        wants = Subscribe(1, view.epoch, MINE, positions, view.recovery_epoch[:OWN], None, "", 1)
        self.wire.feed(b"".join(bytes(memoryview(one).cast("B")) for one in wants.frame()), 1 << 20)
        self.listen()

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
        data.clear()

    def _window(self, frame: WindowFrame) -> None:
        self.positions[frame.ranges] = frame.positions
        self.dropped += frame.dropped
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
