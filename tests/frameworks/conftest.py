"""Fixtures of tests with other frameworks: one cluster for a file, and workers that share tables in one test."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
import torch

import elasticps as eps

Connect = Callable[..., eps.Client]
_apps = itertools.count()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with eps.LocalCluster(servers=2) as cluster:
        yield cluster.url


@pytest.fixture
def app() -> str:
    """The application of one test, whose tables no other sees."""
    return f"app{next(_apps)}"


@pytest.fixture
def connect(url: str, app: str) -> Iterator[Connect]:
    clients: list[eps.Client] = []

    def new(worker: str = "w0") -> eps.Client:
        clients.append(eps.connect(url, worker=worker, app=app))
        return clients[-1]

    yield new
    for client in clients:
        client.close()


@pytest.fixture(autouse=True)
def same_numbers_every_time() -> None:
    torch.manual_seed(7)
