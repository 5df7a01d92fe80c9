"""Servers that drain: they hand over what they hold, and leave when others have it."""

from __future__ import annotations

import numpy as np

from coordinator.core.planner import Health, Members
from coordinator.core.repair import Limits
from coordinator.core.view import ClusterConfig
from tests.coordinator.checked_plans import LIMITS, first, members, server, settled, step


def test_a_draining_server_hands_over_every_range_and_leaves_the_view() -> None:
    config = ClusterConfig(64, 2)
    servers = [server(i) for i in range(4)]
    of = members(servers, servers[1])
    view = first(servers, config)
    held = int((view.chains == 1).sum())
    view = step(view, of, config)
    assert view.reason.startswith(f"s1 drains: {held} ranges left")
    while view.index("s1") >= 0:
        assert "s1 drains: " in view.reason
        assert view.chains.min() >= 0, "never fewer replicas than before"
        new = step(view, of, config)
        assert new is not view
        view = new
    assert view.reason.endswith("s1 drained: it may stop")
    assert view.chains.min() >= 0
    assert step(view, of, config) is view
    back = step(view, members(servers), config)
    assert back.index("s1") >= 0, "a request taken back makes it a newcomer"


def test_chains_get_shorter_if_too_few_servers_are_left() -> None:
    config = ClusterConfig(64, 2)
    servers = [server(0), server(1)]
    view = step(first(servers, config), members(servers, servers[0]), config)
    assert [s.name for s in view.servers] == ["s1"]
    assert view.chains.tolist() == [[0, -1]] * 64
    assert view.reason == "s0 drained: it may stop; waiting: 64 ranges have fewer than 2 replicas, with 1 server left"


def test_a_short_chain_of_a_draining_server_is_filled_first() -> None:
    config = ClusterConfig(64, 2)
    servers = [server(0), server(1)]
    view = first(servers[:1], config)
    of = members(servers, servers[0])
    view = step(view, of, config)
    assert (view.joining >= 0).sum() == LIMITS.per_server
    view = settled(view, of, config)
    assert [s.name for s in view.servers] == ["s1"]


def test_the_last_server_cannot_be_drained_and_the_reason_says_so() -> None:
    config = ClusterConfig(16, 2)
    servers = [server(0), server(1), server(2)]
    view = settled(first(servers, config), members(servers, *servers), config)
    assert len(view.servers) == 1
    last = view.servers[0]
    assert view.chains.tolist() == [[0, -1]] * 16
    assert f"{last.name} cannot be drained: it is the last server" in view.reason
    relieved = settled(view, members([last, server(3)], last), config)
    assert [s.name for s in relieved.servers] == ["s3"]


def test_a_draining_server_gets_no_more_replicas() -> None:
    config = ClusterConfig(64, 2)
    servers = [server(i) for i in range(4)]
    view = step(first(servers[:3], config), members(servers), config)
    assert (view.joining == 3).any()
    given_up = step(view, members(servers, servers[3]), config, health=Health())
    assert not (given_up.joining == 3).any() if given_up.index("s3") >= 0 else True
    assert given_up.index("s3") < 0
    assert np.array_equal(given_up.chains, view.chains)


def test_repairs_come_before_drains_and_drains_before_balance() -> None:
    config = ClusterConfig(64, 2)
    servers = [server(i) for i in range(5)]
    gone = Health(gone={servers[0].member: "killed"})
    limits = Limits(8, 4)
    view = step(first(servers[:4], config), members(servers[:4], servers[1]), config, limits, gone)
    view = step(view, members(servers, servers[1]), config, limits, gone)
    while bool((view.chains < 0).any()):
        joining = view.joining >= 0
        if int((view.chains[~joining] < 0).sum()):
            assert not (view.leaving >= 0).any(), "repair first"
        level = {r: int(view.since[r]) for r in np.flatnonzero(joining).tolist()}
        view = step(view, members(servers, servers[1]), config, limits, Health(gone.gone, level))
    assert view.index("s1") >= 0
    at = view.leaving[view.leaving >= 0]
    assert at.size
    assert (at == view.index("s1")).all(), "then drains"


def test_ranges_held_only_by_draining_servers_move_before_repairs() -> None:
    """Two that drain together may have little time: what both hold is as badly off as what nobody holds."""
    config, limits = ClusterConfig(64, 2), Limits(8, 4)
    servers = [server(i) for i in range(6)]
    gone = Health(gone={servers[0].member: "killed"})
    of = members(servers, servers[1], servers[2])
    view = step(first(servers, config), of, config, limits, gone)
    begun = 0
    while True:
        view = step(view, of, config, limits, Health(gone.gone, dict(enumerate(view.since.tolist()))))
        only = np.isin(view.chains, [view.index("s1"), view.index("s2"), -1]).all(axis=1)
        full = (view.chains >= 0).all(axis=1)
        filling = view.joining >= 0
        begun += int((filling & only & full).sum())
        if not (only & ~filling).any():
            break
        assert f"{only.sum()} ranges have replicas only at servers that drain" in view.reason
        assert (~only & ~full & ~filling).any(), "repairs wait"
        assert not (filling & ~only).any()
    assert begun, "a range with two replicas, both of which go"
    assert (~only & ~full).any(), "repairs go on"


def test_if_all_servers_drain_one_whose_process_may_stay_keeps_the_ranges() -> None:
    config = ClusterConfig(16, 2)
    servers = [server(0), server(1), server(2)]
    requested = frozenset(s.member for s in servers)
    for stays in servers:
        of = Members("c", tuple(servers), requested, leaving=requested - {stays.member})
        view = settled(first(servers, config), of, config)
        assert [s.name for s in view.servers] == [stays.name]
