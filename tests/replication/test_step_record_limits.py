"""What is kept of a worker's sparse steps is bounded, whatever the worker says."""

from __future__ import annotations

import numpy as np

from replication.step_records import MOST_RECORDS, StepRecords, record_of


def test_a_worker_that_never_says_what_is_committed_has_a_bounded_number_of_records() -> None:
    records, ticked = StepRecords(64), np.zeros(64, np.bool_)
    ticked[3] = True
    for clock in range(1, MOST_RECORDS + 10):
        records.note(5, record_of(clock, 0, ticked))
    left = [record.clock for record in records.of(5)]
    assert left == list(range(10, MOST_RECORDS + 10)), "the newest ones"


def test_a_record_drops_those_of_steps_that_it_says_are_committed() -> None:
    records, ticked = StepRecords(64), np.ones(64, np.bool_)
    for clock in range(1, 6):
        records.note(5, record_of(clock, max(0, clock - 2), ticked))
    assert [record.clock for record in records.of(5)] == [4, 5]
    assert records.of(6) == []
