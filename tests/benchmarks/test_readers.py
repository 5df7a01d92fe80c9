"""The keys that workers beside a reader draw."""

from __future__ import annotations

import numpy as np

from benchmarks.readers import DRAWN, Cost, Keys

ROWS, BATCH = 1000, 256


def test_skewed_keys_come_as_zipf_says_over_ids_that_all_workers_shuffle_alike() -> None:
    skew = 1.05
    counts = []
    for seed in (1, 2):
        keys = Keys(np.random.default_rng(seed), ROWS, skew)
        drawn = np.concatenate([keys.draw(BATCH) for _ in range(DRAWN // BATCH)])
        assert drawn.min() >= 0
        assert drawn.max() < ROWS
        counts.append(np.bincount(drawn, minlength=ROWS))
    expected = np.arange(1, ROWS + 1) ** -skew
    expected /= expected.sum()
    order = np.argsort(-counts[0])
    assert (order[:5] == np.argsort(-counts[1])[:5]).all()
    assert (order[:5] > 4).any()  # ids are shuffled
    for count in counts:
        np.testing.assert_allclose(count[order[:5]] / DRAWN, expected[:5], rtol=0.05)


def test_skewed_keys_go_on_behind_those_that_were_drawn() -> None:
    keys = Keys(np.random.default_rng(1), ROWS, 1.0)
    for _ in range(2 * DRAWN // BATCH + 3):
        assert keys.draw(BATCH).shape == (BATCH,)


def test_keys_without_skew_are_uniform() -> None:
    keys = Keys(np.random.default_rng(1), ROWS, 0.0)
    counts = np.bincount(np.concatenate([keys.draw(BATCH) for _ in range(4000)]), minlength=ROWS)
    assert counts.min() > 0.8 * counts.mean()
    assert counts.max() < 1.2 * counts.mean()


def test_the_ratio_of_processor_time_counts_all_processes() -> None:
    assert Cost((200.0, 300.0), (800.0, 850.0), 100.0).ratio == 1000 / 1250
