"""A group of devices: its models, threads, refusals and end."""

from __future__ import annotations

import copy
import gc
import re
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elasticps as eps
from elasticps.torch import DeviceGroup, Embedding, Optimizer
from tests.torch.devices import STEPS, Batch, Net, alone, backward, batches, same
from tests.torch.fake_ps import FakeClient

ONE = nn.Linear(2, 2)
CUDA = torch.cuda.device_count()


def test_threads_inherit_the_modes_of_the_caller() -> None:
    group = DeviceGroup(lambda: nn.Linear(2, 2), ["cpu"] * 2)

    def look(model: nn.Module, device: torch.device, number: int) -> tuple[int, bool, bool, torch.dtype]:
        out = model(torch.ones(1, 2))
        return threading.get_ident(), torch.is_grad_enabled(), out.requires_grad, out.dtype

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        first = group.run(look, [0, 1])
    second = group.run(look, [0, 1])
    assert [each[1:] for each in first] == [(False, False, torch.bfloat16)] * 2
    assert [each[1:] for each in second] == [(True, True, torch.float32)] * 2
    assert [each[0] for each in first] == [each[0] for each in second]
    assert len({each[0] for each in first}) == 2
    assert group.run(look, []) == []


def test_models_start_as_copies_of_the_first(ps: Any) -> None:
    class Random(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.rand(3))
            self.top = nn.Linear(3, 1)

    group = DeviceGroup(Random, ["cpu"] * 2)
    Optimizer(ps, group, eps.SGD(lr=0.1))
    first, second = (model.state_dict() for model in group.models)
    for name, value in first.items():
        np.testing.assert_array_equal(value.numpy(), second[name].numpy())


@pytest.mark.parametrize(("devices", "failing"), [(3, 0), (3, 2), (1, 0)])
def test_an_error_of_one_device_ends_only_its_step(devices: int, failing: int) -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * devices)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05), pipeline=True)

    def fails(model: Net, device: torch.device, given: Batch) -> None:
        backward(model, device, given)
        if model is group.models[failing]:
            raise ArithmeticError("no number")

    for step in range(STEPS):
        if step == 2:
            with pytest.raises(ArithmeticError, match="no number") as raised:
                group.run(fails, batches(step, devices))
            assert raised.value.__notes__ == [f"It was raised for models[{failing}] of a DeviceGroup, on cpu."]
            assert all(parameter.grad is None for model in group.models for parameter in model.parameters())
            with pytest.raises(eps.InputError, match="int64"):
                group.run(backward, [(torch.rand(4, 3), torch.rand(4, 1))])
            assert ps.clock == step
        group.run(backward, iter(batches(step, devices)))  # without zero_grad(), nothing is left of it
        optimizer.step()
        optimizer.zero_grad()
    same(ps, alone(devices))


@pytest.mark.parametrize(
    ("build", "devices", "match"),
    [
        (lambda: nn.Linear(2, 2), [], "1 to 64 devices"),
        (lambda: nn.Linear(2, 2), ["cpu"] * 65, "1 to 64 devices"),
        (lambda: nn.Linear(2, 2), "cpu", "a list"),
        (lambda: nn.Linear(2, 2), ["meta"], "no memory"),
        (lambda: nn.Linear(2, 2), ["cpu", "nothing:3"], "no devices of torch"),
        (lambda: nn.Linear(2, 2), ["cpu", None], "no devices of torch"),
        (lambda: nn.Linear(2, 2), [f"cuda:{CUDA}"], "there is no device"),
        (lambda: "model", ["cpu"], "not a str"),
        (lambda: ONE, ["cpu", "cpu"], "share 'weight'"),
        (lambda: nn.Sequential(nn.Linear(2, 2), ONE), ["cpu", "cpu"], r"share '1\.weight'"),
        (lambda: nn.LazyLinear(2), ["cpu", "cpu"], "no shape yet"),
    ],
)
def test_impossible_device_groups_are_refused(build: Any, devices: Any, match: str) -> None:
    with pytest.raises((eps.ConfigError, eps.InputError), match=match):
        DeviceGroup(build, devices)


def test_models_that_differ_are_refused(ps: Any) -> None:
    sizes, names = iter([2, 3]), iter(["a", "b"])
    with pytest.raises(eps.ConfigError, match=r"'weight', torch.float32 \[2, 2\], number 1 has .* \[3, 2\]"):
        DeviceGroup(lambda: nn.Linear(2, next(sizes)), ["cpu", "cpu"])
    with pytest.raises(eps.ConfigError, match=r"table 'a', number 1 has a layer over table 'b'"):
        DeviceGroup(lambda: Embedding(ps, next(names), 2, optimizer=eps.SGD(lr=0.1)), ["cpu", "cpu"])
    biases = iter([True, False])
    with pytest.raises(eps.ConfigError, match="number 1 has nothing more"):
        DeviceGroup(lambda: nn.Linear(2, 2, bias=next(biases)), ["cpu", "cpu"])


def test_too_many_batches_and_copies_are_refused() -> None:
    group = DeviceGroup(lambda: nn.Linear(2, 2), ["cpu", "cpu"])
    with pytest.raises(eps.InputError, match="3 batches for 2 devices"):
        group.run(lambda *_: None, [1, 2, 3])
    with pytest.raises(eps.ConfigError, match="cannot call it again"):
        group.run(lambda *_: group.run(lambda *_: None, [1]), [1])
    with pytest.raises(eps.ConfigError, match="cannot be copied"):
        copy.deepcopy(group)
    assert repr(group) == "<DeviceGroup of Linear on cpu, cpu>"
    assert len(group) == 2


def test_the_sample_on_the_page_about_groups_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/guides/groups.md").read_text(encoding="utf-8")
    block = (
        re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[1].replace("cuda:0", "cpu").replace("cuda:1", "cpu")
    )
    ps: Any = FakeClient()
    batch = torch.tensor([[1, 2], [2, 3]]), torch.tensor([0.0, 1.0])
    scope: dict[str, Any] = {"eps": eps, "torch": torch, "ps": ps, "loader": [[batch, batch]] * 3}
    exec(compile(block, "groups.md", "exec"), scope)
    assert ps.clock == 3
    assert len(scope["losses"]) == 2


def test_an_unreferenced_group_ends_its_threads(eventually: Callable[[Callable[[], bool]], None]) -> None:
    group = DeviceGroup(lambda: nn.Linear(2, 2), ["cpu", "cpu"])
    threads = group.run(lambda *_: threading.current_thread(), [1, 2])
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    eventually(lambda: not any(thread.is_alive() for thread in threads))
