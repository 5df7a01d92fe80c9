"""What a reader has been sent: of that, a window says what has changed since."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.progress import RUN, state_words, write_state
from elasticps.server.roles.context import Context
from elasticps.store.codec import Codec
from elasticps.store.journal import followed_tables
from elasticps.wire.windows import Progresses, WindowState, write_records
from replication.chain import Ranges
from replication.step_records import StepRecord, home_range

_NOTHING = np.empty(0, np.int64)
_NO_RUNS = np.empty((0, RUN), np.int64)


class SentState:
    """What a reader of an application has been sent on its connection."""

    def __init__(self, context: Context, app: str) -> None:
        self._replica, self._serving = context.executor.replica, context.serving
        self._app = app  # whose workers it hears of
        self.seqs = np.full(self._serving.ranges, -1, np.int64)  # of ranges
        self.workers = _NOTHING  # whose progress it has,
        self.progress = np.empty((0, 0), np.int64)  # in each range that it follows: [workers, ranges]
        self._rows = _NOTHING  # where the replica's clocks have these workers
        self._roster: Mapping[int, object] | None = None  # in which they were found,
        self._generation = -1  # and of the clocks then
        self.records: dict[int, int] = {}  # by worker, the newest step whose record it has
        self.tables: dict[int, Codec] = {}  # that it knows of,
        self.followed = followed_tables([])  # and the same for the journal
        self.unowned: set[int] = set()  # tables whose application was not known when they were listed
        self.listed = -1, -1  # how many tables there were then
        self.dropped = 0  # how many of those that were dropped it knows, in their order

    def begin_again(self) -> None:
        """It is told again how far ranges and workers are."""
        self.seqs[:] = -1
        self.forget_progress()
        self.records = {}

    def forget_progress(self) -> None:
        """It is told again how far workers are."""
        self.workers, self.progress, self._roster = _NOTHING, np.empty((0, 0), np.int64), None

    def all_of(self, ranges: Ranges) -> bool:
        """Whether it has been told how far these ranges are."""
        return np.array_equal(self._replica.seq[ranges], self.seqs[ranges])

    def write_changes(self, ranges: Ranges, follows: NDArray[np.int64]) -> WindowState:
        """How far ranges and workers have come, as far as that has changed. ranges: that the reader follows here,
        ascending; follows: 1 for these."""
        ended = self._find_workers(ranges)
        clocks, records = self._replica.clocks, self._new_records(follows)
        out = np.empty(state_words(len(ranges), len(self.workers), len(ended)), np.int64)
        moved, words = write_state(
            self._replica.seq, self.seqs, ranges, clocks.matrix, self._rows, clocks.columns, self.workers,
            self.progress, ended, len(records), out,
        )  # fmt: skip
        return WindowState(moved, out[:words].tobytes() + write_records(records))

    def _find_workers(self, ranges: Ranges) -> NDArray[np.int64]:
        """Finds the workers of the roster in the clocks; runs of progress of those that are there no more, which do
        not count from now on."""
        clocks, roster = self._replica.clocks, self._serving.workers
        if roster is self._roster and clocks.generation == self._generation:
            return _NO_RUNS
        self._roster, self._generation = roster, clocks.generation
        present = enumerate(clocks.workers[: clocks.used].tolist())
        ours = [i for i, worker in present if worker in roster and roster[worker].app == self._app]
        self._rows = np.array(ours, np.int64)
        before, self.workers = self.workers, clocks.workers[self._rows]
        if np.array_equal(before, self.workers) and self.progress.shape[1] == len(ranges):
            return _NO_RUNS
        had, self.progress = self.progress, np.zeros((len(self.workers), len(ranges)), np.int64)
        place = {worker: i for i, worker in enumerate(self.workers.tolist())}
        gone = list[int]()
        for i, worker in enumerate(before.tolist()):
            if worker in place:
                self.progress[place[worker]] = had[i]
            else:
                gone.append(i)
        zeros = np.zeros((len(gone), len(ranges)), np.int64)
        return Progresses.between(before[gone], ranges, had[gone], zeros).runs if gone else _NO_RUNS

    def _new_records(self, follows: NDArray[np.int64]) -> list[tuple[int, StepRecord]]:
        """Records of workers' sparse steps that the reader does not have, of homes that it follows here."""
        found = list[tuple[int, StepRecord]]()
        for worker in self.workers.tolist():
            if follows[home_range(worker, len(follows))]:
                have = self.records.get(worker, 0)
                fresh = [(worker, record) for record in self._replica.records.of(worker) if record.clock > have]
                if fresh:
                    self.records[worker] = fresh[-1][1].clock
                    found += fresh
        return found
