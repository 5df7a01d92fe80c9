"""From which position of the journal of changed keys a reader of some ranges goes on. Pure.

A mark notes, at a position of the journal, the sequence number of each range then. What a reader lacks that has range r
up to number s was noted behind the newest mark that has r at s or before: some keys behind it may have been changed
before s, and their rows come once more, which does no harm.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges
from replication.messages import Seqs

KEYS_AT_ONCE = 1 << 14  # of the journal, in one frame of a window; about a millisecond or two
MOST_MARKS = 256
_NEVER = np.iinfo(np.int64).max


class _Mark(NamedTuple):
    """position: of the journal; seqs: int64 [P], of ranges that were not whole here the highest number there is."""

    position: int
    seqs: Seqs


class JournalMarks:
    """The marks of one journal, in the order of positions."""

    def __init__(self) -> None:
        self._marks: deque[_Mark] = deque(maxlen=MOST_MARKS)

    def add(self, position: int, seqs: Seqs, whole: NDArray[np.bool_]) -> None:
        """Marks a position. seqs: of all ranges; whole: bool [P], of which ranges all is here."""
        self._marks.append(_Mark(position, np.where(whole, seqs, _NEVER)))

    def forget(self, ranges: Ranges) -> None:
        """These ranges are filled from elsewhere, or are gone: what changed there meanwhile was not noted here, so no
        earlier mark counts for them."""
        for mark in self._marks:
            mark.seqs[ranges] = _NEVER

    def clear(self) -> None:
        """Forgets all: the journal begins."""
        self._marks.clear()

    def find(self, ranges: Ranges, positions: Seqs, seqs: Seqs, end: int, oldest: int) -> Seqs:
        """Where to go on for each of some ranges: a position of the journal, -1 where the range has to be read again.

        positions: the numbers that the reader has; seqs: those of the ranges now; end, oldest: of the journal."""
        found = np.full(len(ranges), -1, np.int64)
        found[(positions == seqs) & (positions >= 0)] = end  # both may lack it: a relay that reads it itself
        left = (positions >= 0) & (positions < seqs)
        for mark in reversed(self._marks):
            if mark.position < oldest or not left.any():
                break
            covered = left & (mark.seqs[ranges] <= positions)
            found[covered] = mark.position
            left &= ~covered
        return found
