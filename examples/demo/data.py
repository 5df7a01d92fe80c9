"""MovieLens-100K as the recbole wheel carries it: 100 000 ratings of 1 682 films by 943 people.

F. M. Harper, J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015. The ratings are read
from the installed wheel and copied nowhere.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from elasticps.errors import ConfigError

LIKED = 4.0  # stars from which a rating counts as a like
TEST_SHARE = 0.2
BATCH = 256
AGES = (18, 25, 35, 45, 50, 56)  # lower ends of the age groups, those of MovieLens-1M
FIELDS = ("user", "item", "age", "gender", "occupation")  # one id each in `Ratings.features`
NO_GENRE = 0  # fills rows of `Ratings.genres`


@dataclass(frozen=True)
class Ratings:
    """Ratings as ids: every value of every field has an id of its own in 0..feature_count-1."""

    features: NDArray[np.int64]  # [n, len(FIELDS)]
    genres: NDArray[np.int64]  # [n, most genres of a film], filled up with NO_GENRE; ids of their own from 1
    liked: NDArray[np.float32]  # [n], 0 or 1
    feature_count: int
    genre_count: int  # with NO_GENRE

    def __len__(self) -> int:
        return len(self.liked)

    def take(self, index: NDArray[np.int64]) -> Ratings:
        """The ratings at `index`."""
        return Ratings(
            self.features[index], self.genres[index], self.liked[index], self.feature_count, self.genre_count
        )


def find() -> Path:
    """The folder with the three files. Raises ConfigError when the wheel is not installed."""
    spec = importlib.util.find_spec("recbole")  # finds it without importing it, and what it would import
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        folder = Path(place) / "dataset_example" / "ml-100k"
        if (folder / "ml-100k.inter").is_file():
            return folder
    raise ConfigError(
        "the demo reads MovieLens-100K from the package recbole, which is not installed: "
        "run `make demo`, or `pip install --no-deps recbole==1.2.1`"
    )


def _table(path: Path) -> list[dict[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    names = [column.split(":")[0] for column in lines[0].split("\t")]
    return [dict(zip(names, line.split("\t"), strict=True)) for line in lines[1:]]


def load(folder: Path) -> Ratings:
    """Reads the ratings, and gives ids to the values in the order of the files."""
    ids: dict[tuple[str, str], int] = {}

    def number(field: str, value: str) -> int:
        return ids.setdefault((field, value), len(ids))

    users = {
        row["user_id"]: [
            number("user", row["user_id"]),
            number("age", str(sum(float(row["age"]) >= low for low in AGES))),
            number("gender", row["gender"]),
            number("occupation", row["occupation"]),
        ]
        for row in _table(folder / "ml-100k.user")
    }
    items = {
        row["item_id"]: (number("item", row["item_id"]), row["class"].split())
        for row in _table(folder / "ml-100k.item")
    }
    names = sorted({genre for _, genres in items.values() for genre in genres})
    genre_ids = {name: i for i, name in enumerate(names, start=NO_GENRE + 1)}
    width = max(len(genres) for _, genres in items.values())

    rows = _table(folder / "ml-100k.inter")
    features = np.empty((len(rows), len(FIELDS)), np.int64)
    films = np.full((len(rows), width), NO_GENRE, np.int64)
    liked = np.empty(len(rows), np.float32)
    for i, row in enumerate(rows):
        user, age, gender, occupation = users[row["user_id"]]
        item, genres = items[row["item_id"]]
        features[i] = user, item, age, gender, occupation
        films[i, : len(genres)] = [genre_ids[genre] for genre in genres]
        liked[i] = float(row["rating"]) >= LIKED
    return Ratings(features, films, liked, len(ids), len(names) + 1)


def split(ratings: Ratings, seed: int) -> tuple[Ratings, Ratings]:
    """(training, test), drawn at random by `seed`."""
    order = np.random.default_rng(seed).permutation(len(ratings))
    held_out = int(len(ratings) * TEST_SHARE)
    return ratings.take(order[held_out:]), ratings.take(order[:held_out])


def batches(count: int, seed: int, epoch: int, worker: int = 0, workers: int = 1) -> list[NDArray[np.int64]]:
    """The batches of one worker in one epoch: the epoch's random order, dealt out batch by batch.

    `count` samples in all. All workers together train on every sample once; the last batch of the epoch may be small.
    """
    order = np.random.default_rng([seed, epoch]).permutation(count)
    return [order[start : start + BATCH] for start in range(worker * BATCH, count, workers * BATCH)]


def auc(scores: NDArray[np.floating], labels: NDArray[np.floating]) -> float:
    """Area under the ROC curve: how often a random positive scores above a random negative, ties counted half.

    Hanley, McNeil, "The meaning and use of the area under a ROC curve", Radiology 143, 1982. NaN with one class only.
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]  # from 1, ties share their mean
    positive = labels > 0.5
    n_positive, n_negative = int(positive.sum()), int((~positive).sum())
    if not n_positive or not n_negative:
        return float("nan")
    return float((ranks[positive].sum() - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))
