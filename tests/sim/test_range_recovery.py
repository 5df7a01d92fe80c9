"""All replicas of some ranges are lost: what comes back is what the checkpoint had, and what is missing is told, to the
step. Each step adds its own number to the rows that it pushes to, so that a sum says which steps are in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from chaos.sim.checkpointer import Checkpointer
from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.run import virtual
from chaos.sim.threads import Threads
from coordinator.core.keys import HELD_UP, RANGE_RECOVERY
from coordinator.core.view import ClusterConfig
from elasticps.client.losses import Loss
from elasticps.kernels.hashing import key_ranges, range_shift
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from tests.sim.conftest import wait_for

KEYS, WORKERS, RANGES = 64, 2, 8
SERVERS = ("s0", "s1", "s2", "s3")
PATIENCE_S = 90.0
RESTART_S = 1.0


class Pusher:
    """A worker that pushes until it is stopped. steps: the keys of each, by clock; base: the first one is above it."""

    def __init__(self, scene: Scene, column: int) -> None:
        self.column = column
        self.name = f"w{column}"
        self.steps: dict[int, NDArray[np.int64]] = {}
        self.committed = self.base = 0
        self.done = False
        self._scene = scene

    def run(self, threads: Threads) -> None:
        scene, random = self._scene, Random(f"{self._scene.seed} {self.name}")
        with scene.cluster.connect(threads, self.name, ASP(), 4, "app") as ps:
            table = scene.open(ps)
            self.base = ps.resume().clock
            while scene.on:
                keys = np.array(random.sample(range(KEYS), random.randint(1, KEYS)))
                grads = np.zeros((len(keys), WORKERS), np.float32)
                self.steps[ps.clock + 1] = keys
                grads[:, self.column] = ps.clock + 1 - self.base
                step = ps.push({table: (keys, grads)})
                if random.random() < 0.3:
                    step.result()
                self.committed = ps.committed
                threads.sleep(random.expovariate(1 / 0.02))
            ps.flush()
        self.done = True


class Scene:
    """A cluster of four servers, two workers that push, and whoever makes checkpoints. on: steps are begun."""

    def __init__(self, seed: int, cluster: Cluster, on_loss: str, budget: int | None) -> None:
        self.seed, self.cluster, self._policy = seed, cluster, (on_loss, budget)
        self.on = True
        self.random = Random(f"losses {seed}")
        self.checkpointer = Checkpointer(cluster, lambda: self.on)
        self.pushers = [Pusher(self, column) for column in range(WORKERS)]
        self.ranges = np.empty(KEYS, np.int32)
        for leader in ("c0", "c1"):
            cluster.start_leader(leader)
        for name in SERVERS:
            cluster.start_server(name)
        for pusher in self.pushers:
            cluster.start_worker(pusher.name, pusher.run)
        self.checkpointer.start()

    def open(self, ps: Any) -> Any:
        on_loss, budget = self._policy
        table = ps.table("t", dim=WORKERS, optimizer=Accumulate(), on_loss=on_loss, max_lost_steps=budget)
        key_ranges(np.arange(KEYS), table.salt, range_shift(RANGES), self.ranges)
        return table

    def wait(self, what: Callable[[], bool]) -> None:
        wait_for(self.cluster, what, PATIENCE_S)

    def well(self) -> bool:
        return self.cluster.settled() == ""

    def train(self) -> None:
        """Until there is a checkpoint, and a bit longer."""
        self.wait(lambda: bool(self.checkpointer.made) and self.well() and min(len(p.steps) for p in self.pushers) > 10)
        self.pass_s(self.random.uniform(0.05, 0.8))

    def pass_s(self, seconds: float) -> None:
        self.cluster.clock.run(self.cluster.clock.now + seconds)
        assert self.cluster.violation is None, self.cluster.violation

    @property
    def recovered(self) -> bool:
        """Whether any range has."""
        view = self.cluster.view
        return view is not None and bool(view.recovery_epoch.any())

    def holders(self) -> list[str]:
        """All who have some range."""
        view = self.cluster.view
        assert view is not None
        copies = view.as_chains.copies[self.random.randrange(RANGES)]
        return [view.servers[i].name for i in sorted({*copies.tolist()} - {-1})]

    def lose(self) -> dict[str, int]:
        """All who have some range are killed, perhaps a leader too; what workers knew to be committed then. They come
        back, empty, perhaps soon."""
        gone = self.holders()
        for name in gone:
            self.cluster.kill(self.cluster.servers[name].process, power=False)
            self.cluster.clock.after(self.random.choice((RESTART_S, 20.0)), self.cluster.start_server, name)
        if self.random.random() < 0.3:
            self.cluster.kill(self.cluster.leaders["c0"], power=False)
        return {pusher.name: pusher.committed for pusher in self.pushers}

    def get(self, key: str) -> Any:
        entry = self.cluster.store.run(self.cluster.store.data.get(key))
        return None if entry is None else json.loads(entry.value)

    def finish(self) -> list[Loss]:
        """Workers end; what there is is what the model says, from what was told. Returns that."""
        self.on = False
        self.wait(lambda: all(pusher.done for pusher in self.pushers) and self.well() and not self.get(RANGE_RECOVERY))
        found: list[tuple[NDArray[np.float32], list[Loss]]] = []

        def look(threads: Threads) -> None:
            with self.cluster.connect(threads, "auditor", ASP(), 1, "app") as ps:
                found.append((self.open(ps).pull(np.arange(KEYS)), ps.losses()))

        self.cluster.start_worker("auditor", look)
        self.wait(lambda: bool(found))
        ((rows, losses),) = found
        assert (rows == self.expected(losses)).all()
        return losses

    def expected(self, losses: list[Loss]) -> NDArray[np.float64]:
        """Of each key: all steps but those that are missing in its range."""
        rows = np.zeros((KEYS, WORKERS))
        for pusher in self.pushers:
            for clock, keys in pusher.steps.items():
                there = np.zeros(KEYS, np.bool_)
                there[keys] = True
                for loss in losses:
                    first, last = loss.missing.get(f"app/{pusher.name}", loss.missing.get(pusher.name, (0, -1)))
                    if first <= clock <= last:
                        there[np.isin(self.ranges, loss.ranges)] = False
                rows[there, pusher.column] += clock - pusher.base
        return rows

    def check(self, losses: list[Loss], known: dict[str, int]) -> None:
        """What is missing begins behind the checkpoint, and ends no earlier than what was known to be committed."""
        assert losses
        for loss in losses:
            workers = self.checkpointer.made[loss.cut].workers
            for pusher in self.pushers:
                name = next(name for name in workers if name.endswith(pusher.name))
                first, last = loss.missing.get(name, (workers[name].clock + 1, workers[name].clock))
                assert first == workers[name].clock + 1
                assert last >= known[pusher.name] or loss is not losses[0]


@contextmanager
def scene(seed: int, on_loss: str, budget: int | None = None) -> Iterator[Scene]:
    with virtual() as install:
        weather = Weather(latency_s=Random(seed).choice((0.0003, 0.001, 0.004)))
        cluster = Cluster(seed, weather, ClusterConfig(ranges=RANGES, replicas=2, min_servers=4), admin=True)
        install(cluster)
        yield Scene(seed, cluster, on_loss, budget)
        cluster.end()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_lost_ranges_come_back_by_themselves(seed: int) -> None:
    with scene(seed, "restore") as story:
        story.train()
        known = story.lose()
        story.wait(lambda: story.recovered and story.well())
        story.pass_s(0.5)
        if seed % 2:  # and again
            story.train()
            story.lose()
            story.wait(story.well)
        story.check(story.finish(), known)


@pytest.mark.parametrize("seed", range(1))
def test_lost_ranges_that_wait_come_back_when_a_person_accepts_the_loss(seed: int) -> None:
    with scene(seed, "wait") as story:
        story.train()
        known = story.lose()
        story.pass_s(15)
        assert not story.recovered
        reported: list[dict[str, Any]] = []
        story.checkpointer.have_brought_back(reported.append)
        story.wait(lambda: bool(reported) and story.well())
        losses = story.finish()
        story.check(losses, known)
        assert [tuple(one["ranges"]) for one in reported] == [loss.ranges for loss in losses]


@pytest.mark.parametrize("seed", range(1))
def test_a_loss_above_the_budget_waits_for_a_person(seed: int) -> None:
    with scene(seed, "restore", budget=0) as story:
        story.train()
        known = story.lose()
        story.wait(lambda: story.get(HELD_UP) is not None)
        assert "steps would be lost, table app/t allows 0" in story.get(HELD_UP)["reason"]
        assert not story.recovered
        reported: list[dict[str, Any]] = []
        story.checkpointer.have_brought_back(reported.append)
        story.wait(lambda: bool(reported) and story.well())
        story.wait(lambda: story.get(HELD_UP) is None)
        story.check(story.finish(), known)


@pytest.mark.parametrize(("seed", "on_loss"), [(0, "wait"), (1, "restore")])
def test_servers_that_were_only_frozen_bring_all_rows_back(seed: int, on_loss: str) -> None:
    """It may live, so nobody gives up what it has."""
    with scene(seed, on_loss) as story:
        story.train()
        frozen = [story.cluster.servers[name].process for name in story.holders()]
        for process in frozen:
            process.stall()
        story.pass_s(15)
        for process in frozen:
            process.thaw()
        story.wait(story.well)
        assert not story.recovered
        assert story.finish() == []
