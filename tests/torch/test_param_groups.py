"""Param groups of an Optimizer and their learning rates, and its state_dict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticps.client.rates import SetRate
from elasticps.errors import ConfigError
from elasticps.model.spec import SGD, Adagrad, Adam, Schedule, Zeros
from elasticps.torch import Embedding, Optimizer
from tests.torch.perceptron import batch, loss_of


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1, gamma=0.5),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 1.0 / (1 + epoch)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=5, cycle_momentum=False),
    ],
)
def test_torchs_schedulers_set_the_rate_of_the_step(ps: Any, make: Callable[[Any], Any]) -> None:
    model = nn.Linear(3, 1)
    reference = nn.Linear(3, 1)
    reference.load_state_dict(model.state_dict())
    ours, theirs = Optimizer(ps, model, optimizer=SGD(lr=0.1)), torch.optim.SGD(reference.parameters(), lr=0.1)
    schedulers = make(ours), make(theirs)
    for _ in range(4):
        x, y = batch()
        for net, optimizer, scheduler in ((model, ours, schedulers[0]), (reference, theirs, schedulers[1])):
            optimizer.zero_grad()
            loss_of(net, x, y).backward()
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(model.weight, reference.weight)


def test_tables_have_a_group_and_a_rate_of_their_own(ps: Any) -> None:
    embedding = Embedding(ps, "users", 3, optimizer=SGD(lr=0.5), init=Zeros())
    model = nn.Sequential(embedding, nn.Linear(3, 1))
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {"dense0": 0.1, "users": 0.5}
    optimizer.param_groups[1]["lr"] = 0.0
    model(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert ps.tables["users"].row(1).tolist() == [0, 0, 0]


def test_each_parameter_may_have_its_own_optimizer(ps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = Optimizer(ps, model, optimizer=lambda name, _: SGD(lr=1.0) if name == "bias" else Adagrad(lr=0.1))
    assert [(len(group["params"]), group["lr"]) for group in optimizer.param_groups] == [(1, 0.1), (1, 1.0)]
    assert ps.targets["model.bias"].spec == SGD(lr=1.0)


def test_a_schedule_of_the_server_side_optimizer_is_followed(ps: Any) -> None:
    model = nn.Linear(1, 1, bias=False)
    start = model.weight.item()
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=Schedule(lambda clock: 1.0 / clock)))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
    assert model.weight.item() == pytest.approx(start - 1 - 1 / 2 - 1 / 3)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(ConfigError, match="its own schedule"):
        optimizer.step()


def test_rates_that_are_set_for_all_workers_are_assigned_to_groups(ps: Any) -> None:
    embedding = Embedding(ps, "users", 1, optimizer=SGD(lr=1.0), init=Zeros())
    linear = nn.Linear(1, 1)
    model = nn.ModuleDict({"users": embedding, "linear": linear})

    def set_rate(target: Any, lr: float, revision: int) -> None:
        target.spec = SGD(lr=lr)
        for handle in (ps.tables["users"], *tensors.values()):
            if handle.target is target:
                handle.rate_set = SetRate(1, lr, revision)

    tensors: dict[str, Any] = {}
    make = ps.tensor
    ps.tensor = lambda name, **options: tensors.setdefault(name, make(name, **options))
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0), bucket_bytes=1)

    def train() -> list[float]:
        row, bias = embedding.table.pull(np.array([7]))[0, 0], linear.bias.item()
        optimizer.zero_grad()
        (embedding(torch.tensor([7])).sum() + linear(torch.ones(1)).sum()).backward()
        optimizer.step()
        moved = [row - embedding.table.pull(np.array([7]))[0, 0], bias - linear.bias.item()]
        return [round(float(by), 3) for by in moved]

    assert train() == [1.0, 1.0]
    set_rate(ps.targets["users"], 0.5, 1)
    assert train() == [0.5, 1.0]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.5]
    set_rate(ps.targets["model.linear.weight"], 0.25, 3)  # a group has one rate
    set_rate(ps.targets["model.linear.bias"], 0.125, 2)
    assert train() == [0.5, 0.25]
    optimizer.param_groups[0]["lr"] = 2.0  # as if both had been assigned: the last one counts
    assert train() == [0.5, 2.0]


def test_groups_cannot_be_added_later(ps: Any) -> None:
    optimizer = Optimizer(ps, nn.Linear(3, 1), optimizer=SGD(lr=0.1))
    with pytest.raises(ConfigError, match="whole model"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_rates_survive_a_state_dict(ps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    optimizer.param_groups[0]["lr"] = 0.03
    again = Optimizer(ps, model, optimizer=SGD(lr=0.1))
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.03


def test_rates_of_schedulers_reach_the_servers_after_a_state_dict_was_loaded(ps: Any) -> None:
    embedding = Embedding(ps, "users", 1, optimizer=SGD(lr=1.0), init=Zeros())
    linear = nn.Linear(1, 1)
    model = nn.ModuleDict({"users": embedding, "linear": linear})
    optimizer = Optimizer(ps, model, optimizer=SGD(lr=1.0))
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    moved = []
    for _ in range(3):
        row, bias = embedding.table.pull(np.array([7]))[0, 0], linear.bias.item()
        optimizer.zero_grad()
        (embedding(torch.tensor([7])).sum() + linear(torch.ones(1)).sum()).backward()
        optimizer.step()
        scheduler.step()
        moved.append([row - embedding.table.pull(np.array([7]))[0, 0], bias - linear.bias.item()])
    np.testing.assert_allclose(moved, [[1.0, 1.0], [0.5, 0.5], [0.25, 0.25]], rtol=1e-4)


def test_the_state_of_another_optimizer_is_refused(ps: Any) -> None:
    Embedding(ps, "users", 1, optimizer=SGD(lr=1.0))
    users = Optimizer(ps, Embedding(ps, "users", 1, optimizer=SGD(lr=1.0)), overlap=False)
    items = Optimizer(ps, Embedding(ps, "items", 1, optimizer=SGD(lr=1.0)), overlap=False)
    with pytest.raises(ConfigError, match="its groups are items, not users"):
        users.load_state_dict(items.state_dict())
    with pytest.raises(ConfigError, match="not users"):
        users.load_state_dict(torch.optim.SGD([torch.zeros(1)], lr=0.1).state_dict())


def test_options_fixed_at_the_servers_cannot_be_changed_in_a_group(ps: Any) -> None:
    model = nn.Linear(3, 1)
    optimizer = Optimizer(ps, model, optimizer=Adam(lr=0.1, weight_decay=0.01))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=5)
    loss_of(model, *batch()).backward()
    with pytest.raises(ConfigError, match=r"momentum of group 'dense0' is 0.95.*OneCycleLR.* cycle_momentum=False"):
        optimizer.step()
    optimizer.param_groups[0]["momentum"] = None
    loss_of(model, *batch()).backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["weight_decay"] = 0.1
    with pytest.raises(ConfigError, match=r"weight_decay of group 'dense0' is 0.1.* stays 0.01"):
        optimizer.load_state_dict(state)
    del state["param_groups"][0]["weight_decay"]  # of an earlier version
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(ConfigError, match="only lr can be changed"):
        optimizer.step()
