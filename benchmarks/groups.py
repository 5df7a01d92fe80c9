"""What a `LocalGroup` saves: bytes of a step, and its speed over a link, beside as many separate workers.

The same processes do both, one after the other, through one relay: the link of their machine. "dlrm" is mostly rows, of
categories drawn by a power law; "dense" has no rows at all. A step is one batch of each process.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.machine import cpu_seconds
from benchmarks.relay import Link
from benchmarks.runner import Progress, Result, Side, Turn, in_turns, silent, table
from benchmarks.train import took_s
from benchmarks.workers import Team
from elasticps.local import LocalCluster

MODELS, WAYS = ("dense", "dlrm"), ("separate", "group")
WARM_STEPS, ROUNDS, LEAST_STEPS = 5, 3, 4


@dataclass(frozen=True)
class GroupLine:
    """One model and way of training it, with so many processes.

    up_per_step, down_per_step   bytes that left the machine, and came to it, for a batch of each process
    of_separate                  all of them, by those of separate workers
    samples_per_s                of all processes together, over the link: the median of the rounds
    faster                       that, by what separate workers reached
    worker_cpu_us_per_sample     CPU time of all processes, for each sample
    server_cpu_us_per_sample     CPU time of all servers, for each sample
    """

    model: str
    way: str
    processes: int
    mbit: int
    up_per_step: int
    down_per_step: int
    of_separate: float
    samples_per_s: float
    faster: float
    worker_cpu_us_per_sample: float
    server_cpu_us_per_sample: float


@dataclass(frozen=True)
class Trained:
    """How one way went. up, down: bytes of a step, of all processes; its turns have CPU times of "workers" and
    "servers"."""

    up: float
    down: float
    turns: Sequence[Turn]


def run(
    *,
    processes: int = 4,
    mbit: int = 1000,
    batch: int = 64,
    dim: int = 16,
    servers: int = 2,
    seconds: float = 6.0,
    progress: Progress = silent,
) -> Result:
    """Measures both ways of each model, each for about `seconds`; rows of DLRM have `dim` floats."""
    lines: list[GroupLine] = []
    with tempfile.TemporaryDirectory(prefix="elasticps-groups-") as folder, ExitStack() as stack:
        progress(f"starting {servers} servers")
        cluster = stack.enter_context(LocalCluster(servers=servers, replicas=1))
        link = stack.enter_context(Link([server.address for server in cluster.servers]))
        pids = [server.pid for server in cluster.servers]
        for model in MODELS:
            job = {"model": model, "batch": batch, "workers": processes, "meeting": str(Path(folder) / model)}
            with Team("training:Trainer", [{**job, "rank": rank} for rank in range(processes)]) as team:
                both = {}
                for way in WAYS:
                    progress(f"{model}, {way}")
                    where = {"url": cluster.url, "ports": link.ports, "app": f"{model}-{way}"}
                    link.limit(0)
                    team.ask(processes, "build_grouped", way=way, dim=dim, **where)
                    both[way] = _trained(team, link, pids, way, mbit, seconds)
            lines += lines_of(model, both, processes, mbit, batch)
    title = f"{processes} processes, {batch:,} samples each, a link of {mbit:,} Mbit/s, {servers} servers"
    shown = table(title, lines, [
        ("model", lambda line: line.model), ("way", lambda line: line.way),
        ("KB up", lambda line: f"{line.up_per_step / 1e3:,.0f}"),
        ("KB down", lambda line: f"{line.down_per_step / 1e3:,.0f}"),
        ("of separate", lambda line: f"{line.of_separate:.3f}"),
        ("samples/s", lambda line: f"{line.samples_per_s:,.0f}"), ("faster", lambda line: f"{line.faster:.2f}"),
        ("CPU µs/sample", lambda line: f"{line.worker_cpu_us_per_sample:.1f}"),
        ("of servers", lambda line: f"{line.server_cpu_us_per_sample:.1f}"),
    ], left=("way",))  # fmt: skip
    return Result(lines, [shown])


def _trained(team: Team, link: Link, servers: Sequence[int], way: str, mbit: int, seconds: float) -> Trained:
    workers = [worker.pid for worker in team.workers]

    def train(steps: int) -> float:
        return took_s(team.ask(len(workers), "train", way=way, steps=steps))

    side = Side(train, WARM_STEPS, lambda: {"workers": cpu_seconds(workers), "servers": cpu_seconds(servers)})
    side.turn()
    before = link.count()
    link.limit(mbit)
    first = side.turn()
    up, down = ((now - then) / first.steps for now, then in zip(link.count(), before, strict=True))
    side.fit(first, seconds / ROUNDS, LEAST_STEPS)
    return Trained(up, down, in_turns({way: side}, ROUNDS, seconds=seconds, least=LEAST_STEPS)[way])


def lines_of(model: str, both: Mapping[str, Trained], processes: int, mbit: int, batch: int) -> Iterator[GroupLine]:
    """The lines of both ways of a model."""
    separate = both["separate"]
    samples = processes * batch  # of a step
    speeds = {way: statistics.median(turn.steps * samples / turn.seconds for turn in made.turns)
              for way, made in both.items()}  # fmt: skip
    for way, made in both.items():
        whole = sum(turn.steps for turn in made.turns) * samples
        yield GroupLine(
            model, way, processes, mbit, round(made.up), round(made.down),
            round((made.up + made.down) / (separate.up + separate.down), 3),
            round(speeds[way], 1), round(speeds[way] / speeds["separate"], 3),
            *(round(sum(turn.cpu_s[name] for turn in made.turns) / whole * 1e6, 2) for name in ("workers", "servers")),
        )  # fmt: skip
