"""Large clusters: as many servers, workers and ranges as one asks for, and a program of workers whose checks cost what
they touch."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np

from chaos.sim.checks.counts import COLUMNS, CountedPushes, Incarnation, amounts
from chaos.sim.checks.sums import Keys
from chaos.sim.cluster import Cluster
from chaos.sim.network import Weather
from chaos.sim.programs import Training, Worker
from chaos.sim.story import App, Kind, Story
from chaos.sim.threads import Threads
from elasticps.client.client import Client
from elasticps.client.steps import Step
from elasticps.client.tables import SparseTable
from elasticps.model.optimizers import Accumulate

KEYS_PER_RANGE = 4
MOST_AT_ONCE = 8  # keys of a push or a pull
WINDOW = 4
THINK_S = 0.5
WEATHER = Weather(latency_s=0.0003, bytes_per_s=5e8, buffer_bytes=256 << 10, short=0.0, cut=0.0, preempted=0.0)


def enlarged(story: Story, kind: Kind) -> Story:
    """Returns the story with the servers, workers and ranges that `kind` asks for, all workers in one application, on
    good links: what is looked for is what comes of the numbers."""
    app = App("app0", "counted", kind.workers, WINDOW, 0, large=False, readers=0, think_s=THINK_S, eager=False)
    return replace(
        story, servers=kind.servers, ranges=kind.ranges, replicas=2, weather=WEATHER, apps=(app,), small=False
    )


class Counting(Worker):
    """A worker that pushes and pulls few keys of many, and checks every pull."""

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, counts: CountedPushes) -> None:
        super().__init__(cluster, name, app, training)
        self.counts = counts

    def main(self, ps: Client) -> None:
        table = counts_table(ps)
        mine, before = self.counts.start(self.name)
        found = ps.resume()
        if found.predecessor and before is not None:
            self.counts.resume(before, found.begun, found.trained)
        outstanding: deque[Step] = deque()
        while self.training.on:
            action = self.random.random()
            if action < 0.5:
                outstanding.append(self.push(ps, table, mine))
            elif action < 0.8:
                self.pull(table, mine)
            elif outstanding:
                outstanding.popleft().result()
            self.counts.commit(mine, ps.committed)
            self.think()
        ps.flush()
        self.counts.commit(mine, ps.committed)

    def push(self, ps: Client, table: SparseTable, mine: Incarnation) -> Step:
        """Pushes one to each of some keys."""
        keys = self.keys()
        self.counts.begin(mine, ps.clock + 1, keys)
        grads = np.stack([np.ones(len(keys)), amounts(keys)], axis=1).astype(np.float32)
        step = ps.push({table: (keys, grads)})
        self.steps += 1
        return step

    def pull(self, table: SparseTable, mine: Incarnation) -> None:
        """Pulls some keys, and checks what is shown."""
        keys = self.keys()
        least = self.counts.least(mine, keys)
        self.counts.check(self.name, keys, table.pull(keys), least)
        self.pulls += 1

    def keys(self) -> Keys:
        """Draws different keys."""
        return np.array(self.random.sample(range(self.counts.keys), self.random.randint(1, MOST_AT_ONCE)), np.int64)


def check_all(ps: Client, counts: CountedPushes, threads: Threads) -> None:
    """Pulls all rows and compares them with the pushes."""
    threads.process.clock.note(f"{threads.process} compares all rows")
    counts.check_end(counts_table(ps).pull(np.arange(counts.keys)))


def counts_table(ps: Client) -> SparseTable:
    """Opens the table of counts."""
    return ps.table("counts", dim=COLUMNS, optimizer=Accumulate())
