"""What a `LocalGroup` saves: bytes of a step, and its speed over a link, beside as many separate workers.

The same processes do both, in turns, through one relay: the link of their machine. "dlrm" is mostly rows, of categories
drawn by a power law; "dense" has no rows at all. A step is one batch of each process.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.limits import cpu_seconds
from benchmarks.workers import Team, Worker
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
    worker_cpu_us_per_sample     CPU time of all processes, for each sample; of the servers
    server_cpu_us_per_sample
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


@dataclass
class _GroupTally:
    up: float = 0.0
    down: float = 0.0
    speeds: list[float] = field(default_factory=list)
    samples: int = 0
    worker_s: float = 0.0
    server_s: float = 0.0


def run(
    *,
    processes: int = 4,
    mbit: int = 1000,
    batch: int = 64,
    dim: int = 16,
    servers: int = 2,
    seconds: float = 6.0,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[GroupLine]:
    """Yields two lines for each model. Trains each way for about `seconds`; rows of DLRM have `dim` floats."""
    with tempfile.TemporaryDirectory(prefix="elasticps-groups-") as folder, ExitStack() as stack:
        progress(f"starting {servers} servers and {processes} processes")
        cluster = stack.enter_context(LocalCluster(servers=servers, replicas=1))
        addresses = [server.address for server in cluster.servers]
        relay = Worker("benchmarks.relay", *addresses)
        stack.callback(relay.close)
        ports = dict(zip(addresses, relay.answer(), strict=True))
        common = {"processes": processes, "batch": batch, "dim": dim, "url": cluster.url, "ports": ports}
        common["meeting"] = str(Path(folder) / "meeting")
        team = Team("benchmarks.groups_worker", [{**common, "rank": rank} for rank in range(processes)])
        stack.callback(team.close)
        for model in MODELS:
            tallies = {}
            for way in WAYS:
                progress(f"{model}, {way}")
                pids = [server.pid for server in cluster.servers]
                tallies[way] = _trained(team, relay, pids, model, way, processes, mbit, batch, seconds)
            yield from _lines(model, tallies, processes, mbit)


def _trained(
    team: Team, relay: Worker, servers: Sequence[int], model: str, way: str, processes: int, mbit: int, batch: int,
    seconds: float,
) -> _GroupTally:  # fmt: skip
    tally, steps = _GroupTally(), WARM_STEPS
    relay.ask("limit 0")
    team.ask(f"build {model} {way}", processes)
    team.ask(f"train {WARM_STEPS}", processes)
    before = relay.ask("count")
    relay.ask(f"limit {mbit}")
    took_s = _took(team, steps, processes)
    after = relay.ask("count")
    tally.up, tally.down = ((after[each] - before[each]) / steps for each in ("up", "down"))
    workers = [worker.pid for worker in team.workers]
    worker_s, server_s = cpu_seconds(workers), cpu_seconds(servers)
    for _ in range(ROUNDS):
        steps = max(LEAST_STEPS, int(steps * seconds / ROUNDS / took_s))
        took_s = _took(team, steps, processes)
        tally.speeds.append(steps * processes * batch / took_s)
        tally.samples += steps * processes * batch
    tally.worker_s, tally.server_s = cpu_seconds(workers) - worker_s, cpu_seconds(servers) - server_s
    return tally


def _took(team: Team, steps: int, processes: int) -> float:
    answers = team.ask(f"train {steps}", processes)
    return float(max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers))


def _lines(model: str, tallies: dict[str, _GroupTally], processes: int, mbit: int) -> Iterator[GroupLine]:
    apart = tallies["separate"]
    for way, tally in tallies.items():
        speed, theirs = statistics.median(tally.speeds), statistics.median(apart.speeds)
        yield GroupLine(
            model, way, processes, mbit, round(tally.up), round(tally.down),
            round((tally.up + tally.down) / (apart.up + apart.down), 3), round(speed, 1), round(speed / theirs, 3),
            *(round(used / tally.samples * 1e6, 2) for used in (tally.worker_s, tally.server_s)),
        )  # fmt: skip
