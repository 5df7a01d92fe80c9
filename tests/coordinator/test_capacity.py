"""Servers are filled as far as they have memory; repairs use the room that moves keep free."""

from __future__ import annotations

import numpy as np

from coordinator.core.health import Detector, Memory, Report
from coordinator.core.planner import Health, Members, plan
from coordinator.core.repair import Capacity
from coordinator.core.view import ClusterConfig, ServerInfo, View
from replication.chain import Member

CONFIG = ClusterConfig(ranges=32, replicas=2, min_servers=4)
SERVERS = tuple(ServerInfo(name, 1, "h:1") for name in "abcd")
A, B, C, D = (server.member for server in SERVERS)


def first() -> View:
    decision = plan(None, Members("demo", SERVERS), CONFIG)
    assert decision is not None
    assert decision.view is not None
    return decision.view


def run(
    view: View,
    servers: tuple[ServerInfo, ...],
    capacity: dict[Member, Capacity],
    gone: dict[Member, str],
    draining: frozenset[Member] = frozenset(),
) -> tuple[View, str]:
    """Until nothing more happens; a range that is filled takes one place."""  # fmt: skip
    left = dict(capacity)
    for _ in range(200):
        level = {r: int(view.since[r]) for r in np.flatnonzero(view.joining >= 0).tolist()}
        decision = plan(view, Members("demo", servers, draining), CONFIG, Health(gone, level, capacity=left))
        if decision is None or decision.view is None:
            return view, "" if decision is None else decision.reason
        for r in np.flatnonzero(decision.view.joining >= 0).tolist():
            joiner = decision.view.servers[decision.view.joining[r]].member
            if view.as_chains.joiner_of(r) != joiner and joiner in left:
                left[joiner] = Capacity(left[joiner].repairs - 1, left[joiner].moves - 1)
                assert left[joiner].repairs >= 0
        view = decision.view
    raise AssertionError(view.reason)


def held(view: View, member: Member) -> int:
    return int((view.chains == view.as_chains.index(member)).any(axis=1).sum())


def test_a_repair_stops_where_memory_ends_and_the_reason_names_it() -> None:
    view = first()
    capacity = {A: Capacity(2, -3), B: Capacity(2, -3), C: Capacity(2, -3)}
    after, reason = run(view, SERVERS, capacity, {D: "killed"})
    short = int((after.chains < 0).any(axis=1).sum())
    assert short == held(view, D) - 6
    assert f"no memory at a, b, c: {short} ranges wait for a replica; add servers" in reason
    # With a newcomer they find their place, and nothing waits any more.
    newcomer = ServerInfo("e", 1, "h:1")
    capacity = dict.fromkeys((A, B, C), Capacity(0, -5))
    after, reason = run(after, (*SERVERS, newcomer), capacity, {D: "killed"})
    assert not (after.chains < 0).any()
    assert "no memory" not in reason


def test_a_drain_keeps_room_for_repairs() -> None:
    view = first()
    capacity = {A: Capacity(9, 2), B: Capacity(9, 2), C: Capacity(9, 2)}
    after, reason = run(view, SERVERS, capacity, {}, frozenset({D}))
    assert held(after, D) == held(view, D) - 6
    assert f"no memory to spare at a, b, c: {held(after, D)} ranges stay at d; add servers" in reason


def test_a_full_newcomer_does_not_keep_others_from_getting_their_share() -> None:
    view = first()
    small, large = ServerInfo("e", 1, "h:1"), ServerInfo("f", 1, "h:1")
    after, _ = run(view, (*SERVERS, small, large), {small.member: Capacity(3, 0)}, {})
    assert held(after, large.member) > 32 * 2 // 6 // 2
    assert after.index("e") >= 0
    assert held(after, small.member) == 0


def test_capacity_follows_from_reports_and_its_change_wakes_the_planner() -> None:
    view, detector = first(), Detector()
    detector.watch(dict.fromkeys((A, B, C, D), True), 0.0)
    for member in (A, B, C, D):
        assert detector.heard(member, Report(1, nbytes=1600, memory=Memory(3000, 4000, 5000)), 0.1)
    size = 4 * 1600 / (2 * 32)
    assert detector.health(view).capacity[A] == Capacity(int(2000 / size), int(1000 / size))
    assert not detector.heard(A, Report(1, nbytes=1600, memory=Memory(3001, 4000, 5000)), 0.2)
    assert detector.heard(A, Report(1, nbytes=1600, memory=Memory(4950, 4000, 5000)), 0.3)
    assert detector.health(view).capacity[A].repairs == 0
    assert detector.heard(B, Report(1, nbytes=1600), 0.4)
    assert B not in detector.health(view).capacity
