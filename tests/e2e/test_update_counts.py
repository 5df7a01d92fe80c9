"""Adam updates tensors and rows as torch does, whenever they were made and whichever worker trains them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import elasticps as eps
from elasticps.exchange.export import export
from elasticps.exchange.load import load
from elasticps.torch import Optimizer
from tests.e2e.conftest import Connect

ADAM = eps.Adam(lr=0.01)
SHAPE, DIM = (40, 9), 5
KEYS = np.arange(20)
Floats = NDArray[np.float32]


def gradient(step: int, shape: tuple[int, ...]) -> Floats:
    return np.random.default_rng((step, *shape)).standard_normal(shape).astype(np.float32)


class Reference:
    """A tensor that torch's Adam trains."""

    def __init__(self, values: Floats) -> None:
        self.weight = nn.Parameter(torch.from_numpy(values.copy()))
        self.optimizer = torch.optim.Adam([self.weight], lr=0.01)

    def step(self, gradient: Floats) -> None:
        self.weight.grad = torch.from_numpy(gradient)
        self.optimizer.step()

    def agrees(self, values: Floats) -> None:
        np.testing.assert_allclose(values, self.weight.detach().numpy(), rtol=1e-4, atol=2e-6)


def let_the_clock_run(ps: eps.Client, steps: int = 100) -> None:
    for _ in range(steps):
        ps.push({})
    ps.flush()


def test_tensors_and_tables_made_or_loaded_late_train_as_in_torch(connect: Connect) -> None:
    ps = connect()
    let_the_clock_run(ps)
    tensor = ps.tensor("w", init=np.ones(SHAPE, np.float32), optimizer=ADAM)
    table = ps.table("t", dim=DIM, optimizer=ADAM)
    dense, rows = Reference(tensor.pull()), Reference(table.pull(KEYS))
    for step in range(10):
        ps.push({tensor: gradient(step, SHAPE), table: (KEYS, gradient(step, (20, DIM)))}).result()
        dense.step(gradient(step, SHAPE))
        rows.step(gradient(step, (20, DIM)))
        dense.agrees(tensor.pull())
        rows.agrees(table.pull(KEYS))
    tensor.load(np.full(SHAPE, 2.0, np.float32))
    table.load(KEYS, np.full((20, DIM), 2.0, np.float32))
    dense, rows = Reference(tensor.pull()), Reference(table.pull(KEYS))
    for step in range(10):
        ps.push({tensor: gradient(step, SHAPE), table: (KEYS, gradient(step, (20, DIM)))}).result()
        dense.step(gradient(step, SHAPE))
        rows.step(gradient(step, (20, DIM)))
    dense.agrees(tensor.pull())
    rows.agrees(table.pull(KEYS))


def test_every_push_of_any_worker_is_an_update(connect: Connect) -> None:
    """Without rounds each worker's push is a step of the optimizer; a joiner's clock says nothing of the tensor."""
    one = connect("w0")
    tensor = one.tensor("w", init=np.ones(SHAPE, np.float32), optimizer=ADAM)
    reference = Reference(tensor.pull())
    for step in range(6):
        one.push({tensor: gradient(step, SHAPE)}).result()
        reference.step(gradient(step, SHAPE))
    other = connect("w1")
    let_the_clock_run(other, 50)
    theirs = other.open("w")
    assert isinstance(theirs, eps.DenseTensor)
    for step in range(6, 12):
        (other if step % 2 else one).push({theirs if step % 2 else tensor: gradient(step, SHAPE)}).result()
        reference.step(gradient(step, SHAPE))
    reference.agrees(tensor.pull())


