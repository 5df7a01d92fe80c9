"""Whole clusters under seeds: every invariant holds, a seed is one story, and a failure says how to replay it."""

from __future__ import annotations

import dataclasses

import pytest

from chaos.faults import Fault, Kind, Plan, random_plan
from chaos.simulator import run

SEEDS = 200
BATCH = 40


@pytest.mark.parametrize("start", range(0, SEEDS, BATCH))
def test_every_invariant_holds_under_every_seed(start: int) -> None:
    failed = [str(result) for seed in range(start, start + BATCH) if not (result := run(seed)).ok]
    assert not failed, "\n".join(failed)


def test_the_same_seed_gives_the_same_trace() -> None:
    first, second = run(3, trace=True), run(3, trace=True)
    assert len(first.trace) > 100
    assert first.trace == second.trace
    assert first.digest == run(3).digest
    assert run(4).digest != first.digest


def test_a_failure_names_the_invariant_and_the_command_that_replays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from chaos.contents import Content

    monkeypatch.setattr(Content, "private_copy", lambda self: self)
    result = run(0)
    assert result.invariant == "content"
    assert str(result).splitlines()[-1] == "replay it: elasticps sim --protocol --seed 0"


def _calm(**changes: object) -> Plan:
    """Three servers, two replicas, two workers, and only the faults that a test names."""
    plan = Plan(
        seed=1, servers=3, replicas=2, ranges=8, workers=2, window=4, steps=60, budget_bytes=1 << 20, delay_s=0.0005,
        one_frame=False, cas_trouble=0.0, roster_lag_s=0.02, anywhere=0.2, operations=0.1, fills=8, pieces=3,
        faults_end_s=0.6, faults=(),
    )  # fmt: skip
    return dataclasses.replace(plan, **changes)  # type: ignore[arg-type]


def test_without_faults_every_step_commits_under_the_first_view() -> None:
    result = run(1, plan=_calm())
    assert result.ok, result
    assert result.commits == 120
    assert result.epochs == 1


@pytest.mark.parametrize("victim", range(3))
@pytest.mark.parametrize("replicas", [2, 3])
def test_a_server_dies_at_any_moment(victim: int, replicas: int) -> None:
    for i in range(12):
        faults = (Fault(0.05 + i * 0.0007, Kind.CRASH_SERVER, victim, 0, 0.0),)
        result = run(i, plan=_calm(seed=i, servers=4, replicas=replicas, faults=faults))
        assert result.ok, result
        assert result.commits == 120
        assert result.epochs > 1


@pytest.mark.parametrize("lasts_s", [0.02, 0.2])
def test_a_frozen_server_thaws_with_full_queues(lasts_s: float) -> None:
    for i in range(12):
        faults = (Fault(0.05 + i * 0.0007, Kind.FREEZE_SERVER, i, 0, lasts_s),)
        result = run(i, plan=_calm(seed=i, faults=faults, one_frame=True))
        assert result.ok, result


