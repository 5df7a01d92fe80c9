"""Servers that die and come back while rows are updated: ranges of many pieces are filled, and lack no update."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import elasticps as eps
from elasticps.admin.audit import audit
from tests.conftest import NewCluster

BATCHES, ROWS, DIM, SECONDS = 50, 4_000, 64, 24.0


@pytest.mark.slow
def test_a_server_that_joins_lacks_no_update_of_ranges_of_many_pieces(local_cluster: NewCluster) -> None:
    """Failed in most runs when what a joiner's full socket had not taken yet was received over."""
    cluster = local_cluster(servers=3, replicas=2, ranges=32)
    wrong: list[str] = []
    end = time.monotonic() + SECONDS

    def train(name: str) -> None:
        random, ones = np.random.default_rng(int(name[1:])), np.ones((ROWS, DIM), np.float32)
        with eps.connect(cluster.url, worker=name, timeout=60.0) as ps:
            table = ps.table(name, dim=DIM, optimizer=eps.Accumulate())
            known = np.ones((BATCHES, ROWS), np.float32)
            for b in range(BATCHES):
                ps.push({table: (np.arange(b * ROWS, (b + 1) * ROWS), ones)})
            while time.monotonic() < end:
                b, some = int(random.integers(BATCHES)), random.random(ROWS) < random.random()
                ps.push({table: (b * ROWS + np.flatnonzero(some), ones[some])}).result()
                known[b][some] += 1
            for b in range(BATCHES):
                found = table.pull(np.arange(b * ROWS, (b + 1) * ROWS))
                if differ := int((found != known[b][:, None]).any(axis=1).sum()):
                    wrong.append(f"{differ} rows of batch {b} of {name}")

    workers = [threading.Thread(target=train, args=(f"w{i}",)) for i in range(2)]
    for worker in workers:
        worker.start()
    for name in ("s0", "s1"):
        cluster.kill(name)
        cluster.start_server(name)
        cluster.scale(3)  # returns when nothing moves any more
    for worker in workers:
        worker.join(120.0)
    assert not wrong
    assert not audit(cluster.operator_url).differences
