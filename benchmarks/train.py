"""Training through the servers beside training without: one torch process, and all-reduce between several.

The same processes do all of it, in turns and several times over, so that every way sees the same noise. Every process
computes in one thread. Only what is measured works: the others wait to be asked.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.machine import cpu_seconds
from benchmarks.runner import Progress, Result, Side, Turn, in_turns, silent, table
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

    def __str__(self) -> str:
        text = f"{self.kind}, {self.workers} worker{'s' if self.workers > 1 else ''}"
        return text if not self.replicas else f"{text}, {self.replicas} replica{'s' if self.replicas > 1 else ''}"


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


def run(
    *,
    models: Sequence[str] = MODELS,
    workers: Sequence[int] = WORKERS,
    replicas: Sequence[int] = REPLICAS,
    servers: int = 3,
    batch: int = 256,
    seconds: float = 6.0,
    progress: Progress = silent,
) -> Result:
    """Measures each model and way of training: one torch process first, then all-reduce with each number of workers
    above one, then the servers with each number of replicas and workers. Trains each for about `seconds`."""
    ways = [Way("alone")]
    ways += [Way("all-reduce", count) for count in workers if count > 1]
    ways += [Way("servers", count, copies) for copies in replicas for count in workers]
    lines: list[TrainingLine] = []
    with ExitStack() as stack:
        clusters = {}
        for copies in replicas:
            progress(f"starting {servers} servers with {copies} replica{'s' if copies > 1 else ''}")
            clusters[copies] = stack.enter_context(LocalCluster(servers=servers, replicas=copies))
        for model in models:
            lines += _model(model, ways, clusters, batch, seconds, progress)
    return Result(lines, [_shown([line for line in lines if line.model == model]) for model in models])


def _model(
    model: str,
    ways: Sequence[Way],
    clusters: Mapping[int, LocalCluster],
    batch: int,
    seconds: float,
    progress: Progress,
) -> Iterator[TrainingLine]:
    most = max(way.workers for way in ways)
    groups = sorted({way.workers for way in ways if way.kind == "all-reduce"})
    with tempfile.TemporaryDirectory(prefix="elasticps-train-") as folder, ExitStack() as stack:
        meeting = str(Path(folder) / "meeting") if groups else ""
        job = {"model": model, "batch": batch, "workers": most, "groups": groups, "meeting": meeting}
        jobs = [{**job, "rank": rank} for rank in range(most)]
        team = stack.enter_context(Team("training:Trainer", jobs, ANSWER_S + 2 * seconds))
        sides = {}
        for way in ways:
            progress(f"{model}: warming up, {way}")
            sides[way] = _warm(team, way, clusters.get(way.replicas), seconds)
        turns = in_turns(sides, ROUNDS, lambda text: progress(f"{model}: {text}"), seconds=seconds, least=LEAST_STEPS)
    servers = len(next(iter(clusters.values())).servers)
    alone = line_of(model, batch, ways[0], turns[ways[0]], servers, None)
    yield alone
    for way in ways[1:]:
        yield line_of(model, batch, way, turns[way], servers, alone)


def _warm(team: Team, way: Way, cluster: LocalCluster | None, seconds: float) -> Side:
    """Makes a way ready and warm."""
    servers = {} if cluster is None else {server.name: server.pid for server in cluster.servers}
    workers = [worker.pid for worker in team.workers[: way.workers]]

    def run(steps: int) -> float:
        return took_s(team.ask(way.workers, "train", way=way.name, steps=steps))

    def cpu_s() -> dict[str, float]:
        return {"": cpu_seconds(workers), **{name: cpu_seconds([pid]) for name, pid in servers.items()}}

    team.ask(way.workers, "build", way=way.name, url=cluster.url if cluster is not None else "")
    side = Side(run, WARM_STEPS, cpu_s)
    side.turn()
    side.fit(side.turn(), seconds / ROUNDS, LEAST_STEPS)  # the second time tells how long a step takes
    return side


def took_s(answers: Sequence[Mapping[str, float]]) -> float:
    """Seconds from the first that began to the last that ended: all clocks are this machine's."""
    return max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers)


def line_of(
    model: str, batch: int, way: Way, turns: Sequence[Turn], servers: int, alone: TrainingLine | None
) -> TrainingLine:
    """The line of a way's turns. Their CPU times are by the name of a server, or "" for all workers."""
    speed = statistics.median(turn.steps * way.workers * batch / turn.seconds for turn in turns)
    steps = sum(turn.steps for turn in turns) * way.workers
    cpu_us = {name: sum(turn.cpu_s[name] for turn in turns) / steps / batch * 1e6 for name in turns[0].cpu_s}
    worker_us = cpu_us.pop("")
    return TrainingLine(
        model, batch, way.kind, way.workers, way.replicas, servers,
        samples_per_s=round(speed, 1),
        of_alone=1.0 if alone is None else round(speed / alone.samples_per_s, 3),
        worker_cpu_us_per_sample=round(worker_us, 3),
        worker_cpu_of_alone=1.0 if alone is None else round(worker_us / alone.worker_cpu_us_per_sample, 3),
        server_cpu_us_per_sample={name: round(us, 3) for name, us in cpu_us.items()},
        server_cpu_ms_per_step={name: round(us * batch / 1e3, 3) for name, us in cpu_us.items()},
        steps=steps,
    )  # fmt: skip


def _shown(lines: Sequence[TrainingLine]) -> Table:
    """The table of a model."""
    first = lines[0]
    return table(f"train {first.model}: {first.batch:,} samples a step, {first.servers} server(s)", lines, [
        ("way", lambda line: line.way), ("workers", lambda line: line.workers),
        ("replicas", lambda line: line.replicas or ""), ("samples/s", lambda line: f"{line.samples_per_s:,.0f}"),
        ("of alone", lambda line: f"{line.of_alone:.2f}"),
        ("worker CPU µs/sample", lambda line: f"{line.worker_cpu_us_per_sample:.1f}"),
        ("of alone", lambda line: f"{line.worker_cpu_of_alone:.2f}"),
        ("each server CPU µs/sample", lambda line: _range(line.server_cpu_us_per_sample)),
        ("ms/step", lambda line: _range(line.server_cpu_ms_per_step)),
    ])  # fmt: skip


def _range(of_servers: Mapping[str, float]) -> str:
    values = of_servers.values()
    return f"{min(values):.2f}–{max(values):.2f}" if values else ""
