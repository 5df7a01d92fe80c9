"""The leader while servers join and drain, with and without their reports."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.core.keys import DRAINS, ELECTION
from coordinator.core.patience import Pace
from coordinator.core.planner import Health
from coordinator.core.view import ServerInfo, View
from coordinator.membership import cancel_drain, list_drains, request_drain
from tests.coordinator.support import until, until_key
from tests.coordinator.test_repair import RANGES, WAIT_S, cluster, leading, whole


def holds(view: View, name: str) -> int:
    return int((view.chains == view.index(name)).sum()) if view.index(name) >= 0 else 0


async def test_servers_that_come_get_their_share() -> None:
    async with cluster("a", "b", "c") as it:
        await it.rack.start("d", "e")

        def shared(view: View) -> bool:
            return whole(view) and min(holds(view, "d"), holds(view, "e")) >= 4

        view = await it.follower.wait_for(shared, WAIT_S)
        assert max(holds(view, name) for name in "abcde") <= 9
        for server in it.rack.servers.values():
            await it.until_sent(server)


async def test_servers_that_join_together_are_planned_together() -> None:
    async with cluster("a", "b", "c") as it:
        it.rack.find_level(False)
        await it.rack.start("d", "e")
        view = await it.reach("filling")
        assert {view.servers[i].name for i in view.joining[view.joining >= 0]} == {"d", "e"}
        assert view.epoch == 2


async def test_a_drained_server_leaves_the_view_and_its_request_is_deleted() -> None:
    async with cluster("a", "b", "c") as it:
        info = await request_drain(it.memory, "b")
        view = await it.reach("whole without b")
        assert view.reason.endswith("b drained: it may stop")
        await it.until_sent(it.rack.servers["b"])
        assert await list_drains(it.memory) == {"b": info.incarnation}
        it.rack.kill("b")
        await it.rack.expire("b")
        await until_key(it.memory, f"{DRAINS}b", lambda entry: entry is None)
        assert it.view == view, "its going changes nothing more"


async def test_a_restarted_server_does_not_drain() -> None:
    async with cluster("a", "b", "c") as it:
        it.rack.find_level(False)
        await request_drain(it.memory, "b")
        await it.reach("filling")
        await it.rack.start("b")
        it.rack.find_level(True)
        await it.follower.wait_for(
            lambda v: whole(v) and v.index("b") >= 0 and v.servers[v.index("b")].incarnation == 2, WAIT_S
        )
        await until_key(it.memory, f"{DRAINS}b", lambda entry: entry is None)


async def test_a_server_whose_drain_is_cancelled_is_a_newcomer() -> None:
    async with cluster("a", "b", "c") as it:
        await request_drain(it.memory, "b")
        await it.reach("whole without b")
        assert await cancel_drain(it.memory, "b")
        await it.follower.wait_for(lambda view: whole(view) and holds(view, "b") >= 6, WAIT_S)


async def test_a_standby_continues_a_drain() -> None:
    async with cluster("a", "b", "c") as it:
        it.rack.find_level(False)
        await request_drain(it.memory, "b")
        await it.reach("filling")
        it.faulty.out = True
        await it.memory.delete(ELECTION)
        async with leading(it.memory, it.rack, "c1"):
            it.rack.find_level(True)
            await it.reach("whole without b")
            it.faulty.out = False


async def test_the_last_server_stays_until_another_comes() -> None:
    async with cluster("a", replicas=1) as it:
        await request_drain(it.memory, "a")
        view = await it.follower.wait_for(lambda view: "cannot be drained" in view.reason, WAIT_S)
        assert (view.epoch, view.chains.max()) == (2, 0)
        await it.rack.start("b")
        await it.reach("whole without a")


async def test_a_server_dies_while_another_drains() -> None:
    async with cluster("a", "b", "c", "d") as it:
        it.rack.find_level(False)
        await request_drain(it.memory, "b")
        await it.reach("filling")
        it.rack.kill("c")
        await it.follower.wait_for(lambda view: view.index("c") < 0, WAIT_S)
        it.rack.find_level(True)
        view = await it.reach("whole without b")
        assert {server.name for server in view.servers} == {"a", "d"}


async def test_that_ranges_wait_is_in_the_view_once() -> None:
    async with cluster("a", "b", replicas=1) as it:
        it.rack.kill("b")
        view = await it.follower.wait_for(lambda view: "wait for it" in view.reason, WAIT_S)
        assert view.epoch == 2
        assert np.array_equal(view.since, np.ones(RANGES))
        await it.settle()
        assert it.view == view


async def test_a_worker_that_comes_changes_only_the_roster() -> None:
    async with cluster("a", "b", "c") as it:
        view = it.view
        found = {name: list(server.views) for name, server in it.rack.servers.items()}
        await it.settle()
        await it.settle()
        assert it.follower.roster is not None
        assert len(it.follower.roster.workers) == 2
        assert it.view == view
        assert {name: server.views for name, server in it.rack.servers.items()} == found


async def test_a_request_that_makes_no_sense_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster("a", "b", "c") as it:
        view = it.view
        await it.memory.put(f"{DRAINS}b", b"nonsense")
        await until(lambda: "an entry is ignored key=drains/b" in caplog.text)
        await it.settle()
        assert it.view == view


def test_level_replicas_wait_for_the_rest_of_their_batch_but_not_for_long() -> None:
    servers = (ServerInfo("a", 1, "h:1"), ServerInfo("b", 1, "h:1"))
    chains, since = np.array([[0], [0]], np.int32), np.array([4, 4])
    view = View("c", 4, 2, 1, servers, chains, np.array([1, 1], np.int32), since, "")
    pace = Pace(0.05)
    assert pace.wait(Health(), view, 1.0) == 0
    assert pace.wait(Health(level={0: 4}), view, 1.0) == pytest.approx(0.05)
    assert pace.wait(Health(level={0: 4}), view, 1.04) == pytest.approx(0.01)
    assert pace.wait(Health(level={0: 4}), view, 1.06) == 0
    assert pace.wait(Health(level={0: 4, 1: 4}), view, 1.01) == 0, "all are level"
    later = View("c", 5, 2, 1, servers, chains, np.array([1, 1], np.int32), since, "")
    assert pace.wait(Health(level={0: 4}), later, 2.0) == pytest.approx(0.05), "each view anew"
