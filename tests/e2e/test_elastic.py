"""Servers join and drain while workers push: nothing is lost, nothing fails, and the load ends up where it should.

The oracle of `tests.e2e.oracle`: every value must be the exact sum of the acknowledged pushes, on every replica.
"""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import View
from elasticps.admin.audit import audit
from elasticps.cli.status import look
from elasticps.local import LocalCluster
from elasticps.local.operator_client import OperatorClient, held
from elasticps.system import background
from tests.e2e.oracle import Sums, Trainers, check_sums, wait_for

RANGES = 64
REPLICAS = 2
FILLING_ROWS = 60_000  # so that a range takes a moment to move

_apps = itertools.count()


class Scene:
    """A cluster of three servers, and training in it."""

    def __init__(self, cluster: LocalCluster, operator: OperatorClient) -> None:
        self.cluster = cluster
        self.operator = operator
        self.app = f"elastic{next(_apps)}"
        self.trainers = Trainers(cluster.url, seeds=(1, 2), app=self.app)
        self.trainers.progress()

    def names(self) -> set[str]:
        return {server.name for server in self.operator.view.servers}

    def settled(self) -> View:
        """Waits until nothing moves any more."""
        wait_for(
            self.operator.settled,
            lambda: f"not settled at epoch {self.operator.view.epoch}: {self.operator.view.reason}",
            100.0,
            self.trainers.check,
        )
        return self.operator.view

    def until(self, condition: Callable[[View], bool]) -> View:
        """Waits for such a view: others may have seen it, and acted on it, before it comes here."""
        wait_for(
            lambda: condition(self.operator.view),
            lambda: f"not at epoch {self.operator.view.epoch}: {self.operator.view.reason}",
            100.0,
            self.trainers.check,
        )
        return self.operator.view

    def verify(self) -> None:
        """No operation has failed; every value is the sum of the pushes, on every replica."""
        self.trainers.progress(steps=5)
        self.trainers.finish()
        view = self.settled()
        ledgers = [trainer.ledger for trainer in self.trainers.all]
        assert all(ledger.begun == ledger.acknowledged for ledger in ledgers)
        with eps.connect(self.cluster.url, worker="reader", app=self.app) as ps:
            check_sums(Sums([ledger.seed for ledger in ledgers]).read(ps), ledgers)
        report = audit(self.cluster.url, 30.0)
        assert report.clean, report
        assert report.short == int((view.chains < 0).any(axis=1).sum())


@pytest.fixture(scope="module")
def shared() -> Iterator[LocalCluster]:
    with LocalCluster("elastic", servers=3, replicas=REPLICAS, ranges=RANGES) as cluster:
        with eps.connect(cluster.url, worker="filler", app="filler") as ps:
            table = ps.table("heavy", dim=16, optimizer=eps.Accumulate())
            for keys in np.array_split(np.arange(FILLING_ROWS), 4):
                ps.push({table: (keys, np.ones((len(keys), 16), np.float32))})
        yield cluster


@pytest.fixture
def scene(shared: LocalCluster) -> Iterator[Scene]:
    with OperatorClient(shared.url) as operator:
        scene = Scene(shared, operator)
        yield scene
        scene.trainers.close()
        shared.scale(3)


def test_three_servers_become_five_and_three_again(scene: Scene) -> None:
    grown = scene.cluster.scale(5)
    assert grown.servers == ("s0", "s1", "s2", "s3", "s4")
    scene.trainers.progress(steps=5)
    share = held(scene.until(lambda view: len(held(view)) == 5 and scene.operator.settled()))
    assert sum(share.values()) == RANGES * REPLICAS
    assert max(share.values()) <= 1.25 * RANGES * REPLICAS / 5
    assert min(share.values()) > 0
    assert scene.cluster.scale(3).servers == ("s0", "s1", "s2")
    scene.verify()


def test_two_servers_join_while_another_drains_and_a_third_dies(scene: Scene) -> None:
    cluster = scene.cluster
    drained = cluster.server("s2").pid
    work = [threading.Thread(target=cluster.start_server, args=(name,)) for name in ("s5", "s6")]
    for each in work:
        each.start()
    scene.operator.request_drain("s2")
    for each in work:
        each.join(120)
    cluster.kill("s1")
    wait_for(lambda: scene.names() == {"s0", "s5", "s6"}, lambda: scene.operator.view.reason, 100.0)
    wait_for(lambda: not _running(cluster, "s2"), lambda: f"s2 (pid {drained}) runs on", 60.0)
    scene.verify()


def _running(cluster: LocalCluster, name: str) -> bool:
    return any(server.running for server in cluster.servers if server.name == name)


def test_a_server_that_gets_sigterm_hands_everything_over_and_exits_0(scene: Scene) -> None:
    victim = max(scene.cluster.servers, key=lambda server: held(scene.operator.view).get(server.name, 0))
    process = scene.cluster._process(victim.name)
    os.kill(victim.pid, signal.SIGTERM)
    assert process.popen.wait(100) == 0
    view = scene.until(lambda view: view.index(victim.name) < 0)
    assert not (view.chains[:, 0] < 0).any()
    assert f"server {victim.name} (pid {victim.pid}) ended, as it was asked to" in scene.cluster.ended()
    scene.verify()


