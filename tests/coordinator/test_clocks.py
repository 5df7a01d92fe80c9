"""The median of clocks: one that is wrong changes nothing, whichever it is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.core.clocks import MOST_SECONDS, UNKNOWN, ClusterTime, ServerClocks, median
from coordinator.core.view import ClusterConfig
from coordinator.membership import create_cluster
from replication.chain import Member
from tests.coordinator.support import until
from tests.coordinator.test_repair import Cluster, cluster, leading

NOW, DAYS_S = 1_700_000_000.0, 5 * 86_400.0
SERVERS = [Member(f"s{i}", 1) for i in range(5)]


def heard(*skews: float, wall_s: float = NOW) -> ServerClocks:
    """Clocks of servers that are so far ahead of a right one, as a leader knows them whose clock shows `wall_s`."""
    clocks = ServerClocks()
    for member, skew in zip(SERVERS, skews, strict=False):
        clocks.heard(member, NOW + skew, wall_s)
    return clocks


@given(right=st.lists(st.floats(-1, 1), min_size=2, max_size=5), wrong=st.floats(-1e9, 1e9))
def test_with_three_clocks_or_more_one_wrong_clock_changes_nothing(right: list[float], wrong: float) -> None:
    assert min(right) <= median([*right, wrong]) <= max(right)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=9))
def test_at_least_half_of_the_clocks_are_no_later_than_the_median(clocks: list[float]) -> None:
    found = median(clocks)
    assert 2 * sum(clock <= found for clock in clocks) > len(clocks)
    assert 2 * sum(clock >= found for clock in clocks) >= len(clocks)


@pytest.mark.parametrize("skew_s", [DAYS_S, -DAYS_S])
def test_the_wrong_clock_of_a_leader_or_of_a_server_is_not_cluster_time(skew_s: float) -> None:
    assert heard(0, skew_s, 0).time(NOW, (), False) == ClusterTime(int(NOW), int(NOW))
    wall_s = NOW + skew_s
    assert heard(0, 0, wall_s=wall_s).time(wall_s, (), False) == ClusterTime(int(wall_s), int(NOW))


def test_of_two_clocks_the_later_one_counts() -> None:
    assert heard(DAYS_S).time(NOW, (), False).median == NOW + DAYS_S
    assert heard(-DAYS_S).time(NOW, (), False).median == NOW


def test_while_servers_have_yet_to_report_two_clocks_say_nothing() -> None:
    """The first server that reports may be the one whose clock is wrong."""
    assert heard(DAYS_S).time(NOW, (), True) == UNKNOWN
    assert heard().time(NOW, (), True) == UNKNOWN
    assert heard(DAYS_S, 0).time(NOW, (), True).median == NOW


def test_a_server_that_is_gone_or_forgotten_does_not_count() -> None:
    clocks = heard(DAYS_S, DAYS_S, 0)
    assert clocks.time(NOW, (), False).median == NOW + DAYS_S
    assert clocks.time(NOW, SERVERS[:1], False).median == NOW
    clocks.watch(SERVERS[2:])
    assert clocks.time(NOW, (), False).median == NOW


def test_an_older_server_that_does_not_tell_its_time_does_not_count() -> None:
    clocks = heard(DAYS_S)
    clocks.heard(SERVERS[1], 0, NOW)
    assert clocks.time(NOW, (), False).median == NOW + DAYS_S


def test_a_newer_report_takes_the_place_of_the_one_before() -> None:
    clocks = heard(DAYS_S, 0, 0)
    assert clocks.differing(()) == {SERVERS[0]: DAYS_S}
    clocks.heard(SERVERS[0], NOW + 60, NOW)
    assert not clocks.differing(())


def test_clocks_that_differ_are_named() -> None:
    assert heard(0, -90, 20, 90).differing(()) == {SERVERS[1]: -90, SERVERS[3]: 90}
    assert heard(0, 0, wall_s=NOW + DAYS_S).differing(()) == {None: DAYS_S}
    assert heard(0, -90).differing(SERVERS) == {}


def test_a_time_that_no_message_has_room_for_becomes_the_nearest_one() -> None:
    assert ServerClocks().time(1e18, (), False) == (MOST_SECONDS, MOST_SECONDS)
    assert ServerClocks().time(-5, (), False) == (1, 1)


async def test_a_leader_tells_servers_the_median_and_names_the_wrong_clock(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster("a", "b", "c") as it:
        servers = it.rack.servers
        for name, skew_s in (("a", 0.0), ("b", DAYS_S), ("c", 0.0)):
            servers[name].skew_s = skew_s
        await until(lambda: "a clock differs from the others" in caplog.text)
        await until(lambda: all(server.time != UNKNOWN for server in servers.values()))
        assert all(abs(server.time.median - server.time.own) < DAYS_S / 2 for server in servers.values())
        assert "server b" in caplog.text
        servers["b"].skew_s = 0.0
        await until(lambda: "a clock agrees with the others again" in caplog.text)


async def test_a_leader_says_no_time_before_the_servers_of_its_first_view_have_reported() -> None:
    """The server that registers first may be the one that is wrong, and makes tables as soon as there is a view."""
    it = Cluster()
    await create_cluster(it.memory, ClusterConfig(ranges=8, replicas=2, min_servers=3))
    servers = it.rack.servers
    it.rack.skews = {"a": 0.0, "b": DAYS_S, "c": 0.0}
    async with leading(it.faulty, it.rack, ttl_s=60):
        await it.rack.start("b")
        await until(lambda: servers["b"].beats > 3)
        assert servers["b"].time == UNKNOWN
        await it.rack.start("a", "c")
        await until(lambda: all(server.view is not None for server in servers.values()))
        assert all(abs(server.time.median - server.time.own) < DAYS_S / 2 for server in servers.values())
        assert all(server.time != UNKNOWN for server in servers.values())
