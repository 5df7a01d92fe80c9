"""One worker of `elasticps bench elastic`: `python -m benchmarks.mover URL NAME SEED ROWS BATCH RATE`.

Pulls rows and pushes a step, each waited for, RATE times a second, or without pause if it is 0. Steps are counted by
key as `benchmarks.pusher` does.

A line on standard input asks for something, a line of JSON on standard output answers:

    done        how many operations have ended, and whether one has failed
    end         no more operations; all that ended, as lists [Unix time of the start, seconds], and how often each key
                was pushed, all of them acknowledged
"""

from __future__ import annotations

import gc
import sys
import time

import numpy as np

import elasticps as eps
from benchmarks.pusher import COUNTED, DIM, STORED
from benchmarks.sparse import keys_of
from benchmarks.workers import BusyWorker


class Mover(BusyWorker):
    """Pulls and pushes, and tells how long each took."""

    def __init__(self, url: str, name: str, seed: int, rows: int, batch: int, rate: float) -> None:
        super().__init__()
        self._ps = eps.connect(url, worker=name, timeout=120.0)
        self._counted = self._ps.table("counted", dim=DIM, optimizer=eps.Accumulate())
        self._stored = self._ps.table(STORED, dim=64, optimizer=eps.Adagrad(lr=0.01))
        self._keys = keys_of(rows)
        self._batch = batch
        self._pause = 1 / rate if rate else 0.0
        self._random = np.random.default_rng(seed)
        self._counts = np.zeros(COUNTED, np.int64)
        self._pulls: list[tuple[float, float]] = []
        self._pushes: list[tuple[float, float]] = []
        self._failed: list[str] = []

    def run(self) -> None:
        """Pulls and pushes until told to end."""
        batch, counted_batch = self._batch, min(self._batch, COUNTED)
        ones, grads = np.ones((counted_batch, DIM), np.float32), np.full((batch, 64), 0.1, np.float32)
        gc.disable()  # a collection of this loop's garbage is not the system's latency
        due = time.monotonic()
        with self._ps as ps:
            while not self.ended.wait(max(0.0, due - time.monotonic())):
                due = max(due + self._pause, time.monotonic())  # what was late is not made up for
                rows = self._random.choice(self._keys, batch)
                counted = self._random.choice(COUNTED, counted_batch, replace=False)
                try:
                    began = time.time()
                    self._stored.pull(rows)
                    pulled = time.time()
                    ps.push({self._counted: (counted, ones), self._stored: (rows, grads)}).result()
                    pushed = time.time()
                except eps.Error as error:
                    self._failed.append(str(error))
                    break
                self._pulls.append((began, round(pulled - began, 6)))
                self._pushes.append((pulled, round(pushed - pulled, 6)))
                self._counts[counted] += 1
            self.ended.wait()
            self.tell(pulls=self._pulls, pushes=self._pushes, failed=self._failed, counts=self._counts.tolist())

    def answer(self, word: str, rest: str) -> dict[str, object]:
        """To `done`."""
        return {"done": len(self._pushes), "failed": self._failed[:1]}


def main() -> None:
    """Runs the worker that the command line describes."""
    url, name, seed, rows, batch, rate = sys.argv[1:]
    Mover(url, name, int(seed), int(rows), int(batch), float(rate)).serve()


if __name__ == "__main__":
    main()
