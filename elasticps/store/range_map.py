"""A map from ranges to descriptors, some words each, that compiled code reads and writes, too.

A table has rows in some ranges only: at most in those of which its server has a copy. An array with a place for each of
P ranges would cost every table P times a descriptor, an empty one as well. So a descriptor takes a place when its range
first needs one. A range is looked for from place r mod capacity on, up to a free place: that reads as a range without
anything does, so nobody has to ask whether a range has a descriptor. Once a sixteenth of all ranges are there, each has
place r of P, and no search goes beyond its first place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.store.native import inlined

RANGE = 0  # the word of a descriptor that says whose it is
_FREE = -1  # in its place
_SHARE = 16  # with one in so many ranges there, each has a place of its own: to search costs 4 ns a key


@inlined
def place_of(words: NDArray[np.int64], last: int, width: int, r: int | np.int64) -> int:
    """Where in `words` the descriptor of range r begins, or a free place that reads as if it were that. words: of a
    map, flat, `width` words a place; last: its capacity less one, or -1 if each range has a place of its own."""
    at: Any = (r & last) * width
    if last >= 0:  # else a search ends where it begins; not to look there saves a tenth of the time of `index.find`
        while words[at] != r and words[at] >= 0:
            at = (at + width) if at < last * width else 0
    return at


class RangeMap:
    """Descriptors of some of `ranges` ranges. blank: what the words behind RANGE are where there is none; one that is
    all blank may be forgotten. header, field: where kernels find the words' address and, in the field behind,
    `last` of `place_of`. Both change with any call that adds or drops; kernels only change words of descriptors."""

    def __init__(
        self, ranges: int, blank: Sequence[int], header: NDArray[np.int64] | None = None, field: int = 0
    ) -> None:
        self.ranges = ranges
        self._blank = np.array([_FREE, *blank], np.int64)
        self._width = len(self._blank)
        self._header, self._field = header, field
        self._take(1)

    def _take(self, capacity: int) -> None:
        self.words = np.tile(self._blank, (capacity, 1))
        self._flat = memoryview(cast(Any, self.words.reshape(-1)))  # faster for single words
        self._last, self._used, self._dropped = capacity - 1, 0, 0
        if self._header is not None:
            last = self._last if capacity < self.ranges else -1
            self._header[self._field], self._header[self._field + 1] = self.words.ctypes.data, last

    @property
    def nbytes(self) -> int:
        """Bytes of all places."""
        return self.words.nbytes

    @property
    def there(self) -> NDArray[np.int64]:
        """The ranges whose descriptors are not blank, in order."""
        return np.sort(self._filled()[:, RANGE])

    def _filled(self) -> NDArray[np.int64]:
        return self.words[(self.words[:, RANGE + 1 :] != self._blank[RANGE + 1 :]).any(axis=1)]

    def place(self, r: int) -> int:
        """As `place_of`. Raises IndexError for what is no range: a search for it might not end."""
        if not 0 <= r < self.ranges:
            raise IndexError(f"there are {self.ranges} ranges, and {r} is none of them")
        flat, at = self._flat, (r & self._last) * self._width
        while flat[at] != r and flat[at] >= 0:
            at += self._width
            if at == len(flat):
                at = 0
        return at

    def get(self, r: int, word: int) -> int:
        """A word of range r's descriptor."""
        return int(self._flat[self.place(r) + word])

    def set(self, r: int, word: int, value: int) -> None:
        """Sets a word of range r's descriptor."""
        at = self.add(r)  # which may take other places
        self._flat[at + word] = value

    def add(self, r: int) -> int:
        """The place of range r's descriptor, which is blank if it is a new one."""
        at = self.place(r)
        if self._flat[at] != r:
            if self._full(1):
                self._rebuild(1)
                at = self.place(r)
            self._flat[at] = r
            self._used += 1
        return at

    def drop(self, r: int) -> None:
        """Makes range r's descriptor blank, and gives memory back once most are."""
        row = self.words[self.place(r) // self._width]
        if row[RANGE] == r and (row[RANGE + 1 :] != self._blank[RANGE + 1 :]).any():
            row[RANGE + 1 :] = self._blank[RANGE + 1 :]
            self._dropped += 1
            if 2 * self._dropped > self._used:
                self._rebuild(0)

    def clear(self) -> None:
        """Forgets all descriptors."""
        self._take(1)

    # --- of many ranges -----------------------------------------------------------------------------------------------

    def read(self, ranges: NDArray[np.int64], word: int) -> NDArray[np.int64]:
        """A word of the descriptors of ranges [n]: int64 [n]."""
        return self.words[self._rows(ranges), word]

    def write(self, ranges: NDArray[np.int64], word: int, values: NDArray[np.int64] | int) -> None:
        """Sets a word of the descriptors of ranges [n], each of which comes once."""
        if self._full(int(np.count_nonzero(self.read(ranges, RANGE) != ranges))):
            self._rebuild(len(ranges))  # blank ones of them have no place then
        for r in ranges[self.read(ranges, RANGE) != ranges].tolist():
            self.add(r)
        self.words[self._rows(ranges), word] = values

    def everywhere(self, word: int) -> NDArray[np.int64]:
        """A word of all ranges: int64 [ranges]."""
        found = np.full(self.ranges, self._blank[word])
        rows = self._filled()
        found[rows[:, RANGE]] = rows[:, word]
        return found

    def _rows(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        if len(ranges) and not (ranges.min() >= 0 and ranges.max() < self.ranges):
            raise IndexError(f"there are {self.ranges} ranges, and some of {ranges} are none of them")
        at = ranges & self._last
        while self._last + 1 < self.ranges:
            known = self.words[at, RANGE]
            elsewhere = (known != ranges) & (known >= 0)
            if not elsewhere.any():
                break
            at[elsewhere] = (at[elsewhere] + 1) & self._last
        return at

    def _full(self, more: int) -> bool:
        """Whether so many descriptors more would make searches long, or endless."""
        return more > 0 and self._last + 1 < self.ranges and 2 * (self._used + more) > self._last + 1

    def _rebuild(self, more: int) -> None:
        """Takes places for the descriptors that are not blank, and so many more."""
        rows = self._filled()
        needed, capacity = len(rows) + more, 1
        while capacity < self.ranges and 2 * capacity < 5 * needed:
            capacity *= 2
        if _SHARE * needed >= self.ranges:
            capacity = self.ranges
        self._take(capacity)
        for row in rows[np.argsort(rows[:, RANGE])]:
            at = self.place(int(row[RANGE])) // self._width
            self.words[at] = row
        self._used = len(rows)
