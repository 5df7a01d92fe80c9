"""Shards as torch's datasets and samplers see them, on real servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import elasticps as eps
from elasticps.torch import ShardedDataset, ShardSampler

Connect = Callable[..., eps.Client]
SAMPLES = 23
DATA = TensorDataset(torch.arange(SAMPLES) * 10, torch.arange(SAMPLES).float())

_apps = itertools.count()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with eps.LocalCluster(servers=1, replicas=1) as cluster:
        yield cluster.url


@pytest.fixture
def ps(url: str) -> Iterator[eps.Client]:
    with eps.connect(url, worker="w0", app=f"data{next(_apps)}", timeout=60) as ps:
        yield ps


def batches(ps: eps.Client, loader: Any) -> list[Any]:
    """The batches that a training loop gets if it makes a step of each."""
    found = []
    for batch in loader:
        found.append(batch)
        ps.push({})
    return found


def test_a_dataset_gives_batches_of_items(ps: eps.Client) -> None:
    dataset = ShardedDataset(ps, SAMPLES, 4, epochs=2, shuffle_seed=3, dataset=DATA)
    found = batches(ps, DataLoader(dataset, batch_size=None))
    assert [len(keys) for keys, _ in found] == [4, 4, 4, 4, 4, 3] * 2
    for keys, values in found:
        assert torch.equal(keys, (values * 10).long())
    everything = torch.cat([values for _, values in found]).long().tolist()
    assert sorted(everything[:SAMPLES]) == sorted(everything[SAMPLES:]) == list(range(SAMPLES))
    assert everything[:SAMPLES] != everything[SAMPLES:]


def test_without_a_dataset_batches_are_indices(ps: eps.Client) -> None:
    found = batches(ps, ShardedDataset(ps, SAMPLES, 10))
    assert [each.tolist() for each in found] == [list(range(a, min(a + 10, SAMPLES))) for a in (0, 10, 20)]
    assert found[0].dtype == torch.int64


def test_a_sampler_lets_the_loader_fetch(ps: eps.Client) -> None:
    found = batches(ps, DataLoader(DATA, batch_sampler=ShardSampler(ps, SAMPLES, 5)))
    assert torch.cat([values for _, values in found]).tolist() == list(range(SAMPLES))
    assert batches(ps, ShardSampler(ps, SAMPLES, 5)) == []  # all is done


def test_a_loop_that_breaks_gives_back_its_shards(ps: eps.Client) -> None:
    for at, _ in enumerate(ShardSampler(ps, SAMPLES, 5)):
        if at == 2:
            break
        ps.push({})
    assert [batch[0] for batch in batches(ps, ShardSampler(ps, SAMPLES, 5))] == [10, 15, 20]


def test_processes_of_a_loader_are_refused(ps: eps.Client) -> None:
    for context in ("fork", "spawn"):
        loader = DataLoader(ShardedDataset(ps, SAMPLES, 4), None, num_workers=1, multiprocessing_context=context)
        with pytest.raises(eps.ConfigError, match="num_workers=0"):
            next(iter(loader))


def test_a_shard_taken_before_the_last_was_trained_is_refused(ps: eps.Client) -> None:
    shards = iter(ShardSampler(ps, SAMPLES, 4))
    next(shards)
    with pytest.raises(eps.InputError, match="shard 0 of epoch 0 was not trained before the next one was asked for"):
        next(shards)


def test_arguments_are_checked_at_once(ps: eps.Client) -> None:
    with pytest.raises(eps.InputError, match="shard_size"):
        ShardedDataset(ps, SAMPLES, 0)
