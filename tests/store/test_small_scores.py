"""Scores that have fallen to almost nothing: an older version of a row that goes goes as well, or the row is noted."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.kernels.hashing import HASH_END
from elasticps.model.optimizers import Accumulate
from elasticps.model.policies import Capacity
from elasticps.model.spec import TableSpec
from elasticps.store import Table
from elasticps.store.eviction import Measure, Predicate, Reason, Sweep, threshold
from elasticps.store.swept import RowUsage

KEYS = np.arange(800)


@pytest.mark.parametrize("idle_s", [100, 106, 127, 128, 129, 130, 131, 140, 300])
def test_what_a_sweep_by_score_takes_does_not_come_back_from_an_older_version(idle_s: int) -> None:
    spec = TableSpec("t", 1, Accumulate(), eviction=[Capacity(10, "score", half_life=1)])
    times = np.full(2, 1000, np.int64)
    table = Table(spec, 3, 2, times=times)
    assert table.lifecycle is not None
    table.lifecycle.begin(np.arange(2), spec)

    def push(scores: np.ndarray) -> None:
        grads = np.stack([np.ones(len(KEYS)), scores], axis=1).astype(np.float32)
        table.apply(KEYS, grads, np.empty(0, np.float32), 7, 1)

    push(np.where(KEYS % 4, (1 + KEYS / len(KEYS)) * 2.0**-20, 0))
    there, rows, *_ = table.dump_stamped(0, 0, HASH_END)
    there, rows = there.copy(), rows.copy()
    for seconds in (idle_s // 2, idle_s - idle_s // 2):  # uses without a score, each of which rounds
        times += seconds
        push(np.zeros(len(KEYS)))
    times += 1
    found = table.lifecycle.measure(
        table, 0, 0, HASH_END, Predicate(Measure.SCORE, Reason.CAPACITY, 0, 0, int(times[0]), 1.0)
    )
    for going in (25, 50, 100, 101, 150, 200, 300):
        below, tie = threshold(found.keys, found.ranks, going)
        by = Predicate(Measure.SCORE, Reason.CAPACITY, below, tie, int(times[0]), 1.0)
        chosen = by.chosen(found.keys, found.ranks)
        gone = set(found.keys[chosen & ~by.unsure(found.ranks)].tolist())
        older = set(there[RowUsage(spec, 3).swept(there, rows, [Sweep(1, by)])].tolist())
        assert gone <= older
        never = set(KEYS[KEYS % 4 == 0].tolist())
        assert never.isdisjoint(found.keys[chosen & by.unsure(found.ranks)].tolist()), "they need no note"
