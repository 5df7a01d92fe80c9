"""Large clusters: as many servers, workers and ranges as one asks for, and a program of workers whose checks cost what
they touch. They train for a time under faults that the seed draws; or each worker takes a few steps (`Waves`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from chaos.sim.checks.counts import COLUMNS, CountedPushes, Incarnation, amounts
from chaos.sim.checks.sums import Keys
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import Cluster
from chaos.sim.faults import inject
from chaos.sim.injector import Injector
from chaos.sim.network import Weather
from chaos.sim.programs import Training, Worker
from chaos.sim.story import App, Fault, Kind, Story
from chaos.sim.threads import Threads
from elasticps.client.client import Client
from elasticps.client.steps import Step
from elasticps.client.tables import SparseTable
from elasticps.model.optimizers import Accumulate

KEYS_PER_RANGE = 4
MOST_AT_ONCE = 8  # keys of a push or a pull
WINDOW = 4
THINK_S = 0.5
STEPS = 2  # of each worker, where training does not last for a time
BRIEF_THINK_S = 0.1  # then
REST_S = 1.0  # how often a worker that has taken its steps looks whether it may end
WAVES, MOST_PER_WAVE, WAVE_S = 6, 500, 0.25  # workers start in so many waves at least, so far apart
LOOK_S = 0.25
PATIENCE_S = 60.0  # without a step, or without a first view, before progress counts as lost
WEATHER = Weather(latency_s=0.0003, bytes_per_s=5e8, buffer_bytes=256 << 10, short=0.0, cut=0.0, preempted=0.0)


def enlarged(story: Story, kind: Kind) -> Story:
    """Returns the story with the servers, workers and ranges that `kind` asks for, all workers in one application, on
    good links: what is looked for is what comes of the numbers."""
    think_s = BRIEF_THINK_S if story.counted else THINK_S
    app = App("app0", "counted", kind.workers, WINDOW, 0, large=False, readers=0, think_s=think_s, eager=False)
    story = replace(
        story, servers=kind.servers, ranges=kind.ranges, replicas=2, weather=WEATHER, apps=(app,), small=False
    )
    return replace(story, faults=()) if story.counted else story  # `Waves` has faults of its own


class Waves:
    """Training in which each worker takes STEPS steps and stays: all workers are there at the same time. They start in
    waves, while a server dies and starts again, and another one joins. start: starts a worker's process."""

    def __init__(self, injector: Injector, workers: Mapping[str, Worker], start: Callable[[str], None]) -> None:
        self._cluster = injector.cluster
        self._injector = injector
        self._workers = workers
        self._start = start
        self.started = 0  # workers

    @property
    def trained(self) -> int:
        """How many workers have taken their steps."""
        return sum(worker.stepped for worker in self._workers.values())

    def play(self, broken: Callable[[], bool]) -> None:
        """Plays until each worker has taken its steps, or a promise is broken."""
        self._wait(self._formed, broken, "the servers have not formed a cluster")
        every = len(self._workers)
        self._start(next(iter(self._workers)))  # makes the table: whoever finds none tells all servers of it
        self.started = 1
        self._wait(lambda: self.trained, broken, "the first worker has not taken its steps")
        for wave in self._waves():
            if broken():
                return
            before = self.started
            for name in wave:
                self._start(name)
            self.started += len(wave)
            for share, what in ((3, "server dies"), (1.5, "server joins")):
                if before < every / share <= self.started:
                    inject(self._injector, Fault(self._cluster.clock.now, what, self._injector.random.random(), 0.0))
            self._cluster.clock.run(self._cluster.clock.now + WAVE_S, broken)
        self._wait(lambda: self.trained, broken, "some workers have not taken their steps", until=every)

    def _waves(self) -> Iterator[Sequence[str]]:
        names = list(self._workers)[1:]
        size = max(1, min(MOST_PER_WAVE, len(names) // WAVES))
        return (names[at : at + size] for at in range(0, len(names), size))

    def _formed(self) -> int:
        return int(self._cluster.settled() == "")

    def _wait(self, count: Callable[[], int], broken: Callable[[], bool], why: str, until: int = 1) -> None:
        """Runs until there are so many. Raises Violation if there are no more for a while."""
        clock = self._cluster.clock
        reached, since_s = count(), clock.now
        while reached < until and not broken():
            clock.run(clock.now + LOOK_S, broken)
            if (now := count()) > reached:
                reached, since_s = now, clock.now
            elif clock.now > since_s + PATIENCE_S and not broken():
                raise Violation("progress", f"for {PATIENCE_S:g} s {why}: {reached} of {until}")


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
            if self.training.story.counted and self.steps >= STEPS:
                outstanding.clear()
                self.rest(ps, mine)
                break
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

    def rest(self, ps: Client, mine: Incarnation) -> None:
        """Has all steps committed, and stays until training ends."""
        ps.flush()
        self.counts.commit(mine, ps.committed)
        self.stepped = True
        while self.training.on:
            self.threads.sleep(REST_S)

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
