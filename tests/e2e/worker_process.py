"""A worker in a process of its own, to be killed and frozen: `python -m tests.e2e.worker_process ROLE URL APP NAME …`.

It tells what it does in lines of JSON, each before it does it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

import elasticps as eps

KEYS_PER_STEP = 60
HALF = KEYS_PER_STEP // 2


def counts(ps: eps.Client) -> eps.SparseTable:
    """The table of the oracles: each step adds 1 to rows of its own."""
    return ps.table("counts", dim=1, optimizer=eps.Accumulate())


def ones(keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Gradients that add 1 to rows."""
    return keys, np.ones((len(keys), 1), np.float32)


def keys_of(number: int) -> NDArray[np.int64]:
    """The rows of step `number` (from 0); they lie in many ranges."""
    return np.arange(number * KEYS_PER_STEP, (number + 1) * KEYS_PER_STEP)


def tell(**document: Any) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def two_parts(ps: eps.Client, number: int, between: Any = None) -> eps.Step:
    """Step `number`, in two parts."""
    table, keys = counts(ps), keys_of(number)
    step = ps.step()
    step.push({table: ones(keys[:HALF])})
    if between is not None:
        between()
    step.push({table: ones(keys[HALF:])})
    return step.commit()


def stop_half_way(ps: eps.Client, steps: str) -> None:
    """Pushes so many steps, and half of another; then does nothing more."""
    counts(ps)
    resume = ps.resume()
    for number in range(resume.steps, int(steps)):
        tell(number=number, clock=ps.clock)
        two_parts(ps, number)

    def stop() -> None:
        tell(half=int(steps), clock=ps.clock)
        time.sleep(600)

    two_parts(ps, int(steps), stop)


def push_on(ps: eps.Client) -> None:
    """Pushes for ever."""
    number = 0
    while True:
        tell(number=number, clock=ps.clock)
        try:
            ps.push({counts(ps): ones(keys_of(number))}).result()
        except eps.Closed as error:
            tell(closed=str(error))
            return
        number += 1


def shards(ps: eps.Client, samples: str, size: str, pause_s: str) -> None:
    """Trains shards; tells of each before, and which step is committed."""
    table = counts(ps)
    for shard in ps.shards(int(samples), int(size), shuffle_seed=5):
        tell(indices=shard.indices.tolist(), clock=ps.clock + 1, committed=ps.committed)
        ps.push({table: ones(shard.indices)})
        time.sleep(float(pause_s))
    tell(finished=True)


def bounded(ps: eps.Client, row: str) -> None:
    """Adds 1 to a row of its own for ever, under bounded delay."""
    table = counts(ps)
    tell(base=ps.resume().clock, at=time.monotonic())
    while True:
        ps.push({table: ones(np.array([int(row)]))})
        table.pull(np.array([int(row)]))
        tell(clock=ps.clock)


ROLES = {f.__name__: f for f in (stop_half_way, push_on, shards, bounded)}


@dataclass
class Child:
    """Such a process, and what it has told."""

    process: subprocess.Popen[str]
    lines: list[dict[str, Any]]

    def hear(self) -> dict[str, Any]:
        """The next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.endswith("\n"), f"the worker ended: {self.process.wait(10)}"
        self.lines.append(json.loads(line))
        return self.lines[-1]

    def hear_until(self, word: str) -> dict[str, Any]:
        """The next line with that word in it."""
        while word not in self.hear():
            pass
        return self.lines[-1]

    def rest(self) -> Iterator[dict[str, Any]]:
        """The remaining messages of the process until its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):
                self.lines.append(json.loads(line))
                yield self.lines[-1]


@contextmanager
def child(role: str, url: str, app: str, name: str, *more: object, consistency: str = "asp") -> Iterator[Child]:
    """Runs one; it is dead at the end."""
    command = [sys.executable, "-m", "tests.e2e.worker_process", role, url, app, name, consistency, *map(str, more)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Child(process, [])
        finally:
            process.kill()


def main() -> None:
    role, url, app, name, consistency, *more = sys.argv[1:]
    kinds: dict[str, eps.ASP | eps.SSP | eps.BSP] = {"asp": eps.ASP(), "ssp": eps.SSP(staleness=2), "bsp": eps.BSP()}
    with eps.connect(url, worker=name, app=app, consistency=kinds[consistency], timeout=60) as ps:
        ROLES[role](ps, *more)


if __name__ == "__main__":
    main()
