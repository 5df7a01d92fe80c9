"""Synchronous rounds equal one process that averages the same gradients, bit for bit, whatever dies."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import elasticps as eps
from elasticps.local.operator_client import OperatorClient
from elasticps.model.spec import ServerOptimizer
from elasticps.store import Table
from tests.e2e.oracle import wait_for

KEYS = np.arange(300, dtype=np.int64)
DIM = 5
SHAPE = (70, 9)
STEPS = 12


def gradients(worker: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
    """The push of a worker in a round: keys, rows and a tensor's gradient."""
    random = np.random.default_rng((worker, step))
    keys = random.choice(KEYS, 100, replace=False)
    return keys, random.normal(size=(100, DIM)).astype(np.float32), random.normal(size=SHAPE).astype(np.float32)


def one_process(
    optimizer: ServerOptimizer, workers: list[list[int]]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The same steps without a cluster. workers: who takes part in each round, in the order of their ids."""
    sparse = Table(eps.TableSpec("rows", DIM, optimizer), 1, 2)
    dense = Table(eps.TableSpec("tensor", SHAPE[1], optimizer), 2, 2)
    blocks = np.arange(SHAPE[0], dtype=np.int64)
    dense.put_if_absent(blocks, np.ones(SHAPE, np.float32))
    for step, present in enumerate(workers, start=1):
        pushed = [gradients(worker, step) for worker in present]
        total, mean = np.zeros((len(KEYS), DIM), np.float32), np.zeros(SHAPE, np.float32)
        for keys, rows, tensor in pushed:
            total[keys] += rows
            mean += tensor
        touched = np.unique(np.concatenate([keys for keys, _, _ in pushed]))
        values = optimizer.step_values(step)
        sparse.apply(touched, total[touched] / np.float32(len(present)), values)
        dense.apply(blocks, mean / np.float32(len(present)), values)
    rows, tensor = np.empty((len(KEYS), DIM), np.float32), np.empty(SHAPE, np.float32)
    sparse.gather(KEYS, rows)
    dense.gather(blocks, tensor)
    return rows, tensor


class Training:
    """Workers of one application, each in a thread. `at(step)` is called by the first worker at each step."""

    def __init__(self, url: str, app: str, optimizer: ServerOptimizer, count: int, at: Callable[[int], None]) -> None:
        self.url, self.app, self.optimizer, self.at = url, app, optimizer, at
        self.ready = threading.Barrier(count)
        self.errors: list[BaseException] = []
        self.ids: dict[int, int] = {}
        self.seen: dict[tuple[int, int], NDArray[np.float32]] = {}  # by worker and step
        self.threads = [threading.Thread(target=self._run, args=(i, count)) for i in range(count)]

    def _run(self, index: int, count: int) -> None:
        try:
            with eps.connect(self.url, worker=f"w{index}", app=self.app, consistency=eps.BSP(), timeout=100) as ps:
                rows, tensor = self.open(ps)
                ids = self._enter(ps, index)
                for step in range(1, STEPS + 1):
                    keys, grads, dense = gradients(ids.index(ps.worker.id), step)
                    ps.push({rows: (keys, grads), tensor: dense})
                    self.seen[index, step] = rows.pull(KEYS)
                    if index == 0:
                        self.at(step)
        except BaseException as error:
            self.errors.append(error)
            self.ready.abort()

    def _enter(self, ps: eps.Client, index: int) -> list[int]:
        """All enter the rounds before anybody pushes; the order of the average is that of the ids."""
        ps.table("rows", dim=DIM, optimizer=self.optimizer).pull(KEYS[:1])
        self.ids[index] = ps.worker.id
        self.ready.wait(100)
        return sorted(self.ids.values())

    def open(self, ps: eps.Client) -> tuple[eps.SparseTable, eps.DenseTensor]:
        rows = ps.table("rows", dim=DIM, optimizer=self.optimizer)
        return rows, ps.tensor("tensor", init=np.ones(SHAPE, np.float32), optimizer=self.optimizer)

    def run(self) -> None:
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(200)
        if self.errors:
            raise self.errors[0]


def final(training: Training) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    with eps.connect(training.url, worker="reader", app=training.app, timeout=30) as ps:
        rows, tensor = training.open(ps)
        return rows.pull(KEYS), tensor.pull()


OPTIMIZERS = [eps.SGD(lr=0.1), eps.SGD(lr=0.1, momentum=0.9), eps.Adam(lr=0.01)]


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["sgd", "momentum", "adam"])
def test_rounds_equal_training_in_one_process_bit_for_bit(
    cluster: eps.LocalCluster, optimizer: ServerOptimizer, count: int
) -> None:
    training = Training(cluster.url, f"{optimizer.kind}{id(optimizer)}-{count}", optimizer, count, lambda step: None)
    training.run()
    rows, tensor = final(training)
    expected_rows, expected_tensor = one_process(optimizer, [list(range(count))] * STEPS)
    assert np.array_equal(rows, expected_rows)
    assert np.array_equal(tensor, expected_tensor)
    for step in range(1, STEPS + 1):  # all see the same after each round
        assert all(np.array_equal(training.seen[i, step], training.seen[0, step]) for i in range(count))


def test_a_server_that_dies_in_a_round_changes_no_bit(eventually: Callable[[Callable[[], bool]], None]) -> None:
    optimizer = eps.Adam(lr=0.01)
    with eps.LocalCluster(servers=3, replicas=2) as cluster, OperatorClient(cluster.url) as operator:

        def at(step: int) -> None:
            if step in (4, 8):
                eventually(lambda: not (operator.view.chains < 0).any())  # or nobody has what both had
                cluster.kill("s0" if step == 4 else "s1")
                cluster.start_server("s0" if step == 4 else "s1")

        training = Training(cluster.url, "train", optimizer, 2, at)
        training.run()
        rows, tensor = final(training)
    expected_rows, expected_tensor = one_process(optimizer, [[0, 1]] * STEPS)
    assert np.array_equal(rows, expected_rows)
    assert np.array_equal(tensor, expected_tensor)


def test_workers_join_and_leave_between_rounds(cluster: eps.LocalCluster) -> None:
    def connect(name: str) -> eps.Client:
        return eps.connect(cluster.url, worker=name, app="elastic", consistency=eps.BSP(), timeout=20)

    def push(ps: eps.Client, value: float) -> eps.Step:
        table = ps.table("t", dim=1, optimizer=eps.Accumulate())
        return ps.push({table: (np.array([7]), np.full((1, 1), value, np.float32))})

    def value(ps: eps.Client) -> float:
        return float(ps.table("t", dim=1, optimizer=eps.Accumulate()).pull(np.array([7]))[0, 0])

    def together(*pushed: tuple[eps.Client, float]) -> None:
        threads = [threading.Thread(target=lambda p=ps, v=v: push(p, v).result()) for ps, v in pushed]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

    first = connect("a")
    together((first, 10.0))
    assert value(first) == 10.0
    second = connect("b")
    assert value(second) == 10.0  # it has entered, at round 1
    together((first, 2.0), (second, 4.0))
    assert value(first) == value(second) == 13.0
    first.close()
    together((second, 5.0))  # nobody waits for the one that left
    assert value(second) == 18.0
    second.close()


def test_a_timeout_of_a_round_names_the_missing_worker(cluster: eps.LocalCluster) -> None:
    options = {"app": "slow", "consistency": eps.BSP()}
    with (
        eps.connect(cluster.url, worker="quick", timeout=20, **options) as quick,  # type: ignore[arg-type]
        eps.connect(cluster.url, worker="dawdler", timeout=20, **options) as dawdler,  # type: ignore[arg-type]
    ):
        table = dawdler.table("t", dim=1, optimizer=eps.Accumulate())
        table.pull(np.array([1]))
        step = quick.push({})
        wait_for(lambda: quick.committed >= step.clock, lambda: "its share is not there", 60)
        with pytest.raises(eps.Timeout, match=r"waited too long for worker slow/dawdler"):
            step.result(2)
        dawdler.push({})
        threading.Thread(target=dawdler.flush).start()
        step.result(20)
