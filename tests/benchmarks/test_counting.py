"""The counts of the benchmarks, without their times."""

from __future__ import annotations

import numpy as np

from benchmarks import control
from benchmarks.elastic import Phase, _within


def test_a_large_view_is_small_on_the_wire_and_workers_write_none() -> None:
    found = control.run(rounds=1).found
    assert found.view_bytes <= 64 * 1024
    assert found.views_for_workers == 0
    assert found.rosters_for_workers > 0


def test_operations_count_that_were_under_way_in_a_span() -> None:
    operations = np.array([[0.0, 0.5], [0.0, 1.5], [1.2, 0.1], [1.9, 9.0], [2.1, 0.1]])
    assert _within(operations, [(1.0, 2.0)]).tolist() == operations[1:4].tolist()
    assert len(_within(operations, [])) == 0


def test_movement_is_compared_with_the_least_possible() -> None:
    phase = Phase(5, 2.0, 120_000_000, 100_000_000, 9)
    assert (phase.as_dict()["of_least"], phase.as_dict()["mb_per_s"]) == (1.2, 60.0)
