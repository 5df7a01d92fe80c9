"""Scikit-learn's handwritten digits and a small convolutional network: all dense, for what filters do to tensors."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

LR = 0.1


def network() -> nn.Sequential:
    """8 × 8 grey pixels -> 10 logits; 38,282 weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class Digits:
    """1,437 images to train on and 360 to score."""

    def __init__(self, seed: int) -> None:
        images, labels = load_digits(return_X_y=True)
        parts = train_test_split(
            images.reshape(-1, 1, 8, 8) / 16.0, labels, test_size=0.2, random_state=seed, stratify=labels
        )
        self._images, self.held_out = (torch.from_numpy(part).float() for part in parts[:2])
        self._labels, self.answers = (torch.from_numpy(part) for part in parts[2:])
        self._draw = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Images float32 [size, 1, 8, 8] and labels int64 [size], drawn anew."""
        chosen = torch.randint(len(self._images), (size,), generator=self._draw)
        return self._images[chosen], self._labels[chosen]
