"""DLRM in plain torch: it does not know where its embeddings live.

Naumov, Mudigere, Shi et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.core.criteo import CATEGORIES, NUMBERS

DIM = 16
BOTTOM, TOP = 64, (64, 32)


class DLRM(nn.Module):
    """`rows`: ids [n, categories] -> [n, categories, dim]; a module, or not one of the model's."""

    def __init__(self, rows: Callable[[Tensor], Tensor], dim: int = DIM) -> None:
        super().__init__()
        self.rows = rows
        vectors = CATEGORIES + 1
        self.bottom = _layers(NUMBERS, BOTTOM, dim)
        self.top = nn.Sequential(*_layers(dim + vectors * (vectors - 1) // 2, *TOP), nn.Linear(TOP[-1], 1))
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Logit of a click, [n]."""
        bottom = self.bottom(numbers)
        vectors = torch.cat([bottom[:, None], self.rows(categories)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        pairs: Tensor = self.get_buffer("pairs")
        top: Tensor = self.top(torch.cat([bottom, products[:, pairs[0], pairs[1]]], dim=1))
        return top[:, 0]


def _layers(*widths: int) -> nn.Sequential:
    pairs = itertools.pairwise(widths)
    return nn.Sequential(*(part for before, after in pairs for part in (nn.Linear(before, after), nn.ReLU())))
