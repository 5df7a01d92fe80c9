"""Bugs in what tables keep of ranges: descriptors that stay behind or are lost, and stamps that do not follow cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from elasticps.store.cuts import PassedCuts
from elasticps.store.native import POLICY
from elasticps.store.range_map import RANGE, RangeMap


def leave_counters_where_a_range_was(patch: pytest.MonkeyPatch) -> None:
    drop = RangeMap.drop

    def mutant(self: RangeMap, r: int) -> None:
        if self.words.shape[1] != POLICY:
            drop(self, r)

    patch.setattr(RangeMap, "drop", mutant)


def lose_blank_descriptors_that_are_being_written(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: RangeMap, ranges: Any, word: int, values: Any) -> None:
        new = ranges[self.read(ranges, RANGE) != ranges]
        if self._full(len(new)):
            self._rebuild(len(new))
        for r in new.tolist():
            self.add(r)
        self.words[self._rows(ranges), word] = values

    patch.setattr(RangeMap, "write", mutant)


def stamp_rows_as_before_the_cut(patch: pytest.MonkeyPatch) -> None:
    set_ = PassedCuts.set

    def mutant(self: PassedCuts, *given: Any) -> None:
        before = self.stamps.copy()
        set_(self, *given)
        np.copyto(self.stamps, before)

    patch.setattr(PassedCuts, "set", mutant)
