"""The last hour, a sample a second, in memory that does not grow. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

SAMPLES = 3600
SERVERS_MAX = 256  # of which each has a history of its own: about 60 MB


class History:
    """Columns of numbers over time; what was not measured is NaN. The oldest samples make room for new ones."""

    def __init__(self, columns: Sequence[str], samples: int = SAMPLES) -> None:
        self._columns = tuple(columns)
        self._times = np.zeros(samples)
        self._values = np.full((samples, len(columns)), np.nan, np.float32)
        self._count = 0

    def __len__(self) -> int:
        return min(self._count, len(self._times))

    def add(self, time: float, sample: Mapping[str, float | None]) -> None:
        """Notes a sample; columns that it lacks were not measured."""
        at = self._count % len(self._times)
        self._times[at] = time
        values = [sample.get(column) for column in self._columns]
        self._values[at] = [np.nan if value is None else value for value in values]
        self._count += 1

    def add_before(self, samples: Mapping[float, Mapping[str, float | None]]) -> None:
        """Notes what was before the oldest sample, by its time."""
        times, values = self._ordered()
        first = times[0] if len(times) else np.inf
        room = len(self._times) - len(times)
        older = [time for time in sorted(samples) if time < first]
        older = older[len(older) - room :] if len(older) > room else older
        self._count = 0
        for time in older:
            self.add(time, samples[time])
        at = slice(self._count, self._count + len(times))
        self._times[at], self._values[at] = times, values
        self._count += len(times)

    def _ordered(self) -> tuple[NDArray[np.float64], NDArray[np.float32]]:
        order = (np.arange(len(self)) + max(0, self._count - len(self._times))) % len(self._times)
        return self._times[order], self._values[order]

    def document(self) -> dict[str, Any]:
        """Times and columns, oldest first, as plain values; None where nothing was measured."""
        times, values = self._ordered()
        document: dict[str, Any] = {"time": [round(t, 3) for t in times.tolist()]}
        for i, column in enumerate(self._columns):
            document[column] = [None if v != v else float(f"{v:.5g}") for v in values[:, i].tolist()]
        return document
