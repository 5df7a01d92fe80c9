"""How far each worker's steps are in each range, as servers said last. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replication.progress import PART_BITS

MOST_WORKERS = 1 << 16


class RangeClocks:
    """progress: by worker, int64 [P], as servers count it: clock, and parts of the step after it."""

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self.progress: dict[int, NDArray[np.int64]] = {}

    def reset(self, ranges: NDArray[np.int64]) -> None:
        """Forgets what is known of these ranges: servers are about to say it."""
        for worker in list(self.progress):
            row = self.progress[worker]
            row[ranges] = 0
            if not row.any():
                del self.progress[worker]

    def note(self, runs: NDArray[np.int64], counts: NDArray[np.bool_] | None = None) -> None:
        """Takes what a server says, int64 [k, 4]: worker, first range, last range, progress. counts: of which ranges
        that counts, bool [P], None for all."""
        for worker, first, last, progress in runs.tolist():
            row = self.progress.get(worker)
            if row is None:
                if len(self.progress) >= MOST_WORKERS:
                    continue
                row = self.progress[worker] = np.zeros(self._ranges, np.int64)
            if counts is None:
                row[first : last + 1] = progress
            else:
                row[first : last + 1][counts[first : last + 1]] = progress

    def steps(self) -> dict[int, NDArray[np.int64]]:
        """By worker, the step up to which all of its pushes are in each range, int64 [P]."""
        return {worker: row >> PART_BITS for worker, row in self.progress.items()}
