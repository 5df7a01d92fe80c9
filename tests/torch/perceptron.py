"""A small model, and what is asked of it."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from tests.torch.fake_ps import FakeClient


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))


def batch(device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 3, device=device)
    return x, x.sum(dim=1, keepdim=True)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(model(x), y)


def agree(ps: FakeClient, model: nn.Module, prefix: str = "model") -> None:
    """The model shows what the servers have."""
    for name, parameter in model.named_parameters():
        if parameter.numel():
            np.testing.assert_array_equal(parameter.detach().float().cpu().numpy(), ps.weight(f"{prefix}.{name}"))
