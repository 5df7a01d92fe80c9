"""Compares this checkout of elasticps with another one. Each has a cluster and a worker of its own, all alive at once,
and they do the same operations in turns of a fifth of a second.

Runs one after the other differ by a tenth or more on a machine that others use; two turns side by side do not. What
starts differ by, as memory lies otherwise, is left: a checkout compared with a copy of itself shows how much that is.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.runner import Progress, Result, silent, table
from benchmarks.workers import Process

OPERATIONS = ("pull", "push", "window")
ROWS, REPLICAS = (64, 8192), (1, 2)
SERVERS, STARTS, TURNS, TURN_S = 3, 4, 8, 0.2
KEYS, DIM, WINDOW = 300_000, 64, 4
_END_S = 30.0  # a player that takes longer to end is killed

# Microseconds of an operation, and of the servers' processor time for it: there, and here.
_Pair: TypeAlias = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class Compared:
    """One operation with so many rows and replicas. other_us, this_us: of one, median of all turns; other_cpu_us,
    cpu_us: what it takes the servers; ratio, low, high: this by the other of each pair of turns, median and quartiles;
    by_start: the median of each start."""

    replicas: int
    operation: str
    rows: int
    other_us: float
    this_us: float
    other_cpu_us: float
    cpu_us: float
    ratio: float
    low: float
    high: float
    by_start: list[float]


class _Player(Process):
    """A process with a cluster and a worker, of one checkout. It runs this file: an older checkout has none like it."""

    def __init__(self, checkout: Path, servers: int, replicas: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(servers), str(replicas)], cwd=checkout, text=True,
            env={**os.environ, "PYTHONPATH": str(checkout)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def play(self, operation: str, rows: int, seconds: float) -> tuple[float, float]:
        """Microseconds of an operation, and of the servers' processor time. The first call waits for the cluster."""
        us, cpu_us = self.ask("play", operation=operation, rows=rows, seconds=seconds)
        return us, cpu_us

    def close(self) -> None:
        """Lets the process end its cluster; ends it if that takes too long."""
        with suppress(subprocess.TimeoutExpired):
            self._process.communicate(timeout=_END_S)
        super().close()


@contextmanager
def _pair(checkouts: Sequence[Path], servers: int, replicas: int) -> Iterator[list[_Player]]:
    """Processes of both checkouts, started in this order."""
    with ExitStack() as stack:
        players = []
        for checkout in checkouts:
            players.append(_Player(checkout, servers, replicas))
            stack.callback(players[-1].close)
            players[-1].play("pull", 1, 0)  # when it is there
        yield players


def run(
    other: Path, *, servers: int = SERVERS, replicas: Sequence[int] = REPLICAS, rows: Sequence[int] = ROWS,
    starts: int = STARTS, turns: int = TURNS, seconds: float = TURN_S, progress: Progress = silent,
) -> Result:  # fmt: skip
    """Compares this checkout with the one at `other`."""
    ours = Path(__file__).resolve().parent.parent
    found: dict[tuple[int, str, int], list[list[_Pair]]] = {}
    for start, copies in itertools.product(range(starts), replicas):
        progress(f"start {start + 1} of {starts}, replicas {copies}")
        order = (other, ours) if start % 2 else (ours, other)
        with _pair(order, servers, copies) as players:
            theirs, our = players if start % 2 else players[::-1]
            for operation, count in itertools.product(OPERATIONS, rows):
                pairs = []
                for turn in range(turns + 1):
                    first, second = (theirs, our) if turn % 2 else (our, theirs)
                    one, two = (player.play(operation, count, seconds) for player in (first, second))
                    pairs.append((one, two) if turn % 2 else (two, one))
                found.setdefault((copies, operation, count), []).append(pairs[1:])  # the first one warms up
    lines = [_compared(*line, pairs) for line, pairs in sorted(found.items(), key=lambda item: item[0][0])]
    shown = table(f"{servers} servers, this checkout by {other}: time of an operation", lines, [
        ("replicas", lambda line: line.replicas), ("operation", lambda line: line.operation),
        ("rows", lambda line: f"{line.rows:,}"), ("there", lambda line: f"{line.other_us:,.0f} µs"),
        ("here", lambda line: f"{line.this_us:,.0f} µs"), ("ratio", lambda line: f"{line.ratio:.2f}"),
        ("quartiles", lambda line: f"{line.low:.2f}, {line.high:.2f}"),
        ("of each start", lambda line: ", ".join(f"{each:.2f}" for each in line.by_start)),
        ("servers' CPU there", lambda line: f"{line.other_cpu_us:,.0f} µs"),
        ("here", lambda line: f"{line.cpu_us:,.0f} µs"),
    ])  # fmt: skip
    return Result(lines, [shown])


def _compared(copies: int, operation: str, rows: int, starts: list[list[_Pair]]) -> Compared:
    pairs = [pair for start in starts for pair in start]
    ratios = np.array([this[0] / other[0] for other, this in pairs])
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75)).tolist()
    by_start = [statistics.median(this[0] / other[0] for other, this in start) for start in starts]
    times = [[statistics.median(pair[who][what] for pair in pairs) for what in (0, 1)] for who in (0, 1)]
    return Compared(
        copies, operation, rows, times[0][0], times[1][0], times[0][1], times[1][1], middle, low, high, by_start
    )


def _play(servers: int, replicas: int) -> None:
    """Plays the turns that are asked for on standard input, with the code of the checkout that it was started in."""
    import elasticps as eps
    from benchmarks.machine import cpu_seconds
    from benchmarks.speed import fill
    from elasticps.local import LocalCluster

    with (
        LocalCluster(servers=servers, replicas=replicas, log_level="warning", memory_limit="700MiB") as cluster,
        eps.connect(cluster.url, worker="bench", window=WINDOW, timeout=120.0) as ps,
    ):
        rows_table = ps.table("bench", dim=DIM, optimizer=eps.Adagrad(lr=0.01))
        pids = [server.pid for server in cluster.servers]
        random = np.random.default_rng(1)
        keys = fill(ps, rows_table, KEYS)
        gc.disable()
        batches: dict[int, Iterator[np.ndarray]] = {}
        for line in sys.stdin:
            _, ask = json.loads(line)
            operation, rows, seconds = ask["operation"], ask["rows"], ask["seconds"]
            grads = np.random.default_rng(rows).standard_normal((rows, DIM), np.float32)
            if rows not in batches:
                batches[rows] = itertools.cycle([keys[random.integers(0, KEYS, rows)] for _ in range(32)])
            count, began, before = 0, time.perf_counter(), cpu_seconds(pids)
            while time.perf_counter() < began + seconds:
                if operation == "pull":
                    rows_table.pull(next(batches[rows]))
                else:
                    step = ps.push({rows_table: (next(batches[rows]), grads)})
                    if operation == "push":
                        step.result()
                count += 1
            ps.flush()
            took = time.perf_counter() - began
            used = cpu_seconds(pids) - before
            print(json.dumps([1e6 * took / max(count, 1), 1e6 * used / max(count, 1)]), flush=True)


if __name__ == "__main__":
    _play(int(sys.argv[1]), int(sys.argv[2]))
