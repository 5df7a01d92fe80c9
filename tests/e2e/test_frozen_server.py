"""One of two replicas is suspected though it lives, and the other dies: training continues with the first."""

from __future__ import annotations

import os
import signal

import pytest

import elasticps as eps
from coordinator.core.view import View
from elasticps.local import LocalCluster
from replication.chain import CopyState
from tests.e2e.oracle import Sums, Trainers, Watcher, audited, check_sums, wait_for

SEEDS = 1, 2
APP = "suspected"


def check_all_is_there(cluster: LocalCluster, trainers: Trainers) -> None:
    trainers.finish()
    ledgers = [trainer.ledger for trainer in trainers.all]
    assert all(ledger.begun == ledger.acknowledged for ledger in ledgers)
    with eps.connect(cluster.url, worker="reader", app=APP) as ps:
        check_sums(Sums(SEEDS).read(ps), ledgers)
    assert audited(cluster.url).clean


@pytest.mark.slow
@pytest.mark.ci
def test_a_server_left_out_while_frozen_takes_over_when_the_other_is_killed() -> None:
    with LocalCluster("suspected", servers=2, replicas=2, ranges=32) as cluster:
        watcher, trainers = Watcher(cluster.url), Trainers(cluster.url, SEEDS, app=APP)
        try:
            trainers.progress()
            before, dies = cluster.server("s1").incarnation, cluster.server("s0").pid
            killed: list[View] = []

            def kill(view: View) -> None:
                if view.copy_state.any() and not killed:
                    os.kill(dies, signal.SIGKILL)
                    killed.append(view)

            watcher.on_view = kill
            cluster.pause("s1")
            wait_for(lambda: bool(killed), lambda: "s1 was not left out", 20.0)
            cluster.resume("s1")
            trainers.progress()
            watcher.wait(
                lambda view: [s.name for s in view.servers] == ["s1"] and not view.copy_state.any(), "s1 goes on"
            )
            assert cluster.server("s1").incarnation == before, "with the copy that it had"
            cluster.start_server("s0")
            watcher.wait(lambda view: bool((view.chains >= 0).all()), "s0 is filled")
            check_all_is_there(cluster, trainers)
        finally:
            trainers.close()
            watcher.close()


@pytest.mark.slow
@pytest.mark.ci
def test_a_frozen_server_catches_up_with_the_copies_it_had() -> None:
    with LocalCluster("late", servers=2, replicas=2, ranges=32) as cluster:
        watcher, trainers = Watcher(cluster.url), Trainers(cluster.url, SEEDS, app=APP)
        try:
            trainers.progress()
            before = [(server.name, server.incarnation) for server in cluster.servers]
            frozen = cluster.server("s1").pid
            late: list[View] = []

            def thaw(view: View) -> None:
                if (view.copy_state == CopyState.LATE).any() and not late:
                    late.append(view)
                    os.kill(frozen, signal.SIGCONT)

            watcher.on_view = thaw
            cluster.pause("s1")
            wait_for(lambda: bool(late), lambda: "s0 does not go on alone", 20.0)
            watcher.wait(lambda view: view.epoch > late[0].epoch and bool((view.chains >= 0).all()), "s1 is back")
            assert [(server.name, server.incarnation) for server in cluster.servers] == before
            assert "have their second copy again, which gets what it lacks" in cluster.log("c0")
            check_all_is_there(cluster, trainers)
        finally:
            trainers.close()
            watcher.close()
