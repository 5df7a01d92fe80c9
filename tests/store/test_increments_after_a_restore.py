"""Increments after a range was restored from an older checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from elasticps.checkpoint.rows import decode
from elasticps.model.spec import SGD, TableSpec
from elasticps.server.core.operations import CutMark
from elasticps.server.core.scan import Scan
from elasticps.store import Store
from elasticps.store.retained import Allowance

SPEC = TableSpec("t", 2, SGD(1.0))
R, KEYS = 0, 40


def values(n: int, value: float) -> NDArray[np.float32]:
    return np.full((n, 2), value, np.float32)


def cut(store: Store, number: int, since: int, known: dict[int, bytes]) -> dict[int, bytes]:
    """What a checkpoint says of range R, that adds to one with these rows."""
    store.pass_cut(np.arange(2), number)
    scan = Scan(store, CutMark(number, since, "s0", 1, "x://"), Allowance(1 << 20, lambda: None, lambda: None))
    scan.add(np.arange(2))
    rows = dict(known) if since else {}
    for finished in scan.run():
        if finished is None:
            continue
        for piece in decode(SPEC, b"".join(finished.file.encode().parts)):
            if piece.segment.range != R:
                continue
            if piece.segment.full:
                rows = {}
            for key in piece.deleted.tolist():
                rows.pop(key, None)
            rows |= {key: row.tobytes() for key, row in zip(piece.keys.tolist(), piece.rows, strict=True)}
    return rows


def what_there_is(store: Store) -> dict[int, bytes]:
    keys, rows = store.tables[7].dump_range(R)
    return {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}


@pytest.mark.parametrize("between", [False, True])
def test_an_increment_holds_a_range_restored_from_another_checkpoint_whole(between: bool) -> None:
    """Checkpoints 1 and 2 went to two places; range R was lost, and came back from checkpoint 1."""
    store = Store(2)
    table = store.create(SPEC, 7)
    keys = np.arange(KEYS)
    keys = keys[table.ranges_of(keys) == R]
    table.put(keys, values(len(keys), 1.0))
    first = cut(store, 1, 0, {})
    old_keys, old_rows = table.dump_range(R)
    table.put(keys[:5], values(5, 2.0))
    table.delete(keys[-2:])
    new = np.arange(100, 140)
    new = new[table.ranges_of(new) == R]
    table.put(new, values(len(new), 3.0))
    second = cut(store, 2, 0, {})
    assert second == what_there_is(store) != first
    store.erase(np.array([R]))  # it is lost, and begins anew
    table.load_range(R, old_keys, old_rows)
    store.begin_at(np.array([R]), 1)
    table.put(keys[5:7], values(2, 4.0))  # training goes on
    if between:  # one that goes to the first place, or comes to nothing
        assert cut(store, 3, 1, first) == what_there_is(store)
        table.put(keys[7:8], values(1, 5.0))
    assert cut(store, 4, 2, second) == what_there_is(store)


def test_rows_restored_after_a_cut_are_in_the_next_checkpoint() -> None:
    """A cluster that has taken checkpoints of its own, and then gets what another one had at its 100th."""
    store = Store(2)
    for number in (1, 2, 3):
        store.pass_cut(np.arange(2), number)
    table = store.create(SPEC, 7)
    keys = np.arange(KEYS)
    keys = keys[table.ranges_of(keys) == R]
    table.put(keys, values(len(keys), 1.0))
    keys, rows = table.dump_range(R)
    table.drop_range(R)
    table.load_range(R, keys, rows)
    store.begin_at(np.arange(2), 100)
    _, _, stamped = table.dump_stamped(R, 0, 1 << 62)
    assert stamped.max() <= store.cuts.newest[R] - store.cuts.base[R]  # else no joiner takes it
    assert cut(store, 101, 0, {}) == what_there_is(store)
