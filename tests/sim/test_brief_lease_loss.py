"""A worker that loses its lease for a moment, and its place in the roster, while all its connections stay: it says once
on each of them whether it takes part."""

from __future__ import annotations

import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import SSP
from tests.sim.conftest import wait_for
from tests.sim.resting import KEYS, ONES, RestingPair

FROZEN_S = 13.0
SETTLED_S = 2.0


def lose_lease(cluster: Cluster, worker: Threads, frozen: bool) -> None:
    """It is out of the roster, and in it again. frozen: it stands still; else it is cut off from the store alone."""
    name = worker.process.host
    if frozen:
        worker.process.stall()
        cluster.clock.run(cluster.clock.now + FROZEN_S)
        assert len(cluster.counted) == 1
        worker.process.thaw()
    else:
        for source, target in (("store", name), (name, "store")):
            cluster.network.lose(source, target)
        wait_for(cluster, lambda: len(cluster.counted) == 1)
        for source, target in (("store", name), (name, "store")):
            cluster.network.heal(source, target)
    wait_for(cluster, lambda: len(cluster.counted) == 2)
    cluster.clock.run(cluster.clock.now + SETTLED_S)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_pausing_worker_holds_nobody_back_after_a_brief_lease_loss(cluster: Cluster, frozen: bool) -> None:
    """Found in a review: pulls of others waited for it until their time was over."""
    reported: list[str] = []
    waited_s: list[float] = []

    def pauses(threads: Threads) -> None:
        with cluster.connect(threads, "w1", SSP(staleness=0), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            for _ in ps.shards(4, 1):
                ps.push({table: (KEYS, ONES)}).result()
            reported.append("done")  # there are no more: others need not wait for it
            while not waited_s:
                threads.sleep(0.1)

    def goes_on(threads: Threads) -> None:
        while "done" not in reported:
            threads.sleep(0.01)
        with cluster.connect(threads, "w0", SSP(staleness=0), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            for _ in range(9):
                ps.push({table: (KEYS, ONES)}).result()
            table.pull(KEYS)
            reported.append("before")
            while "back" not in reported:
                threads.sleep(0.01)
            began = cluster.clock.now
            table.pull(KEYS)
            waited_s.append(cluster.clock.now - began)

    worker = cluster.start_worker("w1", pauses)
    cluster.start_worker("w0", goes_on)
    wait_for(cluster, lambda: "before" in reported)
    lose_lease(cluster, worker, frozen)
    reported.append("back")
    wait_for(cluster, lambda: bool(waited_s))
    assert waited_s[0] < 1.0


@pytest.mark.parametrize("frozen", [False, True])
def test_a_resting_worker_holds_others_back_after_a_brief_lease_loss(cluster: Cluster, frozen: bool) -> None:
    """Found in a review: it had joined and pushed nothing, so nobody waited for it."""
    pair = RestingPair(cluster, lambda _: "back" in pair.reported, rests_on="asks")
    worker = cluster.start_worker("w1", pair.rests)
    cluster.start_worker("w0", pair.reads)
    wait_for(cluster, lambda: {"joined", "w0 is there"} <= set(pair.reported))
    lose_lease(cluster, worker, frozen)
    pair.reported.append("back")
    pair.check()
