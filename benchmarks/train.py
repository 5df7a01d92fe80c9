"""Training through the servers beside training without: one torch process, and all-reduce between several.

The same processes do all of it, in turns and several times over, so that every way sees the same noise. Every process
computes in one thread. Only what is measured works: the others wait for the next line.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.limits import cpu_seconds
from benchmarks.workers import ANSWER_S, Team
from elasticps.local import LocalCluster

MODELS = ("deepfm", "dlrm")
WORKERS, REPLICAS = (1, 2, 4), (1, 2)
ROUNDS = 3
WARM_STEPS = 30  # by then kernels are compiled, buckets and buffers have their sizes, and rows exist
LEAST_STEPS = 10


@dataclass(frozen=True)
class Way:
    """How to train: "alone", "all-reduce" or "servers", with so many workers, and replicas at the servers."""

    kind: str
    workers: int = 1
    replicas: int = 0

    @property
    def name(self) -> str:
        """What workers call it."""
        count = {"all-reduce": self.workers, "servers": self.replicas}.get(self.kind)
        return self.kind if count is None else f"{self.kind} {count}"


@dataclass(frozen=True)
class TrainingLine:
    """What one way of training reached. CPU times are of all threads, in user mode and in the kernel, from /proc.

    samples_per_s             of all workers together: the median of the rounds
    of_alone                  that, by what one torch process reached
    worker_cpu_us_per_sample  of the workers, for each sample that they trained
    worker_cpu_of_alone       that, by what one torch process needed
    server_cpu_us_per_sample  of each server, by its name
    server_cpu_ms_per_step    the same for each step of a worker
    """

    model: str
    batch: int
    way: str
    workers: int
    replicas: int
    servers: int
    samples_per_s: float
    of_alone: float
    worker_cpu_us_per_sample: float
    worker_cpu_of_alone: float
    server_cpu_us_per_sample: Mapping[str, float]
    server_cpu_ms_per_step: Mapping[str, float]
    steps: int


@dataclass
class _Tally:
    """What the rounds of one way gave. steps: of each worker in the next one."""

    steps: int
    speeds: list[float] = field(default_factory=list)
    samples: int = 0
    worker_s: float = 0.0
    server_s: dict[str, float] = field(default_factory=dict)


def run(
    *,
    models: Sequence[str] = MODELS,
    workers: Sequence[int] = WORKERS,
    replicas: Sequence[int] = REPLICAS,
    servers: int = 3,
    batch: int = 256,
    seconds: float = 6.0,
    all_reduce: bool = True,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[TrainingLine]:
    """Yields a line for each model and way of training: one torch process first, then `all_reduce` with each number of
    workers above one, then the servers with each number of replicas and workers. Trains each for about `seconds`."""
    ways = [Way("alone")]
    ways += [Way("all-reduce", count) for count in workers if count > 1 and all_reduce]
    ways += [Way("servers", count, copies) for copies in replicas for count in workers]
    with ExitStack() as stack:
        clusters = {}
        for copies in replicas:
            progress(f"starting {servers} servers with {copies} replica{'s' if copies > 1 else ''}")
            clusters[copies] = stack.enter_context(LocalCluster(servers=servers, replicas=copies))
        for model in models:
            yield from _model(model, ways, clusters, batch, seconds, progress)


def _model(
    model: str,
    ways: Sequence[Way],
    clusters: Mapping[int, LocalCluster],
    batch: int,
    seconds: float,
    progress: Callable[[str], None],
) -> Iterator[TrainingLine]:
    most = max(way.workers for way in ways)
    groups = sorted({way.workers for way in ways if way.kind == "all-reduce"})
    urls = {str(copies): cluster.url for copies, cluster in clusters.items()}
    with tempfile.TemporaryDirectory(prefix="elasticps-train-") as folder, ExitStack() as stack:
        common = {"model": model, "batch": batch, "workers": most, "groups": groups, "urls": urls}
        meeting = str(Path(folder) / "meeting")
        team = Team(
            "benchmarks.trainer",
            [{**common, "rank": rank, "meeting": meeting} for rank in range(most)],
            ANSWER_S + 2 * seconds,
        )
        stack.callback(team.close)
        tallies = {}
        for way in ways:
            progress(f"{model}: warming up, {_describe(way)}")
            tallies[way] = _Tally(_warm(team, way, seconds))
        for number in range(ROUNDS):
            for way, tally in tallies.items():
                progress(f"{model}: round {number + 1} of {ROUNDS}, {_describe(way)}")
                _measure(team, way, tally, clusters.get(way.replicas), batch, seconds)
        alone = _line(model, batch, ways[0], tallies[ways[0]], len(next(iter(clusters.values())).servers), None)
        yield alone
        for way in ways[1:]:
            yield _line(model, batch, way, tallies[way], alone.servers, alone)


def _describe(way: Way) -> str:
    text = f"{way.kind}, {way.workers} worker{'s' if way.workers > 1 else ''}"
    return text if not way.replicas else f"{text}, {way.replicas} replica{'s' if way.replicas > 1 else ''}"


def _warm(team: Team, way: Way, seconds: float) -> int:
    """Makes a way ready and warm; how many steps fit a round."""
    team.ask(f"build {way.name}", way.workers)
    for _ in range(2):  # the second time tells how long a step takes
        answers = team.ask(f"train {WARM_STEPS} {way.name}", way.workers)
    return _fitting(WARM_STEPS, _took(answers), seconds)


def _fitting(steps: int, took_s: float, seconds: float) -> int:
    """How many steps fit a round, as so many took so long."""
    return max(LEAST_STEPS, int(steps * seconds / ROUNDS / took_s))


def _measure(team: Team, way: Way, tally: _Tally, cluster: LocalCluster | None, batch: int, seconds: float) -> None:
    """One round."""
    pids = {} if cluster is None else {server.name: server.pid for server in cluster.servers}
    mine = [worker.pid for worker in team.workers[: way.workers]]
    worker_s, server_s = cpu_seconds(mine), {name: cpu_seconds([pid]) for name, pid in pids.items()}
    answers = team.ask(f"train {tally.steps} {way.name}", way.workers)
    tally.worker_s += cpu_seconds(mine) - worker_s
    for name, pid in pids.items():
        tally.server_s[name] = tally.server_s.get(name, 0.0) + cpu_seconds([pid]) - server_s[name]
    samples = tally.steps * way.workers * batch
    tally.samples += samples
    tally.speeds.append(samples / _took(answers))
    tally.steps = _fitting(tally.steps, _took(answers), seconds)


def _took(answers: Sequence[Mapping[str, Any]]) -> float:
    """Seconds from the first that began to the last that ended: all clocks are this machine's."""
    began, ended = ([float(answer[key]) for answer in answers] for key in ("began", "ended"))
    return max(ended) - min(began)


def _line(model: str, batch: int, way: Way, tally: _Tally, servers: int, alone: TrainingLine | None) -> TrainingLine:
    speed = statistics.median(tally.speeds)
    worker_us = tally.worker_s / tally.samples * 1e6
    server_us = {name: round(used / tally.samples * 1e6, 3) for name, used in tally.server_s.items()}
    return TrainingLine(
        model, batch, way.kind, way.workers, way.replicas, servers,
        samples_per_s=round(speed, 1),
        of_alone=1.0 if alone is None else round(speed / alone.samples_per_s, 3),
        worker_cpu_us_per_sample=round(worker_us, 3),
        worker_cpu_of_alone=1.0 if alone is None else round(worker_us / alone.worker_cpu_us_per_sample, 3),
        server_cpu_us_per_sample=server_us,
        server_cpu_ms_per_step={name: round(us * batch / 1e3, 3) for name, us in server_us.items()},
        steps=tally.samples // batch,
    )  # fmt: skip
