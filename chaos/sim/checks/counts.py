"""Checks pulls and the rows at the end of a table in which every push adds one to each of its keys. What a check costs
depends on the keys that it looks at, not on how many workers or servers there are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.sums import Counts, Keys, Rows
from chaos.sim.checks.violation import Violation

COLUMNS = 2
_AMOUNTS = 1021  # how many different amounts keys have: a row of another key shows


def amounts(keys: Keys) -> Counts:
    """Returns what a push adds to the second column of each key's row; to the first it adds 1."""
    return keys % _AMOUNTS + 1


@dataclass
class Incarnation:
    """The pushes of one incarnation of a worker that it does not know to be committed, by clock."""

    name: str
    pushed: dict[int, Keys] = field(default_factory=dict)

    def own(self, keys: Keys) -> Counts:
        """Returns how often each of `keys` is in pushes that are not known to be committed."""
        counts = np.zeros(len(keys), np.int64)
        for pushed in self.pushed.values():
            counts += np.isin(keys, pushed)
        return counts


class CountedPushes:
    """How often each key of a table was pushed: known to be committed, and begun at most. A push names a key once."""

    def __init__(self, keys: int) -> None:
        self.keys = keys
        self.committed: Counts = np.zeros(keys, np.int64)
        self.begun: Counts = np.zeros(keys, np.int64)
        self._last: dict[str, Incarnation] = {}

    def start(self, name: str) -> tuple[Incarnation, Incarnation | None]:
        """Adds an incarnation of a worker. Returns it and the one before it of that name."""
        before = self._last.get(name)
        self._last[name] = incarnation = Incarnation(name)
        return incarnation, before

    def begin(self, worker: Incarnation, clock: int, keys: Keys) -> None:
        """Notes that a push is about to begin."""
        worker.pushed[clock] = keys
        self.begun[keys] += 1

    def commit(self, worker: Incarnation, clock: int) -> None:
        """Notes that a worker knows its steps up to `clock` to be committed."""
        for step in [step for step in worker.pushed if step <= clock]:
            self.committed[worker.pushed.pop(step)] += 1

    def resume(self, before: Incarnation, begun: int, trained: int) -> None:
        """Notes what a worker was told of its predecessor: steps up to `trained` count, those above `begun` never will.
        Of the steps between these each key may count or not."""
        self.commit(before, trained)
        for step in [step for step in before.pushed if step > begun]:
            self.begun[before.pushed.pop(step)] -= 1

    def least(self, worker: Incarnation, keys: Keys) -> Counts:
        """Returns how many pushes of each key a pull of its newest committed rows must show that begins now."""
        return self.committed[keys] + worker.own(keys)

    def check(self, where: str, keys: Keys, rows: Rows, least: Counts) -> None:
        """Checks float32 rows [n, 2] that were pulled just now. Raises Violation if they are no counts of pushes, fewer
        than `least`, or more than have begun."""
        if rows.shape != (len(keys), COLUMNS):
            raise Violation("pulls", f"{where} got rows of shape {rows.shape} for {len(keys)} keys")
        counts: NDArray[np.int64] = rows[:, 0].astype(np.int64)
        mixed = (rows[:, 0] != counts) | (rows[:, 1] != counts * amounts(keys))
        for wrong, what in ((mixed, "no number of its pushes"), (counts < least, "at least"),
                            (counts > self.begun[keys], "at most")):  # fmt: skip
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                limit = {"at least": least[at], "at most": self.begun[keys[at]]}.get(what, "")
                raise Violation("pulls", f"{where} pulled key {keys[at]} and got {rows[at].tolist()}: {what} {limit}")

    def check_end(self, rows: Rows) -> None:
        """Checks all rows, float32 [keys, 2], when everything has come to rest."""
        self.check("the auditor", np.arange(self.keys), rows, self.committed)
