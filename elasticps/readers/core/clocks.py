"""How far each worker's steps are in each range, as servers said last. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from replication.progress import PART_BITS
from replication.step_records import StepRecord

MOST_WORKERS = 1 << 16


class RangeClocks:
    """progress: by worker, int64 [P], as servers count it: clock, and parts of the step after it. records: by worker
    and clock, the ranges that a step ticks which does not tick all; committed: by worker, the step up to which the
    newest of these says that all are committed."""

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self.progress: dict[int, NDArray[np.int64]] = {}
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
        if not len(runs):
            return
        wide = runs[:, 1] != runs[:, 2]
        single = runs[~wide] if wide.any() else runs  # mostly all are, where a server has every other range
        if counts is not None:
            single = single[counts[single[:, 1]]]
        ends = (np.flatnonzero(single[1:, 0] != single[:-1, 0]) + 1).tolist()  # of what is said of one worker
        for start, end in pairwise([0, *ends, len(single)]):
            mine = single[start:end]
            if len(mine) and (row := self._row(int(mine[0, 0]))) is not None:
                row[mine[:, 1]] = mine[:, 3]
        for worker, first, last, progress in runs[wide].tolist():
            row = self._row(worker)
            if row is not None and counts is None:
                row[first : last + 1] = progress
            elif row is not None and counts is not None:
                row[first : last + 1][counts[first : last + 1]] = progress
        if not runs[:, 3].all():
            for worker in np.unique(runs[runs[:, 3] == 0, 0]).tolist():  # it is in the roster no more
                if worker in self.progress and not self.progress[worker].any():
                    self._forget(worker)

    def _row(self, worker: int) -> NDArray[np.int64] | None:
        """A worker's progress by range; None if there are too many workers."""
        row = self.progress.get(worker)
        if row is None and len(self.progress) < MOST_WORKERS:
            row = self.progress[worker] = np.zeros(self._ranges, np.int64)
        return row

    def _forget(self, worker: int) -> None:
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
