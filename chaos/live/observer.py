"""A worker that only reads: it pulls all that the other workers have pushed, again and again, and compares it with
their ledgers.

Of a life's steps every range shows at least those acknowledged before the pull began, at most those begun when it
ended, and never fewer than before.

Run as `python -m chaos.live.observer URL FOLDER RANGES`; its own ledger, observer.ledger in that folder, tells how its
pulls ended.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import elasticps as eps
from chaos.live.load import (
    APP,
    BEGUN,
    COMMITTED,
    DIM,
    READ,
    READ_FAILED,
    STALE,
    TIMEOUT_S,
    LedgerFile,
    newest,
    open_tables,
    own_keys,
    say_ready,
    signals_to_end,
)

NAME = "observer"
PAUSE_S = 0.2


class Observer:
    """Compares once at each call of `look`."""

    def __init__(self, url: str, folder: Path, ranges: int) -> None:
        self._folder = folder
        self._ranges = ranges
        self._ps = eps.connect(url, worker=NAME, app=APP, timeout=TIMEOUT_S)
        self._table, _ = open_tables(self._ps)
        self._shown: dict[Path, NDArray[np.float32]] = {}
        self._keys: dict[Path, NDArray[np.int64]] = {}
        self._ledger = LedgerFile(ledger_of(folder))

    def look(self) -> None:
        """Pulls every life's rows and checks them."""
        paths = sorted(self._folder.glob("w*.ledger"))
        if not paths:
            return
        keys = np.stack([self._own(path) for path in paths])
        least = [newest(path, COMMITTED) for path in paths]
        try:
            found = self._table.pull(keys.ravel()).reshape(*keys.shape, DIM)
        except eps.Closed:
            raise
        except eps.Error as error:
            self._ledger.note(READ_FAILED, 0, f"{NAME}: a pull failed: {error}")
            return
        wrong = ""
        for path, low, rows in zip(paths, least, found, strict=True):
            before = self._shown.get(path, np.zeros(self._ranges, np.float32))
            self._shown[path] = rows[:, 0]
            if text := judge(rows, before, low, newest(path, BEGUN)):
                wrong = f"{NAME}: {path.stem}, {text}"
        self._ledger.note(STALE if wrong else READ, 0, wrong)

    def close(self) -> None:
        """Leaves the cluster."""
        self._ps.close()

    def _own(self, path: Path) -> NDArray[np.int64]:
        if path not in self._keys:
            worker, life = (int(part) for part in path.stem.removeprefix("w").split("."))
            self._keys[path] = own_keys(worker, life, self._ranges, self._table.salt)
        return self._keys[path]


def judge(rows: NDArray[np.float32], before: NDArray[np.float32], low: int, high: int) -> str:
    """Says what is wrong with a life's rows, float32 [ranges, DIM]; "" if nothing is. before: the steps shown last,
    float32 [ranges]; low: the steps acknowledged before the pull; high: the steps begun after it."""
    counts = rows[:, 0]
    for bad, what in (
        ((rows != rows[:, :1]).any(axis=1), "half a push"),
        (counts < low, f"fewer steps than the {low} that were acknowledged"),
        (counts > high, f"more steps than the {high} that were begun"),
        (counts < before, "fewer steps than were shown before"),
        (counts != np.trunc(counts), "a part of a step"),
    ):
        if (where := np.flatnonzero(bad)).size:
            r = int(where[0])
            return f"range {r}, and {len(where) - 1} more: {rows[r].tolist()} after {before[r]:g}: {what}"
    return ""


def ledger_of(folder: Path) -> Path:
    """Returns the path of the observer's ledger, of how its pulls ended."""
    return folder / f"{NAME}.ledger"


def main(arguments: Sequence[str] = sys.argv) -> None:
    """Runs an observer until SIGTERM."""
    ended = signals_to_end()
    observer = Observer(arguments[1], Path(arguments[2]), int(arguments[3]))
    say_ready()
    while not ended:
        observer.look()
        time.sleep(PAUSE_S)
    observer.look()
    observer.close()


if __name__ == "__main__":
    main()
