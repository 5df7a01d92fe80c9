"""What the simulator has found, each as the shortest story that shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.small_limits import turned
from chaos.sim.threads import Threads
from elasticps.client.registry import Registry
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP, SSP
from elasticps.server.roles import snapshots
from tests.sim.conftest import wait_for
from tests.sim.resting import RestingPair, knows


def test_a_worker_finds_its_ranges_when_the_only_server_it_knows_has_come_back_without_them(cluster: Cluster) -> None:
    pulled: list[float] = []

    def program(threads: Threads) -> None:
        ps = cluster.connect(threads, "w0", ASP(), 1, "app")
        table = ps.table("t", dim=1, optimizer=Accumulate())
        ps.push({table: (np.arange(9), np.ones((9, 1), np.float32))})
        while not pulled or cluster.clock.now < 4.0:
            pulled.append(float(table.pull(np.arange(9)).sum()))
            threads.sleep(0.3)
        pulled.append(float("inf"))
        ps.close()

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: bool(pulled))
    cluster.kill(cluster.servers["s0"].process, power=False)
    wait_for(cluster, lambda: [s.name for s in view.servers] == ["s1"] if (view := cluster.view) else False)
    cluster.clock.run(cluster.clock.now + 0.5)  # the worker has heard of it
    cluster.start_server("s0")
    wait_for(cluster, cluster.whole)
    cluster.kill(cluster.servers["s1"].process, power=False)
    cluster.clock.run(cluster.clock.now + 0.1)
    cluster.start_server("s1")
    wait_for(cluster, lambda: pulled[-1] == float("inf"))
    assert set(pulled[:-1]) == {9.0}


@pytest.mark.parametrize("heal", [False, True])
def test_no_step_is_lost_when_a_link_fails_one_way_and_the_server_in_the_view_dies(
    cluster: Cluster, heal: bool
) -> None:
    steps, over, rows = [0], [False], list[float]()

    def program(threads: Threads) -> None:
        with cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            while not over[0]:
                ps.push({table: (np.arange(9), np.ones((9, 1), np.float32))}).result()
                steps[0] += 1
                threads.sleep(0.02)
            rows.extend(table.pull(np.arange(9))[:, 0].tolist())

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: steps[0] > 3)
    cluster.network.lose("s0", "s1")
    wait_for(cluster, lambda: cluster.view is not None and bool((cluster.view.chains < 0).any()))
    cluster.kill(cluster.servers["s0"].process, power=True)
    before = steps[0]
    wait_for(cluster, lambda: steps[0] > before + 3)
    if heal:
        cluster.network.heal("s0", "s1")
        cluster.start_server("s0")
        wait_for(cluster, cluster.whole)
    over[0] = True
    wait_for(cluster, lambda: bool(rows))
    assert rows == [float(steps[0])] * 9


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("tight", [False, True])
def test_the_size_of_a_snapshot_piece_is_at_most_half_of_its_limit(small: bool, tight: bool) -> None:
    """One of 1,012 bytes, where pieces had 1,024 and at most 984, was cut again and again (seed 3001409)."""
    with turned(small, tight, short=False, grows=False):
        assert snapshots.PIECE_BYTES <= snapshots.MOST_BYTES // 2


def test_a_resting_worker_holds_back_reads_at_a_server_that_joined_later(cluster: Cluster) -> None:
    """It has joined and pushed nothing, and asks nobody: it did not know the new tail, nor that one it (seed 3001639).
    After a second pulls there went on without it."""
    pair = RestingPair(cluster, lambda ps: knows(ps, "s2"), pause_s=1.5)
    cluster.start_worker("w1", pair.rests)
    cluster.start_worker("w0", pair.reads)
    wait_for(cluster, lambda: "joined" in pair.reported)
    cluster.start_server("s2")
    pair.check()


def test_a_resting_worker_that_connects_with_an_old_view_holds_back_reads_at_a_new_server(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review. Servers tell who is connected when a view changes; it asked nobody, and never knew."""
    pair = RestingPair(cluster, lambda ps: knows(ps, "s2"), pause_s=2.5, opens_late=True)
    register = Registry.register

    def slowly(self: Registry, name: str, *rest: Any) -> Any:
        if name == "w1":
            pair.reported.append("has read the view")
            while "all serve s2" not in pair.reported:
                self.runtime.sleep(0.001)
        return register(self, name, *rest)

    monkeypatch.setattr(Registry, "register", slowly)
    cluster.start_worker("w0", pair.reads)
    cluster.start_worker("w1", pair.rests)
    wait_for(cluster, lambda: {"has read the view", "w0 is there"} <= set(pair.reported))
    cluster.start_server("s2")
    wait_for(cluster, lambda: cluster.view is not None and len(cluster.view.servers) == 3 and cluster.whole())
    pair.reported.append("all serve s2")
    pair.check()


def test_a_late_worker_starts_at_the_clock_of_a_slow_worker_that_has_connected_again(cluster: Cluster) -> None:
    """Found in a review. It started where the fast one was, and its pulls waited for the slow one for minutes."""
    clocks = {"w0": 0, "w1": 0}
    training, started = [True], list[int]()

    def trains(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, ASP(), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            while training:
                ps.push({table: (np.arange(9), np.ones((9, 1), np.float32))}).result()
                clocks[name] = ps.clock
                threads.sleep(0.01 if name == "w0" else 1.0)

    def comes(threads: Threads) -> None:
        with cluster.connect(threads, "w2", SSP(staleness=1), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            at = ps.resume().clock
            slow = clocks["w1"]
            table.pull(np.arange(9))
            started.extend((at, slow))

    for name in clocks:
        cluster.start_worker(name, trains)
    wait_for(cluster, lambda: clocks["w0"] > 100 and clocks["w1"] > 1)
    for sock in [s for s in cluster.network.sockets if s.process.host == "w1"]:
        cluster.network.reset(sock)
    cluster.clock.run(cluster.clock.now + 2.0)
    cluster.start_worker("w2", comes)
    wait_for(cluster, lambda: bool(started))
    training.clear()
    assert started[0] <= started[1]
