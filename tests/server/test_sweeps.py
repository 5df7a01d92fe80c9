"""Plans of sweeps: what is due, how much goes, and how ranges are grouped."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from elasticps.model.policies import Admission, Capacity, Eviction, IdleFor, MinCount, SmallNorm
from elasticps.server.core.sweeps import SLACK, SLICE_ROWS, SweepPlan, bounded, excess, predicates, share_of
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep, add_sweep
from elasticps.store.intervals import HASH_END

RANGES = 8
WIDTH = HASH_END // RANGES
NOW = 1_000_000


class Counted:
    """A table of which only numbers are known."""

    def __init__(self, rows: list[int], admission: Admission | None = None, *evictions: Eviction) -> None:
        self.rows, self.admission, self.evictions = rows, admission, evictions

    def policies(self, r: int) -> tuple[Admission | None, tuple[Eviction, ...]]:
        return self.admission, self.evictions

    def count(self, r: int, of_candidates: bool) -> int:
        return 0 if of_candidates else self.rows[r]


def slices(plan: SweepPlan, table: Counted, clock_s: float = 0.0, hurry: bool = False) -> list[tuple[int, ...]]:
    return [one.ranges for one, _, _ in plan.slices({1: table}, range(RANGES), NOW, clock_s, hurry)]


def test_small_ranges_are_looked_at_together_and_large_ones_in_parts() -> None:
    table = Counted([10, 20, 3 * SLICE_ROWS, 5, 0, SLICE_ROWS, 1, 1], None, IdleFor("1h"))
    assert slices(SweepPlan(RANGES, WIDTH), table) == [(0, 1), (2,), (2,), (2,), (3, 4), (5,), (6, 7)]
    found = [one for one, _, _ in SweepPlan(RANGES, WIDTH).slices({1: table}, range(RANGES), NOW, 0.0, False)]
    parts = [(one.low, one.high) for one in found if one.ranges == (2,)]
    assert parts[0][0] == 2 * WIDTH
    assert parts[-1][1] == 3 * WIDTH
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


def test_a_policy_by_time_looks_again_after_a_part_of_its_time_or_when_memory_is_short() -> None:
    table, plan = Counted([10] * RANGES, None, IdleFor("64s")), SweepPlan(RANGES, WIDTH)
    assert slices(plan, table)
    assert not slices(plan, table, 1.9)
    assert slices(plan, table, 1.9, hurry=True)
    assert slices(plan, table, 4.0)


def test_a_capacity_looks_only_where_there_are_too_many_rows() -> None:
    plan = SweepPlan(RANGES, WIDTH)
    assert not slices(plan, Counted([10_100] * RANGES, None, Capacity(80_000)))
    assert slices(plan, Counted([10_102] * RANGES, None, Capacity(80_000)))


def test_a_table_that_has_outrun_its_sweeps_is_swept_faster() -> None:
    plan = SweepPlan(RANGES, WIDTH)
    for rows, overfull in ((10_200, False), (10_201, True)):
        table = Counted([rows] * RANGES, None, Capacity(80_000))
        assert plan.overfull({1: table}, range(RANGES)) is overfull


@given(rows=st.integers(1, 10**6), count=st.integers(0, 10**6))
def test_what_is_left_is_within_two_percent_of_the_share(rows: int, count: int) -> None:
    left = count - excess(count, rows)
    assert left <= rows * (1 + SLACK)
    assert left == count or left >= rows * (1 - SLACK)


@given(st.integers(1, 10**9))
def test_shares_of_all_ranges_are_the_whole(rows: int) -> None:
    assert sum(share_of(rows, r, RANGES) for r in range(RANGES)) == rows


@given(rows=st.integers(1, 10**9), ranges=st.sampled_from([1, 16, 256, 4096]), part=st.sampled_from([2, 4, 8]))
def test_neighbours_that_one_server_heads_have_their_part_of_a_small_capacity(
    rows: int, ranges: int, part: int
) -> None:
    """Else a capacity of ten was all the first ranges', and the other servers forgot every row at once."""
    some = range(ranges // part)
    assert abs(sum(share_of(rows, r, ranges) for r in some) - rows * len(some) / ranges) < 1


@given(ranks=st.lists(st.integers(0, 3), min_size=1, max_size=200), share=st.floats(0, 1))
def test_as_many_rows_go_as_shall_also_among_equal_ranks(ranks: list[int], share: float) -> None:
    keys, numbers = np.arange(len(ranks)) * 7919, np.array(ranks, np.int64)
    by = bounded(Predicate(Measure.LAST_USE, Reason.CAPACITY, 0), keys, numbers, share)
    chosen = by.chosen(keys, numbers)
    assert np.count_nonzero(chosen) == round(share * len(ranks))
    if chosen.any() and not chosen.all():
        assert numbers[chosen].max() <= numbers[~chosen].min()


def test_policies_become_predicates_with_their_numbers_fixed() -> None:
    found = predicates(MinCount(3, forget_after="10s", most=5), [IdleFor("1m"), SmallNorm(0.5), Capacity(9)], NOW)
    assert [(by.measure, by.reason, rows) for by, _, rows in found] == [
        (Measure.LAST_USE, Reason.IDLE, 0),
        (Measure.NORM, Reason.SMALL_NORM, 0),
        (Measure.LAST_USE, Reason.CAPACITY, 9),
        (Measure.CANDIDATE_AGE, Reason.FORGOTTEN, 0),
        (Measure.CANDIDATE, Reason.FORGOTTEN, 5),
    ]
    assert [found[0][0].below, found[3][0].below] == [NOW - 60, NOW - 10]
    assert found[1][0].below == int(np.float32(0.25).view(np.uint32))
    ((by, _, _),) = predicates(None, [Capacity(9, "most_used", "10s")], NOW)
    assert (by.now, by.decay) == (NOW, 0.1)


def by_count(below: int, now: int = 0, decay: float = 0.0, tie: int = 0) -> Predicate:
    return Predicate(Measure.COUNT, Reason.CAPACITY, below, tie, now, decay)


def test_a_later_sweep_takes_the_place_of_those_that_it_covers() -> None:
    idle = [Sweep(cut, Predicate(Measure.LAST_USE, Reason.IDLE, below)) for cut, below in ((1, 5), (1, 7), (2, 9))]
    sweeps: list[Sweep] = []
    for sweep in idle:
        add_sweep(sweeps, sweep)
    assert sweeps == [idle[2]]
    add_sweep(sweeps, Sweep(3, by_count(4, 10, 0.5)))
    add_sweep(sweeps, Sweep(3, by_count(3, 11, 0.5)))  # lower, so it does not cover the one before
    assert len(sweeps) == 3
    add_sweep(sweeps, Sweep(4, by_count(4, 12, 0.5)))
    assert sweeps == [idle[2], Sweep(4, by_count(4, 12, 0.5))]
    add_sweep(sweeps, Sweep(4, by_count(9, 13, 0.25)))  # counts fell otherwise: nothing is covered
    assert len(sweeps) == 3


def test_intervals_of_one_sweep_become_one_note() -> None:
    sweeps: list[Sweep] = []
    for low in range(0, 40, 10):
        add_sweep(sweeps, Sweep(3, by_count(4), low, low + 10))
    assert sweeps == [Sweep(3, by_count(4), 0, 40)]
