"""Copies on side streams, with a simulated lazy device and on a GPU if there is one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import elasticps as eps
from elasticps.errors import ConfigError
from elasticps.torch import DeviceGroup, Embedding, EmbeddingBag, EmbeddingBagCollection, Optimizer, TableConfig, host
from elasticps.torch.host import Fetch, SideStreams, fetched, room, sent
from tests.torch.fake_ps import FakeClient
from tests.torch.group.ranks import clients, together
from tests.torch.lazy_device import LazyDevice, LazyEvent

CPU = torch.device("cpu")


@contextmanager
def lazy(seed: int, *, late: bool = False) -> Iterator[LazyDevice]:
    """The CPU has side streams, which run when they like; each thread has its own. late: a test gives it what it
    computes, which is late too."""
    known: dict[int, tuple[LazyDevice, SideStreams]] = {}

    def here() -> tuple[LazyDevice, SideStreams]:
        thread = threading.get_ident()
        if thread not in known:
            device = LazyDevice(seed)
            device.compute.is_torchs = not late
            known[thread] = device, SideStreams(CPU, device)
        return known[thread]

    def instead(name: str) -> Callable[..., Any]:
        return lambda tensor, *args, **options: getattr(here()[0], name)(tensor, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "side_streams_of", lambda _: here()[1])
        for name in ("copy_", "to", "record_stream"):
            patch.setattr(Tensor, name, instead(name))
        yield here()[0]


def write(device: LazyDevice, into: Tensor, value: float) -> None:
    place = device.seen(into)
    device.compute.todo.append(partial(place.fill, value))


@given(st.integers(0, 1 << 32))
def test_copies_have_the_values_of_the_compute_stream(seed: int) -> None:
    """Values pass both ways, in any order of all that may go at once; memory is used again as soon as it may be."""
    with lazy(seed, late=True) as device:
        coming: list[tuple[int, Fetch]] = []
        came: list[tuple[int, Any]] = []
        arrived = np.zeros(60, np.float32)
        for number in range(1, len(arrived)):
            what = device.random.randrange(4)
            if what == 0:
                dtype = device.random.choice([torch.float32, torch.float16])
                gradient = device.empty(device.compute, (3,), dtype)
                write(device, gradient, number)
                coming.append((number, Fetch(gradient)))
                del gradient
            elif what == 1:
                here = room(3, device=CPU).fill_(number)
                there = sent(here, CPU)
                seen = device.seen(there)
                device.compute.todo.append(
                    partial(lambda at, seen: np.copyto(arrived[at : at + 1], seen[2]), number, seen)
                )
                arrived[number] = -number
                del here, there
            elif what == 2 and coming:
                value, fetch = coming.pop(device.random.randrange(len(coming)))
                if device.random.randrange(2):
                    while not fetch.done():
                        device.run(1)
                came.append((value, fetch.result()))
                assert came[-1][1].tolist() == [value] * 3
            device.run(device.random.randrange(4))
        came += [(value, fetch.result()) for value, fetch in coming]
        device.finish()
        assert all(array.tolist() == [value] * 3 for value, array in came)
        assert np.array_equal(arrived, np.where(arrived != 0, np.arange(len(arrived)), 0))


def test_cpu_stubs_have_all_methods_that_a_copy_needs() -> None:
    there, here = torch.arange(6.0).half().view(2, 3), torch.zeros(2, 3)
    done = SideStreams(CPU, torch.cpu).fetch(there, here)
    done.synchronize()
    assert done.query()
    assert torch.equal(here, there.float())


class Net(nn.Module):
    """Rows of two layers over one table, a collection, and dense weights."""

    def __init__(self, ps: Any) -> None:
        super().__init__()
        sgd, init = eps.SGD(lr=0.01), eps.Normal(std=0.3, seed=1)
        self.bags = EmbeddingBag(ps, "words", 4, "sum", optimizer=sgd, init=init, padding_idx=0)
        self.rows = Embedding(ps, "words", 4, optimizer=sgd, init=init, padding_idx=0)
        tables = [TableConfig("users", 4, ["user"]), TableConfig("items", 2, mode="mean")]
        self.several = EmbeddingBagCollection(ps, tables, optimizer=sgd)
        self.layers = nn.Sequential(nn.Linear(14, 5), nn.Tanh(), nn.Linear(5, 1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        several = self.several({"user": ids[:, 0], "items": ids[:, 1:]}).values()
        out: Tensor = self.layers(torch.cat([self.bags(ids), self.rows(ids[:, 1]), several], dim=1))
        return out


def train(ps: Any, model: Any, optimizer: Optimizer, first: int = 0, steps: int = 3) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, step)
        optimizer.step()


def backward(model: Any, step: int) -> None:
    models = model.models if isinstance(model, DeviceGroup) else [model]
    for number, each in enumerate(models):
        ids = torch.randint(0, 9, (6, 3), generator=torch.Generator().manual_seed(10 * step + number))
        each(ids).square().sum().backward()


def weights(ps: FakeClient) -> dict[str, dict[int, list[float]]]:
    return {
        name: {key: row.ravel().tolist() for key, row in target.weights.items()} for name, target in ps.targets.items()
    }


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("options", [{"bucket_bytes": 1}, {"pipeline": True}, {"overlap": False}])
def test_training_with_side_streams_is_the_same_bit_for_bit(seed: int, devices: int, options: Any) -> None:
    def trained() -> Any:
        ps: Any = FakeClient()
        model = Net(ps) if devices == 1 else DeviceGroup(lambda: Net(ps), ["cpu"] * devices)
        train(ps, model, Optimizer(ps, model, eps.Adam(lr=0.1), **options))
        return ps

    expected = trained()
    with lazy(seed) as device:
        assert weights(trained()) == weights(expected)
        assert device.copies > 30


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_of_a_group_add_up_gradients_from_their_devices(overlap: bool) -> None:
    def rank(ps: Any) -> None:
        model = Net(ps)
        train(ps, model, Optimizer(ps, model, eps.Adam(lr=0.1), overlap=overlap), first=10 * ps.rank)

    def trained() -> Any:
        ps = FakeClient()
        with clients(ps, 2) as ranks:
            together(rank, ranks)
        return ps

    expected = trained()
    with lazy(1):
        assert weights(trained()) == weights(expected)


@pytest.mark.parametrize("soon", [True, False])
def test_a_gradient_is_sent_once_copied_and_awaited_only_by_step(
    ps: Any, soon: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net(ps)
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.01), bucket_bytes=1)
    with lazy(0) as device:

        def query(event: LazyEvent) -> bool:
            if soon:
                device.finish()
            return event.reached

        monkeypatch.setattr(LazyEvent, "query", query)
        backward(model, 0)
        assert len(ps.parts) == (7 if soon else 0)
        compared: list[int] = []  # parts that had left when somebody waited for all of a GPU

        def first_edited(dense: object) -> str:
            compared.append(len(ps.parts))
            return ""

        monkeypatch.setattr("elasticps.torch.weights.first_edited", first_edited)
        optimizer.step()
        assert compared == [7]
        assert sum(map(len, ps.parts)) == 7
        order = [name for part in ps.parts for name in part]
        assert order[:2] in (
            ["model.layers.2.bias", "model.layers.2.weight"],
            ["model.layers.2.weight", "model.layers.2.bias"],
        )


def test_a_step_that_is_dropped_takes_its_copies_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had not come is not trained, and nobody is told that it was; the next step is as if it had never been."""
    ps, clean = FakeClient(), FakeClient()
    model, optimizers = Net(ps), dict[Any, Optimizer]()
    with lazy(3) as device:
        monkeypatch.setattr(LazyEvent, "query", lambda event: False)
        for server, net in ((ps, model), (clean, Net(clean))):
            client: Any = server
            optimizers[server] = Optimizer(client, net, eps.SGD(lr=0.01), bucket_bytes=1)
            if server is ps:
                backward(net, 7)
                optimizers[ps].zero_grad()
                backward(net, 8)
                assert next(model.layers.parameters()).grad.mul_(2) is not None  # type: ignore[union-attr]
                with pytest.raises(ConfigError, match="changed between backward"):
                    optimizers[ps].step()
                assert ps.parts == []
            train(client, net, optimizers[server])
        device.finish()
    assert weights(ps) == weights(clean)


