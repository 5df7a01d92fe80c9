"""A stream whose ids churn, learnt by a table that keeps every id, and beside it by one that grows and forgets.

Ids come by a power law, and each hour of the stream some of them are replaced by new ones, whatever their rank. A
sample is a few ids and some features; how likely a click is depends on a hidden vector of each id. Both tables learn a
vector of each id by logistic regression, from the same samples in the same steps, and score each sample before they
learn it (progressive validation). The second table is held to a number of rows, and admits ids by count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.core.stream import Samples, Stream, area_under_curve
from benchmarks.machine import cpu_seconds
from benchmarks.runner import Progress, Result, silent, table
from elasticps.admin import fetch_tables
from elasticps.client import Client, SparseTable, connect
from elasticps.local import LocalCluster
from elasticps.model.policies import Capacity, MinCount
from elasticps.model.spec import Adagrad, Zeros
from elasticps.system import background

UNBOUNDED, BOUNDED = "unbounded", "bounded"
WINDOWS = 4  # of an hour: so often rows are counted, and AUC is computed
LEARNING_RATE = 0.3
Floats = NDArray[np.float32]


@dataclass
class StreamPoint:
    """A part of an hour. hour: when it ended; auc: of the samples in it, by table; rows, candidates: at its end."""

    hour: float
    rows: dict[str, int]
    candidates: int
    auc: dict[str, float]


@dataclass
class StreamLine:
    """What one table came to.

    rows, candidates, bytes  at the end, of all servers; bytes are those of slabs, indices and waiting ids
    capacity                 rows to which it is held, 0 for none; most_rows: in the second half of the stream
    auc                      of all samples of the second half, each scored before it was learnt
    samples_per_s            by the time that its own pulls, pushes and gradients took
    server_cpu_s             CPU time of the servers meanwhile
    admitted, evicted        rows made, and rows and waiting ids that went, by reason
    """

    table: str
    rows: int
    candidates: int
    bytes: int
    capacity: int
    most_rows: int
    auc: float
    samples_per_s: float
    server_cpu_s: float
    admitted: int
    evicted: dict[str, int]


@dataclass
class StreamReport:
    """What a run found: a line for each table, and how both went on. late: how much longer the stream took than its
    hours should have, as a part of them."""

    lines: list[StreamLine]
    points: list[StreamPoint]
    ids: int
    pushes: int
    late: float


@dataclass
class _Learner:
    """One table, and what it has scored in the window and in the second half."""

    rows: SparseTable
    seconds: float = 0.0
    server_cpu_s: float = 0.0
    window: list[Floats] = field(default_factory=list)
    scores: list[Floats] = field(default_factory=list)

    def learn(self, ps: Client, samples: Samples, cpu_s: Callable[[], float]) -> None:
        """Scores samples, and then learns them."""
        began, cpu = time.perf_counter(), cpu_s()
        vectors = self.rows.pull(samples.ids)
        scores = samples.score(vectors)
        ps.push({self.rows: (samples.ids, samples.gradients(scores))}).result()
        self.seconds += time.perf_counter() - began
        self.server_cpu_s += cpu_s() - cpu
        self.window.append(scores)


def run(
    *,
    ids: int = 100_000,
    hours: int = 24,
    hour_s: float = 5.0,
    churn: float = 0.2,
    batch: int = 2048,
    steps: int = 40,
    share: float = 0.2,
    min_count: int = 2,
    servers: int = 2,
    replicas: int = 1,
    picture: Path | None = None,
    progress: Progress = silent,
) -> Result:
    """Streams `hours` hours of `steps` steps and `hour_s` seconds each. ids: alive at any time; churn: the part of them
    that an hour replaces; share: of the ids that come at all, how many rows the bounded table may have."""
    stream = Stream(ids=ids, churn=churn, batch=batch, steps=steps)
    progress("counting the ids of the stream")
    capacity = max(1, int(share * stream.distinct(hours)))
    with LocalCluster(servers=servers, replicas=replicas) as cluster, connect(cluster.url, worker="bench") as ps:
        optimizer = Adagrad(lr=LEARNING_RATE)
        learners = {
            UNBOUNDED: _Learner(ps.table(UNBOUNDED, dim=stream.dim, optimizer=optimizer, init=Zeros(), usage="count")),
            BOUNDED: _Learner(
                ps.table(
                    BOUNDED, dim=stream.dim, optimizer=optimizer, init=Zeros(),
                    admission=MinCount(min_count, forget_after=12 * hour_s),
                    eviction=[Capacity(capacity)],
                )
            ),
        }  # fmt: skip
        pids = [server.pid for server in cluster.servers]
        points, labels, took = _train(stream, ps, learners, pids, hours, hour_s, progress)
        found = _bytes([server.admin for server in cluster.servers])
        lines = [
            _line(name, learner, capacity if name == BOUNDED else 0, points, labels, stream.batch, found)
            for name, learner in learners.items()
        ]
    report = StreamReport(
        lines, points, int(capacity / share), stream.pushes * len(learners), took / (hours * hour_s) - 1
    )
    shown: list[Any] = [_shown(lines, stream, hours), _summary(report)]
    if picture is not None:
        from benchmarks.stream_picture import draw  # only here: matplotlib takes half a second

        draw(report, picture)
        shown.append(f"picture: {picture}")
    return Result(report, shown)


def _train(
    stream: Stream, ps: Client, learners: dict[str, _Learner], pids: Sequence[int], hours: int, hour_s: float,
    progress: Progress,
) -> tuple[list[StreamPoint], list[NDArray[np.bool_]], float]:  # fmt: skip
    """Runs the stream. Moments, the labels of the second half, and how long it took."""
    points: list[StreamPoint] = []
    labels: list[NDArray[np.bool_]] = []
    window: list[NDArray[np.bool_]] = []
    every = max(1, stream.steps // WINDOWS)
    began, steps = time.monotonic(), hours * stream.steps
    for number, samples in enumerate(stream.samples(hours), start=1):
        order = list(learners.values())
        for learner in order if number % 2 else order[::-1]:
            learner.learn(ps, samples, lambda: cpu_seconds(pids))
        window.append(samples.labels)
        if number % every == 0 or number == steps:
            hour, clicked = number / stream.steps, np.concatenate(window)
            states = {name: learner.rows.state() for name, learner in learners.items()}
            auc = {name: area_under_curve(np.concatenate(one.window), clicked) for name, one in learners.items()}
            rows = {name: state.rows for name, state in states.items()}
            points.append(StreamPoint(round(hour, 3), rows, states[BOUNDED].candidates, auc))
            if number > steps // 2:
                labels.append(clicked)
                for learner in learners.values():
                    learner.scores += learner.window
            for learner in learners.values():
                learner.window = []
            window = []
            progress(f"hour {hour:.2f} of {hours}: {rows[BOUNDED]:,} of {rows[UNBOUNDED]:,} rows")
        time.sleep(max(0.0, began + number * hour_s / stream.steps - time.monotonic()))
    return points, labels, time.monotonic() - began


def _bytes(admins: Sequence[str]) -> dict[int, int]:
    """Bytes of each table at all servers, by id."""
    found: dict[int, int] = {}
    for admin in admins:
        for one in background.run(fetch_tables(admin, 10.0)):
            found[one["id"]] = found.get(one["id"], 0) + one["bytes"]
    return found


def _line(
    name: str, learner: _Learner, capacity: int, points: Sequence[StreamPoint], labels: Sequence[NDArray[np.bool_]],
    batch: int, nbytes: dict[int, int],
) -> StreamLine:  # fmt: skip
    state = learner.rows.state()
    half = [point.rows[name] for point in points[len(points) // 2 :]]
    auc = area_under_curve(np.concatenate(learner.scores), np.concatenate(labels))
    samples = batch * round(len(np.concatenate(labels)) / batch) * 2
    return StreamLine(
        name, state.rows, state.candidates, nbytes.get(learner.rows.id, 0), capacity, max(half), round(auc, 5),
        round(samples / learner.seconds, 1), round(learner.server_cpu_s, 2), state.admitted, dict(state.evicted),
    )  # fmt: skip


def _shown(lines: Sequence[StreamLine], stream: Stream, hours: int) -> Any:
    title = f"stream: {hours} hours of {stream.steps} steps of {stream.batch:,} samples, {stream.pushes:,} rows pushed"
    return table(title, lines, [
        ("table", lambda line: line.table), ("rows", lambda line: f"{line.rows:,}"),
        ("capacity", lambda line: f"{line.capacity:,}" if line.capacity else "–"),
        ("MB", lambda line: f"{line.bytes / 1e6:.1f}"), ("ids that wait", lambda line: f"{line.candidates:,}"),
        ("AUC", lambda line: f"{line.auc:.4f}"), ("samples/s", lambda line: f"{line.samples_per_s:,.0f}"),
        ("servers' CPU s", lambda line: f"{line.server_cpu_s:.1f}"), ("admitted", lambda line: f"{line.admitted:,}"),
        ("evicted", lambda line: ", ".join(f"{k} {n:,}" for k, n in line.evicted.items() if n) or "–"),
    ])  # fmt: skip


def _summary(report: StreamReport) -> str:
    every, bounded = report.lines
    most = max(abs(rows / bounded.capacity - 1) for rows in _held(report))
    text = (
        f"in the second half the bounded table's rows were within {most:.1%} of its capacity, its AUC "
        f"{every.auc - bounded.auc:+.4f} below the other's, its bytes {bounded.bytes / max(1, every.bytes):.2f} of them"
    )
    return text if report.late < 0.05 else f"{text}; hours took {1 + report.late:.2f} times as long as asked"


def _held(report: StreamReport) -> list[int]:
    return [point.rows[BOUNDED] for point in report.points[len(report.points) // 2 :]]
