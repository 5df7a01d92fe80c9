"""The order in which effects are carried out, and what they do to policies."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

from elasticps.model.optimizers import SGD
from elasticps.model.policies import MinCount, Probability
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
