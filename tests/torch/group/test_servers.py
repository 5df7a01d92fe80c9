"""Ranks in threads on real servers, one of which dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import elasticps as eps
from elasticps.torch import EmbeddingBag, GroupClient, Optimizer, full_state_dict, load, save
from tests.conftest import NewCluster
from tests.torch.group.ranks import clients, together

STEPS, RANKS = 10, 3


def model_of(ps: Any) -> nn.Sequential:
    bags = EmbeddingBag(ps, "words", 8, optimizer=eps.Adagrad(lr=0.1), init=eps.Normal(std=0.1, seed=1))
    model = nn.Sequential(bags, nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 1))
    with torch.no_grad():
        for parameter in model.parameters():  # threads share torch's generator
            parameter.copy_(torch.linspace(-0.5, 0.7, parameter.numel()).view_as(parameter))
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids, labels = torch.randint(0, 60, (8, 3), generator=generator), torch.randn(8, 1, generator=generator)
    return nn.functional.mse_loss(model(ids), labels)


def alone(url: str) -> dict[str, torch.Tensor]:
    """Trains one worker that adds up the gradients of all ranks."""
    with eps.connect(url, worker="w", app="alone", consistency=eps.BSP()) as ps:
        model = model_of(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), overlap=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            with optimizer.accumulate():
                for rank in range(RANKS):
                    loss_of(model, step, rank).backward()
            optimizer.step()
        return full_state_dict(model)


def test_rounds_of_a_group_equal_those_of_one_worker_while_a_server_dies(
    local_cluster: NewCluster, tmp_path: Path
) -> None:
    cluster = local_cluster(servers=3, replicas=2)

    def train(ps: GroupClient) -> dict[str, torch.Tensor] | None:
        model = model_of(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=0.05), pipeline=True)
        assert ps.resume().steps == 0
        for step in range(STEPS):
            if step == STEPS // 2 and ps.rank == 0:
                cluster.kill("s1")
            optimizer.zero_grad()
            loss_of(model, step, ps.rank).backward()
            optimizer.step()
            assert optimizer.last_step is not None
            if step % 4 == 3:
                optimizer.last_step.result()
                assert optimizer.last_step.done()
        ps.flush()
        assert optimizer.last_step is not None
        assert ps.clock == ps.committed == optimizer.last_step.clock
        state = None
        if ps.client is not None:
            with ps.alone():
                state = full_state_dict(model)
                save(model, tmp_path / "model.pt")
                load(model, tmp_path / "model.pt")
        optimizer.refresh()
        loss_of(model, STEPS, ps.rank).backward()
        optimizer.step()
        ps.flush()
        return state

    with (
        eps.connect(cluster.url, worker="group", app="group", consistency=eps.BSP()) as client,
        clients(client, RANKS) as group,
    ):
        found = together(train, group)[0]
    expected = alone(cluster.url)
    assert found is not None
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name].numpy(), values.numpy(), err_msg=name)


def test_a_group_sums_scores_and_sets_policies_of_a_growing_table(local_cluster: NewCluster) -> None:
    """Ranks that do not say what rows keep learn it from rank 0."""
    cluster = local_cluster(servers=2)
    with eps.connect(cluster.url, worker="maker", app="scored") as ps:
        ps.table("t", dim=2, optimizer=eps.Accumulate(), usage="score")

    def train(ps: GroupClient) -> None:
        table = ps.table("t", dim=2, optimizer=eps.Accumulate())
        for _ in range(3):  # the first step makes memory for the others
            keys = np.array([ps.rank, 7])
            scores = np.array([1.0, 0.5], np.float32)
            ps.push({table: (keys, np.ones((2, 2), np.float32), scores)})
        ps.push({table: (np.array([7]), np.ones((1, 2), np.float32))})
        ps.flush()
        table.set_admission(eps.MinCount(2))
        table.set_eviction([eps.Capacity(100, keep="score")])
        assert table.pull([0, 7]).tolist() == [[3, 3], [12, 12]]
        if ps.client is not None:
            with ps.alone():
                usage = table.usage([0, 1, 2, 7, 9])
                assert usage.score[:4].tolist() == [3, 3, 3, 4.5]
                assert usage.count[:4].tolist() == [3, 3, 3, 4]
                assert np.isnan(usage.count[4])
                assert table.state().rows == 4
                assert table.evict(dry_run=True)["idle"] == 0

    with (
        eps.connect(cluster.url, worker="group", app="scored") as client,
        clients(client, RANKS) as group,
    ):
        together(train, group)
    with eps.connect(cluster.url, worker="reader", app="scored") as ps:
        assert ps.open("t").spec.admission == eps.MinCount(2)
