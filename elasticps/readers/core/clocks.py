"""How far each worker's steps are in each range, as servers said last. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.progress import take_runs
from replication.progress import PART_BITS
from replication.step_records import StepRecord

MOST_WORKERS = 1 << 16
FIRST_ROWS = 4  # of progress; they double as workers come


class RangeClocks:
    """progress: by worker, int64 [P], as servers count it: clock, and parts of the step after it. records: by worker
    and clock, the ranges that a step ticks which does not tick all; committed: by worker, the step up to which the
    newest of these says that all are committed."""

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._matrix = np.zeros((FIRST_ROWS, ranges), np.int64)  # of progress
        self._workers = self._rows = np.empty(0, np.int64)  # ascending, and where in the matrix each is
        self._all = np.ones(ranges, np.bool_)
        self.progress: dict[int, NDArray[np.int64]] = {}  # rows of the matrix
        self.records: dict[int, dict[int, NDArray[np.int64]]] = {}
        self.committed: dict[int, int] = {}

    def reset(self, ranges: NDArray[np.int64]) -> None:
        """Forgets what is known of these ranges: servers are about to say it."""
        for worker in list(self.progress):
            row = self.progress[worker]
            row[ranges] = 0
            if not row.any():
                self._forget(worker)

    def note(self, runs: NDArray[np.int64], counts: NDArray[np.bool_] | None = None) -> None:
        """Takes what a server says, int64 [k, 4]: worker, first range, last range, progress. counts: of which ranges
        that counts, bool [P], None for all."""
        counts, done = self._all if counts is None else counts, 0
        while (done := int(take_runs(runs, done, self._workers, self._rows, counts, self._matrix))) < len(runs):
            done += not self._add(runs[done:, 0])
        if np.count_nonzero(runs[:, 3]) < len(runs):
            for worker in np.unique(runs[runs[:, 3] == 0, 0]).tolist():  # it is in the roster no more
                if worker in self.progress and not self.progress[worker].any():
                    self._forget(worker)

    def _add(self, workers: NDArray[np.int64]) -> bool:
        """Makes rows for those of these workers that have none; False if there is none, or no room."""
        new = np.setdiff1d(workers, self._workers)[: MOST_WORKERS - len(self._workers)]
        known = np.concatenate([self._workers, new])
        while len(self._matrix) < len(known):
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
        free = np.setdiff1d(np.arange(len(self._matrix)), self._rows)[: len(new)]
        self._matrix[free] = 0
        rows, order = np.concatenate([self._rows, free]), np.argsort(known)
        self._workers, self._rows = known[order], rows[order]
        self.progress = dict(zip(known.tolist(), (self._matrix[row] for row in rows.tolist()), strict=True))
        return len(new) > 0

    def _forget(self, worker: int) -> None:
        others = self._workers != worker
        self._workers, self._rows = self._workers[others], self._rows[others]
        for each in (self.progress, self.records, self.committed):
            each.pop(worker, None)

    def note_records(self, records: Sequence[tuple[int, StepRecord]]) -> None:
        """Takes records of steps; drops those that a newer one says are committed."""
        for worker, record in records:
            mine = self.records.setdefault(worker, {})
            mine[record.clock] = record.ranges
            known = self.committed[worker] = max(self.committed.get(worker, 0), record.committed)
            for clock in [clock for clock in mine if clock <= known]:
                del mine[clock]

    def steps(self) -> dict[int, NDArray[np.int64]]:
        """By worker, the step up to which all of its pushes are in each range, int64 [P]."""
        return {worker: row >> PART_BITS for worker, row in self.progress.items()}
