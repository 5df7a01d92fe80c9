"""A worker that adds rows until servers refuse more, and goes on at their limit: rows that are there are updated and
read, new ones are tried again and again, since there is room again when servers come or go.

It knows what each row holds: a push that was acknowledged added 1 to all its rows, one that was refused added 1 to all
rows of some servers and nothing at others, which is looked at at once. Anything else ends it with what is wrong.

Run as `python -m chaos.live.memory_filler URL NAME SECONDS`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from chaos.live.load import TIMEOUT_S, ranges_of, say_ready
from elasticps.errors import Error

DIM = 64
BATCH = 4000
PAUSE_S = 0.02


class MemoryFiller:
    """A worker that fills servers. It knows which batches of keys it has pushed, and what their rows must hold."""

    def __init__(self, url: str, name: str) -> None:
        self.refused = 0
        self._random = np.random.default_rng(0)
        self._rows: list[NDArray[np.float32]] = []
        self._ones = np.ones((BATCH, DIM), np.float32)
        self._ps = eps.connect(url, worker=name, app=name, timeout=TIMEOUT_S)
        self._table = self._ps.table(name, dim=DIM, optimizer=eps.Accumulate())

    def step(self) -> None:
        """Adds rows, or updates or reads rows that exist."""
        turn = self._random.random()
        if not self._rows or (not self.refused or turn < 0.2):
            self._add()
        elif turn < 0.7:
            self._update(int(self._random.integers(len(self._rows))))
        else:
            self._check(int(self._random.integers(len(self._rows))))

    def close(self) -> None:
        """Checks all rows once more, and leaves the cluster."""
        for batch in range(len(self._rows)):
            self._check(batch)
        self._ps.close()

    def _add(self) -> None:
        batch = len(self._rows)
        try:
            self._ps.push({self._table: (_keys(batch), self._ones)}).result()
            self._rows.append(np.ones(BATCH, np.float32))
        except eps.ServerFull:
            self.refused += 1
            found = self._table.pull(_keys(batch))
            self._rows.append(found[:, 0].copy())
            if not np.isin(found, (0, 1)).all():
                raise Error(f"rows that were refused hold {np.unique(found).tolist()}, not 0 or 1") from None
            self._check(batch)

    def _update(self, batch: int) -> None:
        there = np.flatnonzero(self._rows[batch])
        if there.size:
            self._ps.push({self._table: (_keys(batch)[there], self._ones[there])}).result()
            self._rows[batch][there] += 1

    def _check(self, batch: int) -> None:
        found, known = self._table.pull(_keys(batch)), self._rows[batch]
        if (where := np.flatnonzero((found != known[:, None]).any(axis=1))).size:
            key, again = _keys(batch)[where[0]], self._table.pull(_keys(batch))
            ranges = set(ranges_of(_keys(batch)[where], self._ps.view.ranges, self._table.salt).tolist())
            raise Error(
                f"{len(where)} rows in {len(ranges)} ranges differ: key {key} is {found[where[0]][:4].tolist()}, not "
                f"{known[where[0]]:g}; pulled again: {int((again != known[:, None]).any(axis=1).sum())} rows differ"
            )


def _keys(batch: int) -> NDArray[np.int64]:
    return np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.int64)


def main(arguments: Sequence[str] = sys.argv) -> None:
    """Fills servers for some seconds."""
    filler = MemoryFiller(arguments[1], arguments[2])
    say_ready()
    end = time.monotonic() + float(arguments[3])
    while time.monotonic() < end:
        filler.step()
        time.sleep(PAUSE_S)
    filler.close()
    sys.stderr.write(f"{arguments[2]}: refused {filler.refused} times\n")


if __name__ == "__main__":
    main()
