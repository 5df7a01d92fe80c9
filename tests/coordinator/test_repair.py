"""The leader with links to its servers: failover, repair, standbys, and faults of its own."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from coordinator import leader
from coordinator.core.keys import ELECTION
from coordinator.core.planner import Plan, UnsafePlan
from coordinator.core.store import Store
from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.leader import run_coordinator
from coordinator.membership import ViewFollower, create_cluster
from coordinator.memory import MemoryStore
from coordinator.server_links import ServerLinks
from replication.chain import Member
from tests.coordinator.rack import FakeServer, Rack
from tests.coordinator.support import FaultyStore, until, until_key

RANGES = 16
WAIT_S = 30


@asynccontextmanager
async def leading(store: Store, rack: Rack, name: str = "c0", ttl_s: float = 60) -> AsyncIterator[None]:
    """A coordinator that runs while the context lasts."""
    stop = asyncio.Event()
    task = asyncio.create_task(run_coordinator(store, name=name, ttl_s=ttl_s, stop=stop, dial=rack.dial))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, WAIT_S)


class Cluster:
    """A store, servers, a leader named c0 and a follower of views."""

    def __init__(self) -> None:
        self.memory = MemoryStore()
        self.faulty = FaultyStore(self.memory.client())
        self.rack = Rack(self.memory)
        self.follower = ViewFollower(self.memory)

    @property
    def view(self) -> View:
        assert self.follower.view is not None
        return self.follower.view

    async def reach(self, what: str) -> View:
        """Waits for a view that is `whole`, or `whole without NAME`, or has fillings under way: `filling`."""
        word, _, name = what.partition(" without ")
        if word == "filling":
            return await self.follower.wait_for(lambda view: bool((view.joining >= 0).any()), WAIT_S)
        return await self.follower.wait_for(lambda view: whole(view) and view.index(name) < 0, WAIT_S)

    async def until_sent(self, server: FakeServer) -> None:
        """Waits until it has the newest view."""
        await until(lambda: server.view == self.view)

    async def after(self, epoch: int) -> View:
        """Waits for a view above that epoch."""
        return await self.follower.wait_for(lambda view: view.epoch > epoch, WAIT_S)

    async def settle(self) -> None:
        """Waits until the leader has seen all that happened so far: it writes a roster, last of all it does."""
        roster = self.follower.roster
        number = 1 if roster is None else roster.version + 1
        value = f'{{"id":{number},"name":"w{number}","incarnation":1,"app":"default"}}'
        await self.memory.put(f"workers/default/w{number}", value.encode())
        await until(lambda: self.follower.roster is not None and self.follower.roster.version >= number)


def whole(view: View) -> bool:
    return bool(view.chains.min() >= 0 and view.joining.max() < 0)


@asynccontextmanager
async def cluster(*names: str, ttl_s: float = 60, replicas: int = 2) -> AsyncIterator[Cluster]:
    """A healthy cluster of these servers under c0, with its first view known to all."""
    it = Cluster()
    await create_cluster(it.memory, ClusterConfig(ranges=RANGES, replicas=replicas, min_servers=len(names)))
    await it.rack.start(*names)
    await it.follower.start()
    try:
        async with leading(it.faulty, it.rack, ttl_s=ttl_s):
            await it.reach("whole")
            await until(lambda: all(server.view == it.view for server in it.rack.servers.values()))
            yield it
    finally:
        await it.follower.close()


async def test_a_killed_server_is_replaced_and_every_server_gets_the_view(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with cluster("a", "b", "c") as it:
        it.rack.kill("b")
        view = await it.reach("whole without b")
        assert view.reason.startswith("repair: ")
        for server in (it.rack.servers["a"], it.rack.servers["c"]):
            await it.until_sent(server)
            assert server.views == sorted(server.views)
        assert it.rack.servers["b"].views == [1]
    assert "b lost (connection lost, then connection refused): " in caplog.text
    found = re.findall(
        r"failover epoch=(\d+) gone=(\S+) detected=(\d+\.\d+) written=(\d+\.\d+) reason=\"b lost", caplog.text
    )
    assert [(epoch, gone) for epoch, gone, _, _ in found] == [("2", "b#1")]
    assert float(found[0][2]) <= float(found[0][3])
    assert re.search(r"view epoch=3 after_ms=[\d.]+ reason=\"repair: ", caplog.text)


async def test_a_view_that_could_not_be_written_is_planned_again() -> None:
    async with cluster("a", "b", "c") as it:
        it.faulty.stuck = "view"
        it.rack.freeze("a")
        await until(lambda: it.faulty.waiting)  # the leader has found a silent, and the store does not answer
        it.rack.freeze("a", frozen=False)
        it.rack.kill("b")  # whoever left a out now would leave what a and b hold with nobody
        await until(lambda: it.faulty.given_up)
        it.faulty.stuck = ""
        view = await it.reach("whole without b")
        assert it.rack.servers["a"].info in view.servers


async def test_a_range_of_three_replicas_survives_two_kills_at_once() -> None:
    async with cluster("a", "b", "c", "d", replicas=3) as it:
        it.rack.kill("b", "c")
        await it.follower.wait_for(lambda view: view.index("b") < 0 and view.index("c") < 0, WAIT_S)
        await it.rack.start("b")
        await it.follower.wait_for(lambda view: whole(view) and len(view.servers) == 3, WAIT_S)


async def test_a_server_that_starts_again_and_goes_at_once_stays_lost() -> None:
    async with cluster("a", "b", replicas=1) as it:
        await it.rack.start("b")
        it.rack.kill("b")
        await it.rack.expire("b")
        await it.follower.wait_for(lambda view: " wait" in view.reason, WAIT_S)
        await it.settle()
        assert " wait" in it.view.reason, "who is lost stays lost when the next one of its name goes, too"
        assert [str(server.member) for server in it.view.servers] == ["a#1", "b#1"]


async def test_a_restarted_server_is_an_empty_replica() -> None:
    async with cluster("a", "b") as it:
        await it.rack.start("b")
        view = await it.follower.wait_for(
            lambda view: whole(view) and view.servers[view.index("b")].incarnation == 2, WAIT_S
        )
        assert set(view.heads.tolist()) == {view.index("a")}, "it came back empty, and behind"


async def test_a_server_that_comes_gets_its_share_and_takes_over() -> None:
    async with cluster("a", "b") as it:
        await it.rack.start("c")
        view = await it.follower.wait_for(lambda view: view.index("c") >= 0, WAIT_S)
        assert view.reason == "c joined: 9 of 16 ranges move to it, 8 under way"
        it.rack.kill("a")
        view = await it.reach("whole without a")
        assert np.count_nonzero(view.chains == view.index("c")) == RANGES
        it.rack.kill("b")
        await it.follower.wait_for(lambda view: view.index("b") < 0, WAIT_S)


async def test_a_frozen_server_is_left_out_and_used_again_when_it_thaws() -> None:
    async with cluster("a", "b", "c") as it:
        it.rack.freeze("c")
        view = await it.reach("whole without c")
        it.rack.freeze("c", frozen=False)
        await it.follower.wait_for(lambda view: view.index("c") >= 0, WAIT_S)
        it.rack.kill("b")
        view = await it.reach("whole without b")
        assert [server.member for server in view.servers] == [Member("a", 1), Member("c", 1)]


async def test_the_last_replica_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster("a", "b") as it:
        it.rack.find_level(False)
        it.rack.kill("a")
        await it.follower.wait_for(lambda view: view.index("a") < 0, WAIT_S)
        before = it.view
        it.rack.freeze("b")
        await it.rack.expire("b")
        await until(lambda: f"b is gone (not registered and not heard): {RANGES} ranges wait for it" in caplog.text)
        it.rack.freeze("b", frozen=False)
        await it.rack.start("c")
        it.rack.find_level(True)
        view = await it.reach("whole")
        assert view.epoch > before.epoch
        assert set(view.heads.tolist()) == {view.index("b")}


async def test_a_standby_goes_on_in_the_middle_of_a_repair() -> None:
    async with cluster("a", "b", "c", ttl_s=0.5) as it:
        it.rack.find_level(False)
        it.rack.kill("c")
        half = await it.reach("filling")
        leadership = await it.memory.get(ELECTION)
        it.faulty.out = True  # what a killed leader looks like to the store
        async with leading(it.memory, it.rack, "c1"):
            await until_key(it.memory, ELECTION, lambda entry: entry is not None and entry != leadership)
            it.rack.find_level(True)
            view = await it.reach("whole without c")
            assert view.epoch > half.epoch
            it.faulty.out = False


async def test_a_standby_detects_servers_that_died_with_the_leader() -> None:
    async with AsyncExitStack() as standby, cluster("a", "b", "c") as it:
        await standby.enter_async_context(leading(it.memory, it.rack, "c1"))
        it.faulty.out = True
        it.rack.kill("c")
        await it.memory.delete(ELECTION)  # as when the dead leader's lease ends
        await it.reach("whole without c")
        it.faulty.out = False


async def test_the_leader_dies_between_failover_and_repair_and_after_every_view() -> None:
    """Each view of the repair is written by another leader."""
    async with cluster("a", "b", "c") as it:
        it.faulty.out = True
        await it.memory.delete(ELECTION)
        it.rack.kill("c")
        for number in range(1, 100):
            async with leading(it.memory, it.rack, f"c{number}"):
                await it.after(it.view.epoch)
            if whole(it.view):
                break
        assert it.view.index("c") < 0
        assert whole(it.view)
        it.faulty.out = False


async def test_a_failover_of_unknown_outcome_is_read_back_and_then_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with cluster("a", "b", "c") as it:
        it.faulty.lose_next_write = "view"
        it.rack.kill("c")
        view = await it.reach("whole without c")
        await until(lambda: it.rack.servers["a"].view == view)
    assert it.rack.servers["a"].views == list(range(1, view.epoch + 1)), "each view once and none left out"
    assert caplog.text.count("failover epoch=2 gone=c#1 ") == 1


async def test_a_leader_that_hears_no_server_removes_none(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster("a", "b", "c") as it:
        first = it.view
        it.rack.freeze("a", "b", "c")
        await until(lambda: "most servers fell silent at once" in caplog.text)
        await it.settle()
        assert it.view == first
        calls = it.rack.servers["a"].calls
        await until(lambda: it.rack.servers["a"].calls > calls, "it calls them anew")
        assert it.view == first
        it.rack.freeze("a", "b", "c", frozen=False)
        it.rack.kill("c")
        await it.reach("whole without c")


async def test_all_connections_reset_at_once_change_nothing() -> None:
    async with cluster("a", "b", "c") as it:
        first = it.view
        calls = {name: server.calls for name, server in it.rack.servers.items()}
        it.rack.reset_connections()
        await until(lambda: all(server.calls > calls[name] for name, server in it.rack.servers.items()))
        await it.settle()
        assert it.view == first


async def test_leases_that_ran_out_in_an_outage_remove_no_server() -> None:
    async with cluster("a", "b", "c") as it:
        first = it.view
        it.faulty.out = True
        await it.rack.expire("a", "b", "c")
        await it.rack.start("d")
        await until(lambda: it.faulty.refused, "the leader finds the store out")
        it.faulty.out = False
        view = await it.follower.wait_for(lambda view: view.index("d") >= 0, WAIT_S)
        assert view.servers[:3] == first.servers
        assert np.array_equal(view.chains, first.chains)
        it.rack.kill("c")
        await it.reach("whole without c")


async def test_a_server_that_dies_in_an_outage_is_replaced_after_it() -> None:
    async with cluster("a", "b", "c") as it:
        first = it.view
        it.faulty.out = True
        it.rack.kill("b")
        await until(lambda: it.faulty.refused)
        assert it.view == first
        it.faulty.out = False
        await it.reach("whole without b")


async def test_a_view_that_a_server_has_missed_is_sent_again() -> None:
    async with cluster("a", "b") as it:
        it.rack.find_level(False)
        it.rack.servers["a"].deaf = 1
        await it.rack.start("c")
        view = await it.follower.wait_for(lambda view: view.index("c") >= 0, WAIT_S)
        await until(lambda: it.rack.servers["a"].view == view)
        assert it.rack.servers["a"].views == [1, 2, 2]


async def test_a_server_with_an_old_view_is_sent_the_view_once_more_and_not_for_ever() -> None:
    async with cluster("a", "b") as it:
        it.rack.find_level(False)
        it.rack.servers["a"].deaf = 1000
        await it.rack.start("c")
        await until(lambda: it.rack.servers["a"].views == [1, 2, 2])
        await it.rack.start("d")
        # It can make nothing of the difference to view 2, which it has missed: so it hears of view 3 once, as a whole.
        await until(lambda: it.rack.servers["a"].views == [1, 2, 2, 3])


async def test_peers_that_cannot_reach_each_other_are_parted() -> None:
    async with cluster("a", "b", "c") as it:
        it.rack.servers["a"].suspects = {Member("b", 1): 1.5}

        def parted(view: View) -> bool:
            pair = {view.index("a"), view.index("b")}
            return whole(view) and not any(set(chain) == pair for chain in view.chains.tolist())

        view = await it.follower.wait_for(parted, WAIT_S)
        assert len(view.servers) == 3


async def test_a_server_with_damaged_reports_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster("a", "b", "c") as it:

        def nonsense() -> None:
            raise ValueError("nonsense")

        it.rack.servers["c"].report = nonsense  # type: ignore[assignment,method-assign]
        it.rack.kill("b")
        await it.follower.wait_for(lambda view: view.index("b") < 0, WAIT_S)
    assert "a line failed member=c#1" in caplog.text


async def test_a_plan_that_breaks_the_law_is_logged_and_not_written(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("a", "b", "c") as it:
        first = it.view

        def broken(*_: object) -> Plan:
            raise UnsafePlan("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(leader, "plan", broken)
            it.rack.kill("c")
            await until(lambda: "a plan is not carried out" in caplog.text)
            await it.settle()
            assert it.view == first
        await it.rack.expire("c")
        await it.reach("whole without c")


async def test_no_server_link_opens_after_all_were_closed() -> None:
    """Whoever follows the store may do so once more before it ends; the harness looks for tasks that are left."""
    rack = Rack(MemoryStore())
    lines = ServerLinks(rack.dial, lambda ill: None)
    running = asyncio.create_task(lines.run())
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    lines.follow("c", [ServerInfo("a", 1, "127.0.0.1:1")], [])
