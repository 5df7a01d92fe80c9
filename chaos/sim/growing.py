"""Workers whose tables admit keys and forget rows. Times are cluster time, of which `WALL_S` seconds go by in one."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.growth import KEYS, Growth, Shown
from chaos.sim.checks.growth_model import DIM, Content
from chaos.sim.checks.sums import units
from chaos.sim.cluster import Cluster
from chaos.sim.programs import Training, Worker
from chaos.sim.story import App, Story
from chaos.sim.tables import gone_is_fine
from elasticps.client.client import Client
from elasticps.client.tables import SparseTable
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import (
    SCORES,
    Admission,
    Capacity,
    Eviction,
    IdleFor,
    MinCount,
    MinCountSketch,
    Probability,
    SmallNorm,
    usage_of,
)

NAMES = ("grows", "forgets")
LAG_S = {True: 10.0, False: 250.0}  # calm or not: by how much logged time may be behind the true one
LEAD_S = {True: 10.0, False: math.inf}  # the same, ahead of it: while servers are gone, two clocks may be left
ADMISSIONS: tuple[Admission | None, ...] = (
    None,
    MinCount(2),
    MinCount(3, forget_after=15),
    MinCount(2, most=16),
    MinCountSketch(3, nbytes=16 << 10, halve_after=20),
    Probability(0.3),
)
EVICTIONS: tuple[tuple[Eviction, ...], ...] = (
    (IdleFor(14),),
    (Capacity(32),),
    (Capacity(32, "most_used", 20),),
    (Capacity(32, "most_used"), IdleFor(25)),
    (Capacity(32, "score", 15),),
    (SmallNorm(40),),
    (),
)
MOST_STEPS = 8  # of a table, before it is looked at what becomes of it
DROPPED, CLEARED, DELETED, LOADED, CHANGED, SWEPT = 0.1, 0.02, 0.04, 0.04, 0.02, 0.03
OFTEN = 20.0  # the mean of the keys that are pushed: small ones come often


def policies_of(story: Story, name: str) -> tuple[Admission | None, tuple[Eviction, ...]]:
    """The policies of a table in a story."""
    random = Random(f"policies {story.seed} {name}")
    return random.choice(ADMISSIONS), random.choice(EVICTIONS)


class Growing(Worker):
    """A worker of tables that admit keys and forget rows."""

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, growth: Growth) -> None:
        super().__init__(cluster, name, app, training)
        self.growth = growth

    def main(self, ps: Client) -> None:
        while self.training.on:
            with gone_is_fine():
                name = self.random.choice(NAMES)
                admission, eviction = policies_of(self.training.story, name)
                table = ps.table(
                    name, dim=DIM, optimizer=Accumulate(), admission=admission, eviction=eviction or (SmallNorm(0),)
                )
                for _ in range(self.random.randint(1, MOST_STEPS)):
                    self._use(ps, table)
                    self.think()
                if self.random.random() < DROPPED:
                    ps.drop_table(table.name)
            self.think()
        while True:
            with gone_is_fine():  # each refused step is reported once
                ps.flush()
                break

    def _keys(self, most: int) -> NDArray[np.int64]:
        drawn = (int(self.random.expovariate(1 / OFTEN)) % KEYS for _ in range(self.random.randint(1, most)))
        return np.array([*dict.fromkeys(drawn)], np.int64)

    def _use(self, ps: Client, table: SparseTable) -> None:
        chance, keys = self.random.random(), self._keys(12)
        rare: tuple[tuple[float, Callable[[], object]], ...] = (
            (CLEARED, table.clear),
            (DELETED, lambda: table.delete(keys)),
            (LOADED, self._loading(table)),
            (CHANGED, lambda: self._change(table)),
            (SWEPT, lambda: table.evict(dry_run=len(keys) % 2 > 0)),
        )
        for limit, do in rare:
            chance -= limit
            if chance < 0:
                do()
                return
        self._push(ps, table, keys)
        if self.random.random() < 0.3:
            ps.flush()
        if self.random.random() < 0.6:
            self._pull(ps, table)

    def _loading(self, table: SparseTable) -> Callable[[], None]:
        keys = self._keys(4)
        rows = np.stack([np.full(len(keys), 2), 3 * units(keys)], axis=1).astype(np.float32)
        return lambda: table.load(keys, rows)

    def _push(self, ps: Client, table: SparseTable, keys: NDArray[np.int64]) -> None:
        sign = self.random.choice((1, 1, 1, -1))  # so that norms fall, too
        grads = sign * np.stack([np.ones(len(keys)), units(keys)], axis=1).astype(np.float32)
        given = grads
        if scored := table.spec.usage == SCORES:
            scores = np.array([self.random.randint(0, 4) for _ in keys], np.float32)
            given = np.concatenate([grads, scores[:, None]], axis=1)
        ps.resume()  # it takes part: only then its clock is known
        self.growth.pushed[ps.worker.id, ps.clock + 1] = {table.id: Content(keys.tolist(), given.copy())}
        step = ps.push({table: (keys, grads, scores) if scored else (keys, grads)})
        self.steps += 1
        if self.random.random() < 0.3:
            step.result()

    def _pull(self, ps: Client, table: SparseTable) -> None:
        keys, clock = self._keys(40), ps.clock
        if self.random.random() < 0.2:
            table.pull(keys, read="any")
        else:
            rows = table.pull(keys)
            self.growth.shown.append(Shown(str(self.threads.process), ps.worker.id, clock, table.id, keys, rows))
        self.pulls += 1

    def _change(self, table: SparseTable) -> None:
        """Puts the table under another policy."""
        if self.random.random() < 0.5:
            table.set_admission(self.random.choice(ADMISSIONS))
        else:
            scored = table.spec.usage == SCORES
            table.set_eviction(
                self.random.choice([one for one in EVICTIONS if scored or usage_of(None, one) != SCORES])
            )