def test_the_joining_server_its_source_or_the_leader_dies_in_a_move() -> None:
    for i in range(40):
        second = (Kind.CRASH_SERVER, Kind.CRASH_LEADER, Kind.RESET_ALL_LINKS, Kind.FREEZE_SERVER)[i % 4]
        faults = (
            Fault(0.05, Kind.MOVE_RANGE, i, i + 1, 0.0),
            Fault(0.06 + (i // 4) * 0.001, second, i, 0, 0.3),
        )
        result = run(i, plan=_calm(seed=i, servers=4, faults=faults))
        assert result.ok, result


@pytest.mark.parametrize("victim", ["joiner", "source", "leader"])
def test_whoever_takes_part_in_a_filling_dies_in_it(victim: str) -> None:
    role = ["joiner", "source", "leader"].index(victim)
    for i in range(8):
        faults = (
            Fault(0.05, Kind.CRASH_SERVER, i, 0, 0.0),
            Fault(0.051, Kind.STRIKE_FILLING, i, role, 0.01 * i),
        )
        result = run(i, plan=_calm(seed=i, servers=5, replicas=3, faults=faults))
        assert result.ok, result
        assert result.commits == 120
        assert result.epochs > 2


def test_two_servers_die_at_once_where_ranges_have_three_replicas() -> None:
    for i in range(8):
        faults = (Fault(0.05 + i * 0.0007, Kind.CRASH_TWO, i, i + 1 + i % 4, 0.001 * (i % 5)),)
        result = run(i, plan=_calm(seed=i, servers=5, replicas=3, faults=faults))
        assert result.ok, result
        assert result.commits == 120


def test_two_servers_cannot_reach_each_other_and_the_leader_reaches_both() -> None:
    for i in range(12):
        result = run(i, plan=_calm(seed=i, faults=(Fault(0.05, Kind.PARTITION, i % 3, (i + 1) % 3, 0.3),)))
        assert result.ok, result
        assert result.commits == 120
        assert result.epochs > 1


def test_a_server_dies_while_the_store_is_down_and_its_ranges_wait_for_it() -> None:
    for i in range(12):
        result = run(i, plan=_calm(seed=i, faults=(Fault(0.05, Kind.CRASH_IN_OUTAGE, i, 0, 0.2),)))
        assert result.ok, result
        assert result.commits == 120


def test_all_lines_of_the_leader_break_at_once_and_nobody_is_taken_for_dead() -> None:
    result = run(1, plan=_calm(faults=(Fault(0.1, Kind.RESET_LINES, 0, 0, 0.0),)))
    assert result.ok, result
    assert result.epochs == 1


def test_workers_read_and_operators_operate() -> None:
    result = run(1, plan=_calm(operations=0.4))
    assert result.pulls > 100
    assert result.operations > 5


def test_pushes_wait_for_room_in_the_log_and_go_on() -> None:
    result = run(1, plan=_calm(budget_bytes=1, one_frame=True))
    assert result.ok, result
    assert result.commits == 120


def test_without_the_store_training_goes_on_under_the_frozen_view() -> None:
    faults = (Fault(0.01, Kind.STORE_OUTAGE, 0, 0, 0.5), Fault(0.1, Kind.RESET_ALL_LINKS, 0, 0, 0.0))
    result = run(1, plan=_calm(faults=faults))
    assert result.ok, result
    assert result.commits == 120


def test_a_plan_depends_on_its_seed_alone() -> None:
    assert random_plan(11) == random_plan(11)
    assert random_plan(11) != random_plan(12)


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_servers_join_drain_and_come_back_and_only_what_must_move_is_copied(replicas: int) -> None:
    for i in range(6):
        kinds = (Kind.JOIN_SERVER, Kind.JOIN_SERVER, Kind.DRAIN_SERVER, Kind.DRAIN_SERVER, Kind.JOIN_SERVER)
        faults = tuple(Fault(0.05 + k * 0.03 * (1 + i % 3), kind, i + k, 1, 0.0) for k, kind in enumerate(kinds))
        result = run(i, plan=_calm(seed=i, servers=4, replicas=replicas, faults=faults))
        assert result.ok, result
        assert result.commits == 120
        assert result.epochs > 4


@pytest.mark.parametrize("second", [Kind.CRASH_SERVER, Kind.STRIKE_FILLING, Kind.CRASH_LEADER, Kind.FREEZE_SERVER])
def test_a_server_drains_while_another_joins_and_one_dies(second: Kind) -> None:
    for i in range(6):
        faults = (
            Fault(0.05, Kind.JOIN_SERVER, i, 0, 0.0),
            Fault(0.05 + i * 0.001, Kind.DRAIN_SERVER, i, 1, 0.0),
            Fault(0.055 + i * 0.002, second, i, i, 0.1),
        )
        result = run(i, plan=_calm(seed=i, servers=4, faults=faults, fills=2))
        assert result.ok, result
        assert result.commits == 120
