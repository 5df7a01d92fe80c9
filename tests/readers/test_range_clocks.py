"""What servers say of workers' progress, beside a twin that takes it range by range."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.readers.core.clocks import RangeClocks

RANGES = 16


def frames(rng: np.random.Generator) -> list[tuple[int, int, int, int]]:
    """Runs of one window: of each worker and range at most one."""
    found = []
    for worker in range(1, 4) if rng.random() < 0.8 else range(1, 12):
        at = 0
        while at < RANGES:
            length = int(rng.integers(1, 4)) if rng.random() < 0.5 else 1
            last = min(at + length, RANGES) - 1
            if rng.random() < 0.6:
                found.append((worker, at, last, int(rng.integers(0, 4)) << 6))
            at = last + 1
    return found


@given(st.integers(0, 1 << 30))
def test_progress_is_what_servers_have_said_last(seed: int) -> None:
    rng, clocks = np.random.default_rng(seed), RangeClocks(RANGES)
    twin = dict[int, list[int]]()
    for _ in range(6):
        runs = frames(rng)
        counts = None if rng.random() < 0.5 else rng.random(RANGES) < 0.5
        clocks.note(np.array(runs, np.int64).reshape(-1, 4), counts)
        for worker, first, last, progress in runs:
            for r in range(first, last + 1):
                if counts is None or counts[r]:
                    twin.setdefault(worker, [0] * RANGES)[r] = progress
        present = {worker: row.tolist() for worker, row in clocks.progress.items() if row.any()}
        assert present == {worker: row for worker, row in twin.items() if any(row)}
        if rng.random() < 0.3:
            some = np.flatnonzero(rng.random(RANGES) < 0.5)
            clocks.reset(some)
            for row in twin.values():
                for r in some.tolist():
                    row[r] = 0


def test_workers_beyond_the_limit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.readers.core.clocks.MOST_WORKERS", 3)
    clocks = RangeClocks(RANGES)
    for _ in range(2):
        clocks.note(np.array([(worker, 0, RANGES - 1, worker << 6) for worker in (9, 4, 7, 2, 8)], np.int64))
        assert sorted(clocks.progress) == [2, 4, 7]
    assert all((row == worker << 6).all() for worker, row in clocks.progress.items())
