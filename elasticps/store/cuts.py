"""Which cuts a store's ranges have passed. Pure."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from elasticps.store.native import MAX_STAMP


class Cuts:
    """newest: number of the newest cut that each range has passed, 0 for none; base: what stamps count from; both int64
    [ranges]. A stamp says that a row was changed last between the cut base + stamp and the next one; with stamp 0 it
    may have been earlier."""

    most = MAX_STAMP

    def __init__(self, ranges: int) -> None:
        self.newest = np.zeros(ranges, np.int64)
        self.base = np.zeros(ranges, np.int64)

    def passed(self, ranges: NDArray[np.int64], cut: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A cut passes in those ranges that have not had it: which they are, and in which of them all stamps must begin
        anew, for there is no number for this one."""
        behind = ranges[self.newest[ranges] < cut]
        far = behind[cut - self.base[behind] > self.most]
        self.newest[behind] = cut
        self.base[far] = cut - 1
        return behind, far

    def stamp(self, r: int, cut: int) -> int:
        """Of rows of a range that change right after a cut, not above the newest."""
        return max(0, cut - int(self.base[r]))
