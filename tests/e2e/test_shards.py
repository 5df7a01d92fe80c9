"""Samples in shards while workers and servers come and die: each is trained, none twice beyond what is allowed."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

import elasticps as eps
from tests.e2e.conftest import Connect
from tests.e2e.oracle import Watcher, wait_for
from tests.e2e.worker_process import Child, child, counts, ones

SAMPLES, SIZE = 600, 5


class Trainer(threading.Thread):
    """Trains shards until all are done. `slow_s`: for each."""

    def __init__(self, ps: eps.Client, *, samples: int = SAMPLES, epochs: int = 1, slow_s: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.ps, self.slow_s = ps, slow_s
        self.trained: list[eps.Shard] = []
        self.error: BaseException | None = None
        self._cut = samples, SIZE, epochs
        self.start()

    def run(self) -> None:
        try:
            table = counts(self.ps)
            for shard in self.ps.shards(*self._cut, shuffle_seed=5):
                self.trained.append(shard)
                self.ps.push({table: ones(shard.indices)})
                time.sleep(self.slow_s)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self.join(120)
        assert not self.is_alive(), f"it hangs after {len(self.trained)} shards"
        if self.error is not None:
            raise self.error


def trained(ps: eps.Client, samples: int = SAMPLES) -> np.ndarray:
    """How often each sample was trained."""
    return counts(ps).pull(np.arange(samples))[:, 0]


@pytest.mark.parametrize("consistency", [eps.ASP(), eps.SSP(staleness=1), eps.BSP()], ids=lambda c: type(c).__name__)
def test_workers_share_the_samples(connect: Connect, consistency: eps.ASP) -> None:
    trainers = [
        Trainer(connect(name, consistency=consistency), samples=103, epochs=3, slow_s=slow_s)
        for name, slow_s in (("a", 0.0), ("b", 0.005), ("c", 0.01))
    ]
    for trainer in trainers:
        trainer.end()
    everything = [(s.epoch, s.index) for trainer in trainers for s in trainer.trained]
    assert sorted(everything) == [(epoch, index) for epoch in range(3) for index in range(21)]
    if not isinstance(consistency, eps.BSP):  # whose rounds average
        assert set(trained(trainers[0].ps, 103).tolist()) == {3.0}
    for trainer in trainers:  # nothing is left to do
        assert list(trainer.ps.shards(103, SIZE, 3, shuffle_seed=5)) == []


def test_orders_are_the_samples_own_without_a_seed(connect: Connect) -> None:
    ps = connect()
    found = []
    for shard in ps.shards(10, 4, epochs=2, name="plain"):
        found.append((shard.epoch, shard.indices.tolist()))
        ps.push({})
    assert found == [(e, list(range(a, min(a + 4, 10)))) for e in (0, 1) for a in (0, 4, 8)]


def test_a_step_in_parts_trains_a_shard_when_its_last_part_does(connect: Connect) -> None:
    first = connect("a")
    for at, shard in enumerate(first.shards(40, 5, shuffle_seed=5)):
        step = first.step()
        step.push({counts(first): ones(shard.indices[:2])})
        step.push({counts(first): ones(shard.indices[2:])})
        if at == 4:
            break  # the last part is missing: this step is none
        step.commit()
    first._dispatcher.close()  # it dies
    first.close()
    second = connect("b")
    trainer = Trainer(second, samples=40)
    trainer.end()
    assert len(trainer.trained) == 4
    times = trained(second, 40)
    assert set(np.flatnonzero(times == 2).tolist()) <= set(shard.indices.tolist())
    assert times.min() == 1


def test_skipped_and_returned_shards_are_trained_later(connect: Connect) -> None:
    first, second = connect("a"), connect("b")
    shards = first.shards(40, 5, shuffle_seed=5)
    passed = [next(shards) for _ in range(3)]  # the last one of them is the next step's
    first.push({counts(first): ones(passed[-1].indices)})
    shards.close()
    assert list(shards) == []
    last = next(second.shards(40, 5, shuffle_seed=5))
    second.push({counts(second): ones(last.indices)})
    second.close()  # which gives back what it asked for beforehand
    third = connect("c")
    trainer = Trainer(third, samples=40)
    trainer.end()
    assert len(trainer.trained) == 6
    assert set(trained(third, 40).tolist()) == {1.0}


def test_a_shard_set_with_other_sizes_under_the_same_name_is_refused(connect: Connect) -> None:
    ps = connect()
    next(ps.shards(10, 2))
    with pytest.raises(eps.SpecError, match="size 3 instead of 2"):
        next(ps.shards(10, 3))
    with pytest.raises(eps.InputError, match="num_samples must be a whole number above 0"):
        ps.shards(0, 3)
    assert len(list(drain(connect("other", app="elsewhere"), 10, 3))) == 4  # another application's are its own


def drain(ps: eps.Client, samples: int, size: int) -> Iterator[eps.Shard]:
    for shard in ps.shards(samples, size):
        yield shard
        ps.push({})


@pytest.mark.parametrize("consistency", [eps.SSP(staleness=0), eps.BSP()], ids=["ssp", "bsp"])
def test_a_worker_waiting_for_the_last_shards_delays_no_others(connect: Connect, consistency: eps.BSP) -> None:
    quick, slow = connect("quick", consistency=consistency), connect("slow", consistency=consistency)
    shards = slow.shards(10, SIZE, shuffle_seed=5)
    held = next(shards)  # and does not train it yet
    trainer = Trainer(quick, samples=10)
    wait_for(lambda: quick.committed > 0, lambda: "it trains nothing", 60)
    assert trainer.is_alive()
    table = counts(slow)
    for _ in range(5):  # these pulls would wait for a worker that does nothing
        slow.push({table: ones(held.indices)})
        table.pull(held.indices)
    assert trainer.is_alive()  # it cannot know that the shard is done
    shards.close()
    trainer.end()
    assert len(trainer.trained) == 1


def acknowledged(victim: Child) -> tuple[set[int], set[int]]:
    """The samples of steps that a lost worker knew to be committed, and those of the others."""
    steps = [line for line in victim.lines if "indices" in line]
    committed = steps[-1]["committed"]
    sure = {i for line in steps if line["clock"] <= committed for i in line["indices"]}
    return sure, {i for line in steps if line["clock"] > committed for i in line["indices"]}


def check(times: np.ndarray, victim: Child) -> None:
    sure, unknown = acknowledged(victim)
    assert times.min() >= 1.0, f"not trained: {np.flatnonzero(times < 1)}"
    assert set(times[sorted(sure)].tolist()) <= {1.0}
    twice = set(np.flatnonzero(times > 1).tolist())
    assert twice <= unknown, f"trained again: {sorted(twice - unknown)}"
    assert times.max() <= 2.0


def test_a_worker_is_killed_another_comes_and_a_server_dies() -> None:
    with eps.LocalCluster(servers=3, replicas=2) as cluster:
        clients = [eps.connect(cluster.url, worker=f"w{i}", app="train", timeout=60) for i in range(3)]
        with child("shards", cluster.url, "train", "victim", SAMPLES, SIZE, 0.01) as victim:
            for _ in range(3):
                victim.hear()
            trainers = [Trainer(clients[i], slow_s=0.05) for i in (0, 1)]
            for _ in range(8):
                victim.hear()
            victim.process.send_signal(signal.SIGKILL)
            list(victim.rest())
        trainers.append(Trainer(clients[2], slow_s=0.02))
        wait_for(lambda: len(trainers[2].trained) > 5, lambda: "the late one gets nothing", 60)
        cluster.kill("s0")
        for trainer in trainers:
            trainer.end()
        check(trained(clients[0]), victim)
        for ps in clients:
            ps.close()


def test_a_frozen_worker_does_not_train_shards_that_others_took_over(
    cluster: eps.LocalCluster, connect: Connect
) -> None:
    ps = connect("w0")
    with child("shards", cluster.url, ps.app, "frozen", SAMPLES, SIZE, 0.01) as victim:
        for _ in range(10):
            victim.hear()
        victim.process.send_signal(signal.SIGSTOP)
        trainer = Trainer(ps)
        trainer.end()  # it has waited for the lease of the frozen one to run out
        victim.process.send_signal(signal.SIGCONT)
        list(victim.rest())
        victim.process.wait(60)
    ps.push({}).result()
    check(trained(ps), victim)


def test_a_restarted_worker_continues_its_own_shards(cluster: eps.LocalCluster, connect: Connect) -> None:
    app = connect("reader").app
    with child("shards", cluster.url, app, "w", SAMPLES, SIZE, 0.03) as victim:
        for _ in range(12):
            victim.hear()
        victim.process.send_signal(signal.SIGKILL)
        list(victim.rest())
    ps = connect("w")
    trainer = Trainer(ps)
    trainer.end()
    assert trainer.trained
    check(trained(ps), victim)


def test_under_rounds_a_lost_workers_shards_are_trained_too(cluster: eps.LocalCluster, connect: Connect) -> None:
    ps = connect("w0", consistency=eps.BSP())
    with child("shards", cluster.url, ps.app, "mortal", SAMPLES, SIZE, 0.002, consistency="bsp") as victim:
        victim.hear()
        trainer = Trainer(ps)
        for _ in range(10):
            victim.hear()
        victim.process.send_signal(signal.SIGKILL)
        list(victim.rest())
        trainer.end()
    assert trained(ps).min() > 0  # the average of those who were in the round


def test_home_state_moves_with_its_range() -> None:
    """The second server is filled in the middle of training, and the first one dies then."""
    with eps.LocalCluster(servers=1, replicas=2, ranges=16) as cluster:
        ps = eps.connect(cluster.url, worker="w", app="train", timeout=60)
        table = counts(ps)
        shards = ps.shards(200, 5, shuffle_seed=1)
        seen: list[eps.Shard] = []

        def train(count: int) -> None:
            for _, shard in zip(range(count), shards, strict=False):
                seen.append(shard)
                ps.push({table: ones(shard.indices)})

        train(7)
        cluster.start_server("s1")
        watcher = Watcher(cluster.url)
        watcher.wait(lambda view: view.replicas == 2 and not (view.chains < 0).any(), "filled")
        watcher.close()
        train(7)
        cluster.kill("s0")
        train(100)
        ps.flush()
        assert set(table.pull(np.arange(200))[:, 0].tolist()) == {1.0}
        ps.close()
