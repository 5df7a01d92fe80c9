"""What filters save: bytes of a training step, its speed over slow links, and what they do to the model.

One worker trains DLRM on clicks that are made up, or a small network on handwritten digits, through a relay that counts
bytes and holds them back as a link of so many Mbit/s would. Each kind of filter has tables of its own, and begins from
the same seed.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.workers import started
from elasticps.local import LocalCluster

FILTERS = {
    "dlrm": (
        "none", "bfloat16", "float16", "int8", "int8+once", "int8+keys", "int8+keys+top_k", "cache", "cache+int8+keys",
    ),
    "digits": ("none", "top_k", "top_k+int8", "random_k+int8", "threshold+top_k", "threshold+zstd"),
}  # fmt: skip
"""By model; the digits' network pulls without filters."""
MBIT = (1000, 100)
LEAST_STEPS = 4


@dataclass(frozen=True)
class TrafficLine:
    """What one kind of filter came to, over all seeds.

    model                        "dlrm" or "digits"
    up_per_step, down_per_step   bytes that left the worker, and came to it, of which
    of_none, up_of_none          all together, and those that left, are this part of what they are without filters
    keys_of_none                 the bytes of a table's keys are this part, in pulls and pushes
    rows_of_none                 of those that a cache received for rows, with slots and digests
    oldest                       the greatest age, in steps, of a row that it showed
    score                        of each seed, on samples that were not trained: AUC, or the part that is recognised
    lost                         the mean of what that is below the score without filters, of the same seed
    samples_per_s                by the link's Mbit/s, 0 for one without a limit: the median of the seeds
    """

    model: str
    filters: str
    up_per_step: float
    down_per_step: float
    of_none: float
    up_of_none: float
    keys_of_none: float
    rows_of_none: float
    oldest: int
    score: list[float]
    lost: float
    samples_per_s: dict[int, float]


@dataclass
class _Run:
    up: float
    down: float
    score: float
    speeds: dict[int, float]
    keys: tuple[int, int] = (0, 0)  # bytes sent, and without filters
    rows: tuple[int, int] = (0, 0)  # the same of what a cache received
    oldest: int = 0


def run(
    *,
    filters: Sequence[str] = (),
    mbit: Sequence[int] = MBIT,
    seeds: int = 5,
    steps: int = 1000,
    batch: int = 256,
    servers: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[TrafficLine]:
    """Yields a line for each of `filters` (none given: for all) of each model, first that without any. Each trains
    `steps` steps with each seed, then some more over each link."""
    with LocalCluster(servers=servers, replicas=1) as cluster:
        for model, known in FILTERS.items():
            names = [name for name in known[1:] if not filters or name in filters]
            if not names:
                continue
            none: list[_Run] = []
            for name in ("none", *names):
                job = {"model": model, "filters": name, "batch": batch}
                runs = [_trained(cluster, job | {"seed": n}, steps, mbit, progress) for n in range(1, seeds + 1)]
                none = none or runs
                yield _line(model, name, runs, none)


def _line(model: str, name: str, runs: Sequence[_Run], none: Sequence[_Run]) -> TrafficLine:
    up, down = (statistics.mean(getattr(each, way) for each in runs) for way in ("up", "down"))
    whole, whole_up = (statistics.mean(each.up + all_of_it * each.down for each in none) for all_of_it in (1, 0))
    lost = statistics.mean(before.score - each.score for before, each in zip(none, runs, strict=True))
    keys, rows = (_part([getattr(each, what) for each in runs]) for what in ("keys", "rows"))
    speeds = {mbit: statistics.median(each.speeds[mbit] for each in runs) for mbit in runs[0].speeds}
    return TrafficLine(
        model, name, round(up), round(down), round((up + down) / whole, 4), round(up / whole_up, 4),
        keys, rows, max(each.oldest for each in runs), [round(each.score, 5) for each in runs], round(lost, 5),
        {mbit: round(speed, 1) for mbit, speed in speeds.items()},
    )  # fmt: skip


def _part(pairs: Sequence[tuple[int, int]]) -> float:
    """The sum of the first of that of the second."""
    whole = sum(pair[1] for pair in pairs)
    return round(sum(pair[0] for pair in pairs) / whole, 4) if whole else 1.0


def _trained(
    cluster: LocalCluster,
    job: dict[str, Any],
    steps: int,
    mbit: Sequence[int],
    progress: Callable[[str], None],
) -> _Run:
    model, name, seed, batch = (job[each] for each in ("model", "filters", "seed", "batch"))
    addresses = [server.address for server in cluster.servers]
    with ExitStack() as stack:
        relay = stack.enter_context(started("benchmarks.relay", *addresses))
        ports = dict(zip(addresses, relay.answer(), strict=True))
        reached = {"url": cluster.url, "ports": ports, "app": f"{model}-{name.replace('+', '-')}-{seed}"}
        worker = stack.enter_context(started("benchmarks.traffic_worker", json.dumps(job | reached)))
        progress(f"{model}, {name}: seed {seed}")
        worker.ask(f"train {LEAST_STEPS}")  # tables are made, connections open
        before = relay.ask("count")
        took_s = worker.ask(f"train {steps}")["seconds"]
        after = relay.ask("count")
        up, down = ((after[way] - before[way]) / steps for way in ("up", "down"))
        scored = worker.ask("score")
        speeds = {0: batch * steps / took_s}
        for each in mbit:
            relay.ask(f"limit {each}")
            some = max(LEAST_STEPS, min(steps, int(each * 1e6 / 8 / (up + down))))  # a second or two
            speeds[each] = batch * some / worker.ask(f"train {some}")["seconds"]
        return _Run(up, down, scored["score"], speeds, *(scored[each] for each in ("keys", "rows", "oldest")))
