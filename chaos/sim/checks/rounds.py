"""The promise of synchronous rounds: one lasting decision for each round, made of everybody who takes part; in every
range the mean of exactly their gradients, added up in the order of worker ids; and no intermediate state to be seen.

Every worker pushes every key in every round: a share into a column of its own, so that what is read says whose pushes
made a round, and into the last column a number whose float32 sum depends on the order. Where workers push few keys,
each pushes one that all push, and one more: most servers see nothing of most steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from chaos.sim.checks.sums import COLUMNS, KEYS, Keys, Rows, units
from chaos.sim.checks.violation import Violation

SHARE = 12  # exact means of up to four workers
SHARE_UNITS = 128  # the sum of a column stays exact: SHARE * unit * rounds < 2 ** 24
ODD = COLUMNS - 1


class Rounds:
    """The table of an application in synchronous rounds. few: each worker pushes two keys only."""

    def __init__(self, app: str, *, few: bool = False) -> None:
        self.app = app
        self.few = few
        self.rounds = 0  # the newest round that a worker has seen closed
        self.calm = False  # no link and no process is slow: no living worker is taken for lost
        self._workers: list[int] = []  # by column
        self._seen: dict[int, Rows] = {0: np.zeros((KEYS, COLUMNS), np.float32)}

    def start(self, worker: int) -> int:
        """Adds an incarnation of a worker, by its id; returns its column."""
        self._workers.append(worker)
        assert len(self._workers) <= ODD
        return len(self._workers) - 1

    def keys(self, column: int) -> Keys:
        """Returns the keys that a worker pushes in each round."""
        return np.unique([0, (column * 37 + 11) % KEYS]) if self.few else np.arange(KEYS)

    def grads(self, column: int, keys: Keys) -> Rows:
        """Returns the gradients that a worker pushes in a round."""
        grads = np.zeros((len(keys), COLUMNS), np.float32)
        grads[:, column] = SHARE * units(keys, SHARE_UNITS)
        grads[:, ODD] = odd(column, keys)
        return grads

    def check(self, name: str, column: int, clock: int, rows: Rows, *, late: bool = False) -> None:
        """Checks all rows, as a worker of round `clock` has pulled them after it: the sum of so many rounds' means, the
        same for all. late: a step of this worker should have been part of an earlier round."""
        self.result(name, clock, rows)
        if late and self.calm:
            raise Violation("everybody in", f"{self.app}: {name} is in round {clock}, an earlier one went without it")
        self.rounds = max(self.rounds, clock)
        for later in (clock, clock + 1):
            if later - 1 in self._seen and later in self._seen:
                members = self._check_round(later, self._seen[later - 1], self._seen[later])
                if later == clock and column not in members:
                    raise Violation(
                        "everybody in", f"{self.app}: {name} goes on after round {clock} without being in it"
                    )

    def result(self, name: str, clock: int, rows: Rows) -> None:
        """Checks all rows as round `clock` has left them."""
        of_all = rows[:1] if self.few else rows  # keys that everybody pushes
        total = of_all[:, :ODD].astype(np.float64).sum(axis=1) / (SHARE * units(np.arange(len(of_all)), SHARE_UNITS))
        if not (total == clock).all():
            at = int(np.flatnonzero(total != clock)[0])
            raise Violation("rounds", f"{self.app}: {name} sees key {at} after {total[at]} rounds, not {clock}")
        seen = self._seen.setdefault(clock, rows.copy())
        if seen.tobytes() != rows.tobytes():
            raise Violation("one decision", f"{self.app}: {name} sees another result of round {clock} than others do")

    def _check_round(self, clock: int, before: Rows, after: Rows) -> list[int]:
        """Checks that a round has added the mean of its workers' gradients, by their columns."""
        grown = after[:, :ODD] - before[:, :ODD]
        members: list[int] = np.flatnonzero(grown.any(axis=0)).tolist()
        keys = np.arange(KEYS)
        pushed = np.stack([np.isin(keys, self.keys(member)) for member in members], axis=1)
        shares = SHARE * units(keys, SHARE_UNITS) / len(members)
        if not (grown[:, members] == shares[:, None] * pushed).all():
            text = f"{self.app}: round {clock} is not one mean of the workers in columns {members}"
            raise Violation("mean of a round", text)
        total = np.zeros(KEYS, np.float32)
        for member in sorted(members, key=lambda m: self._workers[m]):
            total += odd(member, keys) * pushed[:, members.index(member)]
        total /= np.float32(len(members))
        if (before[:, ODD] + total != after[:, ODD]).any():
            raise Violation("mean of a round", f"{self.app}: round {clock} was not added up in the order of worker ids")
        return members


def odd(column: int, keys: Keys) -> NDArray[np.float32]:
    """Returns numbers whose float32 sum depends on the order."""
    return (((column + 1) * 7919 + keys * 104729) % 10007 / 3).astype(np.float32)
