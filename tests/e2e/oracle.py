"""Workers whose every push is known by its number, so that what the servers must hold can be computed.

Step `c` of a worker adds small whole numbers, drawn by (seed, c), to some shared rows, to a tensor, and 1 to a row of
its own. Sums of whole numbers are exact, so afterwards every value is the sum of the acknowledged pushes; each one that
was begun and not acknowledged may be in it, in each range by itself, once.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from coordinator.connect import open_store
from coordinator.core.view import View
from coordinator.membership import ViewFollower
from elasticps.admin.audit import AuditReport, audit
from elasticps.system import background

KEYS = np.arange(400, dtype=np.int64)
DIM = 4
TOUCHED = 40
SHAPE = (30, 5)
OWN_KEYS = 1_000_000  # plus the worker's seed
PAUSE_S = 0.004  # the cores are shared with servers and other tests


@dataclass(frozen=True)
class Part:
    """The update of one step: `rows` float32 [TOUCHED, DIM] for `keys`, `dense` float32 of SHAPE for the tensor."""

    keys: NDArray[np.int64]
    rows: NDArray[np.float32]
    dense: NDArray[np.float32]


def part(seed: int, number: int) -> Part:
    """The update that worker `seed` pushes in step `number` (from 1)."""
    random = np.random.default_rng((seed, number))
    keys = random.choice(KEYS, TOUCHED, replace=False)
    rows = random.integers(-3, 4, (TOUCHED, DIM)).astype(np.float32)
    return Part(keys, rows, random.integers(-3, 4, SHAPE).astype(np.float32))


@dataclass(frozen=True)
class Ledger:
    """The progress of a worker: steps begun, and `acknowledged` ones, the first of them that it knows to be
    committed."""

    seed: int
    begun: int
    acknowledged: int


class Sums:
    """Everything that pushes change, as one vector: `rows` [keys, DIM], `own` [workers], `dense` [SHAPE]."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = list(seeds)
        self.values = np.zeros(len(KEYS) * DIM + len(seeds) + int(np.prod(SHAPE)))

    def of(self, seed: int, number: int) -> NDArray[np.float64]:
        """The update of one step as a vector."""
        step = part(seed, number)
        rows = np.zeros((len(KEYS), DIM))
        rows[step.keys] = step.rows
        own = np.array([1.0 if each == seed else 0.0 for each in self._seeds])
        return np.concatenate([rows.ravel(), own, step.dense.ravel()])

    def read(self, ps: eps.Client) -> NDArray[np.float64]:
        """The content of the servers as a vector."""
        table, tensor = open_tables(ps)
        own = table.pull(np.array([OWN_KEYS + seed for seed in self._seeds]))
        assert (own == own[:, :1]).all()
        return np.concatenate([table.pull(KEYS).ravel(), own[:, 0], tensor.pull().ravel()]).astype(np.float64)


def check_sums(found: NDArray[np.float64], ledgers: Sequence[Ledger]) -> None:
    """Fails unless every value is the sum of the acknowledged pushes and some of the unacknowledged ones."""
    sums = Sums([ledger.seed for ledger in ledgers])
    expected = sums.values
    for ledger in ledgers:
        for number in range(1, ledger.acknowledged + 1):
            expected += sums.of(ledger.seed, number)
    unknown = [sums.of(each.seed, n) for each in ledgers for n in range(each.acknowledged + 1, each.begun + 1)]
    assert len(unknown) <= 10, "too many unacknowledged steps to try every subset"
    right = np.zeros(len(found), bool)
    for chosen in itertools.product((0.0, 1.0), repeat=len(unknown)):
        right |= found == expected + sum((on * each for on, each in zip(chosen, unknown, strict=True)), np.zeros(1))
    wrong = np.flatnonzero(~right)
    assert not len(wrong), (
        f"{len(wrong)} of {len(found)} values differ from the pushes, the first at {wrong[0]}: "
        f"found {found[wrong[0]]}, acknowledged {expected[wrong[0]]}; {ledgers}"
    )


def open_tables(ps: eps.Client) -> tuple[eps.SparseTable, eps.DenseTensor]:
    """The tables of the oracle, in the client's app. The tensor's pushes are filtered: bfloat16 has such numbers."""
    table = ps.table("counted", dim=DIM, optimizer=eps.Accumulate())
    zeros = np.zeros(SHAPE, np.float32)
    return table, ps.tensor("summed", init=zeros, optimizer=eps.Accumulate(), push=[eps.BFloat16()])


