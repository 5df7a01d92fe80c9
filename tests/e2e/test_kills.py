"""Processes are killed and frozen while workers push: no acknowledged push is lost, none is applied twice.

The oracle of `tests.e2e.oracle`: whole numbers are pushed, so that afterwards every value must be the exact sum of the
acknowledged pushes, on every replica.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

import elasticps as eps
from coordinator.core.view import View
from elasticps.admin.audit import audit
from elasticps.local import LocalCluster
from tests.e2e.oracle import Ledger, Sums, Trainers, Watcher, check_sums, owners, wait_for

REPLICAS = 3
RANGES = 32
FILLING_ROWS = 100_000  # so that filling a replica takes a moment

_apps = itertools.count()


class Scene:
    """A cluster that training goes on in, and what a test does to it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.watcher = Watcher(cluster.url)
        self.trainers: Trainers | None = None
        self.app = ""

    @property
    def view(self) -> View:
        return self.watcher.view

    def train(self) -> Trainers:
        """Starts two workers, with tables of their own."""
        self.app = f"kills{next(_apps)}"
        self.trainers = Trainers(self.cluster.url, seeds=(1, 2), app=self.app)
        self.trainers.progress()
        return self.trainers

    def busiest(self, column: int) -> str:
        """The server that stands first (0), second, … in most chains."""
        counts = np.bincount(self.view.chains[:, column], minlength=len(self.view.servers))
        return self.view.servers[int(counts.argmax())].name

    def wait_until_without(self, *names: str) -> None:
        """Waits for a view in which these incarnations hold nothing."""
        gone = {(name, self.cluster.server(name).incarnation) for name in names}
        self.watcher.wait(lambda view: not gone & set(owners(view)), f"without {', '.join(names)}")

    def repaired(self) -> View:
        """Waits until every range has all its replicas again."""
        return self.watcher.wait(lambda view: not short(view) and not (view.joining >= 0).any(), "repaired")

    def verify(self, *more: Ledger) -> None:
        """Every value is the sum of the pushes, on every replica; each worker's clock is applied in every range."""
        trainers = self.trainers
        assert trainers is not None
        trainers.finish()
        self.repaired()
        ledgers = [trainer.ledger for trainer in trainers.all]
        assert all(ledger.begun == ledger.acknowledged for ledger in ledgers)
        ledgers += more
        with eps.connect(self.cluster.url, worker="reader", app=self.app) as ps:
            check_sums(Sums([ledger.seed for ledger in ledgers]).read(ps), ledgers)
        report = audit(self.cluster.url, 30.0)
        assert report.clean, report
        assert (report.compared, report.short) == (RANGES * self.view.replicas, 0)
        applied = {worker.id: worker.applied for worker in report.workers}
        for trainer in trainers.all:
            assert applied[trainer.ps.worker.id] == trainer.ps.clock

    def close(self) -> None:
        """Ends the training of one test."""
        if self.trainers is not None:
            self.trainers.close()


def short(view: View) -> bool:
    return bool((view.chains < 0).any())


@pytest.fixture(scope="module")
def shared() -> Iterator[Scene]:
    with LocalCluster("kills", servers=4, replicas=REPLICAS, coordinators=2, ranges=RANGES) as cluster:
        with eps.connect(cluster.url, worker="filler", app="filler") as ps:
            table = ps.table("heavy", dim=16, optimizer=eps.Accumulate())
            for keys in np.array_split(np.arange(FILLING_ROWS), 4):
                ps.push({table: (keys, np.ones((len(keys), 16), np.float32))})
        scene = Scene(cluster)
        yield scene
        scene.watcher.close()


@pytest.fixture
def scene(shared: Scene) -> Iterator[Scene]:
    yield shared
    shared.close()
    for server in shared.cluster.servers:
        if not server.running:
            shared.cluster.start_server(server.name)
    for name in ("c0", "c1"):
        if not running(shared.cluster, name):
            shared.cluster.start_coordinator(name)
    shared.repaired()


def running(cluster: LocalCluster, name: str) -> bool:
    return cluster._process(name).running


def leader(cluster: LocalCluster) -> str:
    """The coordinator that became leader last."""
    since = {}
    for name in ("c0", "c1"):
        lines = [line for line in cluster.log(name).splitlines() if "leads cluster" in line]
        since[name] = lines[-1].partition(" ")[0] if lines else ""
    return max(since, key=lambda name: since[name])


def test_the_oracle_accepts_unacknowledged_pushes_at_most_once() -> None:
    ledgers = [Ledger(1, begun=6, acknowledged=4), Ledger(2, begun=3, acknowledged=3)]
    sums = Sums([1, 2])
    acknowledged = sum((sums.of(1, n) for n in range(1, 5)), sums.values) + sum(sums.of(2, n) for n in range(1, 4))
    in_flight = sums.of(1, 5)
    half = np.arange(len(acknowledged)) % 2
    for found in (acknowledged, acknowledged + in_flight, acknowledged + half * in_flight):
        check_sums(found, ledgers)
    for wrong in (acknowledged - sums.of(2, 3), acknowledged + sums.of(1, 4), acknowledged + 2 * in_flight):
        with pytest.raises(AssertionError, match="differ from the pushes"):
            check_sums(wrong, ledgers)


