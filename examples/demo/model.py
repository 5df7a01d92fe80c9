"""DeepFM in plain torch: it does not know where its embeddings live.

Guo, Tang, Ye, Li, He, "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI 2017.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from examples.demo.data import FIELDS, Ratings, auc

if TYPE_CHECKING:
    from collections.abc import Iterator

FACTORS = 16
ROW = 1 + FACTORS  # an embedding row: the linear term's weight, then the factors
HIDDEN = (64, 32)
DROPOUT = 0.3
EMBEDDING_STD = 0.05
EMBEDDING_LR = 0.02  # Adagrad
DENSE_LR = 0.001  # Adam


class DeepFM(nn.Module):
    """`features`: ids [n, fields] -> [n, fields, ROW]; `genres`: ids [n, some] -> their mean, [n, ROW]."""

    def __init__(self, features: nn.Module, genres: nn.Module) -> None:
        super().__init__()
        self.features, self.genres = features, genres
        self.deep = deep()

    def rows(self, features: Tensor, genres: Tensor) -> Tensor:
        """Those of the features, and the mean of those of the genres, [n, fields + 1, ROW]."""
        return torch.cat([self.features(features), self.genres(genres)[:, None]], dim=1)

    def forward(self, features: Tensor, genres: Tensor) -> Tensor:
        """Logit of liking, [n]."""
        rows = self.rows(features, genres)
        linear, factors = rows[..., 0].sum(dim=1), rows[..., 1:]
        pairs = (factors.sum(dim=1).square() - factors.square().sum(dim=1)).sum(dim=1) / 2
        deep: Tensor = self.deep(factors.flatten(1))
        return linear + pairs + deep[:, 0]


def deep() -> nn.Sequential:
    """The layers on top of the factors."""
    widths = (FACTORS * (len(FIELDS) + 1), *HIDDEN)
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise(widths):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(DROPOUT)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], 1))


def tensors(ratings: Ratings, index: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
    """Features, genres and labels of the ratings at `index`."""
    return (
        torch.from_numpy(ratings.features[index]),
        torch.from_numpy(ratings.genres[index]),
        torch.from_numpy(ratings.liked[index]),
    )


def _slices(count: int, size: int) -> Iterator[NDArray[np.int64]]:
    for start in range(0, count, size):
        yield np.arange(start, min(start + size, count))


def evaluate(model: nn.Module, ratings: Ratings) -> tuple[float, float]:
    """(AUC, mean loss) on `ratings`, in evaluation mode."""
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        parts = [model(*tensors(ratings, index)[:2]) for index in _slices(len(ratings), 8192)]
    model.train(was_training)
    logits = torch.cat(parts)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(ratings.liked))
    return auc(logits.numpy(), ratings.liked), loss.item()
