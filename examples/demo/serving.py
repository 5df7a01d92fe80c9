"""A reader beside the demo's training: how old its rows are, through everything that happens to the cluster."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

import elasticps as eps

SAMPLE_S = 0.01
EVERY_S = 0.01  # from one window of changes to the next


@dataclass
class ServedAges:
    """How old a reader's rows were, in milliseconds, while it was connected; looks: how often that was asked."""

    looks: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    most_ms: float = 0.0

    def __str__(self) -> str:
        if not self.looks:
            return "no reader could connect"
        return f"rows were {self.p50_ms:.0f} ms old (p50), {self.p99_ms:.0f} ms (p99), {self.most_ms:.0f} ms at most"


class AgeWatch:
    """Looks at a reader's age while clusters come and go."""

    def __init__(self) -> None:
        self._ages: list[float] = []

    @contextmanager
    def follow(self, url: str) -> Iterator[None]:
        """Has a reader follow this cluster meanwhile."""
        stop = threading.Event()
        thread = threading.Thread(target=self._look, args=(url, stop), name="demo-reader", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _look(self, url: str, stop: threading.Event) -> None:
        try:
            with eps.reader(url, every=EVERY_S, name="demo", timeout=10.0) as reader:
                while not stop.wait(SAMPLE_S):
                    reader.check()
                    if math.isfinite(age := reader.age):
                        self._ages.append(age)
        except eps.Error:
            return  # the cluster has gone; the next one has a reader of its own

    def summary(self) -> ServedAges:
        """Of all that was seen."""
        if not self._ages:
            return ServedAges()
        p50, p99, most = (np.percentile(self._ages, (50, 99, 100)) * 1e3).tolist()
        return ServedAges(len(self._ages), p50, p99, most)
