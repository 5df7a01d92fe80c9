"""Two fake servers for a client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.client.fake_cluster import Cluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(monkeypatch)
    yield cluster
    for client in cluster.clients:
        client.close()
    for server in cluster.servers:
        server.kill()
