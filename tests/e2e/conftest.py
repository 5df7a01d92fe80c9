from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Protocol

import pytest

import elasticps as eps


class Connect(Protocol):
    """Connects a worker; every worker of one test shares its tables with no other test."""

    def __call__(self, worker: str = "w0", **arguments: Any) -> eps.Client: ...


@pytest.fixture(scope="module")
def cluster() -> Iterator[eps.LocalCluster]:
    with eps.LocalCluster(servers=3) as cluster:
        yield cluster


_apps = itertools.count()


@pytest.fixture
def connect(cluster: eps.LocalCluster) -> Iterator[Connect]:
    app = f"app{next(_apps)}"
    with ExitStack() as clients:

        def new(worker: str = "w0", **arguments: Any) -> eps.Client:
            options: dict[str, Any] = {"app": app, "timeout": 20.0} | arguments
            client = eps.connect(cluster.url, worker=worker, **options)
            clients.callback(client.close)
            return client

        yield new
