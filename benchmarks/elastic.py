"""What workers notice as servers come and go: 3 servers become 5 and 3 again, with and without work."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from benchmarks.counting import COUNTED, DIM, STORED_DIM, judge, prepare, start_workers, steps_of
from benchmarks.runner import Progress, Result, figures, percentiles, silent
from benchmarks.workers import Process
from coordinator.core.view import View
from elasticps.admin import fetch_status
from elasticps.errors import ClusterUnreachable
from elasticps.local import LocalCluster
from elasticps.local.operator_client import OperatorClient
from elasticps.system import background

SERVERS, MORE, REPLICAS, WORKERS = 3, 5, 2, 2
STEADY_S = 5.0
BATCH = 256
_SAMPLE_S = 0.2  # asking costs the servers time, too
_HEAD_S = 0.02  # a push that is under way, or begins, so long after a view was seen may have met it

Spans: TypeAlias = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Phase:
    """One change of the number of servers. moved_bytes: rows sent; least_bytes: what newcomers, or those that leave,
    hold of all rows; seconds: from the first range under way to the last."""

    to: int
    seconds: float
    moved_bytes: int
    least_bytes: int
    views: int

    @property
    def ratio(self) -> float:
        return self.moved_bytes / self.least_bytes if self.least_bytes else float("nan")

    @property
    def mb_per_s(self) -> float:
        return self.moved_bytes / self.seconds / 1e6 if self.seconds > 0 else float("nan")

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "of_least": round(self.ratio, 3), "mb_per_s": round(self.mb_per_s, 1)}


@dataclass(frozen=True)
class ElasticRun:
    """One run. Latencies in ms, as {"p50", "p99", "max"}."""

    rows: int  # stored first
    batch: int  # rows in each pull and push
    rate: float  # pulls and pushes per second of each worker; 0: without pause
    load: float  # of the machine, before
    failed: int  # operations that failed
    wrong: int  # keys whose value is not the exact number of acknowledged updates
    clean: bool  # whether the audit found every replica equal and every promise kept
    updates: int  # of rows, acknowledged
    before: dict[str, float]  # pulls and pushes that ended when nothing moved
    during: dict[str, float]  # pulls and pushes that ended when something moved
    pulls: dict[str, float]  # during moves
    pushes: dict[str, float]  # during moves
    heads: dict[str, float]  # pushes under way when a view took heads off living servers
    operations_per_s: tuple[float, ...]  # with 3 servers, and with 5, while nothing moves: on few cores more are slower
    throughput: float  # operations per second during moves, as a part of those with 3 servers
    of_steady: tuple[float, ...]  # the same for each change, as a part of those just before it
    phases: tuple[Phase, ...]  # both changes
    idle: Phase  # the change to more servers, without workers

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        fixed = {"servers": [SERVERS, MORE, SERVERS], "replicas": REPLICAS, "workers": WORKERS, "unit": "ms"}
        content = asdict(self) | {"phases": [p.as_dict() for p in self.phases], "idle": self.idle.as_dict()}
        return {**fixed, **content}


class _Observer:
    """Samples what servers have sent and notes views, in a thread of its own, until closed."""

    def __init__(self, operator: OperatorClient) -> None:
        self._operator = operator
        self._last: View | None = None
        self.head_moves: list[float] = []  # when a view that takes heads off living servers was seen
        self.views = 0
        self.moving: list[tuple[float, bool]] = []  # from when on something moves, or nothing does
        self._sent: dict[tuple[str, int], int] = {}
        self._stop = threading.Event()
        operator.on_view(self._see)
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def _see(self, view: View) -> None:
        now, last = time.time(), self._last
        if last is not None:
            here = {s.member for s in view.servers}
            old = [last.servers[i].member for i in last.heads.tolist()]
            new = [view.servers[i].member for i in view.heads.tolist()]
            if any(a != b and a in here for a, b in zip(old, new, strict=True)):
                self.head_moves.append(now)
        moves = bool((view.joining >= 0).any())
        if not self.moving or self.moving[-1][1] != moves:
            self.moving.append((now, moves))
        self.views += 1
        self._last = view

    def _run(self) -> None:
        while not self._stop.wait(_SAMPLE_S):
            self.sample()

    def sample(self) -> None:
        """Asks every server how much it has sent."""
        view = self._last
        for server in () if view is None else view.servers:
            try:
                found = background.run(fetch_status(server.admin, 1.0))
            except ClusterUnreachable:
                continue  # it has just ended: by then it held nothing
            key = server.name, server.incarnation
            self._sent[key] = max(self._sent.get(key, 0), int(found["sent_bytes"]))

    @property
    def sent(self) -> int:
        return sum(self._sent.values())

    def spans(self, began: float, ended: float) -> list[tuple[float, float]]:
        """When something moved in that time."""
        edges = [(t, moves) for t, moves in self.moving if began <= t <= ended]
        spans, start = [], None
        for t, moves in edges:
            if moves and start is None:
                start = t
            elif not moves and start is not None:
                spans.append((start, t))
                start = None
        return spans

    @property
    def servers(self) -> int:
        """How many the newest view lists."""
        return 0 if self._last is None else len(self._last.servers)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()


def run(*, rows: int = 1_000_000, batch: int = BATCH, rate: float = 0.0, progress: Progress = silent) -> Result:
    """Stores `rows` x 64 float32 with Adagrad, works on `batch` of them at a time with two processes while the cluster
    grows and shrinks, checks every value and replica, and lets the cluster grow again without work.

    rate: pulls and pushes of each process per second; 0: without pause.
    """
    load = os.getloadavg()[0]
    progress("starting a cluster")
    with LocalCluster("elastic", servers=SERVERS, replicas=REPLICAS) as cluster, ExitStack() as stack:
        prepare(cluster, rows, progress)
        observer = _Observer(stack.enter_context(OperatorClient(cluster.operator_url)))
        stack.callback(observer.close)
        workers = start_workers(stack, cluster, WORKERS, rows=rows, batch=batch, rate=rate, pulls=True)
        phases, calm, moves = list[Phase](), list[Spans](), list[Spans]()
        for size, now in ((MORE, SERVERS), (SERVERS, MORE)):
            progress(f"working with {now} servers")
            _work(workers)
            steady = time.time()
            time.sleep(STEADY_S)
            began = time.time()
            phases.append(_change(cluster, observer, size, rows, progress))
            calm.append([(steady, began)])
            moves.append(observer.spans(began, time.time()))
        ended = time.time()
        _work(workers)
        answers = [worker.ask("end") for worker in workers]
        verdict = judge(cluster, [answer["counts"] for answer in answers], progress)
        idle = _change(cluster, observer, MORE, rows, progress)
        head_moves = [t for t in observer.head_moves if t <= ended]
    pulls, pushes = (
        np.concatenate([np.array(a[kind]).reshape(-1, 2) for a in answers]) for kind in ("pulls", "pushes")
    )
    both = np.concatenate([pulls, pushes])
    rates = [_rate(both, spans) for spans in calm]
    moving = [_rate(both, spans) for spans in moves]
    spans = [span for some in moves for span in some]
    heads = _within(pushes, [(t - _HEAD_S, t + _HEAD_S) for t in head_moves])
    found = ElasticRun(
        rows, batch, rate, round(load, 2), sum(len(a["failed"]) for a in answers), verdict.wrong, verdict.clean,
        verdict.updates, _figures(_within(both, calm[0])), _figures(_within(both, spans)),
        _figures(_within(pulls, spans)), _figures(_within(pushes, spans)), _figures(heads),
        tuple(round(rate, 1) for rate in rates), round(_rate(both, spans) / rates[0], 3),
        tuple(round(now / before, 3) for now, before in zip(moving, rates, strict=True)), tuple(phases), idle,
    )  # fmt: skip
    shown = [*_shown(found), f"{found.failed} operations failed; {verdict.text}"]
    return Result(found, shown, ok=not found.failed and not verdict.wrong and verdict.clean)


def _shown(run: ElasticRun) -> list[Table | str]:
    kinds = {
        "before": run.before, "while ranges move": run.during, "  pulls": run.pulls, "  pushes": run.pushes,
        "pushes as heads move": run.heads,
    }  # fmt: skip
    title = f"elastic: {run.rows:,} rows, {run.batch:,} at a time, ms that an operation took"
    measured = {name: each for name, each in kinds.items() if each}
    shown: list[Table | str] = [figures(title, measured, ("count", "p50", "p99", "max"), digits=1)]
    for phase, how in (*((phase, "") for phase in run.phases), (run.idle, " without work")):
        shown.append(
            f"to {phase.to} servers{how}: {phase.moved_bytes / 1e6:,.0f} MB, {phase.ratio:.2f} of the least "
            f"possible, in {phase.seconds:.1f} s: {phase.mb_per_s:,.0f} MB/s"
        )
    (three, five), (growing, shrinking) = run.operations_per_s, run.of_steady
    shown.append(
        f"{three:,.0f} operations/s with 3 servers, {five:,.0f} with 5; while ranges move "
        f"{run.throughput:.0%} of the first: {growing:.0%} of what it was before as it grows, {shrinking:.0%} "
        "as it shrinks"
    )
    return shown


def _change(cluster: LocalCluster, observer: _Observer, size: int, rows: int, progress: Progress) -> Phase:
    before = observer.servers
    sent, views, began = observer.sent, observer.views, time.time()
    cluster.scale(size)
    observer.sample()
    ended = time.time()
    spans = observer.spans(began, ended)
    seconds = spans[-1][1] - spans[0][0] if spans else 0.0
    whole = rows * (8 + 2 * STORED_DIM * 4) + COUNTED * (8 + DIM * 4)  # keys, weights and slots
    least = abs(size - before) / max(size, before) * REPLICAS * whole
    phase = Phase(size, round(seconds, 3), observer.sent - sent, round(least), observer.views - views)
    progress(f"{size} servers: {phase.moved_bytes / 1e6:.0f} MB in {phase.seconds:.1f} s")
    return phase


def _work(workers: Sequence[Process], steps: int = 200) -> None:
    """Waits until each has done so many more steps. Error if an operation failed."""
    goals = [steps_of(worker) + steps for worker in workers]
    for worker, goal in zip(workers, goals, strict=True):
        while steps_of(worker) < goal:
            time.sleep(0.05)


def _within(operations: NDArray[np.float64], spans: Spans) -> NDArray[np.float64]:
    """The operations that were under way at some time in one of the spans."""
    start, end = operations[:, 0], operations.sum(axis=1)
    hit = np.zeros(len(operations), bool)
    for a, b in spans:
        hit |= (end >= a) & (start <= b)
    return operations[hit]


def _rate(operations: NDArray[np.float64], spans: Spans) -> float:
    """Operations per second in the spans."""
    return len(_within(operations, spans)) / max(1e-9, sum(b - a for a, b in spans))


def _figures(operations: NDArray[np.float64]) -> dict[str, float]:
    """Of their latencies, in ms."""
    if not len(operations):
        return {}
    return {"count": len(operations), **percentiles(operations[:, 1] * 1e3, 50, 99, 100, digits=2)}