def test_a_second_gradient_is_refused_while_the_first_is_being_copied(ps: Any) -> None:
    model = Net(ps)
    optimizer = Optimizer(ps, model, eps.SGD(lr=0.5))
    with lazy(5):
        backward(model, 0)
        assert optimizer.last_step is None
        with pytest.raises(ConfigError, match="second gradient"):
            backward(model, 1)


# -- on a GPU, beside integers, which floats add up exactly in any order


def busy(device: str, cycles: int = 20_000_000) -> None:
    """The compute stream has something to do, for some milliseconds."""
    if device == "cuda":
        torch.cuda._sleep(cycles)


def wait(given: Tensor) -> Tensor:
    """The same; the compute stream is busy before it is there, and before its gradient is."""
    busy(given.device.type)
    out = given.clone()
    out.register_hook(lambda gradient: busy(gradient.device.type))
    return out


@pytest.mark.parametrize("options", [{"bucket_bytes": 1}, {"pipeline": True}, {"overlap": False}])
def test_rows_and_weights_are_exact_though_the_device_is_late(ps: Any, device: str, options: Any) -> None:
    """Each step's gradients come of the step before's rows. Beside int64 by NumPy."""
    generator = np.random.default_rng(1)
    rows_there, weights_there = np.zeros((9, 64), np.int64), generator.integers(-1, 2, (32, 64))
    layer = Embedding(ps, "rows", 64, optimizer=eps.SGD(lr=1.0), init=eps.Zeros())
    linear = nn.Linear(64, 32, bias=False).to(device)
    linear.load_state_dict({"weight": torch.from_numpy(weights_there).float()})
    optimizer = Optimizer(ps, nn.ModuleList([layer, linear]), eps.SGD(lr=1.0), **options)
    for step in range(20):
        if step % 2 == 0:  # what the first of two steps gives the rows, the second takes: numbers stay small
            ids, target = generator.permutation(9)[:6], generator.integers(-1, 2, (6, 32))
            pushed = generator.integers(-9, 10, (6, 64))
        optimizer.zero_grad()
        rows = layer(torch.from_numpy(ids).to(device))
        late = wait(rows)
        assert np.array_equal(late.detach().cpu().numpy(), rows_there[ids])
        out = nn.functional.linear(late.detach(), wait(linear.weight))
        sign = 1 - 2 * (step % 2)
        loss = (out * torch.from_numpy(sign * target).to(device)).sum()
        (loss + (late * torch.from_numpy(sign * pushed).to(device)).sum()).backward()
        optimizer.step()
        weights_there -= sign * target.T @ rows_there[ids]
        rows_there[ids] -= sign * pushed
    optimizer.refresh()
    assert np.abs(weights_there).max() > 100
    assert np.array_equal(ps.targets["model.1.weight"].weights[0], weights_there)
    assert np.array_equal(linear.weight.detach().cpu().numpy(), weights_there)


