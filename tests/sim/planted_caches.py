"""Bugs in what a worker keeps of rows: older than it may be, or with pushes that are not in it, or twice."""

from __future__ import annotations

from typing import Any

import pytest

from elasticps.client.batches import Batch
from elasticps.client.core.places import ASKED, Ints, Places
from elasticps.client.row_cache import RowCache


def show_rows_of_any_age(patch: pytest.MonkeyPatch) -> None:
    def look(self: Places, where: Ints, number: int, clock: int, staleness: int, **options: Any) -> Any:
        return judge(self, where, number, clock, staleness and 1 << 30, **options)

    judge = Places.judge
    patch.setattr(Places, "judge", look)


def keep_rows_that_were_pushed_to_on_their_way(patch: pytest.MonkeyPatch) -> None:
    def follow(self: Places, keys: Ints, *, applies: bool) -> Ints:
        where = self.look(keys)
        known = where[where >= 0]
        asked = self._fields[known, ASKED]
        found = pushed(self, keys, applies=applies)
        self._fields[known, ASKED] = asked
        return found

    pushed = Places.pushed
    patch.setattr(Places, "pushed", follow)


def keep_rows_that_were_asked_for_in_an_open_step(patch: pytest.MonkeyPatch) -> None:
    def send(self: RowCache, batch: Batch) -> None:
        batch.upto = 0
        sent(self, batch)

    sent = RowCache._send
    patch.setattr(RowCache, "_send", send)


def take_rows_as_they_are_for_what_was_asked(patch: pytest.MonkeyPatch) -> None:
    """The digest of a row is compared with itself."""

    def compare(self: RowCache, batch: Batch, said: Any, clock: int) -> None:
        compared(self, batch, batch.digests, clock)  # type: ignore[arg-type]

    compared = RowCache._compare
    patch.setattr(RowCache, "_compare", compare)
