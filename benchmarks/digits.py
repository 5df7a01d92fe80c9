"""Scikit-learn's handwritten digits and a small convolutional network: all dense, for what filters do to tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.digits_cnn import digits

LR = 0.1


class Digits:
    """1,437 images to train on and 360 to score."""

    def __init__(self, seed: int) -> None:
        self._images, self.held_out, self._labels, self.answers = digits(seed)
        self._draw = torch.Generator().manual_seed(seed)

    def batch(self, size: int) -> tuple[Tensor, Tensor]:
        """Images float32 [size, 1, 8, 8] and labels int64 [size], drawn anew."""
        chosen = torch.randint(len(self._images), (size,), generator=self._draw)
        return self._images[chosen], self._labels[chosen]
