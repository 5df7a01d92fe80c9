"""Reduces one range of a table, a slice at a time, so that other work has its turn in between.

Replicas with the same rows get the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.store import Table
from elasticps.store.reductions import Reduction

SLICE_BYTES = 512 << 10  # of rows that are read at once, as float32: half a millisecond, and what the function takes
SLICE_ROWS = 8192


class Partial:
    """state: float64 [size], of the `rows` rows so far; None without any."""

    def __init__(self, table: Table, r: int, how: Reduction, constants: Sequence[float]) -> None:
        self.state: NDArray[np.float64] | None = None
        self.rows = 0
        self._table = table
        self._range = r
        self._how = how
        self._constants = np.array(constants, np.float64)

    def slices(self) -> Iterator[None]:
        """Goes on by a slice of the range's hashes at a time, each as it is at that moment: rows that change meanwhile
        count as they were or as they are. Where slices end follows from the rows, and within one they come by key."""
        table, place = self._table, 0
        most = max(1, min(SLICE_ROWS, SLICE_BYTES // (4 * table.spec.dim)))
        while True:
            keys, place = table.list_keys(self._range, place, most)
            if len(keys):
                keys.sort()
                weights = np.empty((len(keys), table.spec.dim), np.float32)
                table.gather(keys, weights)
                self._take(keys, weights)
                self.rows += len(keys)
            if not place:
                break
            yield None
        if self.state is not None:
            self.state[np.isnan(self.state)] = np.nan  # CPUs differ in its sign and payload

    def _take(self, keys: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        """A tensor's last block is filled up with zeros, which are no part of it: its floats come by themselves."""
        spec = self._table.spec
        left = 0 if spec.shape is None else spec.size % spec.dim
        if left and keys[-1] == spec.blocks - 1:
            self._add(keys[:-1], weights[:-1])
            keys, weights = keys[-1:], np.ascontiguousarray(weights[-1:, :left])
        self._add(keys, weights)

    def _add(self, keys: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        if not len(keys):
            return
        state = np.zeros(self._how.size)
        self._how.chunk(keys, weights, state, self._constants)
        if self.state is None:
            self.state = state
        else:
            self._how.merge(self.state, state)
