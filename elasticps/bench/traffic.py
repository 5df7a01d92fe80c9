"""What filters save: bytes of a training step, its speed over slow links, and what they do to the model.

One worker trains DLRM on clicks that are made up, through a relay that counts bytes and holds them back as a link of
so many Mbit/s would. Each kind of filter has tables of its own, and begins from the same seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from elasticps.bench.failover import Worker
from elasticps.local import LocalCluster

FILTERS = ("none", "bfloat16", "int8")
MBIT = (1000, 100)
SCORED = 40  # batches
LEAST_STEPS = 4


@dataclass(frozen=True)
class Line:
    """What one kind of filter came to, over all seeds.

    up_per_step, down_per_step   bytes that left the worker, and came to it, of which
    of_none                      all together are this part of what they are without filters
    auc                          of each seed, on samples that were not trained
    auc_lost                     the mean of what that is below the AUC without filters, of the same seed
    samples_per_s                by the link's Mbit/s, 0 for one without a limit: the median of the seeds
    """

    filters: str
    up_per_step: float
    down_per_step: float
    of_none: float
    auc: list[float]
    auc_lost: float
    samples_per_s: dict[int, float]

    def to_dict(self) -> dict[str, object]:
        """For programs."""
        return asdict(self)


@dataclass
class _Run:
    up: float
    down: float
    auc: float
    speeds: dict[int, float]


def run(
    *,
    filters: Sequence[str] = FILTERS,
    mbit: Sequence[int] = MBIT,
    seeds: int = 5,
    steps: int = 1000,
    batch: int = 256,
    servers: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[Line]:
    """Yields a line for each of `filters`, first that without any. Each trains `steps` steps with each seed, then some
    more over each link."""
    names = ["none", *(name for name in filters if name != "none")]
    with LocalCluster(servers=servers, replicas=1) as cluster:
        found = {
            name: [_trained(cluster, name, seed, steps, batch, mbit, progress) for seed in range(1, seeds + 1)]
            for name in names
        }
    none = found["none"]
    for name in names:
        yield _line(name, found[name], none)


def _line(name: str, runs: Sequence[_Run], none: Sequence[_Run]) -> Line:
    up, down = (statistics.mean(getattr(each, way) for each in runs) for way in ("up", "down"))
    whole = statistics.mean(each.up + each.down for each in none)
    lost = statistics.mean(before.auc - each.auc for before, each in zip(none, runs, strict=True))
    speeds = {mbit: statistics.median(each.speeds[mbit] for each in runs) for mbit in runs[0].speeds}
    return Line(
        name, round(up), round(down), round((up + down) / whole, 4), [round(each.auc, 5) for each in runs],
        round(lost, 5), {mbit: round(speed, 1) for mbit, speed in speeds.items()},
    )  # fmt: skip


def _trained(
    cluster: LocalCluster,
    name: str,
    seed: int,
    steps: int,
    batch: int,
    mbit: Sequence[int],
    progress: Callable[[str], None],
) -> _Run:
    addresses = [server.address for server in cluster.servers]
    with ExitStack() as stack:
        relay = stack.enter_context(_process("elasticps.bench.relay", *addresses))
        ports = dict(zip(addresses, relay.answer(), strict=True))
        job = {"url": cluster.url, "ports": ports, "app": f"{name}{seed}", "seed": seed, "batch": batch}
        worker = stack.enter_context(_process("elasticps.bench.traffic_worker", json.dumps(job | {"filters": name})))
        progress(f"{name}: seed {seed}")
        worker.ask(f"train {LEAST_STEPS}")  # tables are made, connections open
        before = relay.ask("count")
        took_s = worker.ask(f"train {steps}")["seconds"]
        after = relay.ask("count")
        up, down = ((after[way] - before[way]) / steps for way in ("up", "down"))
        auc = worker.ask(f"score {SCORED}")["auc"]
        speeds = {0: batch * steps / took_s}
        for each in mbit:
            relay.ask(f"limit {each}")
            some = max(LEAST_STEPS, min(steps, int(each * 1e6 / 8 / (up + down))))  # a second or two
            speeds[each] = batch * some / worker.ask(f"train {some}")["seconds"]
        return _Run(up, down, auc, speeds)


@contextmanager
def _process(module: str, *arguments: str) -> Iterator[Any]:
    worker = Worker(module, *arguments)
    try:
        yield worker
    finally:
        worker.close()
