"""Chooses the rows of a checkpoint's table by their usage, and reads it, for exports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint.contents import RangeRows
from elasticps.errors import ConfigError, SpecError
from elasticps.model.optimizers import integer, number
from elasticps.model.policies import SCORES, half_life_of, seconds
from elasticps.model.spec import TableSpec
from elasticps.store.eviction import Measure, Predicate, Reason, threshold
from elasticps.store.swept import RowUsage

_MOST_COUNT = 1 << 40
_AT_ONCE = 1 << 20  # rows that are compared at a time for the most used ones
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class UsageFilter:
    """Which rows are exported: those pushed to at least `min_count` times, those used within so many seconds, or a text
    like "30d", before the checkpoint, and of these the `top` with the largest counts; None: no such bound."""

    min_count: float | None = None
    used_within: float | str | timedelta | None = None
    top: int | None = None

    def checked(self) -> UsageFilter:
        """The same with its numbers checked, and the time in seconds. Raises ConfigError."""
        try:
            return UsageFilter(
                None if self.min_count is None else number(self.min_count, "min_count", 0, _MOST_COUNT),
                None if self.used_within is None else seconds(self.used_within, "used_within"),
                None if self.top is None else integer(self.top, "top", 1, _MOST_COUNT),
            )
        except SpecError as error:
            raise ConfigError(str(error)) from None

    def __bool__(self) -> bool:
        return (self.min_count, self.used_within, self.top) != (None, None, None)


def check_usage(name: str, spec: TableSpec) -> None:
    """ConfigError for a table that keeps no usage of its rows."""
    if not spec.usage:
        raise ConfigError(
            f"table {name!r} keeps no usage of its rows, as it has no admission or eviction policy: name tables that "
            "do (--tables), or export it without bounds and columns of usage"
        )


class UsedRows:
    """The usage of rows of one table as it was at a cut, at cluster time `now` in seconds: counts and scores as they
    have fallen until then."""

    def __init__(self, spec: TableSpec, table_id: int, now: int) -> None:
        half_life = half_life_of(spec.eviction)
        self._measures = RowUsage(spec, table_id)
        self._scores = spec.usage == SCORES
        self._now, self._decay = now, 1.0 / half_life if half_life else 0.0
        self._bound: Predicate | None = None  # of the rows that are not among the most used

    def columns(self, rows: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
        """Columns of whole rows, uint8 [n, stride]: last_use int64 [n], seconds since 1970; count, and score where the
        table keeps it, float32 [n]."""
        found: dict[str, NDArray[Any]] = {"last_use": self._measures.measure(rows, Measure.LAST_USE)}
        found["count"] = _floats(self._fallen(rows, Measure.COUNT))
        if self._scores:
            found["score"] = _floats(self._fallen(rows, Measure.SCORE))
        return found

    def choose(self, keys: NDArray[np.int64], rows: NDArray[np.uint8], by: UsageFilter) -> NDArray[np.bool_]:
        """Which rows, uint8 [n, stride], of keys, int64 [n], are exported: bool [n]. With `by.top`, `find_top` has gone
        before."""
        chosen = np.ones(len(keys), np.bool_)
        if by.used_within is not None:
            chosen &= self._measures.measure(rows, Measure.LAST_USE) >= self._now - float(by.used_within)  # type: ignore[arg-type]
        if by.min_count is not None or self._bound is not None:
            counts = self._fallen(rows, Measure.COUNT)
            if by.min_count is not None:
                chosen &= _floats(counts) >= by.min_count
            if self._bound is not None:
                chosen &= ~self._bound.chosen(keys, counts)
        return chosen

    def find_top(self, parts: Iterable[RangeRows], by: UsageFilter) -> None:
        """Finds the bound that leaves `by.top` of all rows of the table that `by` chooses otherwise. Of rows with equal
        counts a hash of the key decides. Memory for twice as many keys is enough."""
        assert by.top is not None
        keys, ranks, bounds = _NOTHING, _NOTHING, list[Predicate]()
        for part in parts:
            chosen = self.choose(part.keys, part.rows, by)
            keys = np.concatenate([keys, part.keys[chosen]])
            ranks = np.concatenate([ranks, self._fallen(part.rows[chosen], Measure.COUNT)])
            if len(keys) > by.top + max(by.top, _AT_ONCE):
                keys, ranks, bound = _most(keys, ranks, by.top)
                bounds.append(bound)
        if len(keys) > by.top:
            bounds.append(_most(keys, ranks, by.top)[2])
        self._bound = max(bounds, key=lambda bound: (bound.below, bound.tie), default=None)

    def _fallen(self, rows: NDArray[np.uint8], what: Measure) -> NDArray[np.int64]:
        return self._measures.measure(rows, what, self._now, self._decay)


def _most(
    keys: NDArray[np.int64], ranks: NDArray[np.int64], top: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], Predicate]:
    """The `top` keys with the largest ranks, fewer than all of them, their ranks, and what chooses the others."""
    others = Predicate(Measure.COUNT, Reason.CAPACITY, *threshold(keys, ranks, len(keys) - top))
    left = ~others.chosen(keys, ranks)
    return keys[left], ranks[left], others


def _floats(ranks: NDArray[np.int64]) -> NDArray[np.float32]:
    return ranks.astype(np.uint32).view(np.float32)
