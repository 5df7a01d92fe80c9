"""Sums over a whole table, in stories in which servers die, move and stand still: each holds at least what its worker
has pushed and was shown, and at most what has been begun."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from chaos.sim.checks.sums import KEYS, Column, Pulled, units
from chaos.sim.checks.violation import Violation
from chaos.sim.programs import Free
from chaos.sim.run import run
from chaos.sim.story import Kind
from elasticps.client.client import Client
from elasticps.client.tables import SparseTable
from elasticps.server.core import partial

OFTEN = 0.4


@pytest.mark.parametrize(("flavour", "seed"), [("kills", 2), ("moves", 2), ("stalls", 3), ("levels", 4)])
def test_no_reduction_lacks_a_step_that_a_pull_has_shown(
    flavour: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, requested = Free.pull, [0]
    amounts = units(np.arange(KEYS))

    def pull(self: Free, ps: Client, table: SparseTable, column: Column) -> None:
        plain(self, ps, table, column)
        if self.random.random() > OFTEN:
            return
        before: Pulled = self.sums.ask(column, np.arange(KEYS), self.now, tail=True)
        found = table.reduce("sum")
        least = int((before.least @ amounts).sum())
        most = int(sum(each.counts[-1] @ amounts for each in self.sums.columns))
        if not least <= found <= most:
            text = f"{self.threads.process} is told a sum of {found}, for {least} to {most}"
            raise Violation("sums of all rows", text)
        requested[0] += 1

    monkeypatch.setattr(Free, "pull", pull)
    monkeypatch.setattr(partial, "SLICE_ROWS", 2)
    result = run(seed, Kind(flavour, "free"))
    assert result.ok, str(result)
    assert requested[0] > 20


def test_a_reduction_without_a_range_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = partial.Partial.slices

    def slices(self: Any) -> Any:
        yield from plain(self)
        if self._range == 1:
            self.state = None

    monkeypatch.setattr(partial.Partial, "slices", slices)
    with pytest.raises(AssertionError, match="sums of all rows"):
        test_no_reduction_lacks_a_step_that_a_pull_has_shown("calm", 6, monkeypatch)
