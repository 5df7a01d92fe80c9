"""Bugs in what a worker keeps of rows: older than it may be, or with pushes that are not in it, or twice."""

from __future__ import annotations

from typing import Any

import pytest

from elasticps.client.cache_batches import CacheBatch
from elasticps.client.core.cache_index import FETCHED_BY, CacheIndex, Ints
from elasticps.client.row_cache import RowCache


def show_rows_of_any_age(patch: pytest.MonkeyPatch) -> None:
    def look(self: CacheIndex, where: Ints, number: int, clock: int, staleness: int, **options: Any) -> Any:
        return judge(self, where, number, clock, staleness and 1 << 30, **options)

    judge = CacheIndex.judge
    patch.setattr(CacheIndex, "judge", look)


def keep_rows_that_were_pushed_to_on_their_way(patch: pytest.MonkeyPatch) -> None:
    def follow(self: CacheIndex, keys: Ints, *, applies: bool) -> Ints:
        where = self.look(keys)
        known = where[where >= 0]
        fetched_by = self._fields[known, FETCHED_BY]
        found = pushed(self, keys, applies=applies)
        self._fields[known, FETCHED_BY] = fetched_by
        return found

    pushed = CacheIndex.pushed
    patch.setattr(CacheIndex, "pushed", follow)


def keep_rows_that_were_asked_for_in_an_open_step(patch: pytest.MonkeyPatch) -> None:
    def send(self: RowCache, batch: CacheBatch) -> None:
        batch.upto = 0
        sent(self, batch)

    sent = RowCache._send
    patch.setattr(RowCache, "_send", send)


def take_rows_as_they_are_for_what_was_asked(patch: pytest.MonkeyPatch) -> None:
    """The digest of a row is compared with itself."""

    def compare(self: RowCache, batch: CacheBatch, versions: Any, clock: int) -> None:
        compared(self, batch, batch.digests, clock)  # type: ignore[arg-type]

    compared = RowCache._compare
    patch.setattr(RowCache, "_compare", compare)
