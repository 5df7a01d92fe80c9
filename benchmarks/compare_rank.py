"""One process of a contestant, which trains, reads, scores and is watched when a holder of rows dies."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooLate
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.compare_systems import SYSTEMS, Built, Seat
from benchmarks.core.criteo import CATEGORIES, Source
from benchmarks.training import HELD_OUT, SEED, Inputs
from examples.demo.data import auc

PROBED = 64  # rows of each category whose values are compared before and after a death
DEATH_BATCHES = 8  # trained again and again while a holder dies
READ_S = 10.0  # a read that has not come so long after a death will not come
RETRY_S = 0.05  # between a step that failed and the next attempt
STEPS_BEFORE = 5
ERRORS_S = 10.0  # a loop whose steps have failed for so long will not go on


@dataclass(frozen=True)
class Sequel:
    """What the training loop saw after `kill -9`; times in seconds since then.

    resumed_s  when the first step that began afterwards was done; None: none was
    error      of the first step that failed, "" if none did, and when that was
    same       the part of the rows trained before, and not since, that still have the values that they had then; None:
               they cannot be read
    """

    resumed_s: float | None
    error: str
    error_s: float | None
    same: float | None


class Rank:
    """A process of a contestant.

    system    a name in SYSTEMS
    rank      of `ranks` processes, of which the first `trainers` train, each its part of every batch
    threads   with which it computes
    replicas  of elasticps
    values    ids of a category at most
    """

    def __init__(
        self,
        *,
        system: str,
        rank: int,
        ranks: int,
        trainers: int,
        threads: int,
        meeting: str,
        replicas: int,
        values: int,
    ) -> None:
        torch.set_num_threads(threads)
        self._part = slice(rank, None, trainers)  # of a batch
        self._system = SYSTEMS[system](Seat(rank, ranks, meeting, replicas))
        self._full = self._source = Source(SEED, values)
        self._full.batch(0, 1)  # what makes batches has arrays as long as the tables: there before memory is measured
        self._now: Built | None = None
        self._prepared: deque[list[Any]] = deque()
        self._trained: list[NDArray[np.int64]] = []  # ids of the first batches

    def build(self, values: int = 0) -> int:
        """Makes a model in the place of the one before, and returns its rows. values: ids of a category at most; 0: as
        many as the process was told."""
        self.end_model()
        self._source = Source(SEED, values) if values else self._full
        self._now = self._system.build(self._source)
        self._trained.clear()
        return self._source.values

    def end_model(self) -> None:
        """Gives the model up."""
        if self._now is not None:
            self._now.close()
        self._now = None
        self._prepared.clear()

    def prepare(self, batch: int, first: int, batches: int) -> None:
        """Makes batches number `first` and so on, of so many samples for all trainers together."""
        self._prepared.extend(self._batches(batch, first, batches, self._part))

    def _batches(self, batch: int, first: int, batches: int, part: slice) -> Iterator[list[Any]]:
        for number in range(first, first + batches):
            clicks = self._source.batch(number, batch)
            if len(self._trained) < STEPS_BEFORE:
                self._trained.append(clicks.categories)
            ids = torch.from_numpy(clicks.categories[part])
            yield [
                torch.from_numpy(clicks.numbers[part]),
                self._model.batch(ids),
                torch.from_numpy(clicks.clicked[part]),
            ]

    @property
    def _model(self) -> Built:
        assert self._now is not None, "built before"
        return self._now

    def train(self, steps: int) -> dict[str, float]:
        """Trains so many of the prepared batches; when it began, and when all was applied, in monotonic seconds."""
        return self._model.trainable.train([tuple(self._prepared.popleft()) for _ in range(steps)])

    def read(self, category: int, rows: int) -> list[list[float]]:
        """The first rows of a category."""
        first = int(self._source.starts[category])
        ids = np.arange(first, first + min(rows, self._source.sizes[category]))
        found: list[list[float]] = self._model.read(category, ids).tolist()
        return found

    def score(self, batch: int, batches: int) -> float:
        """The area under the curve, on samples that nobody trains."""
        self._model.refresh()
        model, scores, labels = self._model.trainable.model, [], []
        model.eval()
        with torch.no_grad():
            for *inputs, clicked in self._batches(batch, HELD_OUT, batches, slice(None)):
                scores.append(model(*inputs).numpy())
                labels.append(clicked.numpy())
        return float(auc(np.concatenate(scores), np.concatenate(labels)))

    def survive(self, victim: int, batch: int, first: int, limit_s: float) -> dict[str, Any]:
        """Trains on, kills a process that holds rows while a step is under way, and says how it went on, or, after
        `limit_s`, that it did not. victim: its pid, if the contestant does not know it; -1: another rank kills."""
        batches: list[Inputs] = [tuple(each) for each in self._batches(batch, first, DEATH_BATCHES, self._part)]
        probes = self._probes(batch, first)
        before = self._read(probes)
        loop = _Loop(self._model, batches)
        loop.wait(lambda: len(loop.steps) >= STEPS_BEFORE, limit_s)
        with open(os.devnull, "w") as nowhere:  # libraries print what we ask for
            os.dup2(nowhere.fileno(), 2)
        killed = time.monotonic()
        if victim >= 0:
            os.kill(self._model.holder or victim, signal.SIGKILL)
        loop.wait(lambda: loop.decided(killed), limit_s)
        loop.end(READ_S)
        resumed = next((ended for began, ended in loop.steps if began > killed), None)
        failed_at, error = loop.errors[0] if loop.errors else (None, "")
        same = None
        threads = ThreadPoolExecutor(1)
        try:
            now = threads.submit(self._read, probes).result(READ_S)
            same = float(np.mean([np.array_equal(one, other) for one, other in zip(before, now, strict=True)]))
        except (Exception, TooLate):
            pass  # whatever it was: they cannot be read
        threads.shutdown(wait=False)
        return asdict(
            Sequel(
                None if resumed is None else resumed - killed, error,
                None if failed_at is None else failed_at - killed, same,
            )
        )  # fmt: skip

    def _probes(self, batch: int, first: int) -> list[tuple[int, NDArray[np.int64]]]:
        """For each category, ids that were trained and are in none of the batches that are trained meanwhile."""
        soon = [self._source.batch(number, batch).categories for number in range(first, first + DEATH_BATCHES)]
        trained, busy = np.concatenate(self._trained), np.concatenate(soon)
        found = [(c, np.setdiff1d(trained[:, c], busy[:, c])[:PROBED]) for c in range(CATEGORIES)]
        return [(category, ids) for category, ids in found if len(ids)]

    def _read(self, probes: list[tuple[int, NDArray[np.int64]]]) -> NDArray[np.float32]:
        return np.concatenate([self._model.read(category, ids) for category, ids in probes])

    def leave(self, within_s: float) -> None:
        """Ends what this process has started, if that can be done in time."""
        ending = threading.Thread(target=self.close, daemon=True)
        ending.start()
        ending.join(within_s)

    def close(self) -> None:
        """Gives up the model and leaves the other processes."""
        self.end_model()
        self._system.close()


class _Loop:
    """Trains batches in turns, each to its end, in a thread, until `end`; after a step that fails it goes on.

    steps   when each began and ended
    errors  when a step failed, and what it said
    """

    def __init__(self, built: Built, batches: list[Inputs]) -> None:
        self._ended = threading.Event()
        self.steps: list[tuple[float, float]] = []
        self.errors: list[tuple[float, str]] = []
        self._trainable = built.trainable
        self._batches = itertools.cycle(batches)
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for batch in self._batches:
            if self._ended.is_set():
                return
            try:
                times = self._trainable.train([batch])
                self.steps.append((times["began"], times["ended"]))
            except Exception as error:
                self.errors.append((time.monotonic(), f"{type(error).__name__}: {error}"))
                self._ended.wait(RETRY_S)
            with self._changed:
                self._changed.notify_all()

    def end(self, within_s: float) -> None:
        """Ends after the step that is under way, if that ends in time."""
        self._ended.set()
        self._thread.join(within_s)

    def decided(self, since: float) -> bool:
        """Whether a step that began since then is done, or all have failed for a long time."""
        return bool(self.steps and self.steps[-1][0] > since) or bool(
            self.errors and time.monotonic() - self.errors[0][0] > ERRORS_S
        )

    def wait(self, condition: Callable[[], bool], limit_s: float) -> None:
        """Returns when a condition holds, or after `limit_s`."""
        with self._changed:
            self._changed.wait_for(condition, limit_s)
