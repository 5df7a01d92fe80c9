"""A table that grows to the servers' limit: refused there, with everybody alive and all replicas the same."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import elasticps as eps
from elasticps.admin.audit import audit
from elasticps.torch import Embedding, Optimizer

DIM, BATCH = 64, 8000
LIMIT = "400MiB"


def status(url: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "elasticps", "status", "--json", "--url", url]
    found: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return found


def test_a_table_that_grows_to_the_limit_is_refused_and_no_process_dies() -> None:
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
        lacks = error.refused["t"]
        step = np.arange(lacks[0] // BATCH * BATCH, lacks[0] // BATCH * BATCH + BATCH)
        assert np.isin(lacks, step).all()
        there = (table.pull(step) != 0).all(axis=1)
        assert step[~there].tolist() == lacks.tolist()
        old = np.arange(BATCH // 2)
        shown = [table.pull(old)]

        def mix() -> None:
            for first in range(1_000_000, 2_000_000, BATCH):
                mixed = np.concatenate([old, np.arange(first, first + BATCH // 2)])
                shown.append(table.pull(old))
                ps.push({table: (mixed, grads)}).result()

        with pytest.raises(eps.ServerFull) as refused:  # rows that are there are updated beside those that are not
            mix()
        assert not np.isin(old, refused.value.refused["t"]).any()
        assert (table.pull(old) != shown[-1]).all()

        layer = Embedding(ps, "more", DIM, optimizer=eps.SGD(lr=1.0))
        optimizer = Optimizer(ps, nn.Sequential(layer), eps.SGD(lr=1.0), overlap=False)

        def train() -> None:
            for first in range(0, 200 * BATCH, 4 * BATCH):
                layer(torch.arange(first, first + 4 * BATCH)).sum().backward()
                optimizer.step()
                assert optimizer.last_step is not None
                optimizer.last_step.result()

        with pytest.raises(eps.ServerFull) as refused:
            train()
        assert list(refused.value.refused) == ["more"]

        for _ in range(3):  # what is there is updated, and the worker's steps go on
            ps.push({table: (np.arange(BATCH), grads)}).result()
        ps.flush()
        assert [(server.name, server.incarnation) for server in cluster.servers] == before
        assert audit(cluster.url).clean
        servers = status(cluster.url)["servers"]
        assert all(server["memory_limit"] == 400 << 20 for server in servers)
        assert any(server["memory_used"] > 0.8 * server["memory_mark"] for server in servers)
        assert all(server["memory_used"] < server["memory_limit"] for server in servers)
