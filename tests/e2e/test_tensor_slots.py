"""Optimizer state of dense tensors is exported, loaded, and continues training as in torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

import elasticps as eps
from elasticps.checkpoint.create import checkpoint_cluster
from elasticps.exchange.checkpoint import export_checkpoint
from elasticps.exchange.export import export
from elasticps.exchange.load import load
from elasticps.local import LocalCluster
from tests.e2e.conftest import Connect

LARGE = (5, 7001)  # three blocks, the last with padding
ADAM = eps.Adam(lr=0.05)


def gradient(step: int, shape: tuple[int, ...]) -> Any:
    return np.random.default_rng((step, *shape)).standard_normal(shape).astype(np.float32)


class Pair:
    """Tensors of two shapes, and what torch makes of the same."""

    def __init__(self) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {"large": LARGE, "one": ()}
        self.theirs = {name: nn.Parameter(torch.ones(shape)) for name, shape in self.shapes.items()}
        self.optimizer = torch.optim.Adam(self.theirs.values(), lr=0.05)

    def open(self, ps: eps.Client) -> dict[str, eps.DenseTensor]:
        return {
            name: ps.tensor(name, init=np.ones(shape, np.float32), optimizer=ADAM)
            for name, shape in self.shapes.items()
        }

    def train(self, ps: eps.Client, first: int, last: int) -> None:
        tensors = self.open(ps)
        for step in range(first, last):
            ps.push({tensors[name]: gradient(step, shape) for name, shape in self.shapes.items()}).result()
            for name, shape in self.shapes.items():
                self.theirs[name].grad = torch.tensor(gradient(step, shape))
            self.optimizer.step()
        for name, tensor in tensors.items():
            np.testing.assert_allclose(tensor.pull(), self.theirs[name].detach().numpy(), rtol=1e-4, atol=2e-6)

    def agrees(self, ps: eps.Client) -> None:
        for name, tensor in self.open(ps).items():
            slots, state = tensor.slots(), self.optimizer.state[self.theirs[name]]
            assert slots["step"].tolist() == [float(state["step"])]
            for slot in ("exp_avg", "exp_avg_sq"):
                np.testing.assert_allclose(slots[slot], state[slot].numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["safetensors", "npz", "npy", "parquet"])
def test_an_exported_tensor_continues_training_as_in_torch(connect: Connect, tmp_path: Path, kind: str) -> None:
    ps, pair = connect(), Pair()
    pair.train(ps, 0, 10)
    export(ps, tmp_path / "out", kind=kind, with_slots=True)
    other = connect("w1", app=f"{ps.app}-other")
    assert load(other, tmp_path / "out", with_slots=True) == {"large": 5, "one": 1}
    pair.agrees(other)
    pair.train(other, 10, 20)


def test_a_tensor_goes_to_another_number_of_servers_with_its_slots(
    cluster: LocalCluster, connect: Connect, tmp_path: Path
) -> None:
    """From a living cluster, and from a checkpoint of it."""
    ps, pair = connect(), Pair()
    pair.train(ps, 0, 10)
    export(ps, tmp_path / "live", with_slots=True)
    retained_at = (tmp_path / "kept").as_uri()
    checkpoint_cluster(cluster.url, retained_at)
    export_checkpoint(retained_at, tmp_path / "kept-out", app=ps.app, with_slots=True)
    files = {path.name for path in (tmp_path / "live").iterdir()}
    assert files == {path.name for path in (tmp_path / "kept-out").iterdir()}
    for name in sorted(files - {"elasticps.json"}):
        live, retained = load_file(tmp_path / "live" / name), load_file(tmp_path / "kept-out" / name)
        assert live.keys() == retained.keys()
        assert all(live[tensor].tobytes() == retained[tensor].tobytes() for tensor in live)
    with LocalCluster("elsewhere", servers=1, ranges=8) as smaller, eps.connect(smaller.url, worker="w") as other:
        load(other, tmp_path / "kept-out", with_slots=True)
        pair.agrees(other)
        pair.train(other, 10, 20)


@pytest.mark.parametrize(
    "optimizer",
    [eps.SGD(lr=0.1), eps.SGD(lr=0.1, momentum=0.9), eps.Adagrad(lr=0.1, initial_accumulator=0.5), eps.FTRL(lr=0.1)],
    ids=["sgd", "momentum", "adagrad", "ftrl"],
)
def test_slots_of_other_optimizers_come_back(connect: Connect, tmp_path: Path, optimizer: Any) -> None:
    ps = connect()
    tensor = ps.tensor("w", init=np.ones(LARGE, np.float32), optimizer=optimizer)
    ps.push({tensor: gradient(1, LARGE)}).result()
    export(ps, tmp_path / "out", with_slots=True)
    other = connect("w1", app=f"{ps.app}-other")
    load(other, tmp_path / "out", with_slots=True)
    there = other.open("w")
    assert isinstance(there, eps.DenseTensor)
    for client, handle in ((ps, tensor), (other, there)):
        client.push({handle: gradient(2, LARGE)}).result()
    assert there.pull().tobytes() == tensor.pull().tobytes()
    ours, theirs = tensor.slots(), there.slots()
    assert ours.keys() == theirs.keys()
    assert all(ours[slot].tobytes() == theirs[slot].tobytes() for slot in ours)


def test_each_block_of_a_tensor_keeps_its_own_slots(connect: Connect) -> None:
    tensor = connect().tensor("w", init=np.ones(LARGE, np.float32), optimizer=ADAM)
    slots = tensor.slots() | {"step": np.array([[3], [4], [3]], np.float32)}
    tensor.load(tensor.pull(), slots=slots)
    assert tensor.slots()["step"].tolist() == [[3], [4], [3]]
    tensor.load(tensor.pull())
    assert tensor.slots()["step"].tolist() == [0]


def test_slots_that_do_not_fit_are_refused(connect: Connect) -> None:
    tensor = connect().tensor("w", init=np.ones(LARGE, np.float32), optimizer=ADAM)
    slots, values = tensor.slots(), np.zeros(LARGE, np.float32)
    with pytest.raises(eps.InputError, match="has slots step, exp_avg, exp_avg_sq, not step"):
        tensor.load(values, slots={"step": slots["step"]})
    with pytest.raises(eps.InputError, match="slot step must have shape"):
        tensor.load(values, slots=slots | {"step": np.ones((2, 1), np.float32)})
    with pytest.raises(eps.InputError, match="slot exp_avg must have shape"):
        tensor.load(values, slots=slots | {"exp_avg": np.ones(3, np.float32)})
    assert (tensor.pull() == 1).all()


def test_an_export_without_slots_warns(connect: Connect, tmp_path: Path) -> None:
    ps = connect()
    adagrad = eps.Adagrad(lr=0.1)
    ps.tensor("w", init=np.ones(3, np.float32), optimizer=adagrad)
    ps.tensor("w.sum", init=np.ones(3, np.float32), optimizer=eps.SGD(lr=0.1))
    export(ps, tmp_path / "out")
    other = connect("w1", app=f"{ps.app}-other")
    with pytest.raises(eps.ConfigError, match="no slot 'sum' of tensor 'w'"):
        load(other, tmp_path / "out", with_slots=True)
    with pytest.raises(eps.ConfigError, match=r"would be 'w\.sum' in the files"):
        export(ps, tmp_path / "again", with_slots=True)
    assert not (tmp_path / "again").exists()
