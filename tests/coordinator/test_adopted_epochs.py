"""A server that is given up may have told workers of views that nobody else knows: those of the new store are newer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from coordinator.adoption import plan_adoption
from coordinator.planner import Health, Members, plan
from coordinator.view import ClusterConfig, View
from elasticps.client.protocol.session import Session
from tests.coordinator.test_adoption import SERVERS, view, witness

A, B = SERVERS


def test_a_worker_that_followed_who_is_given_up_follows_the_others_again() -> None:
    """a was silent in epochs 8 and 9, and b alone had all ranges; then the store was lost, and b."""
    session = Session(1, 2, 4)
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
