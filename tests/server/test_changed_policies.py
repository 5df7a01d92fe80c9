"""Sweeps that were chosen under policies which have changed meanwhile: they take no row."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.model.policies import IdleFor
from elasticps.server.core.barrier_state import RoundStep
from elasticps.server.core.operations import ChangedPolicies
from replication.messages import OperationKind
from tests.server.conftest import RANGES
from tests.server.test_wrong_clocks import HOUR_S, TABLE, USED_MOST, Growing, no_loop_that_runs

__all__ = ["no_loop_that_runs"]
HEADED = np.arange(RANGES)


def idle() -> Growing:
    """Rows that have not been used for two hours, of a table that forgets them after one."""
    growing = Growing(IdleFor("1h"))
    growing.push(USED_MOST, 1)
    growing.server.store.pass_cut(HEADED, 1)  # from now on sweeps are noted
    growing.wires.wall_s += 2 * HOUR_S
    growing.beat(growing.wires.wall_s)
    return growing


def keep_longer(growing: Growing) -> None:
    payload = ChangedPolicies(TABLE, growing.spec.with_policies(None, [IdleFor("30d")]).to_json())
    growing.server.executor.log(growing.view.epoch, OperationKind.POLICY, HEADED, payload, 64)


def all_are_left(growing: Growing) -> bool:
    growing.wires.settle()
    deletions = growing.server.store.tables[TABLE].deletions
    return growing.left(USED_MOST) == len(USED_MOST) and not any(deletions.sweeps(r) for r in range(RANGES))


def test_a_pass_that_is_under_way_takes_no_row_under_new_policies() -> None:
    growing = idle()
    growing.server.sweeper.tick()  # the pass is planned
    slices = growing.server.sweeper._slices
    assert slices is not None
    found = next(slices)  # and its first slice chosen
    keep_longer(growing)
    assert growing.server.sweeper._sweep(*found)[1] == 0
    assert all_are_left(growing)


def test_a_sweep_that_waits_for_room_behind_a_change_of_policies_takes_no_row() -> None:
    growing = idle()
    growing.server.executor.limit_log(0)
    keep_longer(growing)
    growing.sweep()
    assert growing.server.executor.replica.admission.parked == 2
    growing.server.executor.limit_log(1 << 20)
    assert all_are_left(growing)


def test_a_sweep_that_waits_for_a_round_takes_no_row_under_new_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    growing = idle()
    executor = growing.server.executor
    monkeypatch.setattr(executor.rounds, "active", lambda app: True)
    growing.sweep()
    keep_longer(growing)
    app = growing.server.store.tables[TABLE].app
    sweeps = growing.server.sweeper.take(app)
    assert sweeps
    step = RoundStep(app, 1, (), sweeps, 1)
    executor.log(growing.view.epoch, OperationKind.BARRIER_CLOSE, HEADED, step, 64)
    assert all_are_left(growing)


def test_a_sweep_under_present_policies_takes_rows() -> None:
    growing = idle()
    growing.sweep()
    assert growing.left(USED_MOST) == 0
