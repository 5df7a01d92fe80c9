"""Work whose outcome can be checked, beside failures and moves: workers count their pushes by key.

Rows of the table "counted" add up ones. Each worker knows how often it pushed each key, so that afterwards every value
must be the sum of the workers' counts: none lost, none applied twice.
"""

from __future__ import annotations

import bisect
import gc
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

import elasticps as eps
from benchmarks.runner import Progress
from benchmarks.speed import fill, keys_of
from benchmarks.workers import BusyWorker, Process
from elasticps.admin.audit import audit
from elasticps.errors import Error
from elasticps.local import LocalCluster

COUNTED = 4096  # keys of the table whose values are counts of pushes
DIM, STORED_DIM = 8, 64
STORED = "heavy"
AUDIT_TIMEOUT_S = 300.0


def prepare(cluster: LocalCluster, rows: int, progress: Progress) -> None:
    """Makes the tables, and fills that of stored rows with `rows` of 64 float32 with Adagrad."""
    with eps.connect(cluster.url, worker="filler", timeout=120.0) as ps:
        _counted(ps)
        if rows:
            progress(f"filling {rows:,} rows of {STORED_DIM} floats")
            fill(ps, _stored(ps), rows)


@dataclass(frozen=True)
class Verdict:
    """What is true at the end.

    updates  of counted rows, acknowledged
    wrong    keys whose value is not the exact number of the updates acknowledged: some lost, or applied twice
    clean    whether the audit found every replica equal and every promise kept
    """

    updates: int
    wrong: int
    clean: bool

    @property
    def text(self) -> str:
        replicas = "all replicas are equal" if self.clean else "the audit found differences"
        return f"{self.updates:,} updates acknowledged, {self.wrong} values are not their exact sum; {replicas}"


def judge(cluster: LocalCluster, counts: Sequence[Sequence[int]], progress: Progress) -> Verdict:
    """Compares every value with what the workers have counted, and every replica with the others."""
    progress("comparing every value with the pushes, and every replica with the others")
    expected = np.sum(counts, axis=0)
    with eps.connect(cluster.url, worker="reader", timeout=120.0) as ps:
        found = _counted(ps).pull(np.arange(COUNTED))
    wrong = int((found != expected[:, None]).any(axis=1).sum())
    return Verdict(int(expected.sum()), wrong, audit(cluster.operator_url, AUDIT_TIMEOUT_S).clean)


def start_workers(stack: ExitStack, cluster: LocalCluster, count: int, **work: object) -> list[Process]:
    """Starts workers, until the stack ends. work: parameters of `CountingWorker`."""
    workers = []
    for seed in range(count):
        job = {"url": cluster.url, "name": f"worker{seed}", "seed": seed, **work}
        workers.append(stack.enter_context(Process("counting:CountingWorker", **job)))
        workers[-1].ask("begin")
    return workers


def steps_of(worker: Process) -> int:
    """How many steps a worker has done. Error if an operation has failed."""
    answer = worker.ask("progress")
    if answer["failed"]:
        raise Error(f"an operation of the benchmark failed: {answer['failed'][0]}")
    return int(answer["steps"])


class CountingWorker(BusyWorker):
    """Pushes, and before each push pulls if `pulls`, `rate` times a second, or without pause if it is 0. Each operation
    is waited for, and each push ticks every range: so it is committed only when all ranges are served.

    rows   stored: `batch` of them are in each pull and push; 0: only counted ones are pushed
    """

    def __init__(
        self, *, url: str, name: str, seed: int, rows: int, batch: int, rate: float = 0.0, pulls: bool = False
    ) -> None:
        super().__init__()
        self._ps = eps.connect(url, worker=name, timeout=120.0)
        self._table = _counted(self._ps)
        self._stored = _stored(self._ps) if rows else None
        self._keys, self._batch = keys_of(rows), batch
        self._pause_s = 1 / rate if rate else 0.0
        self._pulls: list[tuple[float, float]] | None = [] if pulls else None
        self._pushes: list[tuple[float, float]] = []
        self._commits: list[float] = []
        self._failed: list[str] = []
        self._random = np.random.default_rng(seed)
        self._counts = np.zeros(COUNTED, np.int64)

    def run(self) -> None:
        counted_batch = min(self._batch, COUNTED)
        ones, grads = np.ones((counted_batch, DIM), np.float32), np.full((self._batch, STORED_DIM), 0.1, np.float32)
        gc.disable()  # a collection of this loop's garbage is not the system's latency
        due = time.monotonic()
        while not self.ended.wait(max(0.0, due - time.monotonic())):
            due = max(due + self._pause_s, time.monotonic())  # what was late is not made up for
            keys = self._random.choice(COUNTED, counted_batch, replace=False)
            step: dict[eps.SparseTable | eps.DenseTensor, object] = {self._table: (keys, ones)}
            try:
                began = time.time()
                if self._stored is not None:
                    rows = self._random.choice(self._keys, self._batch)
                    step[self._stored] = rows, grads
                    if self._pulls is not None:
                        self._stored.pull(rows)
                pulled = time.time()
                self._ps.push(step).result()
                pushed = time.time()
            except eps.Error as error:
                self._failed.append(str(error))
                return
            if self._pulls is not None:
                self._pulls.append((began, round(pulled - began, 6)))
            self._pushes.append((pulled, round(pushed - pulled, 6)))
            self._commits.append(pushed)
            self._counts[keys] += 1

    def progress(self) -> dict[str, object]:
        """Steps committed so far, and what has failed."""
        self.check()
        return {"steps": len(self._commits), "failed": self._failed}

    def first_after(self, unix_s: float) -> float | None:
        """Time of the first commit later than `unix_s`."""
        self.check()
        at = bisect.bisect_right(self._commits, unix_s)
        return self._commits[at] if at < len(self._commits) else None

    def end(self) -> dict[str, object]:
        """Ends the work: all operations that ended, as [Unix time of the start, seconds], and how often each key was
        pushed, all of them acknowledged."""
        self.close()
        self._ps.close()
        return {
            "pulls": self._pulls, "pushes": self._pushes, "failed": self._failed, "counts": self._counts.tolist()
        }  # fmt: skip


def _counted(ps: eps.Client) -> eps.SparseTable:
    return ps.table("counted", dim=DIM, optimizer=eps.Accumulate())


def _stored(ps: eps.Client) -> eps.SparseTable:
    return ps.table(STORED, dim=STORED_DIM, optimizer=eps.Adagrad(lr=0.01))
