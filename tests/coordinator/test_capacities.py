"""How capacities of tables are divided among servers, compared with a dumb twin that takes one row after another."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.core.capacities import SLACK, RowCount, allowances, divide

SERVERS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 8)), min_size=1, max_size=6)


def by_one(most: int, rows: list[int], ranges: list[int]) -> list[int]:
    """Takes rows one at a time, from whoever has most of them in a range."""
    keeps = list(rows)
    while sum(keeps) > most:
        keeps[max(range(len(keeps)), key=lambda i: keeps[i] / ranges[i])] -= 1
    return keeps


def counts(rows: list[int], ranges: list[int], capacity: int) -> dict[int, tuple[int, list[RowCount]]]:
    return {
        i: (n, [RowCount(1, False, capacity, count)]) for i, (count, n) in enumerate(zip(rows, ranges, strict=True))
    }


@given(servers=SERVERS, most=st.integers(1, 200))
def test_all_keep_exactly_what_a_table_may_have_and_those_above_a_level_are_cut_to_it(
    servers: list[tuple[int, int]], most: int
) -> None:
    rows, ranges = map(list, zip(*servers, strict=True))
    if sum(rows) > most:
        keeps = divide(most, rows, ranges)
        assert sum(keeps) == most
        twin = by_one(most, rows, ranges)
        for mine, had, one in zip(keeps, rows, twin, strict=True):
            assert 0 <= mine <= had
            assert abs(mine - one) <= max(ranges) + 1


@given(servers=SERVERS, capacity=st.integers(1, 400))
@example(servers=[(7, 1), (3, 1)], capacity=10)  # its own share of each server made it a table of 8
def test_no_server_forgets_a_row_of_a_table_that_is_not_above_its_capacity(
    servers: list[tuple[int, int]], capacity: int
) -> None:
    rows, ranges = map(list, zip(*servers, strict=True))
    found = allowances(counts(rows, ranges, capacity))
    above = sum(rows) > capacity + int(SLACK * capacity)
    assert any(found.values()) == above
    if above:
        left = sum(found[i][0].rows if found[i] else rows[i] for i in range(len(rows)))
        assert 0.98 * capacity <= left <= capacity


def test_a_server_below_the_level_is_told_nothing_as_it_may_have_grown_since_its_report() -> None:
    """Told to keep what it had reported, it once forgot all rows that came since: a new table of 200 went to 56."""
    assert allowances(counts([100, 4], [8, 8], 100)) == {0: [RowCount(1, False, 100, 95)], 1: []}


@given(servers=SERVERS, most=st.integers(1, 200), data=st.data())
def test_what_some_servers_have_cut_already_changes_no_other_s_part(
    servers: list[tuple[int, int]], most: int, data: st.DataObject
) -> None:
    """Servers cut at their own pace, and counts are of different moments."""
    rows, ranges = map(list, zip(*servers, strict=True))
    if sum(rows) <= most:
        return
    keeps = divide(most, rows, ranges)
    cut = data.draw(st.sets(st.integers(0, len(rows) - 1)))
    now = [keeps[i] if i in cut else rows[i] for i in range(len(rows))]
    if sum(now) > most:
        again = divide(most, now, ranges)
        assert all(abs(a - b) <= len(rows) for a, b in zip(again, keeps, strict=True))  # rounded otherwise


def test_a_table_counts_once_for_each_of_its_bounds_and_keys_that_wait_for_themselves() -> None:
    here = [RowCount(1, False, 10, 9), RowCount(1, False, 4, 9), RowCount(1, True, 5, 1), RowCount(2, False, 10, 3)]
    there = [RowCount(1, False, 10, 3), RowCount(1, False, 4, 3), RowCount(1, True, 5, 7)]
    assert allowances({"a": (4, here), "b": (4, there), "c": (8, [])}) == {
        "a": [RowCount(1, False, 10, 7), RowCount(1, False, 4, 2)],
        "b": [RowCount(1, False, 4, 2), RowCount(1, True, 5, 4)],
        "c": [],
    }
