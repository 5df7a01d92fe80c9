"""Several devices of one process, beside one model that runs their batches one after another."""

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
from torch import Tensor, nn

import elasticps as eps
from elasticps.torch import (
    DeviceGroup,
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    GroupClient,
    Optimizer,
    TableConfig,
    full_state_dict,
    load,
    prefetch,
    save,
)
from tests.torch.fake_ps import FakeClient
from tests.torch.group.ranks import clients, together

STEPS = 4
SIZE = 6
Batch = tuple[Tensor, Tensor]
ONE = nn.Linear(2, 2)
CUDA = torch.cuda.device_count()
DEVICES = [
    ["cpu"], ["cpu"] * 3,
    pytest.param(["cuda:0", "cuda:0"], marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
    pytest.param(["cuda:0", "cpu"], marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
    pytest.param(["cuda:0", "cuda:1"], marks=pytest.mark.skipif(CUDA < 2, reason="no two CUDA devices")),
]  # fmt: skip


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
    ids, wanted = given
    loss = nn.functional.mse_loss(model(ids.to(device)), wanted.to(device))
    loss.backward()
    return loss.detach().cpu()


def one_after_another(group: DeviceGroup[Any], given: list[Batch]) -> list[Tensor]:
    return [backward(*each) for each in zip(group.models, group.devices, given, strict=False)]


def at_once(group: DeviceGroup[Any], given: list[Batch]) -> list[Tensor]:
    return group.run(backward, given)


Step = Callable[[Optimizer, int], None]


def plainly(optimizer: Optimizer, step: int) -> None:
    optimizer.zero_grad()


def alone(devices: int, build: Callable[[Any], nn.Module] = Net, device: str = "cpu", **options: Any) -> FakeClient:
    """One model runs the batches one after another."""
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


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("computes", [at_once, one_after_another])
@pytest.mark.parametrize("options", [{}, {"pipeline": True}, {"overlap": False}])
def test_training_is_bit_for_bit_that_of_one_model(devices: list[str], computes: Any, options: dict[str, Any]) -> None:
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


def test_each_row_is_asked_for_once_in_a_step() -> None:
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


@pytest.mark.parametrize(("devices", "failing"), [(3, 0), (3, 2), (1, 0)])
def test_an_error_of_one_device_ends_the_step_and_the_next_one_is_clean(devices: int, failing: int) -> None:
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


def test_rows_that_did_not_come_are_asked_for_again() -> None:
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


def test_gradients_are_clipped_as_one_models() -> None:
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
def test_gradients_of_earlier_steps_add_up_or_are_zeros_as_one_models(before: Step) -> None:
    ps: Any = FakeClient()
    group = DeviceGroup(lambda: Net(ps), ["cpu"] * 3)
    optimizer = Optimizer(ps, group, eps.Adam(lr=0.05))
    for step in range(STEPS):
        before(optimizer, step)
        group.run(backward, batches(step, 3))
        optimizer.step()
    same(ps, alone(3, before=before))


def test_half_precision_adds_up_as_one_model_does() -> None:
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


def test_layers_of_one_table_and_a_shared_parameter_train_as_at_one_model() -> None:
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


def test_threads_have_what_the_caller_has() -> None:
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


def test_models_begin_as_the_first(ps: Any) -> None:
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


def test_rows_that_are_expected_come_with_the_step() -> None:
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


def test_rows_of_the_next_lists_of_batches_are_asked_for_ahead() -> None:
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
    asked = []
    for given in prefetch([batches(step, 3) for step in range(STEPS)], group):
        asked.append(len(ps.tables["words"].pulls))
        optimizer.zero_grad()
        group.run(backward, given)
        asked[-1] = len(ps.tables["words"].pulls) - asked[-1]
        optimizer.step()
    assert asked[2:] == [0] * (STEPS - 2), "a forward pass asks for nothing"
    expected: Any = FakeClient()
    model = Plain(expected)
    single = Optimizer(expected, model, overlap=False)
    for step in range(STEPS):
        for one in batches(step, 3):
            backward(model, torch.device("cpu"), one)
        single.step()
    same(ps, expected)


def test_ranks_with_several_devices_each_add_up_what_these_have() -> None:
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
def test_what_is_no_group_of_devices_is_refused(build: Any, devices: Any, match: str) -> None:
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


def test_what_the_page_on_groups_shows_runs() -> None:
    page = (Path(__file__).parents[2] / "docs/groups.md").read_text(encoding="utf-8")
    block = (
        re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)[1].replace("cuda:0", "cpu").replace("cuda:1", "cpu")
    )
    ps: Any = FakeClient()
    batch = torch.tensor([[1, 2], [2, 3]]), torch.tensor([0.0, 1.0])
    scope: dict[str, Any] = {"eps": eps, "torch": torch, "ps": ps, "loader": [[batch, batch]] * 3}
    exec(compile(block, "groups.md", "exec"), scope)
    assert ps.clock == 3
    assert len(scope["losses"]) == 2


def test_a_group_that_nobody_has_goes_and_its_threads_end(eventually: Callable[[Callable[[], bool]], None]) -> None:
    group = DeviceGroup(lambda: nn.Linear(2, 2), ["cpu", "cpu"])
    threads = group.run(lambda *_: threading.current_thread(), [1, 2])
    gone = weakref.ref(group)
    del group
    gc.collect()
    assert gone() is None
    eventually(lambda: not any(thread.is_alive() for thread in threads))
