"""Workers whose tables come and go: made, pushed to, cleared and dropped by any of them, while others use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.sums import KEYS
from chaos.sim.checks.violation import Violation
from chaos.sim.cluster import Cluster
from chaos.sim.programs import Training, Worker
from chaos.sim.story import App
from elasticps.client.client import Client
from elasticps.client.tables import SparseTable
from elasticps.errors import ServerError, UnknownTable
from elasticps.model.optimizers import Accumulate

NAMES = ("one", "other")
MOST_STEPS = 4  # of a table, before it is looked at what becomes of it
DROPPED, CLEARED, DELETED = 0.5, 0.1, 0.1
ONE = np.float32(1)


@dataclass
class Known:
    """What a table can hold. begun: pushes of 1 that have been begun, by key; forgotten: rows may have been dropped."""

    begun: NDArray[np.int64] = field(default_factory=lambda: np.zeros(KEYS, np.int64))
    forgotten: bool = False


class Fickle(Worker):
    """A worker that makes, uses and drops tables. known: what each table can hold, by id, for all workers."""

    def __init__(self, cluster: Cluster, name: str, app: App, training: Training, known: dict[int, Known]) -> None:
        super().__init__(cluster, name, app, training)
        self.known = known
        self._own: dict[int, NDArray[np.int64]] = {}  # what this incarnation has pushed, by table and key

    def main(self, ps: Client) -> None:
        self._own = {}
        while self.training.on:
            with gone_is_fine():
                table = ps.table(self.random.choice(NAMES), dim=1, optimizer=Accumulate())
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

    def _use(self, ps: Client, table: SparseTable) -> None:
        known, own = self.known.setdefault(table.id, Known()), self._own.setdefault(table.id, np.zeros(KEYS, np.int64))
        keys, chance = self.some_keys(), self.random.random()
        if chance < CLEARED:
            known.forgotten = True
            table.clear()
        elif chance < CLEARED + DELETED:
            known.forgotten = True
            table.delete(keys)
        else:
            known.begun[keys] += 1
            step = ps.push({table: (keys, np.full((len(keys), 1), ONE))})
            own[keys] += 1
            self.steps += 1
            if self.random.random() < DROPPED:
                step.result()
            self._pull(table, known, own, keys)

    def _pull(self, table: SparseTable, known: Known, own: NDArray[np.int64], keys: NDArray[np.int64]) -> None:
        least = own[keys].copy()
        rows = table.pull(keys)[:, 0]
        self.pulls += 1
        high = rows > known.begun[keys]
        low = (rows < least) & (not known.forgotten)
        if wrong := np.flatnonzero(high | low | (rows != np.round(rows))).tolist():
            at = wrong[0]
            raise Violation(
                "a table's content",
                f"{self.threads.process} is shown {rows[at]} of key {keys[at]} of {table.name!r} (id {table.id}), to "
                f"which it has pushed {least[at]}, and {known.begun[keys[at]]} have been begun",
            )


@contextmanager
def gone_is_fine() -> Iterator[None]:
    """Suppresses the error that the table in use has been dropped, or is about to be."""
    try:
        yield
    except UnknownTable:
        pass
    except ServerError as error:
        if "dropped" not in str(error):
            raise
