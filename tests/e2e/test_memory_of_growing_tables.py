"""A table that holds itself to a size trains on where the same table without eviction is refused for want of memory."""

from __future__ import annotations

import time

import numpy as np
import pytest

import elasticps as eps

DIM, BATCH = 1_024, 2_000  # rows of 4 KiB, pushes of 8 MB
LIMIT = "300MiB"


def test_sweeps_come_before_refusals_where_memory_is_short() -> None:
    with (
        eps.LocalCluster(servers=1, replicas=1, ranges=8, memory_limit=LIMIT) as cluster,
        eps.connect(cluster.url, worker="w0", timeout=60) as ps,
    ):
        bounded = eps.Capacity(4_000)
        table = ps.table("t", dim=DIM, optimizer=eps.SGD(lr=0.1), eviction=bounded, usage="count")
        grads, first = np.ones((BATCH, DIM), np.float32), 0

        def push(batches: int) -> None:
            nonlocal first
            for _ in range(batches):
                ps.push({table: (np.arange(first, first + BATCH), grads)}).result()
                first += BATCH

        def push_again_until_all_are_in() -> None:
            """A burst may outrun sweeps for a moment, which then make room."""
            nonlocal first
            keys = np.arange(first, first + BATCH)
            deadline = time.monotonic() + 60.0
            while len(keys):
                assert time.monotonic() < deadline
                try:
                    ps.push({table: (keys, grads[: len(keys)])}).result()
                    break
                except eps.ServerFull as error:
                    keys = error.refused["t"]
            first += BATCH

        for _ in range(60):  # 490 MB of rows
            push_again_until_all_are_in()
        assert table.state().evicted["capacity"] > 60_000
        table.set_eviction(None)
        with pytest.raises(eps.ServerFull):
            push(60)
        table.set_eviction(bounded)
        table.evict()
        for _ in range(10):
            push_again_until_all_are_in()
