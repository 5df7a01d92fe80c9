"""Sweeps that wait: for room in the log, or for a round to close."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elasticps.model.policies import Capacity
from elasticps.server.core.sweeps import MOST_IN_A_ROUND, MOST_RANGES, ROUND_BYTES, SweptInterval
from elasticps.server.roles.sweeper import _RoundSweeps
from elasticps.store.eviction import Measure, Predicate, Reason
from replication.messages import OperationKind
from tests.server.test_wrong_clocks import NEW, TABLE, USED_LESS, USED_MOST, Growing, no_loop_that_runs

PASS_S = 9  # in which a pass over all ranges ends

__all__ = ["no_loop_that_runs"]


def fill(growing: Growing) -> None:
    """Pushes more rows than the table may have."""
    growing.push(USED_MOST, 2)
    growing.push(USED_LESS, 1)
    growing.push(NEW, 3)


def pass_three_times(growing: Growing) -> None:
    """Lets time go on for three passes over all ranges."""
    for _ in range(3):
        growing.server.sweeper.tick()
        for _ in range(PASS_S):
            growing.wires.clock.now += 1.0
            growing.wires.settle()


@pytest.mark.usefixtures("no_loop_that_runs")
def test_a_sweep_that_waits_for_room_in_the_log_is_not_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    growing, kinds = Growing(Capacity(200, keep="most_used")), list[OperationKind]()
    executor = growing.server.executor
    log = executor.log

    def noted(epoch: int, kind: OperationKind, *given: Any) -> Any:
        kinds.append(kind)
        return log(epoch, kind, *given)

    monkeypatch.setattr(executor, "log", noted)
    fill(growing)
    executor.limit_log(0)
    pass_three_times(growing)
    assert kinds.count(OperationKind.EVICT) == 1
    executor.limit_log(1 << 20)
    growing.wires.settle()
    assert executor.replica.admission.parked == 0
    assert growing.left(USED_LESS) < len(USED_LESS)


@pytest.mark.usefixtures("no_loop_that_runs")
def test_a_sweep_that_waits_for_a_round_is_carried_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = Growing(Capacity(200, keep="most_used"))
    monkeypatch.setattr(growing.server.executor.rounds, "active", lambda app: True)
    fill(growing)
    pass_three_times(growing)
    app = growing.server.store.tables[TABLE].app
    assert len(growing.server.sweeper.take(app)) == 1
    assert growing.server.sweeper.take(app) == ()


def test_a_round_takes_as_many_sweeps_as_an_operation_has_room_for() -> None:
    growing, most_ranges = Growing(Capacity(200)), tuple(range(10_000, 10_000 + MOST_RANGES))
    sweeper, by = growing.server.sweeper, Predicate(Measure.LAST_USE, Reason.IDLE, 1)
    found = [SweptInterval(TABLE, low, low + 1, by, most_ranges) for low in range(MOST_IN_A_ROUND)]
    sweeper._for_rounds["a"] = _RoundSweeps(0.0, {one: one for one in found})
    taken: list[SweptInterval] = []
    while some := sweeper.take("a"):
        assert sum(one.nbytes for one in some) <= ROUND_BYTES
        assert some[0].nbytes == len(json.dumps(some[0].document(), separators=(",", ":"))) + 1
        taken += some
    assert taken == found
