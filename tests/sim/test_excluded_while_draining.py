"""A server that is asked to go, and is left out of the view before it has drained."""

from __future__ import annotations

import pytest

from chaos.sim.cluster import STORE_HOST, Cluster
from coordinator.core.keys import DRAINS, SERVERS
from coordinator.membership import LEASE_S
from tests.sim.conftest import begun, wait_for


def test_a_draining_server_that_is_excluded_ends_and_does_not_register_again(three: Cluster) -> None:
    """Found in a run of `chaos run everything`: it was given ranges, and went with them."""
    cluster, incarnations = three, set[int]()

    def there(prefix: str) -> bool:
        return cluster.store.run(cluster.store.data.get(f"{prefix}s2")) is not None

    wait_for(cluster, cluster.whole)
    server = cluster.servers["s2"]
    cluster.drain("s2")
    cluster.clock.run(cluster.clock.now + 1.0, lambda: there(DRAINS))
    server.process.stall()
    wait_for(cluster, lambda: not there(SERVERS) and not there(DRAINS))  # its lease has run out, and it is left out
    server.process.thaw()

    def ended() -> bool:
        if server.now is not None:
            incarnations.add(server.now.me.incarnation)
        return server.left

    wait_for(cluster, ended)
    assert incarnations == {1}
    assert not there(SERVERS)
    wait_for(cluster, cluster.whole)


def test_servers_that_drain_together_without_time_leave_no_range_without_a_copy() -> None:
    """On a starved node two of five went when their time was over, each with the other's copy in mind."""
    with begun(5, 32) as cluster:
        cluster.drain_timeout_s = 0.005  # less than a leader takes to move anything
        wait_for(cluster, cluster.whole)
        for name in ("s3", "s4"):
            cluster.drain(name)
        wait_for(cluster, lambda: all(cluster.servers[name].left for name in ("s3", "s4")))
        assert not cluster.uncopied("")


@pytest.mark.parametrize("away_s", [1.0, LEASE_S + 2.0])
def test_a_server_that_was_asked_to_drain_and_cannot_say_so_keeps_its_copies(away_s: float) -> None:
    """Found in a story (seed 99), whose check took this for a loss. Without the store the server does not end, and when
    its own request is there it sees the request of the server that has ended, or that this one is gone."""
    with begun(5, 32) as cluster:
        cluster.drain_timeout_s = 0.005
        wait_for(cluster, cluster.whole)
        paths = (("s3", STORE_HOST), (STORE_HOST, "s3"))
        for source, target in paths:
            cluster.network.lose(source, target)
        cluster.drain("s3")
        cluster.drain("s4")
        wait_for(cluster, lambda: cluster.servers["s4"].left)
        until = cluster.clock.now + away_s
        wait_for(cluster, lambda: cluster.clock.now >= until)
        assert not cluster.servers["s3"].left
        for source, target in paths:
            cluster.network.heal(source, target)
        wait_for(cluster, lambda: cluster.servers["s3"].left)
        assert not cluster.uncopied("")


def test_a_draining_server_does_not_count_on_a_server_that_has_just_lost_its_power() -> None:
    """Found in a story (seed 5010 of "hurried", with servers that die): until its lease has run out a dead server is in
    the store, and in the view as long as no coordinator has seen that it is silent."""
    with begun(5, 32) as cluster:
        cluster.drain_timeout_s = 0.005
        wait_for(cluster, cluster.whole)
        cluster.leaders["c0"].stall()
        cluster.kill(cluster.servers["s4"].process, power=True)
        cluster.drain("s3")
        until = cluster.clock.now + 1.0
        wait_for(cluster, lambda: cluster.clock.now >= until)
        assert not cluster.servers["s3"].left
        cluster.leaders["c0"].thaw()
        wait_for(cluster, lambda: cluster.servers["s3"].left)
        assert not cluster.uncopied("")
