"""Finds the keys that come most often ("heavy hitters") among more keys than can be counted.

Misra and Gries, "Finding repeated elements" (1982), in batches: Agarwal et al., "Mergeable summaries" (PODS 2012).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class FrequentKey(NamedTuple):
    """A key, and how often it came: at least and at most."""

    key: int
    least: int
    most: int


class Sketch:
    """Counts at most `capacity` keys. lost: what each count may be too low by, at most total / (capacity + 1), so that
    no key that came more often than that is missing."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.total = 0
        self.lost = 0
        self._keys = np.empty(0, np.int64)
        self._counts = np.empty(0, np.int64)

    def add(self, keys: NDArray[np.int64]) -> None:
        """Counts keys, int64 [n]; repeated ones count each time."""
        self.total += len(keys)
        every = np.concatenate([self._keys, keys])
        weights = np.concatenate([self._counts, np.ones(len(keys), np.int64)])
        found, where = np.unique(every, return_inverse=True)
        counts = np.zeros(len(found), np.int64)
        np.add.at(counts, where, weights)
        if len(found) > self.capacity:
            cut = int(np.partition(counts, -self.capacity - 1)[-self.capacity - 1])
            self.lost += cut
            counts -= cut
            found, counts = found[counts > 0], counts[counts > 0]
        self._keys, self._counts = found, counts

    def top(self, most: int) -> list[FrequentKey]:
        """The keys that came most often, the first of them first."""
        order = np.lexsort((self._keys, -self._counts))[:most]
        pairs = zip(self._keys[order].tolist(), self._counts[order].tolist(), strict=True)
        return [FrequentKey(key, count, count + self.lost) for key, count in pairs]
