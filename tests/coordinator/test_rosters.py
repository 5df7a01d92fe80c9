"""Rosters that the leader plans."""

from __future__ import annotations

import string
from random import Random

from coordinator.core.planner import plan_roster
from coordinator.core.store import VALUE_MAX
from coordinator.core.view import WORKERS_MAX, Roster, WorkerInfo


def worker(number: int, name: str, incarnation: int = 1) -> WorkerInfo:
    return WorkerInfo(number, name, incarnation, "app")


def test_the_roster_follows_the_workers() -> None:
    assert plan_roster(None, []) is None
    first = plan_roster(None, [worker(2, "b"), worker(1, "a")])
    assert first is not None
    assert first.roster == Roster(1, (worker(1, "a"), worker(2, "b")))
    assert first.reason == "a, b joined"
    assert plan_roster(first.roster, [worker(1, "a"), worker(2, "b")]) is None
    second = plan_roster(first.roster, [worker(1, "a"), worker(3, "b", 2)])
    assert second is not None
    assert second.roster == Roster(2, (worker(1, "a"), worker(3, "b", 2)))
    assert second.reason == "b joined; b left"
    last = plan_roster(second.roster, [])
    assert last is not None
    assert last.roster == Roster(3, ())


def test_a_roster_that_the_store_would_not_take_is_never_planned() -> None:
    """Newcomers wait, who is listed stays, and what is waited for is said."""
    random = Random(1)
    many = [worker(i, "".join(random.choices(string.ascii_letters, k=60)), i) for i in range(1, WORKERS_MAX + 100)]
    first = plan_roster(None, many)
    assert first is not None
    assert 4096 < len(first.roster.workers) < WORKERS_MAX
    assert len(first.roster.encode()) <= VALUE_MAX
    assert "workers wait: the roster is full" in first.reason
    assert Roster.decode(first.roster.encode()) == first.roster
    assert plan_roster(first.roster, many) is None
    left = first.roster.workers[1:]
    again = plan_roster(first.roster, [one for one in many if one.id != first.roster.workers[0].id])
    assert again is not None
    assert set(again.roster.workers) > set(left)


def test_a_roster_of_sixty_thousand_workers_with_usual_names_fits() -> None:
    found = plan_roster(None, [worker(i, f"averyveryverylongworkername{i}", i) for i in range(1, 60_001)])
    assert found is not None
    assert len(found.roster.workers) == 60_000