def test_a_server_of_twice_the_weight_gets_twice_the_ranges(scene: Scene) -> None:
    (new,) = scene.cluster.scale(4, weight=2.0).change.start
    fair = RANGES * REPLICAS * 2.0 / (3 + 2.0)
    # A newcomer may stop short of its share where more would move more than must (tests/coordinator/test_balance.py).
    view = scene.until(lambda view: new in held(view) and scene.operator.settled())
    assert 0.75 * fair <= held(view)[new] <= 1.25 * fair
    scene.verify()


def test_the_last_server_does_not_drain_and_fills_servers_that_join(scene: Scene) -> None:
    cluster = scene.cluster
    assert len(cluster.scale(1).servers) == 1
    (last,) = (server.name for server in scene.until(lambda view: len(view.servers) == 1).servers)
    scene.trainers.progress(steps=5)
    scene.until(lambda view: f"{RANGES} ranges have fewer than {REPLICAS} replicas" in view.reason)
    scene.operator.request_drain(last)
    scene.until(lambda view: f"{last} cannot be drained: it is the last server" in view.reason)
    scene.trainers.progress(steps=5)
    assert cluster.cancel_drain(last)
    outcome = cluster.scale(2)
    assert len(outcome.servers) == 2
    view = scene.until(lambda view: not (view.chains < 0).any())
    assert "fewer" not in view.reason
    scene.verify()


def test_a_server_in_no_view_ends_at_once_when_asked_to_drain() -> None:
    with LocalCluster(servers=2) as cluster:
        cluster.kill("c0")  # so that nobody lists it
        late = cluster.start_server("late")
        os.kill(late.pid, signal.SIGTERM)
        assert cluster._processes["late"].popen.wait(45) == 0  # before a drain would be over


@contextmanager
def without_time(folder: Path, servers: int, replicas: int) -> Iterator[LocalCluster]:
    """A cluster whose servers have half a second to drain."""
    settings = folder / "elasticps.toml"
    settings.write_text("[server]\ndrain-timeout = 0.5\n")
    surroundings = {"ELASTICPS_CONFIG": str(settings)}
    with LocalCluster(servers=servers, replicas=replicas, ranges=16, environment=surroundings) as cluster:
        yield cluster


def _stays(cluster: LocalCluster, name: str) -> bool:
    return "stays, though its time is over" in cluster.log(name)


def test_servers_that_drain_together_stay_until_another_has_their_shared_ranges(tmp_path: Path) -> None:
    with without_time(tmp_path, 3, 2) as cluster, eps.connect(cluster.url, worker="w0", timeout=100.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        keys = np.arange(1000)
        ps.push({table: (keys, np.ones((1000, 2), np.float32))}).result()
        cluster.pause("c0")  # so that nothing moves
        processes = [cluster._processes[name].popen for name in ("s1", "s2")]
        for process in processes:
            os.kill(process.pid, signal.SIGTERM)
        for name in ("s1", "s2"):
            wait_for(partial(_stays, cluster, name), partial(cluster.log, name), 100.0)
        found = background.run(look(cluster.url, 30.0))
        waits = {server["id"]: server["waits_for"] for server in found["servers"]}
        assert waits["s0"] == ""
        assert "no copy at a server that stays (s2 has copies, but drains or does not answer)" in waits["s1"]
        assert "no copy at a server that stays (s1 has copies, but drains or does not answer)" in waits["s2"]
        assert [process.poll() for process in processes] == [None, None]
        cluster.resume("c0")
        assert [process.wait(100) for process in processes] == [0, 0]
        assert (table.pull(keys) == -1.0).all()


def test_a_server_with_the_last_copy_stays_when_the_time_to_drain_is_over(tmp_path: Path) -> None:
    with without_time(tmp_path, 2, 1) as cluster, eps.connect(cluster.url, worker="w0", timeout=100.0) as ps:
        table = ps.table("t", dim=2, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
        keys = np.arange(1000)
        ps.push({table: (keys, np.ones((1000, 2), np.float32))}).result()
        cluster.pause("c0")  # so that nothing moves
        process = cluster._processes["s0"].popen
        os.kill(process.pid, signal.SIGTERM)
        wait_for(partial(_stays, cluster, "s0"), partial(cluster.log, "s0"), 100.0)
        assert process.poll() is None
        assert (table.pull(keys) == -1.0).all()
        cluster.resume("c0")
        assert process.wait(100) == 0  # what it has is elsewhere
        assert (table.pull(keys) == -1.0).all()
        cluster.pause("c0")
        process = cluster._processes["s1"].popen
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(100) == 0  # nobody is there for whom it could stay
        cluster.resume("c0")
