"""The order in which effects are carried out."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from elasticps.server.fast.path import FastPath
from elasticps.server.roles.executor import Executor
from replication.chain import Member
from replication.effects import Effects

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
