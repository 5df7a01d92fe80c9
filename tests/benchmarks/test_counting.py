"""The counts of the benchmarks, without their times."""

from __future__ import annotations

import numpy as np

from benchmarks import control
from benchmarks.elastic import Phase, _within
from benchmarks.runner import Result, Side, Turn, in_turns, percentiles


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


def test_sides_run_in_turns_with_as_many_steps_as_fit_their_time() -> None:
    order: list[tuple[str, int]] = []
    used = {"fast": 0.0, "slow": 0.0}

    def side(name: str, step_s: float) -> Side:
        def run(steps: int) -> float:
            order.append((name, steps))
            used[name] += steps
            return steps * step_s

        return Side(run, 10, lambda: {name: used[name]})

    turns = in_turns({"fast": side("fast", 0.01), "slow": side("slow", 1.0)}, 2, seconds=4.0, least=3)
    assert order == [("fast", 10), ("slow", 10), ("fast", 200), ("slow", 3)]
    assert turns["fast"] == [Turn(10, 0.1, {"fast": 10.0}), Turn(200, 2.0, {"fast": 200.0})]
    assert [turn.seconds for turn in turns["slow"]] == [10.0, 3.0]


def test_percentiles_are_named_and_none_are_of_nothing() -> None:
    assert percentiles([1.0, 2.0, 4.0], 50, 100) == {"p50": 2.0, "max": 4.0}
    assert percentiles([1.26], 99, digits=1) == {"p99": 1.3}
    assert percentiles([], 50) == {}


def test_a_result_is_what_json_knows() -> None:
    phase = Phase(5, 2.0, 4_000_000, 2_000_000, 9)
    assert Result([phase, {"rows": 3}], []).document == [phase.as_dict(), {"rows": 3}]
