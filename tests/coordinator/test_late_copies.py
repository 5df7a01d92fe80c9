"""Impact of a late copy that can have no more what it lacks is news, also while what is level waits for more."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from coordinator.core.health import Report
from coordinator.core.lost_keys import LastGood
from coordinator.core.store import Guard
from coordinator.core.view import ServerInfo, View
from coordinator.leader import _FirstPlans, _Term
from coordinator.memory import MemoryStore
from coordinator.server_links import ServerLinks
from replication.chain import CopyState, Member
from replication.effects import CaughtUp

A, B = Member("a", 1), Member("b", 1)
VIEW = View(
    "c@x",
    5,
    2,
    2,
    (ServerInfo("a", 1, "a:1"), ServerInfo("b", 1, "b:1")),
    chains=np.array([[0, -1], [0, -1]], np.int32),
    joining=np.array([1, 1], np.int32),
    since=np.array([5, 5]),
    reason="",
    copy_state=np.array([CopyState.NONE, CopyState.CATCHING_UP], np.int32),
)


async def test_a_late_copy_that_cannot_catch_up_wakes_the_planner() -> None:
    lines = ServerLinks(lambda server, cluster: None, lambda ill: None)  # type: ignore[arg-type, return-value]
    term = _Term(MemoryStore(), Guard("election", 1), 0.02, lines, lambda *_: None, LastGood(), _FirstPlans())
    detector, now = lines._detector, asyncio.get_running_loop().time()
    detector.watch({A: True, B: True}, now)
    lines._view = term._view = VIEW
    for member in (A, B):
        detector.heard(member, Report(5, levels=(CaughtUp(0, 5, B),)), now)
    term._paced_by = dataclasses.replace(
        lines.health(), level={}, epochs={}
    )  # as `_paced` leaves it when what is level waits
    assert detector.heard(A, Report(5, levels=(CaughtUp(0, 5, B),), spent=((1, 5),)), now)
    term._heard(False)
    assert term._alarm._rung.is_set()
