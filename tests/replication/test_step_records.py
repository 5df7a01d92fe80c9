"""Homes of workers, records of sparse steps, and what whoever goes on for a worker learns from them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replication.progress import PART_BITS
from replication.step_records import (
    StepRecord,
    StepRecords,
    home_range,
    last_whole_step,
    record_bytes,
    record_of,
    step_is_whole,
)

P = 8


@pytest.mark.parametrize("bits", range(17))
def test_homes_are_ranges_and_workers_spread_evenly_over_them(bits: int) -> None:
    ranges = 1 << bits
    homes = [home_range(worker, ranges) for worker in range(1, 2 * ranges + 1)]
    assert 0 <= min(homes) <= max(homes) < ranges
    assert np.bincount(homes, minlength=ranges).max() <= 4
    assert 0 <= home_range((1 << 32) - 1, ranges) < ranges


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_a_record_names_the_ranges_that_it_is_made_of(bits: list[bool]) -> None:
    ticked = np.array(bits)
    record = record_of(5, 3, ticked)
    assert record.ranges.tolist() == np.flatnonzero(ticked).tolist()
    assert len(record.bits) + 8 == record_bytes(len(bits))


class Past:
    """A worker's steps, as somebody knows who sees everything. Step c ticks ranges[c - 1] and its home, in order."""

    def __init__(self, steps: list[set[int]], reached: list[int], further: list[int], known: list[int]) -> None:
        self.home = home_range(1, P)
        self.steps = [ranges | {self.home} for ranges in steps]
        last = len(steps)
        self.at = [min(reach, last) for reach in reached]  # by range, the clock that all replicas have all steps up to
        self.head_at = [min(reach + more, last) for reach, more in zip(self.at, further, strict=True)]
        self.committed = np.array([self._ticked(r, self.at[r]) << PART_BITS for r in range(P)])
        self.applied = np.array([self._ticked(r, self.head_at[r]) << PART_BITS for r in range(P)])
        records = StepRecords(P)
        for clock, ranges in enumerate(self.steps[: self.head_at[self.home]], 1):
            ticked = np.isin(np.arange(P), list(ranges))
            if not ticked.all():
                records.note(1, record_of(clock, min(known[clock - 1], clock - 1, self.whole()), ticked))
        self.records: list[StepRecord] = records.of(1)

    def _ticked(self, r: int, clock: int) -> int:
        """The last step up to a clock that ticks a range."""
        return max((c for c in range(1, clock + 1) if r in self.steps[c - 1]), default=0)

    def has(self, clock: int, at: list[int]) -> bool:
        return all(at[r] >= clock for r in self.steps[clock - 1])

    def whole(self) -> int:
        """The last step that all up to it are committed, wherever they tick."""
        return next((c - 1 for c in range(1, len(self.steps) + 1) if not self.has(c, self.at)), len(self.steps))


touched = st.sets(st.integers(0, P - 1)) | st.just(set(range(P)))
steps = st.lists(touched, min_size=1, max_size=8)
each = st.lists(st.integers(0, 8), min_size=P, max_size=P)


@given(steps, each, each, each)
def test_a_successor_learns_which_steps_are_whole(
    touched: list[set[int]], reached: list[int], further: list[int], known: list[int]
) -> None:
    past = Past(touched, reached, further, known)
    found = last_whole_step(0, past.home, past.committed, past.records)
    assert found == past.whole()
    assert last_whole_step(100, past.home, past.committed, past.records) == 100


@given(steps, each, each, each)
def test_a_step_of_a_lost_worker_is_whole_lost_or_on_its_way(
    touched: list[set[int]], reached: list[int], further: list[int], known: list[int]
) -> None:
    past = Past(touched, reached, further, known)
    for clock in range(1, len(past.steps) + 1):
        found = step_is_whole(clock, past.home, past.applied, past.committed, past.records)
        whole = past.has(clock, past.at)
        assert (found is True) == whole
        assert found is not False or not past.has(clock, past.head_at)


def test_records_of_a_home_go_with_its_range_and_no_others() -> None:
    workers = range(1, 20)
    records = StepRecords(P)
    for worker in workers:
        records.note(worker, record_of(worker, 0, np.arange(P) == worker % P))
    home = home_range(5, P)
    column = records.column(home)
    assert [worker for worker, _ in column] == [w for w in workers if home_range(w, P) == home]
    joiner = StepRecords(P)
    joiner.note(5, record_of(99, 0, np.ones(P, np.bool_)))
    joiner.set_column(home, column)
    assert joiner.column(home) == column, "what it had of the range before is gone"
    records.clear(np.array([home]))
    assert records.column(home) == []
    assert sum(len(records.of(worker)) for worker in workers) == len(workers) - len(column)
