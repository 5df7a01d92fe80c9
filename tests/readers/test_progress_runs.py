"""Runs of progress that has changed: the compiled loop finds what `Progresses.between` finds."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.kernels.progress import RUN, changed_runs
from elasticps.wire.windows import Progresses

RANGES = 24


@pytest.mark.parametrize("seed", range(40))
def test_changed_runs_are_those_between_two_tables(seed: int) -> None:
    """Rows and columns lie anywhere in the clocks; some ranges have no column, whose progress is 0."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 5))
    ranges = np.flatnonzero(random.random(RANGES) < 0.6)
    columns = np.where(random.random(RANGES) < 0.8, 1 + random.permutation(RANGES), 0)
    workers = 1 + random.permutation(50)[:count]
    rows = random.permutation(8)[:count]
    sent = np.zeros((count, len(ranges)), np.int64)
    for _ in range(6):
        clocks = random.integers(0, 3, (8, RANGES + 1))
        clocks[:, 0] = 0
        now = clocks[np.ix_(rows, columns[ranges])]
        expected = Progresses.between(workers, ranges, sent.copy(), now).runs
        out = np.empty(RUN * sent.size, np.int64)
        n = changed_runs(clocks, rows, columns, workers, ranges, sent, out)
        assert out[: RUN * n].reshape(-1, RUN).tolist() == expected.tolist()
        assert (sent == now).all()
