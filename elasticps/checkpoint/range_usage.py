"""What a file of rows has of a range beside its rows, where the table keeps their usage: keys that wait for a row,
blocks of a sketch, sweeps, and the range's time. Pure.

Waiting keys and the sketch are as they were at the cut, whole in each checkpoint; sweeps say which rows of the
checkpoints before have gone since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import MAX_TIME
from elasticps.store.admission import NO_BLOCKS
from elasticps.store.eviction import TIE_END, Measure, Predicate, Reason, Sweep, add_sweep

NO_KEYS = np.empty(0, np.int64)
_MAX = 1 << 62


class RangeUsage(NamedTuple):
    """keys, words: those that wait for a row, and their words (`elasticps.store.admission`), int64 [m] each; sketch:
    uint8 [blocks, width], without rows where there is none; time: cluster time, in seconds; sweeps: after the cut that
    the checkpoint adds to, in order."""

    keys: NDArray[np.int64] = NO_KEYS
    words: NDArray[np.int64] = NO_KEYS
    sketch: NDArray[np.uint8] = NO_BLOCKS
    time: int = 0
    sweeps: Sequence[Sweep] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of waiting keys and sketch."""
        return self.keys.nbytes + self.words.nbytes + self.sketch.nbytes


class SegmentUsage(NamedTuple):
    """Where a segment's part of the usage lies: `waiting` keys from key `first` on, `blocks` blocks of `width` bytes
    from byte `first_byte` on; and its time and sweeps."""

    first: int
    waiting: int
    first_byte: int
    blocks: int
    width: int
    time: int
    sweeps: tuple[Sweep, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of waiting keys and sketch."""
        return 16 * self.waiting + self.blocks * self.width

    def document(self) -> list[Any]:
        """As JSON."""
        return [*self[:6], [[sweep.cut, sweep.low, sweep.high, *sweep.predicate] for sweep in self.sweeps]]

    @classmethod
    def of(cls, document: Sequence[Any]) -> SegmentUsage:
        """From JSON. ValueError for what it cannot be."""
        first, waiting, first_byte, blocks, width = (_whole(number, _MAX) for number in document[:5])
        time, sweeps = document[5:]
        found = tuple(_sweep(*sweep) for sweep in sweeps)
        return cls(first, waiting, first_byte, blocks, width, _whole(time, MAX_TIME), found)


def _sweep(
    cut: object, low: object, high: object, measure: int, reason: int, below: object, tie: object, now: object,
    decay: object,
) -> Sweep:  # fmt: skip
    if not isinstance(decay, float) or not 0 <= decay <= 1:
        raise ValueError(f"{decay!r} half-lives a second")
    bounds = _whole(below, _MAX), _whole(tie, TIE_END), _whole(now, MAX_TIME)
    predicate = Predicate(Measure(measure), Reason(reason), *bounds, decay)
    if predicate.of_candidates:
        raise ValueError(f"a sweep of rows by {predicate.measure.name}")
    return Sweep(_whole(cut, _MAX), predicate, _whole(low, HASH_END), _whole(high, HASH_END))


def _whole(number: object, most: int) -> int:
    if type(number) is not int or not 0 <= number <= most:  # a bool is no number
        raise ValueError(f"{number!r} is no number from 0 to {most}")
    return number


def together(parts: Sequence[RangeUsage]) -> RangeUsage:
    """The usage of a range, of which several files, or pieces, have a part each."""
    if len(parts) == 1:
        return parts[0]
    keys, words = (np.concatenate([NO_KEYS, *(part[i] for part in parts)]) for i in (0, 1))
    sketch = next((part.sketch for part in parts if part.sketch.size), NO_BLOCKS)
    sweeps = [sweep for part in parts for sweep in part.sweeps]
    return RangeUsage(keys, words, sketch, max((part.time for part in parts), default=0), sweeps)


def joined(older: Iterable[Sweep], newer: Iterable[Sweep]) -> list[Sweep]:
    """The sweeps of two checkpoints, one after the other, without those that others replace."""
    found = list(older)
    for sweep in newer:
        add_sweep(found, sweep)
    return found
