"""What looking ahead saves on a link that takes its time: DLRM, beside one whose rows never leave the worker.

One worker trains over a relay that holds every byte back for so many milliseconds each way. Dense weights are at the
servers in any case: a step waits for them as long as the link takes to and fro.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from benchmarks.workers import Worker, started
from elasticps.local import LocalCluster

WARM_STEPS = 30
KINDS = ("local", "pulled", "ahead", "cache", "cache, ahead")


@dataclass(frozen=True)
class PrefetchLine:
    """rows: where they come from; samples_per_s: the median of the turns; of_local: of what it is with local rows."""

    rows: str
    samples_per_s: float
    of_local: float


def run(
    *,
    delay_ms: float = 5.0,
    batches: int = 4,
    batch: int = 2048,
    steps: int = 60,
    turns: int = 3,
    servers: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> list[PrefetchLine]:
    """Trains `steps` steps of each kind, `turns` times in turns, so that all see the same machine."""
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with LocalCluster(servers=servers, replicas=1) as cluster, ExitStack() as stack:
        workers = {kind: _start(stack, cluster, kind, batches, batch, delay_ms) for kind in KINDS}
        for kind, worker in workers.items():
            progress(f"rows {kind}: {WARM_STEPS} steps to begin with")
            worker.ask(f"train {WARM_STEPS}")
        for turn in range(turns):
            for kind, worker in workers.items():
                progress(f"rows {kind}: turn {turn + 1}")
                speeds[kind].append(batch * steps / worker.ask(f"train {steps}")["seconds"])
    found = {kind: statistics.median(speed) for kind, speed in speeds.items()}
    return [PrefetchLine(kind, round(speed, 1), round(speed / found["local"], 3)) for kind, speed in found.items()]


def _start(stack: ExitStack, cluster: LocalCluster, kind: str, batches: int, batch: int, delay_ms: float) -> Worker:
    addresses = [server.address for server in cluster.servers]
    relay = stack.enter_context(started("benchmarks.relay", *addresses))
    ports = dict(zip(addresses, relay.answer(), strict=True))
    relay.ask(f"delay {delay_ms}")
    job = {
        "model": "dlrm", "filters": "cache" if kind.startswith("cache") else "none", "batch": batch, "seed": 1,
        "rows": kind.split(", ")[-1] if kind != "cache" else "pulled", "ahead": batches,
        "url": cluster.url, "ports": ports, "app": kind.replace(", ", "-"),
    }  # fmt: skip
    return stack.enter_context(started("benchmarks.traffic_worker", json.dumps(job)))
