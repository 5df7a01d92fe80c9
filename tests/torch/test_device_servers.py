"""Several devices of one process on real servers, one of which dies, beside one model."""

from __future__ import annotations

import runpy
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import elasticps as eps
from elasticps.admin.audit import audit
from elasticps.torch import DeviceGroup, EmbeddingBag, EmbeddingBagCollection, Optimizer, TableConfig, full_state_dict
from tests.conftest import NewCluster

STEPS, CLOSED_AT, KILLED_AT, DEVICES = 10, 4, 7, 3
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self, ps: Any) -> None:
        super().__init__()
        init, keys = eps.Normal(std=0.1, seed=1), [eps.KeysOnce(), eps.KeyDeltas()]
        self.bags = EmbeddingBag(
            ps, "words", 8, "sum", optimizer=eps.Adagrad(lr=0.1), init=init, push=[eps.Int8(), *keys], pull=keys
        )
        tables = [TableConfig("users", 4, init=init), TableConfig("items", 4, init=init, push=[eps.TopK(0.5)])]
        self.several = EmbeddingBagCollection(ps, tables, optimizer=eps.Adagrad(lr=0.1), pull=[eps.BFloat16()])
        self.middle, self.top = nn.Linear(16, 20), nn.Linear(20, 1)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))

    def forward(self, ids: Tensor) -> Tensor:
        several = self.several({"users": ids[:, 0], "items": ids[:, 1]}).values()
        out: Tensor = self.top(torch.tanh(self.middle(torch.cat([self.bags(ids), several], dim=1))))
        return out


def of(name: str, _: nn.Parameter) -> eps.SGD | eps.Adam:
    return eps.SGD(lr=0.05) if name.endswith("bias") else eps.Adam(lr=0.02)


def batches(step: int) -> list[Batch]:
    """Keys by a power law: devices share many. Device 1 has an empty batch in step 2, the last one none in 3."""
    made = []
    for device in range(DEVICES - (step == 3)):
        random = torch.Generator().manual_seed(100 * step + device)
        size = 0 if device == 1 and step == 2 else 8 + device
        ids = (60 * torch.rand(size, 3, generator=random) ** 3).long()
        made.append((ids, torch.randn(size, 1, generator=random)))
    return made


def backward(model: nn.Module, _: Any, given: Batch) -> None:
    ids, labels = given
    ((model(ids) - labels) ** 2).sum().backward()


def train(cluster: eps.LocalCluster, app: str, consistency: Any, devices: int, kill: str = "") -> dict[str, Tensor]:
    """Closes in the middle, and goes on under the same name."""
    for stop in (CLOSED_AT, STEPS):
        with eps.connect(cluster.url, worker="w", app=app, consistency=consistency, timeout=100) as ps:
            group = DeviceGroup(lambda ps=ps: Net(ps), ["cpu"] * devices)  # type: ignore[misc]
            optimizer = Optimizer(ps, group, of, overlap=False, pipeline=True, push=[eps.Int8()], pull=[eps.BFloat16()])
            begun = ps.resume().steps
            assert begun == (0 if stop == CLOSED_AT else CLOSED_AT)
            for step in range(begun, stop):
                optimizer.zero_grad()
                if devices > 1:
                    group.run(backward, batches(step))
                else:
                    for given in batches(step):
                        backward(group.models[0], None, given)
                if kill and step == KILLED_AT:
                    cluster.kill(kill)
                optimizer.step()
            ps.flush()
            optimizer.refresh()
            states = [full_state_dict(model) for model in group.models]
    for state in states[1:]:
        for name, value in states[0].items():
            np.testing.assert_array_equal(state[name].numpy(), value.numpy(), err_msg=name)
    return states[0]


def test_steps_equal_those_of_one_model_while_a_server_dies(local_cluster: NewCluster) -> None:
    cluster = local_cluster(servers=3, replicas=2, ranges=32)
    for consistency, kill in ((eps.ASP(), ""), (eps.BSP(), "s1")):
        expected = train(cluster, f"one-{kill}", consistency, 1)
        found = train(cluster, f"group-{kill}", consistency, DEVICES, kill)
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(found[name].numpy(), values.numpy(), err_msg=name)
    report = audit(cluster.url, 30.0)
    assert report.clean, report


@pytest.mark.slow
def test_the_example_learns(
    local_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    threads = torch.get_num_threads()
    url = local_cluster(servers=1).url
    monkeypatch.setattr(sys, "argv", ["device_group.py", "--devices", "cpu", "cpu", "--steps", "100", "--url", url])
    try:
        runpy.run_path("examples/device_group.py", run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    lines = [line.split(": losses ") for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["step 50", "step 100"]
    first, last = ([float(loss) for loss in losses.split(", ")] for _, losses in lines)
    assert len(first) == len(last) == 2
    assert max(last) < min(first)
