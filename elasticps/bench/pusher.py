"""One worker of `elasticps bench failover`: `python -m elasticps.bench.pusher URL NAME SEED HEAVY_ROWS`.

Pushes without pause, each step waited for, and each ticking every range: so a step is committed only when all ranges
are served. A line on standard input asks for something, a line of JSON on standard output answers:

    after T     the time of the first commit later than T (Unix time, seconds), and how many steps were committed
    end         no more pushes; how often each key was pushed, all of them acknowledged
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque

import numpy as np

import elasticps as eps
from elasticps.bench.sparse import keys_of

COUNTED = 4096  # keys of the table whose values are counts of pushes
DIM = 8
BATCH = 64
KEPT = 1 << 16  # commits remembered
HEAVY = "heavy"


class Pusher:
    """Pushes in the thread that calls `run`, answers in another."""

    def __init__(self, url: str, name: str, seed: int, heavy_rows: int) -> None:
        self._ps = eps.connect(url, worker=name, timeout=120.0)
        self._table = self._ps.table("counted", dim=DIM, optimizer=eps.Accumulate())
        self._heavy = self._ps.table(HEAVY, dim=64, optimizer=eps.Adagrad(lr=0.01)) if heavy_rows else None
        self._heavy_keys = keys_of(heavy_rows)
        self._random = np.random.default_rng(seed)
        self._counts = np.zeros(COUNTED, np.int64)
        self._commits: deque[float] = deque(maxlen=KEPT)
        self._steps = 0
        self._ended = threading.Event()

    def run(self) -> None:
        """Pushes until told to end."""
        ones, grads = np.ones((BATCH, DIM), np.float32), np.full((BATCH, 64), 0.1, np.float32)
        with self._ps as ps:
            while not self._ended.is_set():
                keys = self._random.choice(COUNTED, BATCH, replace=False)
                step: dict[eps.SparseTable | eps.DenseTensor, object] = {self._table: (keys, ones)}
                if self._heavy is not None:
                    step[self._heavy] = (self._random.choice(self._heavy_keys, BATCH), grads)
                ps.push(step).result()
                self._commits.append(time.time())
                self._counts[keys] += 1
                self._steps += 1
            self._tell(counts=self._counts.tolist())

    def answer(self) -> None:
        """Answers requests until standard input ends; then the process does."""
        for line in sys.stdin:
            word, _, rest = line.strip().partition(" ")
            if word == "after":
                later = [t for t in self._commits.copy() if t > float(rest)]
                self._tell(first=later[0] if later else None, steps=self._steps)
            elif word == "end":
                self._ended.set()
        self._ended.set()

    @staticmethod
    def _tell(**values: object) -> None:
        print(json.dumps(values), flush=True)


def main() -> None:
    """Runs the worker that the command line describes."""
    url, name, seed, heavy_rows = sys.argv[1:]
    pusher = Pusher(url, name, int(seed), int(heavy_rows))
    threading.Thread(target=pusher.answer, name="answers", daemon=True).start()
    pusher.run()


if __name__ == "__main__":
    main()
