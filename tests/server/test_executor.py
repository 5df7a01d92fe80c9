"""The order in which effects are carried out, and what they do to policies."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

from elasticps.model.optimizers import SGD, Accumulate
from elasticps.model.policies import Capacity, MinCount, Probability
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import ChangedPolicies, CreatedTable, CreatedTables
from elasticps.server.fast.path import FastPath
from elasticps.server.roles.executor import Executor
from replication.chain import Member, Ranges
from replication.effects import Apply, Effects, Erase
from replication.messages import Operation, OperationKind

RANGES = 4


class First:
    """An effect during which another event happens."""


class Second:
    """An effect that belongs after the first one."""


def test_waiting_pushes_are_admitted_after_all_effects_of_nested_events() -> None:
    """A link that is full as a frame is queued there, for example: pushes that waited come behind the frame's rest."""
    executor = Executor(Member("a", 1), RANGES, 1 << 20, FastPath(RANGES, 1 << 20))
    replica, done = executor.replica, list[str]()

    def begins() -> Any:
        return [First(), Second()]

    def event() -> Effects:
        replica.admission.unsettled = True
        return []

    def go_on() -> Effects:
        done.append("go on")
        replica.admission.unsettled = False
        return []

    def first(effect: Any) -> None:
        done.append("first")
        executor.perform(event)

    executor.handlers |= {First: first, Second: lambda _: done.append("second")}
    with patch.object(replica, "go_on", go_on):
        executor.perform(begins)
    assert done == ["first", "second", "go on"]


def test_a_worker_that_opens_a_table_late_does_not_undo_its_policies() -> None:
    """Its CREATE has the policies that the registry had when it looked."""
    executor = Executor(Member("a", 1), RANGES, 1 << 20, FastPath(RANGES, 1 << 20))
    old = TableSpec("t", 2, SGD(0.1), admission=MinCount(3))
    new = old.with_policies(Probability(0.5), ())
    every = np.arange(RANGES)

    def apply(kind: OperationKind, payload: Any, ranges: Ranges) -> Effects:
        operation = Operation(kind, -1, 0, payload, 0)
        return [Apply(operation, ranges, np.ones(len(ranges), np.int64), None)]

    created = CreatedTables((CreatedTable(1, old.to_json()),))
    executor.perform(apply, OperationKind.CREATE, created, every[:3])
    executor.perform(apply, OperationKind.POLICY, ChangedPolicies(1, new.to_json()), every[:2])
    late = CreatedTables((CreatedTable(1, new.with_policies(None, ()).to_json()),))
    executor.perform(apply, OperationKind.CREATE, late, every)
    lifecycle = executor.store.tables[1].lifecycle
    assert lifecycle is not None
    assert [lifecycle.spec_of(r).admission for r in range(RANGES)] == [*[Probability(0.5)] * 2, MinCount(3), None]
    executor.perform(lambda: [Erase(every[:1])])
    executor.perform(apply, OperationKind.CREATE, late, every[:1])
    assert lifecycle.spec_of(0).admission is None


def test_a_policy_of_another_half_life_has_the_next_increment_hold_the_range_whole() -> None:
    """A row's older version may count more than the newer one then. A CREATE, which comes first, changes nothing."""
    counted = TableSpec("t", 2, Accumulate(), eviction=(Capacity(9, "most_used", "1h"),))
    faster = counted.with_policies(None, (Capacity(9, "most_used", "1m"),)).to_json()
    fewer = counted.with_policies(MinCount(2), (Capacity(5, "most_used", "1h"),)).to_json()
    executor = Executor(Member("a", 1), RANGES, 1 << 20, FastPath(RANGES, 1 << 20))

    def apply(kind: OperationKind, payload: object, *ranges: int) -> None:
        operation = Operation(kind, -1, 0, payload, 0)
        executor.perform(lambda: [Apply(operation, np.array(ranges), np.arange(len(ranges)), None)])

    apply(OperationKind.CREATE, CreatedTables((CreatedTable(3, counted.to_json()),)), 0, 1, 2, 3)
    table = executor.store.tables[3]
    executor.store.pass_cut(np.arange(RANGES), 5)
    apply(OperationKind.POLICY, ChangedPolicies(3, fewer), 0, 1)
    assert table.deletions.floors(np.arange(RANGES)).tolist() == [0, 0, 0, 0]
    apply(OperationKind.POLICY, ChangedPolicies(3, faster), 1, 2)
    assert table.deletions.floors(np.arange(RANGES)).tolist() == [0, 6, 6, 0]
    assert table.lifecycle is not None
    assert [table.lifecycle.spec_of(r).to_json() for r in range(RANGES)] == [fewer, faster, faster, counted.to_json()]
