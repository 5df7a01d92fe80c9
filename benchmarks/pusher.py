"""One worker of `elasticps bench failover`: `python -m benchmarks.pusher URL NAME SEED STORED_ROWS`.

Pushes without pause, each step waited for, and each ticking every range: so a step is committed only when all ranges
are served. A line on standard input asks for something, a line of JSON on standard output answers:

    after T     the time of the first commit later than T (Unix time, seconds), and how many steps were committed
    end         no more pushes; how often each key was pushed, all of them acknowledged
"""

from __future__ import annotations

import sys
import time
from collections import deque

import numpy as np

import elasticps as eps
from benchmarks.sparse import keys_of
from benchmarks.workers import BusyWorker

COUNTED = 4096  # keys of the table whose values are counts of pushes
DIM = 8
BATCH = 64
REMEMBERED = 1 << 16  # commits remembered
STORED = "heavy"


class Pusher(BusyWorker):
    """Pushes, and tells when what was committed."""

    def __init__(self, url: str, name: str, seed: int, stored_rows: int) -> None:
        super().__init__()
        self._ps = eps.connect(url, worker=name, timeout=120.0)
        self._table = self._ps.table("counted", dim=DIM, optimizer=eps.Accumulate())
        self._stored = self._ps.table(STORED, dim=64, optimizer=eps.Adagrad(lr=0.01)) if stored_rows else None
        self._stored_keys = keys_of(stored_rows)
        self._random = np.random.default_rng(seed)
        self._counts = np.zeros(COUNTED, np.int64)
        self._commits: deque[float] = deque(maxlen=REMEMBERED)
        self._steps = 0

    def run(self) -> None:
        """Pushes until told to end."""
        ones, grads = np.ones((BATCH, DIM), np.float32), np.full((BATCH, 64), 0.1, np.float32)
        with self._ps as ps:
            while not self.ended.is_set():
                keys = self._random.choice(COUNTED, BATCH, replace=False)
                step: dict[eps.SparseTable | eps.DenseTensor, object] = {self._table: (keys, ones)}
                if self._stored is not None:
                    step[self._stored] = (self._random.choice(self._stored_keys, BATCH), grads)
                ps.push(step).result()
                self._commits.append(time.time())
                self._counts[keys] += 1
                self._steps += 1
            self.tell(counts=self._counts.tolist())

    def answer(self, word: str, rest: str) -> dict[str, object]:
        """To `after T`."""
        later = [t for t in self._commits.copy() if t > float(rest)]
        return {"first": later[0] if later else None, "steps": self._steps}


def main() -> None:
    """Runs the worker that the command line describes."""
    url, name, seed, stored_rows = sys.argv[1:]
    Pusher(url, name, int(seed), int(stored_rows)).serve()


if __name__ == "__main__":
    main()
