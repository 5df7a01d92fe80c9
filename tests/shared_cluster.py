"""Fixtures of tests that share a cluster of two servers in a file, for the conftest.py of a folder to import."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

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
    """Connects workers that share tables with each other and with no other test."""
    clients: list[eps.Client] = []

    def new(worker: str = "w0", **options: Any) -> eps.Client:
        clients.append(eps.connect(url, **{"worker": worker, "app": app, **options}))
        return clients[-1]

    yield new
    for client in clients:
        client.close()
