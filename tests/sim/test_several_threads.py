"""Threads of one worker that use its client at the same time. Found in a review, each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP, BSP
from tests.sim.conftest import wait_for

STEPS = 20
THREADS = 3
ONE = np.ones((1, 1), np.float32)


def test_threads_that_push_in_rounds_take_turns(cluster: Cluster) -> None:
    """Two found the round closed and began a step each: the first was never said to be done, and the worker ended."""
    rows: list[float] = []

    def program(threads: Threads) -> None:
        threads._preempted = 0.4
        with cluster.connect(threads, "w0", BSP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())

            def trains(key: int) -> Callable[[], None]:
                def train() -> None:
                    for _ in range(STEPS):
                        ps.push({table: (np.array([key]), ONE)})

                return train

            for one in [threads.spawn(f"t{key}", trains(key)) for key in range(THREADS)]:
                threads.join(one, 300)
            ps.flush()
            rows.extend(table.pull(np.arange(THREADS))[:, 0].tolist())

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: bool(rows), 200.0)
    assert rows == [STEPS] * THREADS


def test_a_thread_pushes_while_another_thread_waits_for_shards(cluster: Cluster) -> None:
    """The worker paused with a step outstanding, and could not go on behind it."""
    training, held = [True], list[int]()
    pushed, found = list[int](), list[float]()

    def slow(threads: Threads) -> None:
        with cluster.connect(threads, "w1", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            for _ in ps.shards(1, 1):
                held.append(1)
                threads.sleep(5.0)
                ps.push({table: (np.array([100]), ONE)})

    def program(threads: Threads) -> None:
        while not held:
            threads.sleep(0.01)
        with cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())

            def pushes() -> None:
                while training:
                    ps.push({table: (np.array([0]), ONE)})
                    pushed.append(ps.clock)
                    threads.sleep(0.002)

            other = threads.spawn("pushes", pushes)
            for _ in ps.shards(1, 1):
                raise AssertionError("the other worker has the only one")
            training.clear()
            threads.join(other, 100)
            ps.flush()
            found.extend(table.pull(np.array([0, 100]))[:, 0].tolist())

    cluster.start_worker("w1", slow)
    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: bool(found), 60.0)
    assert len(pushed) > 100
    assert found == [len(pushed), 1]
