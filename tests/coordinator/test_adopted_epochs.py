"""Views of an adopted cluster are newer than those of a server that was given up."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from coordinator.adoption import plan_adoption
from coordinator.core.health import Report
from coordinator.core.planner import Health, Members, plan
from coordinator.core.view import ClusterConfig, View
from coordinator.server_links import ServerLinks, _Open
from elasticps.client.core.session import PushSession
from tests.coordinator.test_adoption import SERVERS, view, witness

A, B = SERVERS


def test_a_worker_that_followed_an_abandoned_server_follows_the_adopted_view() -> None:
    """a was silent in epochs 8 and 9, and b alone had all ranges; then the store was lost, and b."""
    session = PushSession(1, 2, 4)
    alone = np.array([[1, -1], [1, -1]], np.int32)
    session.adopt(replace(view(9), chains=alone, since=np.full(2, 8)).as_chains)
    assert session.heads == (B.member,)
    found = plan_adoption([witness("a", 7)], ("b",), "x")
    adopted = View.decode(found.writes["view"])
    config = ClusterConfig.from_json(found.writes["config"])
    decision = plan(adopted, Members(adopted.cluster, (A,)), config, Health(gone={B.member: "given up"}))
    assert decision is not None
    assert decision.view is not None  # and nothing more is to be done
    for each in (adopted, decision.view):
        session.adopt(each.as_chains)
    assert session.heads == (A.member,), "it waits for b, for ever"


async def test_a_coordinator_announces_the_adopted_view_even_over_an_unsent_newer_one() -> None:
    """The store and its leader went away as they had written a view: who stood by had read it, and told servers that
    one, and none of the next ones of the same epochs."""
    found: list[View] = []
    line: Any = SimpleNamespace(send_view=lambda view, _: found.append(view), beat=lambda *_: None)
    lines = ServerLinks(lambda server, cluster: None, lambda ill: None)  # type: ignore[arg-type, return-value]
    lines._open[A.member] = _Open(line, report=Report(8))
    lines.announce(view(9))
    lines.lead(1, lambda death: None)
    adopted = View.decode(plan_adoption([witness("a", 8), witness("b", 8)], (), "x").writes["view"])
    lines.announce(adopted)
    assert found == [adopted]
