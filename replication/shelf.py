"""Clocks of workers that have left, in a sixtieth of the room.

They have to stay: such a worker may come back under its id, its successor asks how far it came, and so does whoever
gets a shard that it had. But nothing is under way any more, so its progress is one number in all ranges that it has
pushed to, but for those in which its last step is missing: then it is not put here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges

Numbers = NDArray[np.int64]


class Shelf:
    """workers, values: int64 [n]; where: one bit per range, uint8 [n, ceil(P / 8)]: value or 0."""

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self.workers: Numbers = np.empty(0, np.int64)
        self.values: Numbers = np.empty(0, np.int64)
        self.where: NDArray[np.uint8] = np.empty((0, -(-ranges // 8)), np.uint8)

    def put(self, workers: Sequence[int], rows: Numbers) -> NDArray[np.bool_]:
        """Takes rows of progress [n, P] in which there is one number above 0, and 0; returns which those are."""
        values = rows.max(axis=1)
        fits: NDArray[np.bool_] = (values > 0) & ((rows == 0) | (rows == values[:, None])).all(axis=1)
        self.workers = np.concatenate([self.workers, np.array(workers, np.int64)[fits]])
        self.values = np.concatenate([self.values, values[fits]])
        self.where = np.concatenate([self.where, np.packbits(rows[fits] > 0, axis=1, bitorder="little")])
        return fits

    def look(self, worker: int) -> Numbers | None:
        """A worker's progress, int64 [P]; None if it is not here."""
        at = np.flatnonzero(self.workers == worker)
        if not len(at):
            return None
        there = np.unpackbits(self.where[at[0]], count=self._ranges, bitorder="little")
        row: Numbers = there * self.values[at[0]]
        return row

    def take(self, worker: int) -> Numbers | None:
        """The same; it is not here any more."""
        if (row := self.look(worker)) is not None:
            self._keep(self.workers != worker)
        return row

    def column(self, r: int) -> tuple[Numbers, Numbers]:
        """(workers, progress) of those that have pushed to a range."""
        there = self.where[:, r >> 3] & np.uint8(1 << (r & 7)) != 0
        return self.workers[there], self.values[there]

    def set_column(self, r: int, workers: Numbers, progress: Numbers) -> NDArray[np.bool_]:
        """The progress of workers in a range, in the place of what was known; returns where it fits."""
        self.clear(np.array([r]))
        order = np.argsort(self.workers)
        at = np.searchsorted(self.workers, workers, sorter=order)
        found = np.append(order, -1)[at]
        known = np.append(self.workers, -1)[found] == workers
        fits: NDArray[np.bool_] = known & (np.append(self.values, -1)[found] == progress)
        self.where[found[fits], r >> 3] |= np.uint8(1 << (r & 7))
        return fits

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        none = np.zeros(self._ranges, np.bool_)
        none[ranges] = True
        self.where &= ~np.packbits(none, bitorder="little")

    def drop_empty(self) -> None:
        """Forgets those of whom nothing is left."""
        self._keep(np.bitwise_or.reduce(self.where, axis=1) > 0)

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self.workers, self.values, self.where = self.workers[which], self.values[which], self.where[which]
