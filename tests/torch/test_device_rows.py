"""Rows for several devices of one process are requested together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.torch import DeviceGroup, Embedding, Optimizer, full_state_dict, prefetch
from tests.torch.devices import STEPS, Net, alone, backward, batches, same
from tests.torch.fake_ps import FakeClient


def test_each_row_is_pulled_once_in_a_step() -> None:
    ps: Any = FakeClient()
    keys: list[list[list[int]]] = [[[5, 7], [7], [9, 5, 11]], [[1], [], [1]], [[5], [5], [5]]]
    group = DeviceGroup(lambda: Embedding(ps, "rows", 3, optimizer=eps.SGD(lr=1.0)), ["cpu"] * 3)
    optimizer = Optimizer(ps, group)
    shown = []
    for step in keys:
        optimizer.zero_grad()
        for model, some in zip(group.models, step, strict=True):
            rows = model(torch.tensor(some, dtype=torch.int64))
            for key, row in zip(some, rows.detach().numpy(), strict=True):
                np.testing.assert_array_equal(row, ps.tables["rows"].row(key))
            if some:
                rows.sum().backward()
        shown.append(list(ps.tables["rows"].pulls))
        ps.tables["rows"].pulls.clear()
        optimizer.step()
    assert shown == [[[5, 7], [9, 11]], [[1]], [[5]]]
    group.models[0].eval()
    for _ in range(2):  # what is not trained is asked for each time: others may have trained it
        group.models[0](torch.tensor([5]))
    assert ps.tables["rows"].pulls == [[5], [5]]


def test_rows_that_did_not_arrive_are_pulled_again() -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Embedding(ps, "rows", 3, optimizer=eps.SGD(lr=1.0)), ["cpu"] * 2)
    optimizer = Optimizer(ps, group)
    pull_async, lost = ps.pull_async, [True, True]

    class Lost:
        def result(self, timeout: float | None = None) -> None:
            raise eps.Timeout("no answer")

    ps.pull_async = lambda *given: Lost() if lost and lost.pop() else pull_async(*given)

    def shown(model: Embedding, device: torch.device, ids: Tensor) -> Tensor:
        rows = model(ids)
        rows.sum().backward()
        return rows.detach()  # type: ignore[no-any-return]

    for _ in range(len(lost) // 2):
        with pytest.raises(eps.Timeout):
            group.run(shown, [torch.tensor([1, 2]), torch.tensor([2, 1])])
    lost.clear()
    found = group.run(shown, [torch.tensor([1, 2]), torch.tensor([2, 3])])
    for keys, rows in zip([[1, 2], [2, 3]], found, strict=True):
        np.testing.assert_array_equal(rows.numpy(), [ps.tables["rows"].row(key) for key in keys])
    optimizer.step()


def test_expected_rows_arrive_with_the_step() -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * 3)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
    with pytest.raises(eps.ConfigError, match="take one of its models"):
        full_state_dict(group)  # type: ignore[arg-type]
    for step in range(STEPS):
        optimizer.zero_grad()
        group.run(backward, batches(step, 3))
        for model, given in zip(group.models, batches(step + 1, 3), strict=False):
            model.rows.expect(given[0][:, 1])
        optimizer.step()
    same(ps, alone(3))


def test_rows_of_the_next_lists_of_batches_are_prefetched() -> None:
    """In step 1 a device has no batch."""

    class Plain(nn.Module):
        def __init__(self, ps: Any) -> None:
            super().__init__()
            self.rows = Embedding(ps, "words", 4, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=1))

        def forward(self, given: Tensor) -> Tensor:
            out: Tensor = self.rows(given).sum(dim=(1, 2))[:, None]
            return out

    ps: Any = FakeClient()
    ps.consistency = eps.BSP()
    group = DeviceGroup(lambda: Plain(ps), ["cpu"] * 3)
    optimizer = Optimizer(ps, group)
    pulls = []
    for given in prefetch([batches(step, 3) for step in range(STEPS)], group):
        pulls.append(len(ps.tables["words"].pulls))
        optimizer.zero_grad()
        group.run(backward, given)
        pulls[-1] = len(ps.tables["words"].pulls) - pulls[-1]
        optimizer.step()
    assert pulls[2:] == [0] * (STEPS - 2), "a forward pass asks for nothing"
    expected: Any = FakeClient()
    model = Plain(expected)
    single = Optimizer(expected, model, overlap=False)
    for step in range(STEPS):
        for one in batches(step, 3):
            backward(model, torch.device("cpu"), one)
        single.step()
    same(ps, expected)