class Trainer:
    """One worker that pushes until stopped, and checks now and then that it reads its own writes."""

    def __init__(self, url: str, seed: int, app: str, timeout: float = 60.0) -> None:
        self.seed = seed
        self.ps = eps.connect(url, worker=f"{app}-w{seed}", app=app, timeout=timeout)
        self.begun = 0
        self.acknowledged = 0
        self._table, self._tensor = open_tables(self.ps)
        self._waiting: deque[eps.Step] = deque()

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.seed, self.begun, self.acknowledged)

    def step(self) -> None:
        """Pushes once; waits for the oldest step where four are outstanding."""
        now = part(self.seed, self.begun + 1)
        own = np.array([OWN_KEYS + self.seed])
        keys = np.concatenate([now.keys, own])
        rows = np.concatenate([now.rows, np.ones((1, DIM), np.float32)])
        self.begun += 1
        self._waiting.append(self.ps.push({self._table: (keys, rows), self._tensor: now.dense}))
        if len(self._waiting) >= 4:
            self.confirm()
        if self.begun % 8 == 0:
            mine = self._table.pull(own)
            assert (mine == self.begun).all(), f"read {mine} after {self.begun} steps: not what was written"

    def confirm(self) -> None:
        """Waits for the oldest outstanding step."""
        self._waiting.popleft().result()
        self.acknowledged += 1

    def finish(self) -> None:
        """Waits for all outstanding steps."""
        while self._waiting:
            self.confirm()


class Trainers:
    """Trainers in threads of their own; waiting for them raises their first error."""

    def __init__(self, url: str, seeds: Sequence[int], app: str) -> None:
        self.all = [Trainer(url, seed, app) for seed in seeds]
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.all]
        for thread in self._threads:
            thread.start()

    def _run(self, trainer: Trainer) -> None:
        try:
            while not self._stop.is_set():
                trainer.step()
                time.sleep(PAUSE_S)
            trainer.finish()
        except BaseException as error:
            self._errors.append(error)

    def check(self) -> None:
        """Raises what has gone wrong."""
        if self._errors:
            raise self._errors[0]

    def progress(self, steps: int = 20, timeout_s: float = 100.0) -> None:
        """Waits until every trainer has begun, and got acknowledged, so many more steps."""
        goals = [trainer.begun + steps for trainer in self.all]
        wait_for(
            lambda: all(trainer.acknowledged >= goal for trainer, goal in zip(self.all, goals, strict=True)),
            lambda: f"no progress: {[each.ledger for each in self.all]}, wanted {goals}",
            timeout_s,
            self.check,
        )

    def finish(self) -> None:
        """Stops pushing and waits until everything is acknowledged."""
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        self.check()
        assert not any(thread.is_alive() for thread in self._threads), "a trainer hangs"

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(90)
        for trainer in self.all:
            trainer.ps.close()


class Watcher:
    """The newest view of a cluster, and a call for each, from the control loop."""

    def __init__(self, url: str) -> None:
        self.on_view: Callable[[View], None] = lambda view: None
        self._store = background.run(open_store(url, timeout_s=20.0))
        self._follower = ViewFollower(self._store)
        background.run(self._follower.start())
        self._follower.subscribe(lambda view: self.on_view(view))

    @property
    def view(self) -> View:
        assert self._follower.view is not None
        return self._follower.view

    def wait(self, condition: Callable[[View], bool], what: str, timeout_s: float = 100.0) -> View:
        """The first view from now on that satisfies a condition."""
        wait_for(
            lambda: condition(self.view),
            lambda: f"{what}: not so at epoch {self.view.epoch}: {self.view.reason}",
            timeout_s,
        )
        return self.view

    def close(self) -> None:
        background.run(self._follower.close())
        background.run(self._store.close())


def owners(view: View) -> set[tuple[str, int]]:
    """(name, incarnation) of the servers that hold something, or are being filled."""
    used = set(np.unique(view.chains).tolist()) | set(np.unique(view.joining).tolist())
    return {(view.servers[i].name, view.servers[i].incarnation) for i in used - {-1}}


def wait_for(
    condition: Callable[[], bool],
    story: Callable[[], str],
    timeout_s: float,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Waits until a condition holds; fails with a story if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        check()
        assert time.monotonic() < deadline, story()
        time.sleep(0.01)


def audited(url: str) -> AuditReport:
    """An audit to which every range shows all its replicas: a server that was starved of processors may have been left
    out for a while, and what has one replica is compared with nothing."""
    reports: list[AuditReport] = []

    def judged() -> bool:
        reports.append(report := audit(url, 30.0))
        return report.wrong or not (report.short or report.lost or report.unjudged)

    wait_for(judged, lambda: str(reports[-1]), 100.0)
    return reports[-1]


def main() -> None:
    """A trainer as a process: `python -m tests.e2e.oracle URL SEED APP`. Tells its ledger before each step."""
    url, seed, app = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    trainer = Trainer(url, seed, app)
    while True:
        sys.stdout.write(json.dumps({"begun": trainer.begun + 1, "acknowledged": trainer.acknowledged}) + "\n")
        sys.stdout.flush()
        trainer.step()
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main()
