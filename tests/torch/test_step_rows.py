from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticps.torch.step_rows import MAX_PULLS, StepRows

TABLES = {"a": 1, "b": 3}


class Later:
    """Rows of a pull, which are there when somebody waits for them. A row is its key, clock and changes."""

    def __init__(self, clock: int, keys: dict[Any, Any], outs: dict[Any, Any]) -> None:
        self.clock, self.keys, self.outs = clock, keys, outs

    def result(self, timeout: float | None = None) -> None:
        for table, keys in self.keys.items():
            assert len(np.unique(keys)) == len(keys) > 0
            assert self.outs[table].shape == (len(keys), TABLES[table.name])
            self.outs[table][:] = (10 * keys + self.clock)[:, None] + table.changes / 8


class Table:
    def __init__(self, name: str) -> None:
        self.name, self.changes = name, 0


keys = st.lists(st.integers(-3, 12), unique=True, max_size=8)
asks = st.tuples(st.booleans(), st.sampled_from(["", "a", "b"]), st.dictionaries(st.sampled_from(["a", "b"]), keys))


@given(st.lists(asks, max_size=20), st.randoms())
def test_rows_of_a_step_equal_separate_pulls_and_are_pulled_once(steps: list[Any], random: Any) -> None:
    rows, tables, clock = StepRows[Table](), {name: Table(name) for name in TABLES}, 0
    requested: set[tuple[str, int, int, int]] = set()
    waiting: list[tuple[Any, dict[Table, Any], dict[Table, Any], int]] = []

    def pull(needed: dict[Table, Any], outs: dict[Table, Any]) -> Later:
        for table, some in needed.items():
            mine = {(table.name, clock, table.changes, key) for key in some.tolist()}
            assert not mine & requested
            requested.update(mine)
        return Later(clock, needed, outs)

    for ticks, changed, wants in steps:
        clock += ticks
        if ticks or changed:  # what is under way comes first: rows of before are of no use for what follows
            for read, _, _, _ in waiting:
                read.result()
        if changed:
            tables[changed].changes += 1
        needed = {tables[name]: np.array(some, np.int64) for name, some in wants.items()}
        outs = {table: np.full((len(some), TABLES[table.name]), np.nan, np.float32) for table, some in needed.items()}
        shown = {
            table: (10 * some + clock)[:, None] + table.changes / 8 + np.zeros(TABLES[table.name])
            for table, some in needed.items()
        }
        waiting.append((rows.ask(clock, needed, outs, pull), outs, shown, clock))
        if random.random() < 0.3:
            waiting[random.randrange(len(waiting))][0].result()
    random.shuffle(waiting)
    for read, outs, shown, _ in waiting:
        read.result()
        for table, expected in shown.items():
            np.testing.assert_array_equal(outs[table], expected)


def test_only_the_pulls_of_one_step_are_remembered() -> None:
    rows, table = StepRows[Table](), Table("a")
    for key in range(3 * MAX_PULLS):
        out = np.empty((1, 1), np.float32)
        rows.ask(0, {table: np.array([key])}, {table: out}, lambda k, o: Later(0, k, o)).result()
        assert out[0, 0] == 10 * key
    assert len(rows._known[table].blocks) <= MAX_PULLS
