"""Workers write their entries themselves: what does not fit together ends no coordinator, and keeps no other out."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.core.planner import Health, Members, plan, plan_roster
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from tests.coordinator.support import until_key

GOOD = WorkerInfo(3, "good", 3, "default")


@pytest.mark.parametrize(
    "entries",
    [
        {"workers/default/a": WorkerInfo(5, "a", 5, "default"), "workers/default/b": WorkerInfo(5, "b", 5, "default")},
        {"workers/default/z": WorkerInfo(3, "z", 3, "default")},
        {"workers/ads/good": WorkerInfo(6, "good", 6, "ads")},
        {"workers/a/good": WorkerInfo(3, "good", 3, "default")},
        {"workers/a/x": WorkerInfo(3, "a/x", 3, "default")},
    ],
)
async def test_workers_with_conflicting_entries_end_no_coordinator(entries: dict[str, WorkerInfo]) -> None:
    store, stop = MemoryStore(), asyncio.Event()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
    await store.put("workers/default/good", GOOD.to_json())
    for key, info in entries.items():
        await store.put(key, info.to_json())
    leads = asyncio.create_task(run_coordinator(store, name="c", stop=stop))
    try:
        last = WorkerInfo(9, "last", 9, "default")
        await until_key(store, "election", lambda entry: entry is not None or leads.done())
        await store.put("workers/default/last", last.to_json())
        await until_key(
            store, "roster",
            lambda entry: leads.done() or (entry is not None and last in Roster.decode(entry.value).workers),
        )  # fmt: skip
        assert not leads.done()
        entry = await store.get("roster")
        assert entry is not None
        assert GOOD in Roster.decode(entry.value).workers
    finally:
        stop.set()
        await asyncio.wait_for(leads, 20)


def test_a_listed_worker_is_not_displaced_by_an_impostor() -> None:
    roster = Roster(4, (GOOD,), "c")
    for other in (WorkerInfo(3, "a", 3, "default"), WorkerInfo(1, "good", 1, "default")):
        assert plan_roster(roster, [other, GOOD], "c") is None
        decision = plan_roster(roster, [other, GOOD, WorkerInfo(9, "last", 9, "default")], "c")
        assert decision is not None
        assert [worker.name for worker in decision.roster.workers] == ["good", "last"]


async def test_a_server_under_two_keys_ends_no_coordinator() -> None:
    store, stop = MemoryStore(), asyncio.Event()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
    for key in ("servers/a", "servers/x/a"):
        await store.put(key, ServerInfo("a", 1, "h:1").to_json())
    leads = asyncio.create_task(run_coordinator(store, name="c", stop=stop))
    try:
        entry = await until_key(store, "view", lambda entry: leads.done() or entry is not None)
        assert entry is not None
        assert [server.name for server in View.decode(entry.value).servers] == ["a"]
    finally:
        stop.set()
        await asyncio.wait_for(leads, 20)


def test_more_servers_than_a_view_may_list_end_no_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write their entries themselves, too. Who is in the view stays, and the others wait for room."""
    for module in ("view", "planner"):
        monkeypatch.setattr(f"coordinator.core.{module}.SERVERS_MAX", 3, raising=False)
    config = ClusterConfig(ranges=4, replicas=2)
    servers = tuple(ServerInfo(f"s{i}", 1, "h:1") for i in range(9))
    decision = plan(None, Members("c", servers[4:]), config)
    assert decision is not None
    assert decision.view is not None
    assert [server.name for server in decision.view.servers] == ["s4", "s5", "s6"]
    assert plan(decision.view, Members("c", servers), config) is None
    without = plan(decision.view, Members("c", servers[:6]), config, Health(gone={servers[6].member: "it ended"}))
    assert without is not None
    assert without.view is not None
    later = plan(without.view, Members("c", servers[:6]), config)
    assert later is not None
    assert later.view is not None
    assert {server.name for server in later.view.servers} == {"s0", "s4", "s5"}
