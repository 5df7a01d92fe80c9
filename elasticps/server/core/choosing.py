"""Chooses the rows of a slice that go, and remembers which ones a dry run has counted. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.sweeps import Slice, bounded
from elasticps.store import Table
from elasticps.store.eviction import Predicate
from elasticps.store.lifecycle import MeasuredRows


class DryRun:
    """What a dry run has counted so far: predicates of slices, by which rows would be gone.

    Rows themselves are not kept: there may be millions. gone: how many, by range, and whether of keys that wait.
    """

    def __init__(self) -> None:
        self.gone: Counter[tuple[int, bool]] = Counter()
        self._by_range: dict[tuple[int, bool], list[tuple[Slice, Predicate]]] = {}

    def gone_of(self, of_candidates: bool, ranges: int) -> NDArray[np.int64]:
        """How many rows, or keys that wait, would be gone of each range, int64 [ranges]."""
        found = np.zeros(ranges, np.int64)
        for (r, waiting), count in self.gone.items():
            found[r] += count if waiting == of_candidates else 0
        return found

    def left(self, table: Table, r: int, at: Slice, by: Predicate, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of the keys [n] of range r in a slice would still be there: bool [n]."""
        assert table.lifecycle is not None
        left = np.ones(len(keys), np.bool_)
        for before, earlier in self._by_range.get((r, by.of_candidates), ()):
            low, high = max(at.low, before.low), min(at.high, before.high)
            if low < high:
                found, _, ranks = table.lifecycle.measure(table, r, low, high, earlier)
                left &= ~np.isin(keys, found[earlier.chosen(found, ranks)])
        return left

    def note(self, r: int, at: Slice, by: Predicate, going: int) -> None:
        """So many more rows of range r in a slice would go."""
        if going:
            self.gone[r, by.of_candidates] += going
            self._by_range.setdefault((r, by.of_candidates), []).append((at, by))


def measure(table: Table, ranges: Sequence[int], at: Slice, by: Predicate) -> dict[int, MeasuredRows]:
    """What there is in a slice, by range."""
    assert table.lifecycle is not None
    return {r: table.lifecycle.measure(table, r, at.low, at.high, by) for r in ranges}


def choose(
    table: Table,
    found: Mapping[int, MeasuredRows],
    at: Slice,
    by: Predicate,
    share: float,
    dry_run: DryRun | None = None,
) -> tuple[Predicate, int]:
    """The predicate for what there is in a slice with its bound chosen, and how much of it goes. dry_run: rows that it
    has counted are not there, and it counts these."""
    measured = []
    for r, (keys, _, ranks) in found.items():
        if dry_run is not None:
            left = dry_run.left(table, r, at, by, keys)
            keys, ranks = keys[left], ranks[left]
        measured.append((keys, ranks))
    if not measured:
        return by, 0
    if share:
        keys, ranks = (np.concatenate([one[i] for one in measured]) for i in (0, 1))
        by = bounded(by, keys, ranks, share)
    going = [int(np.count_nonzero(by.chosen(*one))) for one in measured]
    if dry_run is not None:
        for r, count in zip(found, going, strict=True):
            dry_run.note(r, at, by, count)
    return by, sum(going)
