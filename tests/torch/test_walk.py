"""Files and crossings on the way of a training step of torch, to the servers and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import elasticps as eps
from elasticps.torch import EmbeddingBagCollection, Jagged, Optimizer, TableConfig
from tests.walk import Walk, traced

TABLES = ["users", "items", "words"]
MOST_FILES, MOST_CROSSINGS = 9, 36  # of elasticps.torch
MOST_FILES_OF_ALL, MOST_CROSSINGS_OF_ALL = 33, 164


class Net(nn.Module):
    def __init__(self, ps: eps.Client) -> None:
        super().__init__()
        rows = eps.Adagrad(lr=0.1)
        self.rows = EmbeddingBagCollection(ps, [TableConfig(name, 16) for name in TABLES], optimizer=rows)
        self.layers = nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids: Jagged) -> torch.Tensor:
        out: torch.Tensor = self.layers(self.rows(ids).values())
        return out


def crossings_of_torch(walk: Walk) -> int:
    """Crossings to a file of elasticps.torch, or from one to the client."""
    running: list[str] = []
    count = 0
    for step in walk.steps:
        del running[step.depth :]
        caller = running[-1] if running else ""
        running.append(step.file)
        count += step.crosses and any(file.startswith("elasticps/torch/") for file in (caller, step.file))
    return count


def walk_of_a_step() -> Walk:
    """A training step of a collection of three tables and four dense tensors, against three servers with two replicas
    of each range; the shortest of many. What the client's thread does about its links meanwhile is left out: on a busy
    machine no step is without it."""
    with eps.LocalCluster(servers=3, replicas=2) as cluster, traced() as trace, eps.connect(cluster.url) as ps:
        model = Net(ps)
        optimizer = Optimizer(ps, model, eps.Adam(lr=1e-3))
        ids = torch.randint(0, 5000, (64, len(TABLES)), generator=torch.Generator().manual_seed(1))
        batch: Any = Jagged.columns(TABLES, ids)

        def step() -> None:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

        trace.fewest(step, runs=1)
        walks = [trace.once(step).without("Dispatcher._turn") for _ in range(40)]
    return min(walks, key=lambda walk: walk.calls)


def test_a_step_of_a_collection_stays_within_few_files() -> None:
    walk = walk_of_a_step()
    files = {step.file for step in walk.steps if step.file.startswith("elasticps/torch/")}
    figures = f"{walk.calls} calls, {walk.files} files, {walk.crossings} crossings, {crossings_of_torch(walk)} of torch"
    assert len(files) <= MOST_FILES, sorted(files)
    assert crossings_of_torch(walk) <= MOST_CROSSINGS, figures
    assert walk.files <= MOST_FILES_OF_ALL, figures
    assert walk.crossings <= MOST_CROSSINGS_OF_ALL, figures
