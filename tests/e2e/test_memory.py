"""A table that grows to the servers' limit: refused there, with everybody alive and all replicas the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import elasticps as eps
from elasticps.audit import audit

DIM, BATCH = 64, 8000
LIMIT = "400MiB"


def status(url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "elasticps", "status", "--json", "--url", url]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def test_a_table_that_grows_to_the_limit_is_refused_and_nobody_dies() -> None:
    with (
        eps.LocalCluster(servers=3, replicas=2, ranges=32, memory_limit=LIMIT) as cluster,
        eps.connect(cluster.url, worker="w0", timeout=60) as ps,
    ):
        table = ps.table("t", dim=DIM, optimizer=eps.Adagrad(lr=0.1))
        before = [(server.name, server.incarnation) for server in cluster.servers]
        grads = np.ones((BATCH, DIM), np.float32)

        def grow() -> None:
            for first in range(0, 200 * BATCH, BATCH):
                ps.push({table: (np.arange(first, first + BATCH), grads)}).result()

        with pytest.raises(eps.ServerFull) as refused:
            grow()
        error = refused.value
        assert error.server in {"s0", "s1", "s2"}
        assert error.table == "t"
        assert error.nbytes > 0
        assert isinstance(error, eps.Definite)

        for _ in range(3):  # what is there is updated, and the worker's steps go on
            ps.push({table: (np.arange(BATCH), grads)}).result()
        ps.flush()
        assert [(server.name, server.incarnation) for server in cluster.servers] == before
        assert audit(cluster.url).clean
        servers = status(cluster.url)["servers"]
        assert all(server["memory_limit"] == 400 << 20 for server in servers)
        assert any(server["memory_used"] > 0.8 * server["memory_mark"] for server in servers)
        assert all(server["memory_used"] < server["memory_limit"] for server in servers)
