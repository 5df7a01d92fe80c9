"""A round closes without a worker whose step was committed, and which stands still: the step is pushed anew."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.client.client import Client
from elasticps.client.steps import Step
from elasticps.client.tables import SparseTable
from elasticps.model.optimizers import SGD, Accumulate
from elasticps.model.spec import BSP
from tests.sim.conftest import wait_for

FROZEN_S = 13.0
ONE = np.ones((1, 1), np.float32)


def left_out(
    cluster: Cluster, begin: Callable[[Client, SparseTable], Step], go_on: Callable[[Client, SparseTable], None]
) -> None:
    """w1 begins a step, which is committed, and goes on when a round has been closed without it."""
    training, begun = [True], list[Step]()

    def program(threads: Threads) -> None:
        name = threads.process.host
        with cluster.connect(threads, name, BSP(), 1, "app") as ps:
            table = ps.table("t", dim=1, optimizer=Accumulate())
            if name == "w0":
                while training:
                    threads.sleep(0.2)
                    ps.push({table: (np.array([0]), ONE)}).result()
                return
            ps.push({}).result()
            step = begin(ps, table)
            while not step.done():
                threads.sleep(0.001)
            begun.append(step)
            threads.sleep(1.0)
            go_on(ps, table)
            training.clear()

    cluster.start_worker("w0", program)
    worker = cluster.start_worker("w1", program)
    wait_for(cluster, lambda: bool(begun))
    worker.process.stall()
    cluster.clock.run(cluster.clock.now + FROZEN_S)
    assert len(cluster.counted) == 1
    worker.process.thaw()
    wait_for(cluster, lambda: not training, 60.0)


def test_a_step_left_out_of_its_round_keeps_the_gradients_of_its_push(cluster: Cluster) -> None:
    """Found in a review: it was committed, so the memory was the caller's again; it is copied in rounds."""
    gradient = np.ones(4, np.float32)
    found: list[list[float]] = []

    def begin(ps: Client, _: SparseTable) -> Step:
        tensor = ps.tensor("w", init=np.zeros(4, np.float32), optimizer=Accumulate())
        return ps.push({tensor: gradient}, copy=False)

    def go_on(ps: Client, _: SparseTable) -> None:
        gradient[:] = 100
        tensor = ps.tensor("w", init=np.zeros(4, np.float32), optimizer=Accumulate())
        ps.push({tensor: gradient}, copy=False).result()
        found.append(tensor.pull().tolist())

    left_out(cluster, begin, go_on)
    assert found == [[50.5] * 4]  # each in a round of two


def test_a_step_left_out_of_its_round_keeps_the_rows_of_tables_that_remain(cluster: Cluster) -> None:
    """Found in a review: the rows of the other one were lost."""
    found: list[list[float]] = []

    def begin(ps: Client, table: SparseTable) -> Step:
        other = ps.table("other", dim=1, optimizer=Accumulate())
        return ps.push({table: (np.array([7]), ONE), other: (np.array([7]), ONE)})

    def go_on(ps: Client, table: SparseTable) -> None:
        ps.drop_table("other")
        ps.push({table: (np.array([8]), ONE)}).result()
        found.append(table.pull(np.array([7, 8]))[:, 0].tolist())

    left_out(cluster, begin, go_on)
    assert found == [[0.5, 0.5]]


def test_a_step_left_out_of_its_round_keeps_its_learning_rate(cluster: Cluster) -> None:
    found: list[list[float]] = []

    def begin(ps: Client, _: SparseTable) -> Step:
        other = ps.table("trained", dim=1, optimizer=SGD(lr=1.0))
        return ps.push({other: (np.array([7]), ONE)})

    def go_on(ps: Client, _: SparseTable) -> None:
        with pytest.warns(UserWarning, match="from now on 100.0"):
            other = ps.table("trained", dim=1, optimizer=SGD(lr=100.0))
        found.append(other.pull(np.array([7]))[:, 0].tolist())

    left_out(cluster, begin, go_on)
    assert found == [[-0.5]]