def test_a_round_of_two_workers_is_one_update(connect: Connect) -> None:
    clients: list[eps.Client] = [connect(f"w{i}", consistency=eps.BSP(), timeout=60.0) for i in range(2)]
    tensors: list[Any] = [ps.tensor("w", init=np.ones(SHAPE, np.float32), optimizer=ADAM) for ps in clients]
    tables = [ps.table("t", dim=DIM, optimizer=ADAM) for ps in clients]
    dense, rows = [Reference(of) for of in (tensors[0].pull(), tables[0].pull(KEYS))]
    tables[1].pull(KEYS)  # now both are in the rounds
    both = threading.Barrier(2)
    errors: list[BaseException] = []

    def train(worker: int) -> None:
        try:
            for step in range(8):
                both.wait(60)
                clients[worker].push(
                    {
                        tensors[worker]: gradient(2 * step + worker, SHAPE),
                        tables[worker]: (KEYS, gradient(2 * step + worker, (20, DIM))),
                    }
                ).result()
        except BaseException as error:
            errors.append(error)
            both.abort()

    threads = [threading.Thread(target=train, args=(worker,)) for worker in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    for step in range(8):
        dense.step((gradient(2 * step, SHAPE) + gradient(2 * step + 1, SHAPE)) / np.float32(2))
        rows.step((gradient(2 * step, (20, DIM)) + gradient(2 * step + 1, (20, DIM))) / np.float32(2))
    dense.agrees(tensors[0].pull())
    rows.agrees(tables[0].pull(KEYS))


class Branches(nn.Module):
    """A step takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.top = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor, way: bool) -> Any:
        return self.top(self.first(x) if way else self.second(x)).square().mean()


@pytest.mark.parametrize("accumulate", [1, 3])
def test_skipped_and_accumulated_steps_count_as_in_torch(connect: Connect, accumulate: int) -> None:
    ps = connect()
    torch.manual_seed(1)
    model, reference = Branches(), Branches()
    reference.load_state_dict(model.state_dict())
    ours = Optimizer(ps, model, optimizer=ADAM, overlap=accumulate == 1)
    theirs = torch.optim.Adam(reference.parameters(), lr=0.01)
    for step in range(12):
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
        for part in range(accumulate):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + part))
            for net in (model, reference):
                net(x, step % 4 == 3).backward()
        for optimizer in (ours, theirs):
            optimizer.step()
    ours.refresh()
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["safetensors", "npz"])
def test_training_continues_from_an_export_with_slots(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps = connect()
    table = ps.table("t", dim=DIM, optimizer=ADAM)
    reference = Reference(table.pull(KEYS))
    for step in range(5):
        ps.push({table: (KEYS, gradient(step, (20, DIM)))}).result()
        reference.step(gradient(step, (20, DIM)))
    export(ps, tmp_path / "out", kind=kind, with_slots=True)
    other = connect("w1", app=f"{ps.app}-other")
    load(other, tmp_path / "out", with_slots=True)
    there = other.open("t")
    assert isinstance(there, eps.SparseTable)
    assert (there.slots(KEYS)["step"] == 5).all()
    for step in range(5, 10):
        other.push({there: (KEYS, gradient(step, (20, DIM)))}).result()
        reference.step(gradient(step, (20, DIM)))
    reference.agrees(there.pull(KEYS))


@pytest.mark.parametrize("optimizer", [ADAM, eps.FTRL(lr=0.1, l1=100.0)], ids=lambda of: of.kind)
def test_a_cache_tells_trained_rows_from_new_ones(connect: Connect, optimizer: Any) -> None:
    """A gradient that leaves weights as they are still changes what the optimizer keeps of them."""
    ps, random = connect(), np.random.default_rng(2)
    table = ps.table("t", dim=DIM, optimizer=optimizer, cache=eps.Cache(rows=8, staleness=100))
    size = 0.0 if optimizer is ADAM else 1e-3
    for _ in range(4):
        for keys in (KEYS[:8], KEYS[8:16]):  # they do not all fit
            table.pull(keys)
            ps.push({table: (keys, size * random.normal(size=(8, DIM)).astype(np.float32))}).result()
    for step in range(6):
        keys, size = (KEYS[8:16] if step % 2 else KEYS[:8]), 200.0
        table.pull(keys)
        ps.push({table: (keys, size * random.normal(size=(8, DIM)).astype(np.float32))})
        assert table.pull(keys).tobytes() == table.pull(keys, exact=True).tobytes()
