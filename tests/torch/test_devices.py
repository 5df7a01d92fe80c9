"""Several devices of one process train as one model that runs their batches in turn."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.torch import DeviceGroup, Embedding, GroupClient, Optimizer, full_state_dict, load, save
from tests.torch.devices import (
    STEPS,
    Batch,
    Net,
    Step,
    alone,
    at_once,
    backward,
    batch,
    batches,
    one_after_another,
    same,
)
from tests.torch.fake_ps import FakeClient
from tests.torch.group.ranks import clients, together

CUDA = torch.cuda.device_count()
DEVICES = [
    ["cpu"], ["cpu"] * 3,
    pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
    pytest.param(["cuda:0", "cpu"], marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
    pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.skipif(CUDA < 2, reason="no two CUDA devices")),
]  # fmt: skip


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("computes", [at_once, one_after_another])
@pytest.mark.parametrize("options", [{}, {"pipeline": True}, {"overlap": False}])
def test_training_equals_that_of_one_model_bit_for_bit(
    devices: list[str], computes: Any, options: dict[str, Any]
) -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), devices)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05), **options)
    for step in range(STEPS):
        optimizer.zero_grad()
        given = batches(step, len(devices))
        assert len(computes(group, given)) == len(given)
        assert ps.clock == step, "nothing leaves before all devices have their gradients"
        optimizer.step()
    optimizer.refresh()
    on_cpu = all(device == "cpu" for device in devices)
    same(ps, alone(len(devices), device="cpu" if on_cpu else "cuda"), on_cpu)
    for model, device in zip(group.models, devices, strict=True):
        for name, parameter in model.named_parameters():
            assert str(parameter.device) == device
            if parameter.numel():
                np.testing.assert_array_equal(parameter.detach().cpu().numpy(), ps.weight(f"model.{name}"))


def test_gradients_are_clipped_as_with_one_model() -> None:
    ps: Any = FakeClient()
    group, norms = DeviceGroup(lambda: Net(ps), ["cpu"] * 3), list[float]()

    def clip(optimizer: Optimizer, step: int) -> None:
        norms.append(float(optimizer.clip_grad_norm_(0.3)))

    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05), overlap=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        group.run(backward, batches(step, 3))
        clip(optimizer, step)
        optimizer.step()
    expected = alone(3, after=clip)
    same(ps, expected)
    assert norms[:STEPS] == norms[STEPS:]


@pytest.mark.parametrize("before", [lambda optimizer, step: optimizer.zero_grad(set_to_none=False), lambda *_: None])
def test_gradients_of_earlier_steps_add_up_as_with_one_model(before: Step) -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * 3)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
    for step in range(STEPS):
        before(optimizer, step)
        group.run(backward, batches(step, 3))
        optimizer.step()
    same(ps, alone(3, before=before))


def test_half_precision_gradients_add_up_as_with_one_model() -> None:
    def build(ps: Any) -> nn.Module:
        return Net(ps).bfloat16()

    def half(model: nn.Module, device: torch.device, given: Batch) -> Tensor:
        return backward(model, device, (given[0], given[1].bfloat16()))

    ps, single = FakeClient(), FakeClient()
    ours: Any = ps
    group = DeviceGroup(lambda: build(ours), ["cpu"] * 2)
    optimizer = Optimizer(ours, group, eps.Adam(lr=0.05))
    theirs: Any = single
    model = build(theirs)
    other = Optimizer(theirs, model, eps.Adam(lr=0.05), overlap=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        group.run(half, batches(step, 2))
        optimizer.step()
        other.zero_grad()
        for given in batches(step, 2):
            half(model, torch.device("cpu"), given)
        other.step()
    same(ps, single)


def test_shared_tables_and_parameters_train_as_with_one_model() -> None:
    class Tied(nn.Module):
        def __init__(self, ps: Any) -> None:
            super().__init__()
            self.one = Embedding(ps, "rows", 3, optimizer=eps.Adagrad(lr=0.1), init=eps.Constant(0.3))
            self.other = Embedding(ps, "rows", 3, optimizer=eps.Adagrad(lr=0.1), init=eps.Constant(0.3))
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.second(self.first(self.one(ids[:, 0])) + self.other(ids[:, 1]) * self.frozen).sum(
                1, True
            )
            return out

    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Tied(ps), ["cpu"] * 3)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
    for step in range(STEPS):
        optimizer.zero_grad()
        group.run(backward, batches(step, 3))
        optimizer.step()
    same(ps, alone(3, Tied))


def test_a_model_is_saved_and_loaded_for_all_devices(tmp_path: Path) -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * 2)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))

    def step() -> None:
        optimizer.zero_grad()
        group.run(backward, batches(0, 2))
        optimizer.step()

    step()
    save(group.models[0], tmp_path / "model.pt")
    saved = copy.deepcopy(full_state_dict(group.models[0]))
    step()
    load(group.models[0], tmp_path / "model.pt")
    for model in group.models:
        found = full_state_dict(model)
        for name, value in saved.items():
            if "running" not in name and "tracked" not in name:  # buffers are each model's own
                np.testing.assert_array_equal(found[name].numpy(), value.numpy(), err_msg=name)
    step()
    with torch.no_grad():
        group.models[1].top.bias.add_(1.0)
    with pytest.raises(eps.ConfigError, match=r"'top\.bias' was changed"):
        step()


def test_a_frozen_layer_is_trained_on_no_device() -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * 2)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
    group.run(backward, batches(0, 2))
    for model in group.models:
        model.hidden.requires_grad_(False)
    before = ps.weight("model.hidden.weight").copy()
    optimizer.step()
    np.testing.assert_array_equal(ps.weight("model.hidden.weight"), before)
    assert ps.targets["model.top.weight"].slots


def test_ranks_with_several_devices_add_up_their_gradients() -> None:
    """As ranks that have one model each, and run its batches one after another."""

    def of_rank(step: int, rank: int) -> list[Batch]:
        return [batch(step, 2 * rank + device) for device in range(2)]

    def train(ps: GroupClient) -> None:
        group = DeviceGroup(lambda: Net(ps), ["cpu", "cpu"])
        optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
        with pytest.raises(eps.ConfigError, match="one after another"):
            group.run(backward, of_rank(0, ps.rank))
        for step in range(STEPS):
            optimizer.zero_grad()
            one_after_another(group, of_rank(step, ps.rank))
            optimizer.step()

    def accumulate(ps: GroupClient) -> None:
        model = Net(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), overlap=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            for given in of_rank(step, ps.rank):
                backward(model, torch.device("cpu"), given)
            optimizer.step()

    found = []
    for does in (train, accumulate):
        ps = FakeClient()
        with clients(ps, 2) as ranks:
            together(does, ranks)
        found.append(ps)
    same(found[0], found[1])
