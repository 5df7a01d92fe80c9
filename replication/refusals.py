"""Steps whose content a head refused: they tick as empty, and nobody may say of them only that they are committed.

What was refused is logged with the tick. So a replica knows it if and only if it has the tick, whoever dies, and it
goes wherever a range's vector clocks go. What is kept of a range depends on the range's log alone: a refused tick says
up to which clock its worker knows its steps to be committed, and what was refused up to there can be forgotten. So a
worker's window bounds it, and `MOST_STEPS` bounds all of it.

Checkpoints have none of it: who brings a range back from one tells workers which steps it may lack. Nor have digests:
beyond `MOST_STEPS` replicas that are in other chains, too, forget others.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from replication.chain import Ranges

MOST_STEPS = 1 << 13
"""Beyond, those of whoever was not refused anything for longest are forgotten."""


class Refusal(NamedTuple):
    """With a push: why its head refused the content, for the worker; replication never looks into it. told: the clock
    up to which the worker knew its steps to be committed, and so which of them were refused."""

    why: str
    told: int = 0


class RefusedStep(NamedTuple):
    """In one range."""

    worker: int
    clock: int
    why: str


class Refusals:
    """By worker, clock and reason the ranges, one bit each. False as long as there are none."""

    __slots__ = ("_count", "_ranges", "_steps")

    def __init__(self, ranges: int) -> None:
        self._ranges = ranges
        self._steps: dict[int, dict[int, dict[str, int]]] = {}
        self._count = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __len__(self) -> int:
        return self._count

    def note(self, worker: int, clock: int, ranges: Ranges, refusal: Refusal) -> None:
        """A refused tick of a worker's step is applied."""
        bits = self._bits(ranges)
        mine = self._steps.pop(worker, {})
        for old in [known for known in mine if known <= refusal.told]:
            self._drop(mine, old, bits)
        if clock not in mine:
            self._count += 1
        whys = mine.setdefault(clock, {})
        whys[refusal.why] = whys.get(refusal.why, 0) | bits
        self._steps[worker] = mine  # it is the last one now
        while self._count > MOST_STEPS:
            first = next(iter(self._steps))
            self._drop(self._steps[first], min(self._steps[first]), -1)
            if not self._steps[first]:
                del self._steps[first]

    def look(self, worker: int, clock: int, ranges: Ranges) -> str:
        """Why something of a step was refused in some of these ranges, "" if nothing was."""
        whys = self._steps.get(worker, {}).get(clock)
        if not whys:
            return ""
        bits = self._bits(ranges)
        return next((why for why, where in whys.items() if where & bits), "")

    def of(self, worker: int, ranges: Ranges) -> list[tuple[int, str]]:
        """(clock, why) of a worker's steps of which something was refused in these ranges, by clock."""
        mine = self._steps.get(worker)
        if not mine:
            return []
        bits = self._bits(ranges)
        return [(clock, why) for clock in sorted(mine) for why, where in mine[clock].items() if where & bits]

    def column(self, r: int) -> list[RefusedStep]:
        """Those of one range, by worker and clock: what a snapshot of the range carries."""
        return [
            RefusedStep(worker, clock, why)
            for worker, mine in sorted(self._steps.items())
            for clock, whys in sorted(mine.items())
            for why, where in whys.items()
            if where >> r & 1
        ]

    def set_column(self, r: int, steps: Iterable[RefusedStep]) -> None:
        """Replaces those of one range by those of a snapshot."""
        one = np.array([r], np.int64)
        self.clear(one)
        for worker, clock, why in steps:
            self.note(worker, clock, one, Refusal(why))

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        for worker in list(self._steps):
            self.forget(worker, ranges)

    def forget(self, worker: int, ranges: Ranges) -> None:
        """The same of one worker."""
        mine = self._steps.get(worker)
        if mine is None:
            return
        bits = self._bits(ranges)
        for clock in list(mine):
            self._drop(mine, clock, bits)
        if not mine:
            del self._steps[worker]

    def _drop(self, mine: dict[int, dict[str, int]], clock: int, bits: int) -> None:
        """Forgets a step in some ranges."""
        left = {why: kept for why, where in mine[clock].items() if (kept := where & ~bits)}
        if left:
            mine[clock] = left
        else:
            del mine[clock]
            self._count -= 1

    def _bits(self, ranges: Ranges) -> int:
        mask = np.zeros(self._ranges, np.bool_)
        mask[ranges] = True
        return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
