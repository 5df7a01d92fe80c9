"""What windows say of ranges and workers adds up, at the reader, to what its server has."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from elasticps.readers.core.clocks import RangeClocks
from elasticps.server.roles.sent_state import SentState
from elasticps.wire.frames import HEADER_BYTES, unpack_header
from elasticps.wire.windows import WindowFrame, WindowState, window_frame
from replication.progress import Clocks
from replication.step_records import StepRecords

RANGES = 16
OURS, OTHERS = SimpleNamespace(app="ours"), SimpleNamespace(app="others")


def read(state: WindowState) -> WindowFrame:
    """A window with this state, as it is received."""
    frame = b"".join(bytes(part) for part in window_frame(1, 1, 1, state, 0, b"", [], []))
    found = unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8)
    return WindowFrame.of(*found, RANGES)


class Server:
    """Clocks and a roster that change at random, and what a reader has heard of them."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.clocks = Clocks(RANGES)
        self.seq = np.zeros(RANGES, np.int64)
        replica = SimpleNamespace(clocks=self.clocks, records=StepRecords(RANGES), seq=self.seq)
        self.serving: Any = SimpleNamespace(ranges=RANGES, workers={})
        context: Any = SimpleNamespace(executor=SimpleNamespace(replica=replica), serving=self.serving)
        self.sent = SentState(context, "ours")
        self.follows = np.ones(RANGES, np.int64)
        self.heard, self.heard_seq = RangeClocks(RANGES), np.full(RANGES, -1, np.int64)

    def change(self) -> None:
        """Workers step, come, leave and retire; the reader follows other ranges."""
        turn, worker = self.random.random(), self.random.randint(1, 12)
        roster = dict(self.serving.workers)
        if turn < 0.15:
            roster[worker] = OTHERS if worker % 4 == 0 else OURS
        elif turn < 0.2:
            roster.pop(worker, None)
        elif turn < 0.25:
            self.clocks.retire_rows(roster)
        elif turn < 0.3:
            self.subscribe()
        elif roster:
            worker = self.random.choice(sorted(roster))
            ticked = np.array(self.random.sample(range(RANGES), self.random.randint(1, RANGES)))
            self.clocks.set(worker, ticked, self.random.randint(1, 5))
            self.seq[ticked] += 1
        if roster != self.serving.workers:
            self.serving.workers = roster

    def subscribe(self) -> None:
        """The reader follows other ranges from now on."""
        self.follows = np.array([self.random.random() < 0.7 for _ in range(RANGES)], np.int64)
        self.sent.begin_again()
        self.heard, self.heard_seq = RangeClocks(RANGES), np.full(RANGES, -1, np.int64)

    def window(self) -> None:
        """The reader takes what has changed, and then has what is there."""
        ranges = np.flatnonzero(self.follows)
        frame = read(self.sent.write_changes(ranges, self.follows))
        assert len(frame.ranges) == np.count_nonzero(self.heard_seq[ranges] != self.seq[ranges])
        self.heard_seq[frame.ranges] = frame.positions
        assert (self.heard_seq[ranges] == self.seq[ranges]).all()
        self.heard.note(frame.progress.runs)
        there = {}
        for worker, info in self.serving.workers.items():
            if info is OURS and worker in self.clocks.workers:
                there[worker] = np.where(self.follows == 1, self.clocks.of(worker, np.arange(RANGES)), 0)
        found = {worker: row.tolist() for worker, row in self.heard.progress.items()}
        assert found == {worker: row.tolist() for worker, row in there.items() if row.any()}


@pytest.mark.parametrize("seed", range(30))
def test_what_windows_say_adds_up_to_what_the_server_has(seed: int) -> None:
    server = Server(seed)
    for _ in range(120):
        server.change()
        if server.random.random() < 0.5:
            server.window()


def test_a_window_says_nothing_of_what_is_the_same() -> None:
    server = Server(1)
    server.serving.workers = {1: OURS}
    server.clocks.set(1, np.arange(RANGES), 3)
    for expected in ([[1, 0, RANGES - 1, 3]], []):
        ranges = np.arange(RANGES)
        frame = read(server.sent.write_changes(ranges, server.follows))
        assert frame.progress.runs.tolist() == expected


def test_a_worker_that_joins_later_is_heard_of() -> None:
    server = Server(2)
    for worker in (1, 2, 3):
        server.serving.workers = {**server.serving.workers, worker: OURS}
        server.clocks.set(worker, np.arange(RANGES), worker)
        server.window()
