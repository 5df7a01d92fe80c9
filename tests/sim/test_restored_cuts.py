"""A cluster that came back from a checkpoint takes checkpoints of its own, wherever they go."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from chaos.sim.cluster import STORE_TIMEOUT_S, Cluster
from chaos.sim.cuts import HOST, Afar
from elasticps.checkpoint.cuts import CutTaker, GivenUp
from elasticps.server.core.operations import RestoredState
from elasticps.server.roles.executor import FutureTicket
from replication.effects import Push
from replication.messages import OperationKind
from tests.sim.conftest import wait_for

CUT = 100  # that it came back from


def bring_back(cluster: Cluster) -> None:
    """What a restore logs of each range in the end."""
    for found in cluster.servers.values():
        server = found.now
        assert server is not None
        for r in server.serving.headed.tolist():
            state = RestoredState(CUT, (), (), {}, [], [])
            ticket, epoch, where = FutureTicket(), server.serving.epoch, np.array([r])
            push = Push(ticket, -1, epoch, 0, 0, True, where, state, 256, kind=OperationKind.RESTORED)
            server.executor.perform(server.replica.push, push)
    cluster.clock.run(cluster.clock.now + 1.0)


def replace_server(cluster: Cluster, old: str, new: str) -> None:
    """By another, to which all its ranges move."""
    cluster.start_server(new)
    wait_for(cluster, lambda: new in names(cluster) and cluster.whole())
    cluster.drain(old)
    wait_for(cluster, lambda: cluster.servers[old].left, 60.0)


def names(cluster: Cluster) -> list[str]:
    return [] if cluster.view is None else [server.name for server in cluster.view.servers]


@pytest.mark.parametrize("replaced", [False, True])
def test_the_next_cut_is_above_the_cut_that_the_ranges_came_back_from(cluster: Cluster, replaced: bool) -> None:
    """Found in a review: the place was a new one, so they were counted from 1, and nobody wrote them."""
    reported: list[str] = []

    async def take() -> None:
        driver = CutTaker(cluster.store.client(HOST, STORE_TIMEOUT_S), lambda info: Afar(cluster, info, Random(1)), 1.0)
        try:
            reported.append(f"above: {(await driver.take('file:///new')).number > CUT}")
        except GivenUp as error:
            reported.append(str(error))

    wait_for(cluster, lambda: all(s.now is not None for s in cluster.servers.values()) and cluster.whole())
    bring_back(cluster)
    if replaced:
        replace_server(cluster, "s0", "s2")
        replace_server(cluster, "s1", "s3")
    cluster.start_task(HOST, take)
    wait_for(cluster, lambda: bool(reported), 60.0)
    assert reported == ["above: True"]
