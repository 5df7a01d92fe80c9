"""A worker whose rows come and go: it adds 1 to some of its keys, or deletes some, one operation after the other, and
reads after each what it has made of them.

Its ledger has the values of all its keys as each operation was to leave them, before it began, and as it left them. So
whoever reads one of these rows knows which values it may have had between two times. 0: the row is not there.

Run as `python -m chaos.live.churn URL FOLDER RANGES LIFE`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from chaos.live.load import APP, BEGUN, COMMITTED, DIM, TIMEOUT_S, own_keys, say_ready, signals_to_end

NAME = "churn"
NUMBER = 100  # among workers, of which there are at most 64
TABLE = "passing"
PAUSE_S = 0.02
DELETED = 0.3  # of operations
Values = NDArray[np.int32]


def open_passing(ps: eps.Client) -> eps.SparseTable:
    """Opens the table of the rows that come and go."""
    return ps.table(TABLE, dim=DIM, optimizer=eps.Accumulate())


def record_type(keys: int) -> np.dtype[np.void]:
    """A record of the ledger: whether an operation was begun or done, and the values of all keys then."""
    return np.dtype([("kind", "<u4"), ("time", "<f8"), ("values", "<i4", (keys,))])


def keys_of(life: int, ranges: int, salt: np.uint64) -> NDArray[np.int64]:
    """The keys of one life, one in each range."""
    return own_keys(NUMBER, life, ranges, salt)


def ledger_of(folder: Path, life: int) -> Path:
    """The path of the ledger of one life."""
    return folder / f"{NAME}.{life}.values"


def values_of(rows: NDArray[np.float32]) -> Values | None:
    """The values of rows, float32 [keys, DIM]; None if some row has several, or a part of one."""
    first = rows[:, 0].astype(np.int32)
    return None if (rows != first[:, None]).any() else first


class Churn:
    """Makes one operation at each call of `step`. Error if it reads anything but what it has written."""

    def __init__(self, url: str, folder: Path, ranges: int, life: int) -> None:
        self._ps = eps.connect(url, worker=NAME, app=APP, timeout=TIMEOUT_S)
        self._table = open_passing(self._ps)
        self._keys = keys_of(life, ranges, self._table.salt)
        self._values = np.zeros(ranges, np.int32)
        self._random = np.random.default_rng(life)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(ledger_of(folder, life), flags, 0o600)
        self._type = record_type(ranges)
        self._note(COMMITTED, self._values)

    def step(self) -> None:
        """Adds to some rows, or deletes some."""
        chosen = self._random.random(len(self._keys)) < 0.25
        deletes = self._random.random() < DELETED
        after = np.where(chosen, 0 if deletes else self._values + 1, self._values).astype(np.int32)
        self._note(BEGUN, after)
        refused = False
        if deletes:
            self._table.delete(self._keys[chosen])
        else:
            try:
                ones = np.ones((int(chosen.sum()), DIM), np.float32)
                self._ps.push({self._table: (self._keys[chosen], ones)}).result()
            except eps.ServerFull:  # some servers have no room for a row that is to come back
                refused = True
        found = values_of(self._table.pull(self._keys))
        expected = (found == after) | (found == self._values) if refused and found is not None else found == after
        if found is None or not np.all(expected):
            raise eps.Error(f"read {found} after {self._values.tolist()} was to become {after.tolist()}")
        self._values = found
        self._note(COMMITTED, found)

    def close(self) -> None:
        """Leaves the cluster."""
        self._ps.close()

    def _note(self, kind: int, values: Values) -> None:
        os.write(self._file, np.array((kind, time.time(), values), self._type).tobytes())


def main(arguments: Sequence[str] = sys.argv) -> None:
    """Runs one life until SIGTERM."""
    ended = signals_to_end()
    churn = Churn(arguments[1], Path(arguments[2]), int(arguments[3]), int(arguments[4]))
    say_ready()
    while not ended:
        churn.step()
        time.sleep(PAUSE_S)
    churn.close()


if __name__ == "__main__":
    main()
