"""A table is pushed to and dropped while a server stands still, before the others are confirmed: what is kept for the
one that is away has its push and its end, and can be sent no more once the table is forgotten."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from chaos.sim.cluster import Cluster
from chaos.sim.threads import Threads
from elasticps.errors import UnknownTable
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from replication.chain import CopyState
from tests.sim.conftest import wait_for

KEYS = np.arange(64)
ONES = np.ones((len(KEYS), 1), np.float32)


@pytest.mark.parametrize("name", ["s0", "s1", "s2"])
def test_a_table_dropped_during_a_stall_ends_no_server_as_a_server_comes_back(three: Cluster, name: str) -> None:
    """Found in a review: the only one that had what was acknowledged meanwhile ended itself."""
    cluster, reported, rows = three, list[str](), list[float]()
    steps = [0]

    def program(threads: Threads) -> None:
        # The push that nobody waited for may be refused: the table has gone.
        with suppress(UnknownTable), cluster.connect(threads, "w0", ASP(), 4, "app") as ps:
            t = ps.table("t", dim=1, optimizer=Accumulate())
            u = ps.table("u", dim=1, optimizer=Accumulate())
            for _ in range(3):
                ps.push({t: (KEYS, ONES), u: (KEYS, ONES)}).result()
                steps[0] += 1
            reported.append("ready")
            while "stalled" not in reported:
                threads.sleep(0.01)
            ps.push({t: (KEYS, ONES)})
            ps.drop_table("t")
            reported.append("dropped")
            while "over" not in reported:
                ps.push({u: (KEYS, ONES)}).result()
                steps[0] += 1
                threads.sleep(0.02)
            rows.extend(u.pull(KEYS)[:, 0].tolist())

    cluster.start_worker("w0", program)
    wait_for(cluster, lambda: "ready" in reported and cluster.clock.now > 1.0)
    wait_for(cluster, cluster.whole)
    cluster.servers[name].process.stall()
    reported.append("stalled")
    wait_for(cluster, lambda: (v := cluster.view) is not None and CopyState.LATE in v.copy_state.tolist())
    wait_for(cluster, lambda: "dropped" in reported)
    before = steps[0]
    wait_for(cluster, lambda: steps[0] > before + 3)
    cluster.servers[name].process.thaw()
    wait_for(cluster, lambda: (v := cluster.view) is not None and CopyState.LATE not in v.copy_state.tolist())
    cluster.clock.run(cluster.clock.now + 2.0)
    assert cluster.violation is None, cluster.violation
    wait_for(cluster, cluster.whole)
    reported.append("over")
    wait_for(cluster, lambda: bool(rows))
    assert rows == [float(steps[0])] * len(KEYS)
