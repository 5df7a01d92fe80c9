"""Bugs in checkpoints of tables that forget rows, each of a kind that a careful person could have written."""

from __future__ import annotations

from typing import Any

import pytest

from elasticps.server.core.scan import Scan
from elasticps.store import Table
from elasticps.store.cuts import Deletions


def write_an_increment_without_its_sweeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deletions, "swept_between", lambda self, r, since, before: [])


def note_a_sweep_under_the_cut_before(patch: pytest.MonkeyPatch) -> None:
    """As if it had been planned before the cut, and ran past it."""
    sweep = Deletions.sweep
    patch.setattr(Deletions, "sweep", lambda self, r, swept: sweep(self, r, swept._replace(cut=swept.cut - 1)))


def note_no_sweep_of_a_part_of_a_range(patch: pytest.MonkeyPatch) -> None:
    sweep = Deletions.sweep
    patch.setattr(Deletions, "sweep", lambda self, r, swept: None if swept.low else sweep(self, r, swept))


def fill_a_joiner_without_the_sweeps(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Deletions, "load_sweeps", lambda self, r, sweeps: None)


def write_waiting_keys_only_into_full_checkpoints(patch: pytest.MonkeyPatch) -> None:
    usages = Scan._usages

    def mutant(self: Scan, table: Table, ranges: Any, whole: set[int]) -> Any:
        found = usages(self, table, ranges, whole)
        return {r: each if r in whole else each._replace(keys=each.keys[:0], words=each.words[:0])
                for r, each in found.items()}  # fmt: skip

    patch.setattr(Scan, "_usages", mutant)


def write_the_time_of_another_range(patch: pytest.MonkeyPatch) -> None:
    usages = Scan._usages

    def mutant(self: Scan, table: Table, ranges: Any, whole: set[int]) -> Any:
        found = usages(self, table, ranges, whole)
        return {r: each._replace(time=int(self._store.times[0])) for r, each in found.items()}

    patch.setattr(Scan, "_usages", mutant)
