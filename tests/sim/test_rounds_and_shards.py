"""Clusters that train in rounds, or on shards, while one thing goes wrong at any moment."""

from __future__ import annotations

import dataclasses

import pytest

from chaos.faults import Fault, Kind, Plan
from chaos.simulator import Result, run

STEPS = 12
SHARDS = 10
MODES = {"rounds": {"rounds": True}, "shards": {"shards": SHARDS}, "both": {"rounds": True, "shards": SHARDS}}

modes = pytest.mark.parametrize("mode", MODES)


def _calm(mode: str, **changes: object) -> Plan:
    """Three servers, two replicas, three workers, and only the faults that a test names."""
    plan = Plan(
        seed=1, servers=3, replicas=2, ranges=4, workers=3, window=4, steps=STEPS, budget_bytes=1 << 20, delay_s=0.0005,
        one_frame=False, cas_trouble=0.0, roster_lag_s=0.02, anywhere=0.2, operations=0.0, fills=8, pieces=3,
        faults_end_s=0.6, faults=(),
    )  # fmt: skip
    return dataclasses.replace(plan, **MODES[mode], **changes)  # type: ignore[arg-type]


def _all_is_trained(result: Result, mode: str) -> None:
    assert result.ok, result
    if mode != "shards":
        assert result.rounds > 0
    if mode != "rounds":
        assert result.shards == SHARDS


@modes
def test_without_faults_all_is_trained_under_the_first_view(mode: str) -> None:
    result = run(1, plan=_calm(mode))
    _all_is_trained(result, mode)
    assert result.epochs == 1
    if mode == "rounds":  # nobody waits for workers that have come to their end
        assert STEPS <= result.rounds <= 3 * STEPS


@modes
def test_a_server_dies_at_any_moment_of_a_round(mode: str) -> None:
    for i in range(6):
        faults = (Fault(0.008 + i * 0.0011, Kind.CRASH_SERVER, i, 0, 0.0),)
        _all_is_trained(run(i, plan=_calm(mode, seed=i, servers=4, faults=faults)), mode)


@modes
@pytest.mark.parametrize("again", [0, 1], ids=["for good", "and comes back"])
def test_a_worker_dies_and_the_others_go_on(mode: str, again: int) -> None:
    for i in range(4):
        faults = (Fault(0.008 + i * 0.0013, Kind.KILL_WORKER, i, again, 0.05 + 0.05 * i),)
        result = run(i, plan=_calm(mode, seed=i, faults=faults))
        _all_is_trained(result, mode)
        if mode == "rounds":
            assert result.rounds >= STEPS


@modes
def test_a_worker_stands_still_for_longer_than_its_lease_and_goes_on(mode: str) -> None:
    for i in range(4):
        faults = (
            Fault(0.008 + i * 0.0013, Kind.FREEZE_WORKER, i, 0, 0.25),
            Fault(0.12, Kind.CRASH_SERVER, i, 0, 0.0),
        )
        _all_is_trained(run(i, plan=_calm(mode, seed=i, faults=faults)), mode)


@modes
def test_ranges_move_while_workers_are_started_again(mode: str) -> None:
    for i in range(4):
        faults = (
            Fault(0.006, Kind.JOIN_SERVER, i, 0, 0.0),
            Fault(0.008, Kind.DRAIN_SERVER, i, 1, 0.0),
            Fault(0.010 + i * 0.002, Kind.RESTART_WORKER, i, i, 0.01),
            Fault(0.020 + i * 0.002, Kind.CRASH_LEADER, i, i, 0.01),
        )
        _all_is_trained(run(i, plan=_calm(mode, seed=i, servers=4, faults=faults)), mode)
