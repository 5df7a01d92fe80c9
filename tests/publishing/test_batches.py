"""Gathering windows: whatever windows come, and whenever a batch is taken, a target has what a dumb twin has."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticps.model.spec import Assign, TableSpec
from elasticps.publishing.core.batches import PendingChanges, PublishBatch
from elasticps.readers.values import AppliedWindow, AsOf, TableChange

SPECS = {name: TableSpec(name, 2, Assign()) for name in ("a", "b")}


def as_of(time_s: float) -> AsOf:
    return AsOf(time_s, 1, np.empty(0, np.int64), {})


def change(
    table: str, rows: dict[int, float], deleted: set[int] | None = None, *, new: bool = False, dropped: bool = False
) -> TableChange:
    keys = np.array(sorted(rows), np.int64)
    values = np.array([[rows[key]] * 2 for key in keys.tolist()], np.float32).reshape(-1, 2)
    gone = np.array(sorted(deleted or ()), np.int64)
    return TableChange(table, SPECS[table], new, dropped, gone, keys, values)


class Model:
    """Tables as dictionaries, and a target that is written to."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, float]] = {}
        self._listed: dict[str, dict[int, float]] = {}

    def apply(self, one: TableChange) -> None:
        if one.dropped:
            self.tables.pop(one.table, None)
            return
        if one.new:
            self.tables[one.table] = {}
        table = self.tables.setdefault(one.table, {})
        for key in one.deleted.tolist():
            table.pop(key, None)
        table |= dict(zip(one.keys.tolist(), one.rows[:, 0].tolist(), strict=True))

    def write(self, batch: PublishBatch) -> None:
        if batch.begins:
            self._listed = {}
        for name, table in batch.tables.items():
            assert not np.isin(table.keys, table.deleted).any()
            assert len(np.unique(table.keys)) == len(table.keys)
            for target in (self.tables, self._listed):
                if table.replaced or table.gone:
                    target.pop(name, None)
                if not table.gone:
                    rows = target.setdefault(name, {})
                    for key in table.deleted.tolist():
                        rows.pop(key, None)
                    rows |= dict(zip(table.keys.tolist(), table.rows[:, 0].tolist(), strict=True))
        if batch.complete:  # nothing that an earlier run has left stays
            self.tables = {name: dict(rows) for name, rows in self._listed.items()}


KEYS = st.integers(0, 5)
VALUES = st.integers(1, 99).map(float)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from("ab"), st.dictionaries(KEYS, VALUES), st.sets(KEYS)),
        st.tuples(st.sampled_from(["drop", "new"]), st.sampled_from("ab"), st.just({}), st.just(set())),
        st.tuples(st.sampled_from(["take", "list"]), st.just("a"), st.just({}), st.just(set())),
    ),
    max_size=30,
)


@given(EVENTS, st.booleans())
def test_a_target_has_after_each_batch_what_the_windows_say(events: list[Any], take_in_listings: bool) -> None:
    pending, model, target = PendingChanges(), Model(), Model()
    target.tables = {"a": {77: 1.0}, "z": {1: 1.0}}  # of an earlier run

    def take() -> PublishBatch | None:
        batch = pending.take()
        if batch is not None:
            target.write(batch)
        return batch

    def listing() -> None:
        parts = [
            change(name, {key: value}, new=i == 0)
            for name, rows in model.tables.items()
            for i, (key, value) in enumerate(rows.items())
        ]
        parts += [change(name, {}, new=True) for name, rows in model.tables.items() if not rows]
        for i, part in enumerate(parts):
            pending.add(AppliedWindow([part], as_of(1), True, i == len(parts) - 1))
            if take_in_listings:
                take()
        if not parts:
            pending.add(AppliedWindow([], as_of(1), True, True))

    listing()
    for kind, table, rows, deleted in events:
        if kind == "take":
            take()
            assert target.tables == model.tables
        elif kind == "list":
            listing()
        elif kind == "new" or table in model.tables:
            one = change(table, rows, deleted - rows.keys(), new=kind == "new", dropped=kind == "drop")
            model.apply(one)
            pending.add(AppliedWindow([one], as_of(2)))
    take()
    assert target.tables == model.tables
    assert take() is None
    assert not pending.nbytes


def test_a_batch_says_where_a_listing_begins_and_ends() -> None:
    pending = PendingChanges()
    pending.add(AppliedWindow([change("a", {1: 1})], as_of(1), True, False))
    first = pending.take()
    pending.add(AppliedWindow([change("a", {2: 1})], as_of(2), True, True))
    pending.add(AppliedWindow([change("a", {}, {1})], as_of(3)))
    second = pending.take()
    pending.add(AppliedWindow([], as_of(4)))
    third = pending.take()
    assert first
    assert second
    assert third
    assert (first.begins, first.listing, first.complete) == (True, True, False)
    assert (second.begins, second.listing, second.complete) == (False, False, True)
    assert (third.begins, third.listing, third.complete) == (False, False, False)
    assert second.tables["a"].deleted.tolist() == [1]
    assert (second.as_of.time_s, third.as_of.time_s, third.tables) == (3, 4, {})
