"""The clicks that `bench train` makes up."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn import functional

from benchmarks import training
from benchmarks.core.criteo import ALPHA, CARDINALITIES, CATEGORIES, CLICKS, NUMBERS, Clicks, Source
from examples.demo.data import auc

SOURCE = Source(seed=7, most_values=20_000)
LARGE = SOURCE.batch(0, 100_000)


def test_a_batch_has_the_shape_of_criteos_data() -> None:
    batch = SOURCE.batch(3, 50)
    assert len(batch) == 50
    assert [part.shape for part in vars(batch).values()] == [(50, NUMBERS), (50, CATEGORIES), (50,)]
    assert [part.dtype.name for part in vars(batch).values()] == ["float32", "int64", "float32"]
    assert set(batch.clicked.tolist()) == {0.0, 1.0}


def test_every_category_has_ids_of_its_own() -> None:
    first = 0
    for c, count in enumerate(CARDINALITIES):
        size = min(count, SOURCE.most_values)
        assert first <= LARGE.categories[:, c].min()
        assert LARGE.categories[:, c].max() < first + size
        first += size
    assert first == SOURCE.values


def test_a_batch_depends_on_seed_and_number_alone() -> None:
    def same(one: Clicks, other: Clicks) -> bool:
        return all(np.array_equal(getattr(one, part), getattr(other, part)) for part in vars(one))

    again = Source(seed=7, most_values=20_000)
    assert same(again.batch(1, 100), SOURCE.batch(1, 100))
    assert not same(again.batch(2, 100), SOURCE.batch(1, 100))
    assert not same(Source(seed=8, most_values=20_000).batch(1, 100), SOURCE.batch(1, 100))


@pytest.mark.parametrize("category", [c for c, count in enumerate(CARDINALITIES) if count > 20_000])
def test_categories_follow_the_power_law(category: int) -> None:
    counts = np.sort(np.unique(LARGE.categories[:, category], return_counts=True)[1])[::-1]
    ranks = np.arange(1, 31)
    slope, _ = np.polyfit(np.log(ranks), np.log(counts[:30]), 1)
    assert slope == pytest.approx(-ALPHA, abs=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_about_a_quarter_are_clicks(seed: int) -> None:
    assert Source(seed, 20_000).batch(0, 20_000).clicked.mean() == pytest.approx(CLICKS, abs=0.04)


def log_odds(clicks: Clicks) -> NDArray[np.float64]:
    """The log odds that naive Bayes learns for each id."""
    seen = np.bincount(clicks.categories.ravel(), minlength=SOURCE.values)
    clicked = np.bincount(clicks.categories[clicks.clicked > 0.5].ravel(), minlength=SOURCE.values)
    share = (clicked + CLICKS * 10) / (seen + 10)
    odds: NDArray[np.float64] = np.log(share / (1 - share))
    return odds


def test_labels_can_be_learned_but_not_perfectly() -> None:
    test = SOURCE.batch(1, 20_000)
    naive = auc(log_odds(LARGE)[test.categories].sum(axis=1), test.clicked)
    best = auc(SOURCE.best_scores(test.numbers, test.categories), test.clicked)
    assert 0.65 < naive < best < 0.87
    shuffled = np.random.default_rng(0).permutation(LARGE.clicked)
    chance = auc(log_odds(Clicks(LARGE.numbers, LARGE.categories, shuffled))[test.categories].sum(axis=1), test.clicked)
    assert chance == pytest.approx(0.5, abs=0.02)


@pytest.mark.slow  # that the labels can be learned has a test of its own
def test_dlrm_learns_the_made_up_clicks() -> None:
    source = training.DLRMTraining(batch=512, rank=0, workers=1)
    what = source.local()
    test = Source(training.SEED).batch(10_000, 10_000)
    inputs = torch.from_numpy(test.numbers), torch.from_numpy(test.categories)

    def score() -> float:
        with torch.inference_mode():
            return auc(what.model(*inputs).numpy(), test.clicked)

    before = score()
    for numbers, categories, clicked in source.batches:
        for optimizer in what.optimizers:
            optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(what.model(numbers, categories), clicked).backward()
        for optimizer in what.optimizers:
            optimizer.step()
    assert before < 0.55
    assert score() > 0.6
