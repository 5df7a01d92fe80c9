"""A stalled filling is given up and started elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.core.health import STALLED_S, TICK_S, Detector, Report
from coordinator.core.planner import Health, Members, plan
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import Member, unsafe_transition

RANGES = 16
CONFIG = ClusterConfig(RANGES, 2)


def infos(count: int) -> tuple[ServerInfo, ...]:
    return tuple(ServerInfo(f"s{i}", 1, "h:1") for i in range(count))


def after(view: View, count: int, health: Health) -> View:
    decision = plan(view, Members("c", infos(count)), CONFIG, health)
    if decision is None or decision.view is None:
        return view
    assert unsafe_transition(view.as_chains, decision.view.as_chains, health.level) == ""
    return decision.view


def filled_from(view: View) -> set[tuple[str, str]]:
    """(tail, joiner) of every filling."""
    names = [server.name for server in view.servers]
    return {
        (names[tail], names[joiner])
        for tail, joiner in zip(view.tails.tolist(), view.joining.tolist(), strict=True)
        if joiner >= 0
    }


def a_repair(count: int) -> View:
    """s0 holds all ranges, and the others are to be filled by it."""
    chains = np.stack([np.zeros(RANGES), np.full(RANGES, -1)], axis=1).astype(np.int32)
    nobody = np.full(RANGES, -1)
    view = View("c", 1, RANGES, 2, infos(count), chains, nobody, np.ones(RANGES, np.int64), "by hand")
    return after(view, count, Health())


def pair(a: int, b: int) -> frozenset[tuple[Member, Member]]:
    return frozenset({(infos(9)[a].member, infos(9)[b].member)})


@pytest.mark.parametrize("pairs", [pair(0, 1), pair(1, 0)])
def test_another_server_is_filled_instead_of_a_stalled_one(pairs: frozenset[tuple[Member, Member]]) -> None:
    view = a_repair(3)
    assert filled_from(view) == {("s0", "s1"), ("s0", "s2")}
    stalled = view.joining == view.index("s1")
    new = after(view, 3, Health(stalled=pairs))
    assert filled_from(new) == {("s0", "s2")}
    assert "s1 could not be filled: given up for now" in new.reason
    assert (new.since[~stalled] == view.since[~stalled]).all()  # those that get on are left alone
    for _ in range(9):
        new = after(new, 3, Health(stalled=pairs, level={r: int(new.since[r]) for r in filling(new)}))
        assert not filled_from(new) & {("s0", "s1"), ("s1", "s0")}
    assert (new.chains >= 0).all()


def filling(view: View) -> list[int]:
    found: list[int] = np.flatnonzero(view.joining >= 0).tolist()
    return found


def test_a_stalled_filling_without_another_server_is_retried_later() -> None:
    view = a_repair(2)
    assert filled_from(view) == {("s0", "s1")}
    new = after(view, 2, Health(stalled=pair(0, 1)))
    assert not filling(new)
    assert after(new, 2, Health(stalled=pair(0, 1))) is new
    assert filled_from(after(new, 2, Health())) == {("s0", "s1")}


def test_a_level_joiner_of_a_stalled_server_is_promoted() -> None:
    view = a_repair(2)
    done = filling(view)[0]
    new = after(view, 2, Health(stalled=pair(0, 1), level={done: int(view.since[done])}))
    assert not filling(new)
    assert [r for r in range(RANGES) if new.chains[r, 1] >= 0] == [done]


def test_a_move_to_a_stalled_server_is_given_up() -> None:
    chains = np.tile(np.array([0, 1], np.int32), (RANGES, 1))
    view = View(
        "c", 1, RANGES, 2, infos(2), chains, np.full(RANGES, -1), np.ones(RANGES, np.int64), "by hand"
    )  # fmt: skip
    moving = after(view, 3, Health())
    assert {joiner for _, joiner in filled_from(moving)} == {"s2"}
    stalled = Health(stalled=pair(0, 2) | pair(1, 2))
    given_up = after(moving, 3, stalled)
    assert not filling(given_up)
    assert after(given_up, 3, stalled) is given_up


def test_a_report_of_a_stalled_filling_is_remembered_for_a_while() -> None:
    a, b, now = *(info.member for info in infos(2)), 0.0
    detector = Detector()
    detector.watch({a: True, b: True}, now)
    report, fine = Report(1, stalled=frozenset({b})), Report(1)
    detector.heard(b, fine, now)
    detector.heard(a, fine, now)
    assert detector.heard(a, report, now)
    assert not detector.heard(a, report, now), "it is known"
    assert detector.health(None).stalled == {(a, b)}
    while now < STALLED_S - 1:
        now += TICK_S
        detector.heard(a, fine, now)
        detector.heard(b, fine, now)
        assert not detector.tick(now)
    assert detector.health(None).stalled
    changed = False
    while now < STALLED_S + 1:
        now += TICK_S
        detector.heard(a, fine, now)
        detector.heard(b, fine, now)
        changed |= detector.tick(now)
    assert changed
    assert replace(detector.health(None), epochs={}) == Health()
