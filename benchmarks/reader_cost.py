"""What a reader costs a model's training: samples a second beside one, of those without, in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import sleep

import numpy as np
from rich.table import Table

from benchmarks.machine import cpu_seconds
from benchmarks.readers import SETTLE_S
from benchmarks.runner import Progress, Result, Side, Turn, silent, table
from benchmarks.train import LEAST_STEPS, WARM_STEPS, took_s
from benchmarks.workers import ANSWER_S, Process, Team
from elasticps.local import LocalCluster

WAY = "servers 1"  # what `Trainer` calls training through servers with one copy of each range
TRAINING, READER = "servers and workers", "the reader"


@dataclass(frozen=True)
class ReaderCost:
    """What a model's training reached without a reader and beside one.

    without, beside   samples a second of all workers together, in each turn
    ratio             the median of the turns' ratios
    quartiles         of these ratios
    cpu_us            processor time of a step, microseconds: of servers and workers without a reader, beside one, and
                      of the reader
    """

    model: str
    batch: int
    workers: int
    servers: int
    every_ms: float
    dtype: str
    without: tuple[float, ...]
    beside: tuple[float, ...]
    ratio: float
    quartiles: tuple[float, float]
    cpu_us: tuple[float, float, float]


def run(
    model: str, workers: int = 2, servers: int = 2, batch: int = 256, every_ms: float = 20.0, dtype: str | None = None,
    turns: int = 8, seconds: float = 3.0, progress: Progress = silent,
) -> Result:  # fmt: skip
    """Trains a model of `bench train` at full speed, in turns of about `seconds` without a reader and with one in a
    process of its own, which follows all tables and tensors. dtype: the reader's, None for the tables'."""
    job = {"model": model, "batch": batch, "workers": workers}
    with (
        LocalCluster(servers=servers, replicas=1) as cluster,
        Team("training:Trainer", [{**job, "rank": rank} for rank in range(workers)], ANSWER_S + seconds) as team,
        Process("readers:ReaderProcess", url=cluster.url, every=every_ms / 1e3, dtype=dtype) as reader,
    ):
        progress(f"{model}: warming up")
        team.ask(workers, "build", way=WAY, url=cluster.url)
        training = [server.pid for server in cluster.servers] + [worker.pid for worker in team.workers]

        def train(steps: int) -> float:
            return took_s(team.ask(workers, "train", way=WAY, steps=steps))

        def cpu_s() -> dict[str, float]:
            return {TRAINING: cpu_seconds(training), READER: cpu_seconds([reader.pid])}

        side = Side(train, WARM_STEPS, cpu_s)
        side.turn()
        side.fit(side.turn(), seconds, LEAST_STEPS)  # the second time tells how long a step takes
        without, beside = list[Turn](), list[Turn]()
        for number in range(turns):
            progress(f"{model}: turn {number + 1} of {turns}")
            without.append(side.turn())
            reader.ask("attach")
            sleep(SETTLE_S)
            beside.append(side.turn())
            reader.ask("detach")
    found = cost_of(model, batch, workers, servers, every_ms, dtype, without, beside)
    return Result(found, [_shown(found)])


def cost_of(
    model: str, batch: int, workers: int, servers: int, every_ms: float, dtype: str | None,
    without: Sequence[Turn], beside: Sequence[Turn],
) -> ReaderCost:  # fmt: skip
    """The cost by pairs of turns, each without a reader and then beside one."""
    speeds = [tuple(turn.steps * workers * batch / turn.seconds for turn in side) for side in (without, beside)]
    ratios = np.array(speeds[1]) / np.array(speeds[0])
    steps = [workers * sum(turn.steps for turn in side) for side in (without, beside)]
    cpu_us = [
        1e6 * sum(turn.cpu_s[kind] for turn in side) / steps[which]
        for which, side, kind in ((0, without, TRAINING), (1, beside, TRAINING), (1, beside, READER))
    ]
    low, middle, high = np.percentile(ratios, (25, 50, 75)).round(3).tolist()
    return ReaderCost(
        model, batch, workers, servers, every_ms, dtype or "as the tables", tuple(np.round(speeds[0], 1).tolist()),
        tuple(np.round(speeds[1], 1).tolist()), middle, (low, high), tuple(np.round(cpu_us, 1).tolist()),
    )  # fmt: skip


def _shown(found: ReaderCost) -> Table:
    lines = [
        ("samples/s without a reader, median", f"{np.median(found.without):,.0f}"),
        ("samples/s beside one, median", f"{np.median(found.beside):,.0f}"),
        ("of those without, median (quartiles)", "{:.3f} ({:.3f}–{:.3f})".format(found.ratio, *found.quartiles)),
        ("processor time of servers and workers in a step", "{:.0f} µs, with a reader {:.0f}".format(*found.cpu_us)),
        ("of the reader", f"{found.cpu_us[2]:.0f} µs"),
    ]
    title = (
        f"{found.model}, {found.workers} workers, {found.batch} samples a step, {found.servers} servers; "
        f"a reader ({found.dtype}), a window every {found.every_ms:g} ms"
    )
    return table(title, lines, [("", lambda line: line[0]), ("found", lambda line: line[1])])
