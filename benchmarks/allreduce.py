"""Adding up dense gradients: by ring all-reduce, through servers, and in groups that go through servers.

What was measured stands beside what bandwidths say (`cost.py`), which are measured in the same run.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import elasticps as eps
from benchmarks.core.cost import Machine, here_s, links_s
from benchmarks.machine import memcpy_gb_per_s, socket_pair
from benchmarks.runner import Progress, Result, silent, table
from benchmarks.training import TIMEOUT_S, meet
from benchmarks.workers import Team
from elasticps.local import LocalCluster
from elasticps.torch import LocalGroup

SIZES_MB, PROCESSES, SERVERS = (1.0, 16.0), (2, 4), (1, 2, 3)
STEPS = 3
LR = 1e-3
LINK_MBIT, MACHINES = 1000, 4  # of the comparison over links
_PAIR_BYTES = 16 << 20


@dataclass(frozen=True)
class AllReduceLine:
    """One way: "ring", "servers" or "group", with so many processes and servers (0: none), for `mb` of gradients.

    taken_ms      until every process has the sum, or the new weights: the median of the steps, of the slowest process
    predicted_ms  what the bandwidths say
    of_ring       taken, by what the ring took for the same
    """

    mb: float
    processes: int
    way: str
    servers: int
    taken_ms: float
    predicted_ms: float
    of_ring: float


@dataclass(frozen=True)
class AllReduceRun:
    """A run: the lines, the machine, and in words what is better from when on."""

    lines: list[AllReduceLine]
    machine: Machine
    conclusion: str


def run(
    *,
    sizes_mb: Sequence[float] = SIZES_MB,
    processes: Sequence[int] = PROCESSES,
    servers: Sequence[int] = SERVERS,
    steps: int = STEPS,
    progress: Progress = silent,
) -> Result:
    """Measures each size with each number of processes, by all-reduce and with each number of servers."""
    progress("measuring memory and loopback")
    here, lines, most = measured(), list[AllReduceLine](), max(processes)
    with tempfile.TemporaryDirectory(prefix="elasticps-allreduce-") as folder, ExitStack() as stack:
        common = {"most": most, "processes": sorted(set(processes)), "meeting": str(Path(folder) / "meeting")}
        jobs = [{**common, "rank": rank} for rank in range(most)]
        team = stack.enter_context(Team("allreduce:AllReduceProcess", jobs))
        cluster: LocalCluster | None = None
        rings: dict[tuple[float, int], float] = {}
        for count in (0, *sorted(set(servers))):
            if count == 1 or (count and cluster is None):
                progress(f"starting {count} server(s)")
                cluster = stack.enter_context(LocalCluster(servers=count, replicas=1))
            elif cluster is not None:
                progress(f"going on with {count} servers")
                cluster.scale(count)
            for size in sizes_mb:
                for n in sorted(set(processes)):
                    for way in ("servers", "group") if count else ("ring",):
                        progress(f"{way}, {size:g} MB, {n} processes" + f", {count} server(s)" * bool(count))
                        url = cluster.url if cluster is not None else ""
                        answers = team.ask(n, "measure", way=way, processes=n, mb=size, steps=steps, url=url,
                                           app=f"{way}-{n}-{size:g}-{count}")  # fmt: skip
                        taken = statistics.median(map(max, zip(*answers, strict=True)))
                        rings.setdefault((size, n), taken)
                        predicted = here_s(way, size * 1e6, n, here)
                        lines.append(
                            AllReduceLine(size, n, way, count, round(taken * 1e3, 2), round(predicted * 1e3, 2),
                                 round(taken / rings[size, n], 3))
                        )  # fmt: skip
    lines.sort(key=lambda line: (line.mb, line.processes, line.way != "ring", line.way, line.servers))
    found = AllReduceRun(lines, here, concluded(lines, max(sizes_mb), most))
    shown = table("dense gradients: ms until all have the sum, or the new weights", lines, [
        ("MB", lambda line: f"{line.mb:g}"), ("processes", lambda line: line.processes),
        ("way", lambda line: line.way), ("servers", lambda line: line.servers or ""),
        ("taken ms", lambda line: f"{line.taken_ms:,.1f}"), ("predicted ms", lambda line: f"{line.predicted_ms:,.1f}"),
        ("taken of predicted", lambda line: f"{line.taken_ms / line.predicted_ms:.2f}"),
        ("of the ring", lambda line: f"{line.of_ring:.2f}"),
    ], left=("way",))  # fmt: skip
    machine = (
        f"memory {here.memory_per_s / 1e9:.1f} GB/s, loopback {here.loopback_per_s / 1e9:.2f} GB/s, a message and its "
        f"answer {here.turn_s * 1e6:.0f} µs, {here.cores} cores"
    )
    return Result(found, [shown, machine, found.conclusion])


def measured() -> Machine:
    """Bandwidths of this machine, now."""
    with socket_pair() as pair:
        seconds = statistics.median(pair.exchange(_PAIR_BYTES, _PAIR_BYTES) for _ in range(5))
        turn_s = statistics.median(pair.exchange(64, 64) for _ in range(200))
    cores = len(os.sched_getaffinity(0))
    return Machine(memcpy_gb_per_s() * 1e9, 2 * _PAIR_BYTES / seconds, turn_s, cores)


def concluded(lines: Iterable[AllReduceLine], mb: float, each: int) -> str:
    """What is better from when on: here, as measured, and over links, by the cost model."""
    best: dict[tuple[int, float], dict[str, float]] = {}
    for line in lines:
        ways = best.setdefault((line.processes, line.mb), {})
        ways[line.way] = min(line.taken_ms, ways.get(line.way, line.taken_ms))
    sentences = []
    for count in sorted({count for count, _ in best}):
        sizes = {size: best[count, size] for n, size in sorted(best) if n == count}
        parts = [f"{_since(sizes, 'ring', ('servers', 'group'))} a ring is fastest"]
        parts.append(f"{_since(sizes, 'group', ('servers',))} a group is faster than separate workers")
        sentences.append(f"{count} processes here: {', '.join(parts)}.")
    link = LINK_MBIT * 1e6 / 8
    ring, group, apart = (
        links_s(way, mb * 1e6, MACHINES, each, MACHINES, link) for way in ("ring", "group", "servers")
    )
    few = links_s("group", mb * 1e6, MACHINES, each, 1, link)
    sentences.append(
        f"By the model, {MACHINES} machines of {each} processes, each on a link of {LINK_MBIT:,} Mbit/s, {mb:g} MB: "
        f"a ring {ring:.2f} s, groups {group:.2f} s with as many servers as machines ({few:.2f} s with one), separate "
        f"workers {apart:.2f} s: groups come near a ring once there is a server for each machine, separate workers "
        "do not."
    )
    return " ".join(sentences)


def _since(sizes: dict[float, dict[str, float]], way: str, others: Sequence[str]) -> str:
    """From which size on a way is faster than all the others, in words."""
    known = {size: ways for size, ways in sizes.items() if way in ways and any(each in ways for each in others)}
    won = [size for size, ways in known.items() if all(ways[way] < ways.get(each, float("inf")) for each in others)]
    if not won:
        return "never"
    if len(won) == len(known):
        return "always"
    since = next((size for size in sorted(known) if all(s in won for s in known if s >= size)), None)
    return f"from {since:g} MB on" if since is not None else f"at {', '.join(f'{size:g}' for size in won)} MB only"


class AllReduceProcess:
    """One of the worker processes. All meet through the file `meeting`, and make a group of the first few for each of
    `processes`."""

    def __init__(self, *, rank: int, most: int, processes: Sequence[int], meeting: str) -> None:
        torch.set_num_threads(1)
        self._rank = rank
        meet(meeting, rank, most)
        self._groups = {count: distributed.new_group(list(range(count))) for count in processes}

    def measure(self, way: str, processes: int, mb: float, steps: int, url: str, app: str) -> list[float]:
        """Seconds of each step. way: "ring", which adds up float32 by gloo's all-reduce, "servers", where each process
        pushes them and pulls the weights that come of it in a synchronous round, or "group", where all are one
        worker."""
        floats, group = int(mb * 1e6 / 4), self._groups[processes]
        ways: dict[str, AbstractContextManager[Callable[[], object]]] = {
            "ring": self._ring(group, floats),
            "servers": self._servers(group, floats, url, app),
            "group": self._group(group, floats, url, app),
        }
        with ways[way] as step:
            seconds = [self._timed(step, group) for _ in range(steps + 1)]
        return seconds[1:]  # the first one makes buffers and fills caches

    def close(self) -> None:
        """Leaves the other processes."""
        distributed.destroy_process_group()

    @staticmethod
    def _timed(step: Callable[[], object], group: Any) -> float:
        distributed.barrier(group)
        began = time.monotonic()
        step()
        return time.monotonic() - began

    @contextmanager
    def _ring(self, group: Any, floats: int) -> Iterator[Callable[[], object]]:
        gradient = torch.ones(floats)
        yield lambda: distributed.all_reduce(gradient, group=group)

    @contextmanager
    def _servers(self, group: Any, floats: int, url: str, app: str) -> Iterator[Callable[[], object]]:
        gradient, weights = np.ones(floats, np.float32), np.zeros(floats, np.float32)
        with eps.connect(url, worker=f"w{self._rank}", app=app, consistency=eps.BSP(), timeout=TIMEOUT_S) as ps:
            tensor = ps.tensor("weights", init=weights, optimizer=eps.SGD(lr=LR))
            ps.resume()
            distributed.barrier(group)  # a worker that comes later takes part in later rounds only

            def step() -> None:
                ps.push({tensor: gradient}, copy=False)
                tensor.pull(weights)

            yield step
            distributed.barrier(group)
            if self._rank == 0:
                ps.drop_table("weights")
            distributed.barrier(group)

    @contextmanager
    def _group(self, group: Any, floats: int, url: str, app: str) -> Iterator[Callable[[], object]]:
        gradient, weights = np.ones(floats, np.float32), np.zeros(floats, np.float32)
        with LocalGroup(group).connect(url, worker="group", app=app, timeout=TIMEOUT_S) as ps:
            tensor = ps.tensor("weights", init=weights, optimizer=eps.SGD(lr=LR))

            def step() -> None:
                ps.push({tensor: gradient})
                weights[...] = ps.pull_many([tensor])[0].result()

            yield step
            if ps.client is not None:
                ps.client.drop_table("weights")
            ps.flush()
