"""Steps of which a head refused rows: they tick without these, and nobody may say of them only that they are committed.

What was refused is logged with the tick. So a replica knows it if and only if it has the tick, whoever dies, and it
goes wherever a range's vector clocks go. What is kept of a range depends on the range's log alone: a refused tick says
up to which clock its worker knows its steps to be committed, and what was refused up to there can be forgotten. So a
worker's window bounds it, and `MOST_STEPS` and `MOST_BYTES` bound all of it.

A worker hears of refused rows only in ranges where the tick is committed: elsewhere the next head may lack the tick,
and judge the rows again. So a worker can push exactly the refused rows again.

Checkpoints have none of it: who brings a range back from one tells workers which steps it may lack. Nor have digests:
beyond the bounds replicas that are in other chains, too, forget others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges

MOST_STEPS = 1 << 13
MOST_BYTES = 32 << 20
"""Of refused rows. Beyond either, those of whoever was not refused anything for longest are forgotten."""


class Rows(Protocol):
    """Which rows of a push were refused. Replication only cuts them by range, and puts such cuts together."""

    @property
    def nbytes(self) -> int: ...

    def __len__(self) -> int: ...

    def part(self, ranges: Ranges) -> Rows:
        """Those in some ranges."""

    def joined(self, other: Rows) -> Rows:
        """These, and those of other ranges or of another part of the step."""


class Refusal(NamedTuple):
    """With a push: why its head refused rows of it, for the worker; replication never looks into it. told: the clock up
    to which the worker knew its steps to be committed, and so which of their rows were refused. rows: which ones; None
    for all that the push has in each range."""

    why: str
    acknowledged: int = 0
    rows: Rows | None = None


class RefusedStep(NamedTuple):
    """In one range."""

    worker: int
    clock: int
    why: str
    rows: Rows | None = None


class Refused(NamedTuple):
    """What a worker hears of one of its steps."""

    clock: int
    why: str
    rows: Rows | None = None


class _Noted(NamedTuple):
    """In which ranges rows were refused, one bit each, and which rows there."""

    where: int
    rows: Rows | None

    @property
    def nbytes(self) -> int:
        return 0 if self.rows is None else self.rows.nbytes


class Refusals:
    """By worker, clock and reason the ranges and their refused rows. False as long as there are none. `version` grows
    with every change; `most_bytes` bounds what the rows take."""

    __slots__ = ("_count", "_nbytes", "_ranges", "_steps", "most_bytes", "version")

    def __init__(self, ranges: int) -> None:
        self.most_bytes = MOST_BYTES
        self._ranges = ranges
        self._steps: dict[int, dict[int, dict[str, _Noted]]] = {}
        self._count = self._nbytes = 0
        self.version = 0

    def __bool__(self) -> bool:
        return bool(self._steps)

    def __len__(self) -> int:
        return self._count

    @property
    def newest(self) -> Mapping[int, int]:
        """Worker -> its newest step of which something was refused."""
        return {worker: max(mine) for worker, mine in self._steps.items()}

    def note(self, worker: int, clock: int, ranges: Ranges, refusal: Refusal) -> None:
        """A tick of a worker's step, without refused rows, is applied in `ranges`."""
        self.version += 1
        bits = self._bits(ranges)
        mine = self._steps.pop(worker, {})
        for old in [known for known in mine if known <= refusal.acknowledged]:
            self._drop(mine, old, bits)
        rows = None if refusal.rows is None else refusal.rows.part(ranges)
        if rows is None or len(rows):
            self._add(mine, clock, refusal.why, _Noted(bits, rows))
        if mine:
            self._steps[worker] = mine  # it is the last one now
        while self._count > MOST_STEPS or self._nbytes > self.most_bytes:
            first = next(iter(self._steps))
            self._drop(self._steps[first], min(self._steps[first]), -1)
            if not self._steps[first]:
                del self._steps[first]

    def _add(self, mine: dict[int, dict[str, _Noted]], clock: int, why: str, noted: _Noted) -> None:
        self._count += clock not in mine
        whys = mine.setdefault(clock, {})
        known = whys.get(why)
        if known is not None:
            self._nbytes -= known.nbytes
            rows = None
            if known.rows is not None and noted.rows is not None:
                rows = known.rows.joined(noted.rows)
            noted = _Noted(known.where | noted.where, rows)
        whys[why] = noted
        self._nbytes += noted.nbytes

    def look(self, worker: int, clock: int, ranges: Ranges) -> list[Refused]:
        """What was refused of a step in these ranges."""
        whys = self._steps.get(worker, {}).get(clock)
        if not whys or not len(ranges):
            return []
        return self._within(clock, whys, self._bits(ranges))

    def of(self, worker: int, committed: NDArray[np.int64], ranges: Ranges) -> list[Refused]:
        """What was refused of a worker's steps in these ranges, as far as a step is committed there, by clock.
        committed: int64 [n], the worker's clock in each of `ranges`."""
        mine = self._steps.get(worker)
        if not mine:
            return []
        found = (self._within(clock, mine[clock], self._bits(ranges[committed >= clock])) for clock in sorted(mine))
        return [each for some in found for each in some]

    def _within(self, clock: int, whys: Mapping[str, _Noted], bits: int) -> list[Refused]:
        found = []
        for why, (where, rows) in whys.items():
            if (some := where & bits) and rows is not None:
                if len(cut := rows.part(self._named(some))):
                    found.append(Refused(clock, why, cut))
            elif some:
                found.append(Refused(clock, why))
        return found

    def column(self, r: int) -> list[RefusedStep]:
        """Those of one range, by worker and clock: what a snapshot of the range carries."""
        bits = 1 << r
        return [
            RefusedStep(worker, *each)
            for worker, mine in sorted(self._steps.items())
            for clock, whys in sorted(mine.items())
            for each in self._within(clock, whys, bits)
        ]

    def set_column(self, r: int, steps: Iterable[RefusedStep]) -> None:
        """Replaces those of one range by those of a snapshot."""
        one = np.array([r], np.int64)
        self.clear(one)
        for worker, clock, why, rows in steps:
            self.note(worker, clock, one, Refusal(why, rows=rows))

    def clear(self, ranges: Ranges) -> None:
        """Forgets everything about these ranges."""
        for worker in list(self._steps):
            self.forget(worker, ranges)

    def forget(self, worker: int, ranges: Ranges) -> None:
        """The same of one worker."""
        mine = self._steps.get(worker)
        if mine is None:
            return
        self.version += 1
        bits = self._bits(ranges)
        for clock in list(mine):
            self._drop(mine, clock, bits)
        if not mine:
            del self._steps[worker]

    def _drop(self, mine: dict[int, dict[str, _Noted]], clock: int, bits: int) -> None:
        """Forgets a step in some ranges."""
        left = {}
        for why, noted in mine[clock].items():
            self._nbytes -= noted.nbytes
            remaining, rows = noted.where & ~bits, noted.rows
            if rows is not None and remaining != noted.where:
                rows = rows.part(self._named(remaining))
            if remaining and (rows is None or len(rows)):
                left[why] = _Noted(remaining, rows)
                self._nbytes += left[why].nbytes
        if left:
            mine[clock] = left
        else:
            del mine[clock]
            self._count -= 1

    def _bits(self, ranges: Ranges) -> int:
        mask = np.zeros(self._ranges, np.bool_)
        mask[ranges] = True
        return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")

    def _named(self, bits: int) -> Ranges:
        written = np.frombuffer(bits.to_bytes((self._ranges + 7) // 8, "little"), np.uint8)
        named: Ranges = np.flatnonzero(np.unpackbits(written, bitorder="little"))
        return named
