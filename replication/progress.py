"""Vector clocks: how far each worker's pushes have been applied, per range.

Progress is one int64: clock << 16 | parts of the next step already applied. A step of k parts takes progress from
(c-1) << 16 through (c-1) << 16 | 1 … to c << 16, so one comparison with a scalar judges a frame in all its ranges:
equal to what the part follows: next; above: a duplicate; below: a gap.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges

PART_BITS = 16
MAX_PARTS = (1 << PART_BITS) - 1
"""Of a step. With one more, the step that lacks only its last part would read as complete."""
MAX_CLOCK = 1 << 46
"""Clocks and bases from outside must be checked against this: progress has to fit an int64."""

Progress = NDArray[np.int64]


def before_part(clock: int, part: int) -> int:
    """The progress that part `part` of step `clock` follows."""
    return ((clock - 1) << PART_BITS) | part


def after_part(clock: int, part: int, last: bool) -> int:
    """The progress that it leaves."""
    return clock << PART_BITS if last else ((clock - 1) << PART_BITS) | (part + 1)


def touched_clock(progress: int) -> int:
    """The last clock that `progress` has seen anything of: a step under way counts."""
    return (progress + (1 << PART_BITS) - 1) >> PART_BITS


class Clocks:
    """Progress of every worker in every range: int64 [workers, P], one row per worker, rows reused when empty."""

    __slots__ = ("_free", "_ranges", "_rows", "_slots")

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._slots: dict[int, int] = {}
        self._rows: list[Progress] = []
        self._free: list[int] = []

    def row(self, worker: int) -> Progress:
        """The worker's progress per range, int64 [P], for reading and writing; zeros for one never heard of."""
        slot = self._slots.get(worker)
        if slot is None:
            if self._free:
                slot = self._free.pop()
            else:
                slot = len(self._rows)
                self._rows.append(np.zeros(self._ranges, dtype=np.int64))
            self._slots[worker] = slot
        return self._rows[slot]

    def known(self, worker: int) -> bool:
        """Whether anything of that worker is recorded."""
        return worker in self._slots

    def forget(self, worker: int) -> None:
        """Gives the worker's row back if nothing is left in it: it retired from every range held here."""
        slot = self._slots.get(worker)
        if slot is not None and not self._rows[slot].any():
            del self._slots[worker]
            self._free.append(slot)

    def column(self, r: int) -> tuple[NDArray[np.int64], Progress]:
        """(workers, progress) of one range, sorted by worker: what a snapshot of the range carries."""
        workers = sorted(w for w, slot in self._slots.items() if self._rows[slot][r])
        progress = [self._rows[self._slots[w]][r] for w in workers]
        return np.array(workers, dtype=np.int64), np.array(progress, dtype=np.int64)

    def set_column(self, r: int, workers: NDArray[np.int64], progress: Progress) -> None:
        """Replaces one range's clocks by those of a snapshot."""
        self.clear(np.array([r], dtype=np.int64))
        for worker, value in zip(workers.tolist(), progress.tolist(), strict=True):
            self.row(worker)[r] = value

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        for row in self._rows:
            row[ranges] = 0

    def minimum(self, workers: tuple[int, ...], base: dict[int, int]) -> Progress | None:
        """Per range the least completed clock over `workers`, each at least its base; None for no workers.

        int64 [P], clocks and not progress. What a pull under bounded delay may see is judged against it.
        """
        least: Progress | None = None
        for worker in workers:
            slot = self._slots.get(worker)
            zero = np.zeros(self._ranges, dtype=np.int64)
            clock = zero if slot is None else self._rows[slot] >> PART_BITS
            clock = np.maximum(clock, base.get(worker, 0))
            least = clock if least is None else np.minimum(least, clock)
        return least
