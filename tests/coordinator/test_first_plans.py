"""A first view that was planned in a thread is not written if a server may follow a view already."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.cluster_tracker import ClusterTracker
from coordinator.core.health import Report
from coordinator.core.lost_keys import LastGood
from coordinator.core.planner import Health, Members, Plan
from coordinator.core.store import Guard
from coordinator.core.view import ClusterConfig
from coordinator.leader import _FirstPlans, _Term
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.server_links import ServerLinks
from coordinator.sessions import register_server
from replication.chain import Member

A, B = Member("a", 1), Member("b", 1)


@pytest.mark.parametrize("epoch", [None, 0, 40])
async def test_a_server_that_comes_while_the_first_view_is_planned_is_heard_first(epoch: int | None) -> None:
    """epoch: of the view that the server follows, 0 for none; None: it has not been heard yet."""
    store, now = MemoryStore(), asyncio.get_running_loop().time()
    await create_cluster(store, ClusterConfig(ranges=4, replicas=1, id="x"))
    session = await register_server(store, name="a", address="h:1", on_lost=lambda reason: None)
    tracker = ClusterTracker(store.cluster, await store.list(""))
    lines = ServerLinks(lambda server, cluster: None, lambda ill: None)  # type: ignore[arg-type, return-value]
    detector = lines._detector
    detector.watch({A: True}, now)
    detector.heard(A, Report(0), now)

    class Interrupted(_FirstPlans):
        async def plan(self, members: Members, config: ClusterConfig, health: Health) -> Plan | None:
            decision = await super().plan(members, config, health)
            detector.watch({A: True, B: True}, now)
            if epoch is not None:
                detector.heard(B, Report(epoch), now)
            return decision

    term = _Term(store, Guard("election", 1), 0.02, lines, lambda *_: None, LastGood(), Interrupted())
    decision = await term._decide(tracker)
    assert decision is not None
    assert (decision.view is not None) == (epoch == 0)
    assert term._alarm._rung.is_set() == (epoch != 0)
    await session.close()
