"""Plans of sweeps: what is due, how much goes, and how ranges are grouped."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.capacities import SLACK
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import Admission, Capacity, Eviction, IdleFor, MinCount, SmallNorm
from elasticps.server.core.sweeps import SLICE_ROWS, Policies, SweepPlan, bounded, predicates
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep, add_sweep

RANGES = 8
WIDTH = HASH_END // RANGES
HEADED = np.arange(RANGES)
NOW = 1_000_000


class Counted:
    """A table of which only numbers are known. keeps, keeps_waiting: how many rows, and keys that wait, it may keep
    here; None: all. looks: how often ranges were grouped by policies."""

    def __init__(self, rows: list[int], admission: Admission | None = None, *evictions: Eviction) -> None:
        self.rows, self.waiting = np.array(rows), np.zeros(RANGES, np.int64)
        self.admission, self.evictions = admission, evictions
        self.keeps: int | None = None
        self.keeps_waiting: int | None = None
        self.version = self.looks = 0

    def by_policies(self, ranges: np.ndarray) -> dict[Policies, list[int]]:
        self.looks += 1
        return {(self.admission, self.evictions): ranges.tolist()}

    def counts(self, of_candidates: bool) -> np.ndarray:
        return self.waiting if of_candidates else self.rows

    def allowed(self, of_candidates: bool, capacity: int) -> int | None:
        return self.keeps_waiting if of_candidates else self.keeps


def slices(plan: SweepPlan, table: Counted, clock_s: float = 0.0, hurry: bool = False) -> list[tuple[int, ...]]:
    return [one.ranges for one, _, _ in plan.slices({1: table}, HEADED, NOW, clock_s, hurry)]


def test_small_ranges_are_looked_at_together_and_large_ones_in_parts() -> None:
    table = Counted([10, 20, 3 * SLICE_ROWS, 5, 0, SLICE_ROWS, 1, 1], None, IdleFor("1h"))
    assert slices(SweepPlan(WIDTH), table) == [(0, 1), (2,), (2,), (2,), (3, 4), (5,), (6, 7)]
    found = [one for one, _, _ in SweepPlan(WIDTH).slices({1: table}, HEADED, NOW, 0.0, False)]
    parts = [(one.low, one.high) for one in found if one.ranges == (2,)]
    assert parts[0][0] == 2 * WIDTH
    assert parts[-1][1] == 3 * WIDTH
    assert all(a[1] == b[0] for a, b in itertools.pairwise(parts))


def test_a_policy_by_time_looks_again_after_a_part_of_its_time_or_when_memory_is_short() -> None:
    table, plan = Counted([10] * RANGES, None, IdleFor("64s")), SweepPlan(WIDTH)
    assert slices(plan, table)
    assert not slices(plan, table, 1.9)
    assert slices(plan, table, 1.9, hurry=True)
    assert slices(plan, table, 4.0)


def test_a_capacity_looks_only_where_more_rows_are_than_may_be_kept() -> None:
    plan, table = SweepPlan(WIDTH), Counted([10_200] * RANGES, None, Capacity(80_000))
    assert not slices(plan, table)  # the table as a whole is not above it
    table.keeps = 80_800
    assert not slices(plan, table)
    table.keeps = 80_700
    assert slices(plan, table)


def test_a_table_that_has_outrun_its_sweeps_is_swept_faster() -> None:
    plan, table = SweepPlan(WIDTH), Counted([10_250] * RANGES, None, Capacity(80_000))
    assert not plan.overfull({1: table}, HEADED)
    for keeps, overfull in ((79_600, False), (79_500, True)):
        table.keeps = keeps
        assert plan.overfull({1: table}, HEADED) == [1] * overfull


def test_waiting_keys_above_their_bound_are_swept_faster() -> None:
    table = Counted([0] * RANGES, MinCount(3, most=800))
    table.waiting[:] = 105
    table.keeps_waiting = 792
    assert SweepPlan(WIDTH).overfull({1: table}, HEADED) == [1]


def test_tables_that_are_too_large_can_be_cut_to_their_capacity_alone() -> None:
    plan, table = SweepPlan(WIDTH), Counted([2_000] * RANGES, None, IdleFor("1h"), Capacity(8_000))
    table.keeps = 8_000
    assert {by.reason for _, by, _ in plan.cuts({1: table}, HEADED, NOW)} == {Reason.CAPACITY}
    assert Reason.IDLE in {by.reason for _, by, _ in plan.slices({1: table}, HEADED, NOW, 0.0, False)}


def test_ranges_are_grouped_by_policies_only_when_those_or_the_ranges_change() -> None:
    plan, table = SweepPlan(WIDTH), Counted([10] * RANGES, None, IdleFor("64s"))
    for clock_s in (0, 10, 20):
        assert slices(plan, table, clock_s)
    assert table.looks == 1
    table.version += 1
    table.evictions = (IdleFor("32s"),)
    assert slices(plan, table, 30)
    assert [one.ranges for one, _, _ in plan.slices({1: table}, np.arange(4), NOW, 40, False)] == [(0, 1, 2, 3)]
    assert table.looks == 3


@given(rows=st.lists(st.integers(0, SLICE_ROWS), min_size=RANGES, max_size=RANGES), part=st.floats(0, 1))
def test_a_cut_keeps_as_many_rows_as_may_be_kept(rows: list[int], part: float) -> None:
    table, before = Counted(rows, None, Capacity(80_000)), sum(rows)
    keeps = table.keeps = int(part * sum(rows))
    for at, _, share in SweepPlan(WIDTH).slices({1: table}, HEADED, NOW, 0.0, False):
        going = round(share * sum(int(table.rows[r]) for r in at.ranges))
        for r in at.ranges:
            gone = min(going, int(table.rows[r]))
            table.rows[r], going = table.rows[r] - gone, going - gone
    assert table.rows.sum() == (keeps if before > keeps + int(SLACK * keeps) else before)


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
