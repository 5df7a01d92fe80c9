"""What a store knows of checkpoint cuts: the newest that each range has passed, and keys deleted since. Pure.

An increment has to name deleted keys: they are noted by range, each with the cut after which its row was deleted. A
range notes as many as a share of its rows. Beyond that the oldest are forgotten, and increments that would need them
hold the whole range instead.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from elasticps.store.eviction import MOST_SWEEPS, Sweep, add_sweep
from elasticps.store.native import MAX_STAMP
from elasticps.store.range_map import RangeMap


class PassedCuts:
    """newest: number of the newest cut that each range has passed, 0 for none; base: what stamps count from; stamps:
    those of rows that change now, at an address that stays; all int64 [ranges]. newest_stamp: the largest of these. A
    stamp says that a row was changed last between the cut base + stamp and the next one; with stamp 0 it
    may have been earlier."""

    most = MAX_STAMP

    def __init__(self, ranges: int) -> None:
        self.newest, self.base, self.stamps = np.zeros((3, ranges), np.int64)
        self.newest_stamp = 0

    def set(self, ranges: NDArray[np.int64], newest: NDArray[np.int64] | int, base: NDArray[np.int64] | int) -> None:
        """Sets both numbers of some ranges."""
        self.newest[ranges], self.base[ranges] = newest, base
        self.stamps[ranges] = self.newest[ranges] - self.base[ranges]
        self.newest_stamp = int(self.stamps.max())

    def passed(self, ranges: NDArray[np.int64], cut: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A cut passes in the ranges that have not had it. Returns these, and those of them in which all stamps must be
        reset, as they have no number for this cut."""
        passing = ranges[self.newest[ranges] < cut]
        base = self.base[passing]
        far = cut - base > self.most
        base[far] = cut - 1
        self.set(passing, cut, base)
        return passing, passing[far]

    def stamp(self, r: int, cut: int) -> int:
        """The stamp of rows that change right after a cut, which is not above the newest."""
        return max(0, cut - int(self.base[r]))


_MASK = (1 << 64) - 1
_FLOOR = 1  # the word of a range in `Deletions`
SHARE, LEAST = 64, 64  # one in so many rows, but so many of a small range
_M1, _M2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0x9FB21C651E98DF25)

Notes = NDArray[np.int64]
"""Keys and the cuts after which they were deleted: int64 [n, 2]."""
NO_NOTES: Notes = np.empty((0, 2), np.int64)


class Deletions:
    """The rows of one table that went: deleted keys, and sweeps."""

    def __init__(self, ranges: int) -> None:
        self._floors = RangeMap(ranges, (0,))  # cuts; what went after an earlier one is not known in full
        self._notes: dict[int, list[Notes]] = {}
        self._sweeps: dict[int, list[Sweep]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept by range, notes and sweeps not counted."""
        return self._floors.nbytes

    def ranges(self) -> set[int]:
        """The ranges with notes or sweeps."""
        return self._notes.keys() | self._sweeps.keys()

    def floor(self, r: int) -> int:
        """The first cut of range r after which all that went is known; 0: all is known."""
        return self._floors.get(r, _FLOOR)

    def floors(self, ranges: NDArray[np.int64]) -> NDArray[np.int64]:
        """The same of ranges [n]: int64 [n]."""
        return self._floors.read(ranges, _FLOOR)

    def of(self, r: int) -> Notes:
        """The notes of a range."""
        notes = self._notes.get(r, [])
        if len(notes) > 1:
            notes[:] = [np.concatenate(notes)]
        return notes[0] if notes else NO_NOTES

    def note(self, r: int, keys: NDArray[np.int64], cut: int) -> None:
        """Notes that rows of these keys are deleted. Before the first cut nobody needs to know."""
        if cut:
            self.add(r, np.stack((keys, np.full(len(keys), cut)), axis=1))

    def note_each(self, ranges: NDArray[np.int64], keys: NDArray[np.int64], newest: NDArray[np.int64]) -> None:
        """Notes the same of keys in several ranges, int64 [n] each. newest: cuts, by range."""
        for r in np.unique(ranges).tolist():
            self.note(r, keys[ranges == r], int(newest[r]))

    def add(self, r: int, notes: Notes) -> None:
        """Adds notes from another replica, without those that are not known in full: replicas would differ."""
        notes = notes[notes[:, 1] >= self.floor(r)]
        if len(notes):
            self._notes.setdefault(r, []).append(notes)

    def bound(self, r: int, rows: int) -> None:
        """Forgets the oldest notes if there are too many for a range of so many rows."""
        most = max(LEAST, rows // SHARE)
        if sum(map(len, self._notes.get(r, ()))) > most:
            cuts = np.sort(self.of(r)[:, 1])
            self.forget(r, int(cuts[-1 - most]) + 1)

    def forget(self, r: int, floor: int) -> None:
        """Forgets what was deleted after cuts before `floor`."""
        if floor > self.floor(r):
            self._floors.set(r, _FLOOR, floor)
            if r in self._notes:
                notes = self.of(r)
                self._notes[r] = [notes[notes[:, 1] >= floor]]
            if r in self._sweeps:
                self._sweeps[r] = [sweep for sweep in self._sweeps[r] if sweep.cut >= floor]

    def sweep(self, r: int, sweep: Sweep) -> None:
        """Notes a sweep of a range. Before the first cut nobody needs to know. Of too many the oldest are forgotten."""
        if sweep.cut and sweep.cut >= self.floor(r):
            sweeps = self._sweeps.setdefault(r, [])
            add_sweep(sweeps, sweep)
            if len(sweeps) > MOST_SWEEPS:
                self.forget(r, sorted(known.cut for known in sweeps)[len(sweeps) - MOST_SWEEPS - 1] + 1)

    def load_sweeps(self, r: int, sweeps: Iterable[Sweep]) -> None:
        """Takes over the sweeps that another replica has of a range, as they are: joined anew they might be fewer."""
        if found := [sweep for sweep in sweeps if sweep.cut >= self.floor(r)]:
            self._sweeps[r] = found

    def sweeps(self, r: int) -> list[Sweep]:
        """The sweeps of a range, in order."""
        return self._sweeps.get(r, [])

    def erase(self, r: int) -> None:
        """Forgets a range that is not here any more."""
        self._floors.drop(r)
        self._notes.pop(r, None)
        self._sweeps.pop(r, None)

    def between(self, r: int, since: int, before: int) -> NDArray[np.int64]:
        """Keys of rows that went after cut `since` and before cut `before`, each once."""
        notes = self.of(r)
        return np.unique(notes[(since <= notes[:, 1]) & (notes[:, 1] < before), 0])

    def swept_between(self, r: int, since: int, before: int) -> list[Sweep]:
        """Sweeps after cut `since` and before cut `before`, in order."""
        return [sweep for sweep in self.sweeps(r) if since <= sweep.cut < before]

    def words(self, r: int) -> tuple[int, int]:
        """A digest of all notes and sweeps of a range, whatever their order."""
        notes = self.of(r).astype(np.uint64)
        mixed = (notes[:, 0] * _M1 ^ notes[:, 1]) * _M2
        total = np.sum(mixed ^ mixed >> np.uint64(32), dtype=np.uint64)
        swept = sum(sweep.word for sweep in self.sweeps(r))
        word = (int(total) + swept) & _MASK
        return self.floor(r), word - (word >> 63 << 64)