@pytest.mark.parametrize("column", [0, 1, 2], ids=["head", "middle", "tail"])
def test_a_server_is_killed(scene: Scene, column: int) -> None:
    trainers = scene.train()
    victim = scene.busiest(column)
    scene.cluster.kill(victim)
    trainers.progress()
    scene.wait_until_without(victim)
    trainers.progress()
    scene.verify()


def test_two_servers_are_killed_at_once(scene: Scene) -> None:
    trainers = scene.train()
    victims = scene.busiest(0), scene.busiest(1)
    if victims[0] == victims[1]:
        victims = victims[0], scene.busiest(2)
    assert victims[0] != victims[1]
    for victim in victims:
        os.kill(scene.cluster.server(victim).pid, signal.SIGKILL)
    trainers.progress()
    scene.wait_until_without(*victims)
    scene.cluster.start_server(victims[0])
    trainers.progress()
    scene.verify()


def test_a_worker_is_killed_too(scene: Scene) -> None:
    trainers = scene.train()
    command = [sys.executable, "-m", "tests.e2e.oracle", scene.cluster.url, "3", scene.app]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            lines.append(line)
            if len(lines) == 30:
                scene.cluster.kill(scene.busiest(0))
            if len(lines) == 60:
                worker.kill()
    last = json.loads([line for line in lines if line.endswith("\n")][-1])
    assert last["begun"] >= 60
    trainers.progress()
    scene.verify(Ledger(3, last["begun"], last["acknowledged"]))


def test_the_leader_is_killed(scene: Scene) -> None:
    trainers = scene.train()
    first = leader(scene.cluster)
    scene.cluster.kill(first)
    trainers.progress()
    victim = scene.busiest(0)  # which its successor has to notice
    scene.cluster.kill(victim)
    scene.wait_until_without(victim)
    trainers.progress()
    assert leader(scene.cluster) != first
    scene.verify()


def test_the_leader_is_killed_in_the_middle_of_a_repair(scene: Scene) -> None:
    trainers = scene.train()
    first = leader(scene.cluster)
    victim = scene.busiest(0)
    pid = scene.cluster._process(first).pid
    filling = once_filling(scene, lambda view: os.kill(pid, signal.SIGKILL))
    scene.cluster.kill(victim)
    filling()
    wait_for(lambda: not running(scene.cluster, first), lambda: "the leader lives", 60.0)
    trainers.progress()
    scene.repaired()
    assert leader(scene.cluster) != first
    scene.verify()


def test_a_server_is_killed_while_it_is_filled(scene: Scene) -> None:
    trainers = scene.train()
    pids = {server.name: server.pid for server in scene.cluster.servers}
    killed: list[str] = []

    def kill(view: View) -> None:
        name = view.servers[int(view.joining[view.joining >= 0][0])].name
        killed.append(name)
        os.kill(pids[name], signal.SIGKILL)

    filling = once_filling(scene, kill)
    victim = scene.busiest(0)
    scene.cluster.kill(victim)
    filling()
    scene.wait_until_without(victim, *killed)
    assert killed[0] != victim
    scene.cluster.start_server(victim)
    trainers.progress()
    scene.verify()


def once_filling(scene: Scene, act: Callable[[View], None]) -> Callable[[], None]:
    """Calls `act` with the first view in which a replica is being filled; what is returned waits for that."""
    seen: list[View] = []

    def look(view: View) -> None:
        if not seen and (view.joining >= 0).any():
            seen.append(view)
            act(view)

    scene.watcher.on_view = look
    return lambda: wait_for(lambda: bool(seen), lambda: "nothing was filled", 100.0)


def test_a_frozen_server_is_replaced_and_comes_back_as_a_new_incarnation(scene: Scene) -> None:
    trainers = scene.train()
    victim = scene.busiest(0)
    before = scene.cluster.server(victim)
    frozen = time.monotonic()
    scene.cluster.pause(victim)
    trainers.progress()
    scene.wait_until_without(victim)
    scene.repaired()
    while time.monotonic() < frozen + 10:  # meanwhile its lease runs out too
        trainers.progress(steps=5)
    scene.cluster.resume(victim)
    trainers.progress(steps=50)  # the trainers check what they read: a zombie's answer would be stale
    wait_for(
        lambda: scene.cluster.server(victim).incarnation > before.incarnation, lambda: f"{victim} did not rejoin", 100.0
    )
    scene.watcher.wait(
        lambda view: view.index(victim) >= 0 and view.servers[view.index(victim)].incarnation > before.incarnation,
        f"{victim} listed again",
    )
    assert scene.cluster.server(victim).pid == before.pid
    scene.verify()


def test_a_server_dies_while_etcd_is_down(scene: Scene) -> None:
    trainers = scene.train()
    scene.cluster.kill("etcd")
    trainers.progress(steps=50)
    victim = scene.busiest(0)
    scene.cluster.kill(victim)  # nobody can say who heads its ranges now: they wait
    epoch = scene.view.epoch
    time.sleep(1.0)  # so that they do wait
    assert scene.view.epoch == epoch
    scene.cluster.start_etcd()
    scene.wait_until_without(victim)
    trainers.progress()
    scene.verify()
