"""Workers write their entries themselves: what does not fit together ends no coordinator, and keeps no other out."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.planner import plan_roster
from coordinator.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo
from tests.coordinator.support import until_key

GOOD = WorkerInfo(3, "good", 3, "default")


@pytest.mark.parametrize(
    "entries",
    [
        {"workers/a": WorkerInfo(5, "a", 5, "default"), "workers/b": WorkerInfo(5, "b", 5, "default")},
        {"workers/z": WorkerInfo(3, "z", 3, "default")},
        {"workers/ads/good": WorkerInfo(6, "good", 6, "ads")},
        {"workers/a/good": WorkerInfo(3, "good", 3, "default")},
    ],
)
async def test_workers_that_say_the_same_of_themselves_end_no_coordinator(entries: dict[str, WorkerInfo]) -> None:
    store, stop = MemoryStore(), asyncio.Event()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
    await store.put("workers/good", GOOD.to_json())
    for key, info in entries.items():
        await store.put(key, info.to_json())
    leads = asyncio.create_task(run_coordinator(store, name="c", stop=stop))
    try:
        last = WorkerInfo(9, "last", 9, "default")
        await until_key(store, "election", lambda entry: entry is not None or leads.done())
        await store.put("workers/last", last.to_json())
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


def test_who_is_listed_stays_whoever_says_to_be_them() -> None:
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
