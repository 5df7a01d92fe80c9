"""A standby replaces a dead or isolated leader long before its lease ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from coordinator.core.capacities import RowCount
from coordinator.core.clocks import UNKNOWN, ClusterTime
from coordinator.core.health import FRESH_S, LOST_S, SILENT_S, Report, ServerLink, Succession, Tenure
from coordinator.core.keys import ELECTION
from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from replication.chain import Member
from tests.coordinator.rack import FakeLine, Rack
from tests.coordinator.support import until, until_key
from tests.coordinator.test_repair import RANGES, WAIT_S, Cluster, cluster, leading

SERVERS = [Member(name, 1) for name in "abcd"]
HAS, LOST = Tenure(7, True, 0.1), Tenure(7, False, 2 * LOST_S)


@pytest.mark.parametrize(
    ("reports", "term"),
    [
        ([LOST, LOST, LOST, LOST], 7),
        ([LOST, LOST], 7),  # half of the servers have died with it, perhaps
        ([LOST], 0),
        ([LOST, LOST, LOST, HAS], 0),
        ([LOST, LOST, LOST, Tenure(7, True, 2 * SILENT_S)], 7),
        ([LOST, LOST, LOST, Tenure(7, False, 0.0)], 0),  # it may be dialling
        ([LOST, LOST, LOST, Tenure(8, True, 0.0)], 0),  # a newer leader
        ([LOST, LOST, LOST, Tenure(6, True, 0.0)], 7),
        ([Tenure(), Tenure(), Tenure(), Tenure()], 0),
        ([], 0),
    ],
)
def test_a_leader_is_lost_if_half_of_the_servers_report_it_and_none_denies(reports: list[Tenure], term: int) -> None:
    succession = Succession()
    for member, tenure in zip(SERVERS, reports, strict=False):
        succession.heard(member, tenure, 10.0)
    assert succession.lost_term(SERVERS, 10.0) == term
    assert succession.lost_term(SERVERS, 10.0 + 2 * FRESH_S) == 0, "that was long ago"


def test_only_servers_of_the_view_count() -> None:
    succession = Succession()
    for member in SERVERS:
        succession.heard(member, LOST, 10.0)
    succession.heard(Member("z", 1), HAS, 10.0)
    assert succession.lost_term(SERVERS, 10.0) == 7


async def test_a_standby_takes_over_from_a_leader_that_died_with_a_server_before_its_lease_runs_out() -> None:
    it = Cluster()
    await create_cluster(it.memory, ClusterConfig(ranges=RANGES, replicas=2, min_servers=3))
    await it.rack.start("a", "b", "c")
    await it.follower.start()
    async with AsyncExitStack() as dying:
        await dying.enter_async_context(leading(it.faulty, it.rack, ttl_s=3600))
        await it.reach("whole")
        async with leading(it.memory, it.rack, "c1", ttl_s=3600):
            await until(lambda: all(len(server.lines) == 2 for server in it.rack.servers.values()))
            it.faulty.out = True  # so that it cannot give the office back
            await dying.aclose()
            it.rack.kill("b")
            await until_key(it.memory, ELECTION, lambda entry: entry is not None and b"c1" in entry.value)
            await it.reach("whole without b")
    await it.follower.close()


class Earless:
    """Dials servers for a leader, and drops the answers of some."""

    def __init__(self, rack: Rack) -> None:
        self.rack = rack
        self.deaf_to: set[str] = set()

    @asynccontextmanager
    async def dial(self, info: ServerInfo, cluster: str) -> AsyncIterator[ServerLink]:
        if info.name in self.deaf_to:
            await asyncio.Event().wait()  # until it is called anew
        async with self.rack.dial(info, cluster) as line:
            assert isinstance(line, FakeLine)
            yield HalfHeard(line, self.deaf_to)


class HalfHeard(FakeLine):
    def __init__(self, line: FakeLine, deaf_to: set[str]) -> None:
        super().__init__(line.server)
        self.line = line
        self.deaf_to = deaf_to

    async def reports(self) -> AsyncIterator[Report | View]:
        async for report in self.line.reports():
            if self.server.info.name not in self.deaf_to:
                yield report

    def beat(
        self, term: int, epoch: int = 0, allowances: Sequence[RowCount] = (), cluster_time: ClusterTime = UNKNOWN
    ) -> None:
        self.line.beat(term, epoch, allowances, cluster_time)


async def test_a_leader_that_most_servers_stop_reporting_to_excludes_none_and_resigns() -> None:
    async with cluster("a", "b", "c", ttl_s=3600) as it, AsyncExitStack() as ending:
        first = it.view
        earless, stop, ill = Earless(it.rack), asyncio.Event(), list[bool]()
        await it.memory.delete(ELECTION)
        work = run_coordinator(it.memory, name="c1", ttl_s=3600, stop=stop, dial=earless.dial, on_ill=ill.append)
        task = asyncio.create_task(work)
        ending.callback(task.cancel)
        it.faulty.out = True
        await until_key(it.memory, ELECTION, lambda entry: entry is not None and b"c1" in entry.value)
        await until(lambda: all(server.leader is not None for server in it.rack.servers.values()))
        earless.deaf_to.update("ab")
        it.faulty.out = False
        await until(lambda: ill == [True])
        await until_key(it.memory, ELECTION, lambda entry: entry is not None and b"c0" in entry.value)
        await it.settle()
        assert it.view == first
        it.rack.kill("b")
        await it.follower.wait_for(lambda view: view.index("b") < 0, WAIT_S)
        stop.set()
        await asyncio.wait_for(task, WAIT_S)
