"""A table is made while a worker does not reach a server whose ranges nobody else has: what is pushed to it then is
there when the worker does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from tests.sim.conftest import begun, wait_for

KEYS = np.arange(64)
ONES = np.ones((len(KEYS), 1), np.float32)


@pytest.fixture
def alone() -> Iterator[Cluster]:
    with begun(2, 16, replicas=1) as found:
        yield found


def test_a_table_made_while_a_server_was_unreachable_is_made_there_too(alone: Cluster) -> None:
    cluster, reported, rows = alone, list[str](), list[float]()

    def program(threads: Threads) -> None:
        with cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            first = ps.table("t", dim=1, optimizer=Accumulate())
            ps.push({first: (KEYS, ONES)}).result()
            reported.append("ready")
            while "away" not in reported:
                threads.sleep(0.01)
            table = ps.table("u", dim=1, optimizer=Accumulate())
            step = ps.push({table: (KEYS, ONES)})
            reported.append("made")
            step.result()
            rows.extend(table.pull(KEYS)[:, 0].tolist())

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: "ready" in reported and cluster.whole())
    for ends in (("s0", "w0"), ("w0", "s0")):
        cluster.network.lose(*ends)
    for sock in [s for s in cluster.network.sockets if s.process.host == "w0"]:
        if sock.peer is not None and sock.peer.process.host == "s0":
            sock.broken()
    reported.append("away")
    wait_for(cluster, lambda: "made" in reported)
    for ends in (("s0", "w0"), ("w0", "s0")):
        cluster.network.heal(*ends)
    wait_for(cluster, lambda: bool(rows))
    assert rows == [1.0] * len(KEYS)
