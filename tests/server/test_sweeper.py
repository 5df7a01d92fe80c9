"""When a server plans sweeps, and what it looks at first."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.core.capacities import RowCount
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import Capacity, IdleFor
from elasticps.server.core.sweeps import Slice
from elasticps.server.roles.sweeper import PLAN_EVERY_S, Sweeper
from elasticps.store.eviction import Measure, Predicate, Reason
from tests.server.test_wrong_clocks import TABLE, Growing

REST = Slice(TABLE, (0,), 0, HASH_END), Predicate(Measure.LAST_USE, Reason.IDLE, 1), 0.0  # of a pass that is under way


def grown(rows: int) -> Growing:
    growing = Growing(IdleFor("1h"), Capacity(200))
    growing.push(np.arange(rows), 1)
    return growing


def test_a_pass_is_planned_once_a_second() -> None:
    growing = grown(100)
    sweeper = growing.server.sweeper
    sweeper.tick()
    assert passes(sweeper)
    while sweeper._next() is not None:
        pass
    sweeper.tick()
    assert not passes(sweeper), "the pass has ended, and the next one is not due"
    growing.wires.clock.now += PLAN_EVERY_S
    sweeper.tick()
    assert passes(sweeper)


def passes(sweeper: Sweeper) -> bool:
    """Whether a pass is under way."""
    return sweeper._slices is not None


@pytest.mark.parametrize(("rows", "reasons"), [
    (1_000, [Reason.CAPACITY, Reason.IDLE]),
    (203, [Reason.IDLE]),  # above its capacity, and not by so much that it has to be faster
])  # fmt: skip
def test_a_table_that_is_much_too_large_is_cut_before_what_is_left_of_a_pass(rows: int, reasons: list[Reason]) -> None:
    growing = grown(rows)
    sweeper = growing.server.sweeper
    sweeper._slices = iter([REST])
    sweeper.tick()
    found: list[Reason] = []
    while (one := sweeper._next()) is not None:
        found.append(one[1].reason)
    assert list(dict.fromkeys(found)) == reasons


def test_a_table_that_is_being_cut_is_not_cut_a_second_time_meanwhile() -> None:
    """Each cut takes the share of rows that it found too many as it began."""
    growing = grown(1_000)
    sweeper = growing.server.sweeper
    sweeper._slices = iter([(REST[0], REST[1], 0.5), REST])
    assert sweeper._next() is not None
    sweeper.tick()
    assert sweeper._cuts is None
    assert sweeper._next() is not None
    sweeper.tick()
    assert sweeper._cuts is not None


@pytest.mark.parametrize("later", [True, False])
def test_a_capacity_counts_as_it_is_when_a_pass_comes_to_the_table(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other servers have forgotten rows since the pass was planned: the whole table is no more above its capacity."""
    growing = grown(203)
    sweeper = growing.server.sweeper
    monkeypatch.setattr(sweeper, "_allowances", lambda: [RowCount(TABLE, False, 200, 150)])
    monkeypatch.setattr(sweeper._plan, "overfull", lambda large, headed: [])
    sweeper.tick()
    if later:
        monkeypatch.setattr(sweeper, "_allowances", list)
    found: list[Reason] = []
    while (one := sweeper._next()) is not None:
        found.append(one[1].reason)
    assert (Reason.CAPACITY in found) is not later
