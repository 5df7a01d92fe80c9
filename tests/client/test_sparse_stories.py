"""Random stories of a session and real replicas: no part is lost or counted twice, whatever happens."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.client.core.heads import Head
from elasticps.client.core.outstanding import OutstandingStep, Ticks
from replication.chain import Member
from tests.client.sparse_story import SparseStory

# Once found by chance: an answer cut short as a step committed, and `prev` by range cut short as it was looked up.
FOUND = 114, 562


def test_every_part_is_applied_once_and_in_order_and_committed_steps_are_whole() -> None:
    assert sum(SparseStory(seed).play() for seed in (*range(60), *FOUND)) > 300


class Unlucky(list[object]):
    """Groups; the second look at them is cut short."""

    def __iter__(self):  # type: ignore[no-untyped-def]
        each = list(super().__iter__())
        yield each[0]
        raise KeyboardInterrupt


def test_what_is_looked_up_by_range_is_kept_only_when_it_is_whole() -> None:
    """An exception in the middle left ranges that the part did not seem to tick: it was never sent to them again."""
    groups = [(np.array([0, 2]), 5), (np.array([1, 3]), 6)]
    ticks = Ticks(Unlucky(groups))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        ticks.prev(4)
    ticks.groups = groups
    assert ticks.prev(4).tolist() == [5, 6, 5, 6]
    step, heads = OutstandingStep(), [Head(Member(name, 1), np.array(order)) for name, order in groups_of_heads()]
    step.whole = Unlucky(heads)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        step.by_range(4)
    step.whole = set(heads)
    assert step.by_range(4).tolist() == [True] * 4


def groups_of_heads() -> list[tuple[str, list[int]]]:
    return [("a", [0, 2]), ("b", [1, 3])]
