"""The clock up to which each worker has said that it knows its steps to be committed, where compiled code notes it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.server.fast import layout as at
from elasticps.server.fast.shared import Shared

Workers = NDArray[np.int64]


class Told:
    """By the rows of clocks. `workers` is whose these are, int64 [rows]: 0 or less is nobody."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._told = shared.make(at.H_TOLD, 16)
        self._owners = np.zeros(0, np.int64)  # of the rows of clocks, when they were looked at last
        self._left: dict[int, int] = {}  # what workers without a row had been told

    def follow(self, workers: Workers) -> None:
        """Rows may belong to others now: each worker's clock goes with it."""
        before, told = self._owners, self._told
        known = min(len(before), len(workers))
        other = np.ones(max(len(before), len(workers)), np.bool_)  # rows that belong to somebody else now
        other[:known] = before[:known] != workers[:known]
        for i in np.flatnonzero(other[: len(before)] & (told[: len(before)] > 0)).tolist():
            self._left[int(before[i])] = int(told[i])
        if len(told) != len(workers):
            self._told = self._shared.share(at.H_TOLD, np.zeros(len(workers), np.int64))
            self._told[:known] = told[:known]
        fresh = np.flatnonzero(other[: len(workers)])
        self._told[fresh] = 0
        for i in fresh[workers[fresh] > 0].tolist():
            self._told[i] = self._left.pop(int(workers[i]), 0)
        self._owners = workers.copy()

    def of_all(self, workers: Workers) -> dict[int, int]:
        """By worker, those with a row and those without."""
        here = {int(workers[i]): int(self._told[i]) for i in np.flatnonzero(self._told[: len(workers)])}
        return self._left | here

    def note(self, workers: Workers, worker: int, clock: int) -> None:
        """Python heard it."""
        self._told[: len(workers)][workers == worker] = clock
