"""What changed of ranges and of progress: compiled loops write and take what plain code does."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.kernels.progress import RUN, state_words, take_positions, take_runs, write_state
from elasticps.wire.windows import Progresses, WindowState

RANGES = 24


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_is_what_differs(seed: int) -> None:
    """Rows and columns lie anywhere in the clocks; some ranges have no column, whose progress is 0."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 5))
    ranges = np.flatnonzero(random.random(RANGES) < 0.6)
    columns = np.where(random.random(RANGES) < 0.8, 1 + random.permutation(RANGES), 0)
    workers = 1 + random.permutation(50)[:count]
    rows = random.permutation(8)[:count]
    sent, sent_seqs = np.zeros((count, len(ranges)), np.int64), np.full(RANGES, -1, np.int64)
    for _ in range(6):
        clocks, seqs = random.integers(0, 3, (8, RANGES + 1)), random.integers(0, 3, RANGES)
        clocks[:, 0] = 0
        ended = random.integers(0, 9, (int(random.integers(0, 3)), RUN))
        now = clocks[np.ix_(rows, columns[ranges])]
        runs = Progresses.between(workers, ranges, sent.copy(), now)
        runs = Progresses(np.concatenate([ended, runs.runs]))
        moved = ranges[seqs[ranges] != sent_seqs[ranges]]
        others = np.setdiff1d(np.arange(RANGES), ranges)
        before = sent_seqs[others].copy()
        out = np.empty(state_words(len(ranges), count, len(ended)), np.int64)
        n, words = write_state(seqs, sent_seqs, ranges, clocks, rows, columns, workers, sent, ended, 0, out)
        assert (n, out[:words].tobytes()) == WindowState.of(moved, seqs[moved], runs, [])
        assert (sent == now).all()
        assert (sent_seqs[ranges] == seqs[ranges]).all()
        assert (sent_seqs[others] == before).all()


@pytest.mark.parametrize("seed", range(40))
def test_runs_are_taken_as_a_loop_over_ranges_takes_them(seed: int) -> None:
    """Up to the first worker that is not known, and only of ranges that count."""
    random = np.random.default_rng(seed)
    count = int(random.integers(0, 6))
    workers = np.sort(random.permutation(20)[:count])
    rows = random.permutation(8)[:count]
    counts = random.random(RANGES) < 0.7
    length = int(random.integers(0, 30))
    first = random.integers(0, RANGES, length)
    last = np.minimum(first + random.integers(0, 4, length), RANGES - 1)
    named = random.choice(workers, length) if count else np.zeros(length, np.int64)
    named[random.random(length) < 0.05] = 99
    runs = np.stack([named, first, last, random.integers(0, 9, length)], axis=1)
    out = random.integers(0, 9, (8, RANGES))
    expected, start, end = out.copy(), min(2, length), length
    for i in range(start, length):
        at = np.flatnonzero(workers == runs[i, 0])
        if not len(at):
            end = i
            break
        for r in range(runs[i, 1], runs[i, 2] + 1):
            if counts[r]:
                expected[rows[at[0]], r] = runs[i, 3]
    assert take_runs(np.ascontiguousarray(runs), start, workers, rows, counts, out) == end
    assert (out == expected).all()


@pytest.mark.parametrize("seed", range(40))
def test_positions_are_taken_as_operations_on_arrays_take_them(seed: int) -> None:
    """Of ranges that their server is followed for, and shown where the reader has them and has heard of them."""
    random = np.random.default_rng(seed)
    ranges, followed = (np.flatnonzero(random.random(RANGES) < 0.6) for _ in range(2))
    positions, owner = random.integers(5, 9, len(ranges)), random.integers(-1, 2, RANGES)
    heard, have = random.integers(-1, 5, RANGES), random.integers(-1, 5, RANGES)
    times, exact = random.integers(0, 9, RANGES), random.random(RANGES) < 0.5
    expected = [each.copy() for each in (heard, have, times, exact)]
    mine = owner[ranges] == 1
    expected[0][ranges[mine]] = positions[mine]
    shown = followed[(owner[followed] == 1) & (have[followed] >= 0)]
    shown = shown[expected[0][shown] >= 0]
    expected[1][shown], expected[2][shown], expected[3][shown] = expected[0][shown], 99, True
    take_positions(ranges, positions, followed, 1, 99, owner, heard, have, times, exact)
    assert all((a == b).all() for a, b in zip((heard, have, times, exact), expected, strict=True))