@pytest.mark.parametrize("overlap", [True, False])
def test_many_large_gradients_reuse_pinned_memory(ps: Any, device: str, overlap: bool) -> None:
    size = 1 << (18 if device == "cuda" else 10)
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(size, device=device)) for _ in range(8)])
    optimizer = Optimizer(ps, parameters, eps.SGD(lr=1.0), overlap=overlap, bucket_bytes=1)
    total = np.zeros((8, size), np.float32)
    for step in range(12):
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        factors = torch.arange(8 * size, dtype=torch.float32).view(8, -1).remainder(7 + step)
        total -= factors.numpy()
        given = factors.to(device)
        torch.stack([(wait(p) * f).sum() for p, f in zip(parameters, given, strict=True)]).sum().backward()
        del given
        optimizer.step()
    for number, parameter in enumerate(parameters):
        assert np.array_equal(ps.targets[f"model.{number}"].weights[0], total[number])
        assert np.array_equal(parameter.detach().cpu().numpy(), total[number])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_neither_waited_for_nor_overtaken() -> None:
    gpu = torch.device("cuda:0")
    values = torch.zeros(1 << 20, device=gpu)
    torch.cuda.synchronize()
    busy("cuda", 500_000_000)
    values += 3
    fetch = Fetch(values)
    assert not fetch.done()  # the compute stream sleeps still
    values = torch.full_like(values, 4)
    assert (fetch.result() == 3).all()
    for dtype in (torch.float16, torch.bfloat16):
        busy("cuda", 500_000_000)
        half = Fetch(values.to(dtype))
        assert not half.done()
        assert (half.result() == 4).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_freed_rows_stay_intact_until_a_gpu_has_read_them() -> None:
    gpu, sums = torch.device("cuda:0"), list[Tensor]()
    for number in range(50):
        here = room(1 << 16, device=gpu).fill_(number)
        there = sent(here, gpu)
        busy("cuda")
        sums.append(there.clone())
        del here, there
    assert all(bool((each == number).all()) for number, each in enumerate(sums))
    assert [float(each[0]) for each in fetched(sums)] == list(range(50))
