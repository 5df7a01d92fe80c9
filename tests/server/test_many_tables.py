"""The cost of one more table does not depend on how many there are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from elasticps.model.optimizers import SGD
from elasticps.model.spec import TableSpec
from elasticps.server.fast import layout as at
from elasticps.server.fast.buffers import int64_at
from elasticps.server.fast.frames import find_table
from elasticps.server.fast.path import FastPath
from elasticps.server.roles.executor import Executor
from elasticps.store import Store, Table
from replication.chain import Member
from tests.server.conftest import RANGES

MANY = 300
EVERY = np.arange(RANGES)


@pytest.fixture
def path() -> FastPath:
    made = FastPath(RANGES, 1 << 20)
    Executor(Member("a", 1), RANGES, 1 << 20, made)
    return made


def make(store: Store, number: int, app: str = "default") -> Table:
    return store.create(TableSpec(f"t{number}", 2, SGD(lr=0.1)), number, app)


def drop(store: Store, number: int) -> None:
    store.drop(number, EVERY, np.ones(RANGES, np.int64))


def test_a_table_is_written_once_for_compiled_code(path: FastPath) -> None:
    """All rows were, for each table that came: five million for 5,000 tables, ten times over."""
    for number in range(1, MANY + 1):
        make(path.store, number)
        path.sync()
    assert path.tables.written == MANY


def test_compiled_code_finds_the_tables_that_are_there(path: FastPath) -> None:
    store, one, other = path.store, path.number_of("default"), path.number_of("other")

    def found(number: int, app: int) -> int:
        entry = find_table(path.h, number, app)  # type: ignore[no-untyped-call]
        return int(int64_at(entry, at.TABLE)[at.TABLE_HEADER]) if entry else 0

    for number in range(1, MANY + 1):
        make(store, number, "" if number % 3 == 0 else "default")
        if number % 7 == 0:
            drop(store, number - 3)
        if number % 11 == 0:
            path.sync()
    store.belong(dict.fromkeys(range(3, MANY, 6), "other"))
    path.sync()
    assert store.unowned == {number for number in store.live if number % 6 == 0}
    for number in range(1, MANY + 2):
        table = store.live.get(number)
        expected = 0 if table is None else table.header_address
        theirs = table is not None and table.app in ("", "default")
        assert (found(number, 0), found(number, one)) == (expected, expected if theirs else 0)
        assert found(number, other) == (expected if table is not None and table.app != "default" else 0)
    for number in list(store.live):
        drop(store, number)
    path.sync()
    assert not any(found(number, 0) for number in range(1, MANY + 1))


def test_measuring_memory_visits_only_tables_with_dropped_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was at all of them, ten times a second."""
    store, looked = Store(RANGES), list[int]()
    keys = np.arange(1000)
    for number in range(1, MANY + 1):
        make(store, number).put(keys[:20], np.ones((20, 2), np.float32))
    reclaim: Callable[[Table, int], int] = Table.reclaim

    def seen(table: Table, rows: int) -> int:
        looked.append(table.table_id)
        return reclaim(table, rows)

    monkeypatch.setattr(Table, "reclaim", seen)
    store.reclaim(1000)
    assert (looked, store.reusable_bytes) == ([], 0)
    store.tables[5].delete(keys[:3])
    store.tables[7].drop_range(int(store.tables[7].ranges_of(keys[:1])[0]))
    store.tables[9].delete(keys)  # all that it has: nothing is left of it
    store.reclaim(1000)
    assert looked == [5, 7]
    dropped = sum(table.reusable_bytes for table in store.tables.values())
    assert store.reusable_bytes == dropped > 0
    for number in (5, 7):  # new rows take the place of those
        store.tables[number].put(keys[:20], np.ones((20, 2), np.float32))
    assert store.reusable_bytes == 0
    store.reclaim(1000)
    looked.clear()
    store.reclaim(1000)
    assert looked == []
    drop(store, 5)
    assert store.bury(np.ones(RANGES, np.int64)) == [5]
    store.reclaim(1000)
