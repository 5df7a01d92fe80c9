"""Decides which rows go: a predicate with its numbers fixed, and the threshold that makes a range small enough. Pure.

A predicate is chosen once, by the head of a range, and travels in the range's log; every replica applies it to its own
rows at the same place of the log, and a reader of checkpoints to the rows of older parts. It compares ranks (see
`usage.measure` and `admission.rank`): a row goes if its rank is below a bound, or equal to it and its key's tie number
is below another bound. So exactly as many go as shall, also among thousands of rows that were used in the same second.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.store import usage

TIE_END = 1 << 32  # tie numbers are below
MOST_SWEEPS = 64  # that a range remembers; beyond that increments hold the range whole
_ROUNDED = 1 << 12  # units in the last place by which roundings of a score may add up
_M1, _M2 = 0x9E3779B97F4A7C15, 0x9FB21C651E98DF25
_MASK = (1 << 64) - 1


class Measure(IntEnum):
    """What a predicate compares."""

    LAST_USE = usage.LAST_USE
    COUNT = usage.COUNT
    SCORE = usage.SCORE
    NORM = usage.NORM
    CANDIDATE = 4  # keys that wait for a row: by count, then by time
    CANDIDATE_AGE = 5  # by time alone


OF_CANDIDATES = (Measure.CANDIDATE, Measure.CANDIDATE_AGE)


class Reason(IntEnum):
    """Why rows go, for counters and people; numbers are part of the log's format."""

    IDLE = 0
    CAPACITY = 1
    SMALL_NORM = 2
    FORGOTTEN = 3  # candidates


class Predicate(NamedTuple):
    """A row goes if its rank is below `below`, or equal to it with a tie number below `tie`.

    now, decay: of COUNT and SCORE, the cluster time at which they are compared, and half-lives a second by which they
    fall until then. A row that was used later stays: an EVICT may wait for room in the log, or for a round.
    """

    measure: Measure
    reason: Reason
    below: int
    tie: int = 0
    now: int = 0
    decay: float = 0.0

    @property
    def of_candidates(self) -> bool:
        """Whether it is about keys that wait for a row."""
        return self.measure in OF_CANDIDATES

    @property
    def monotone(self) -> bool:
        """Whether an older version of a row that goes would go, too: each use makes a rank larger. Not so for norms;
        and where scores fall but for rounding, see `unsure`."""
        return self.measure != Measure.NORM

    def unsure(self, ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Of which rows that go, by their ranks, an older version might not: of all by their norm; of those by a score
        that falls that are near the bound, since a use without a score rounds it once more, up or down. bool [n]."""
        if self.measure == Measure.SCORE and self.decay:
            return (ranks > self.below - _ROUNDED) & (ranks > 0)
        return np.full(len(ranks), not self.monotone)

    def chosen(self, keys: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of rows go: bool [n]. keys, ranks: int64 [n]."""
        going = ranks < self.below
        if self.tie:
            equal = np.flatnonzero(ranks == self.below)
            numbers = np.empty(len(equal), np.int64)
            usage.ties(np.ascontiguousarray(keys[equal]), numbers)
            going[equal] = numbers < self.tie
        return going

    def covers(self, other: Predicate) -> bool:
        """Whether every row that `other` makes go, now or in an older version, goes by this predicate, too."""
        if self.measure != other.measure or not self.monotone:
            return self == other
        if self.measure in (Measure.COUNT, Measure.SCORE) and (self.decay != other.decay or self.now < other.now):
            return False  # what the other one compares may have been smaller
        return (self.below, self.tie) >= (other.below, other.tie)


def threshold(keys: NDArray[np.int64], ranks: NDArray[np.int64], going: int) -> tuple[int, int]:
    """Bounds (below, tie) by which `going` of the rows with these ranks, int64 [n], go; 0 < going <= n."""
    bound = int(np.partition(ranks, going - 1)[going - 1])
    left = going - int(np.count_nonzero(ranks < bound))
    equal = keys[ranks == bound]
    if left >= len(equal):
        return bound + 1, 0
    numbers = np.empty(len(equal), np.int64)
    usage.ties(np.ascontiguousarray(equal), numbers)
    return bound, int(np.partition(numbers, left - 1)[left - 1]) + 1


class Sweep(NamedTuple):
    """A predicate that was applied after cut `cut` to the keys of a range whose hashes are in low..high-1."""

    cut: int
    predicate: Predicate
    low: int = 0
    high: int = HASH_END

    def replaces(self, other: Sweep) -> bool:
        """Whether a reader of checkpoints needs `other` no more once it knows this one."""
        inside = self.low <= other.low and other.high <= self.high
        return inside and other.cut <= self.cut and self.predicate.covers(other.predicate)

    @property
    def word(self) -> int:
        """A number of 64 bits, for digests: equal sweeps have equal ones."""
        total = 0
        for part in (self.cut, *self.predicate[:5], int(self.predicate.decay * 2**60), self.low, self.high):
            total = ((total ^ (int(part) & _MASK)) * _M1 + _M2) & _MASK
        return total


def add_sweep(sweeps: list[Sweep], new: Sweep) -> None:
    """Adds a sweep to those of a range: as part of the one before, where it goes on with the next hashes; in the place
    of those that it replaces."""
    if sweeps and sweeps[-1][:2] == new[:2] and sweeps[-1].high == new.low:
        new = new._replace(low=sweeps.pop().low)
    sweeps[:] = [other for other in sweeps if not new.replaces(other)]
    sweeps.append(new)
