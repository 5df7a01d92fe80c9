"""A model for several devices of one process, batches for them, and one that runs them one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.torch import DeviceGroup, Embedding, EmbeddingBag, EmbeddingBagCollection, Optimizer, TableConfig
from tests.torch.fake_ps import FakeClient

STEPS = 4
SIZE = 6
Batch = tuple[Tensor, Tensor]
Step = Callable[[Optimizer, int], None]


class Net(nn.Module):
    """Bags, rows of the same table, a collection of two tables, and dense weights."""

    def __init__(self, ps: Any) -> None:
        super().__init__()
        adagrad, init = eps.Adagrad(lr=0.1), eps.Normal(std=0.1, seed=1)
        self.bags = EmbeddingBag(ps, "words", 4, "sum", optimizer=adagrad, init=init, padding_idx=0)
        self.rows = Embedding(ps, "words", 4, optimizer=adagrad, init=init, padding_idx=0)
        tables = [TableConfig("users", 4, ["user", "friend"]), TableConfig("items", 2, mode="mean")]
        self.several = EmbeddingBagCollection(ps, tables, optimizer=eps.SGD(lr=0.2))
        self.norm = nn.BatchNorm1d(18, track_running_stats=True)
        self.hidden = nn.Linear(18, 5)
        self.top = nn.Linear(5, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        several = self.several({"user": ids[:, 0], "friend": ids[:, 1], "items": ids[:, 1:]}).values()
        rows = self.rows(ids[:, 1])
        hidden = self.hidden(self.norm(torch.cat([self.bags(ids), rows, several], dim=1)))
        out: Tensor = self.top(torch.tanh(hidden))
        return out


def batch(step: int, device: int) -> Batch:
    """Device 1 has fewer samples than others, and nothing but padding for some layers in step 2."""
    generator = torch.Generator().manual_seed(100 * step + device)
    size = SIZE - 2 * (device == 1)
    ids = torch.randint(0, 9, (size, 3), generator=generator)
    return (ids * 0 if device == 1 and step == 2 else ids), torch.randn(size, 1, generator=generator)


def batches(step: int, devices: int) -> list[Batch]:
    """In step 1 the last device has none."""
    return [batch(step, device) for device in range(devices - (step == 1 and devices > 1))]


def backward(model: nn.Module, device: torch.device, given: Batch) -> Tensor:
    ids, labels = given
    loss = nn.functional.mse_loss(model(ids.to(device)), labels.to(device))
    loss.backward()
    return loss.detach().cpu()


def one_after_another(group: DeviceGroup[Any], given: list[Batch]) -> list[Tensor]:
    return [backward(*each) for each in zip(group.models, group.devices, given, strict=False)]


def at_once(group: DeviceGroup[Any], given: list[Batch]) -> list[Tensor]:
    return group.run(backward, given)


def plainly(optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()


def alone(devices: int, build: Callable[[Any], nn.Module] = Net, device: str = "cpu", **options: Any) -> FakeClient:
    """Trains one model on the batches, one after another."""
    ps: Any = FakeClient()
    model = build(ps).to(device)
    before, after = options.pop("before", plainly), options.pop("after", None)
    optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), overlap=False, **options)
    for step in range(STEPS):
        before(optimizer, step)
        with optimizer.accumulate():
            for given in batches(step, devices):
                backward(model, torch.device(device), given)
        if after is not None:
            after(optimizer, step)
        optimizer.step()
    return ps  # type: ignore[no-any-return]


def same(found: FakeClient, expected: FakeClient, exactly: bool = True) -> None:
    """The servers have the same, rows and slots."""
    assert found.targets.keys() == expected.targets.keys()
    for name, target in expected.targets.items():
        mine = found.targets[name]
        assert mine.weights.keys() == target.weights.keys(), name
        for key, row in target.weights.items():
            pairs = [(mine.weights[key], row)]
            pairs += [(mine.slots[key][slot], values) for slot, values in target.slots.get(key, {}).items()]
            for one, other in pairs:
                if exactly:
                    np.testing.assert_array_equal(one, other, err_msg=name)
                else:  # GPUs add up in orders of their own
                    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4, err_msg=name)
