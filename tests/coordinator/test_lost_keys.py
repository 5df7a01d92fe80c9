"""Keys of a cluster that lives are lost from the store, or hold what makes no sense: the leader puts them back, or says
what to do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from coordinator.core.keys import ELECTION
from coordinator.core.lost_keys import UNHEARD, is_outdated, put_back
from coordinator.core.planner import Plan
from coordinator.core.store import Entry, Store
from coordinator.core.view import ClusterConfig, Roster, View
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster, new_number
from coordinator.memory import MemoryStore
from coordinator.sessions import ServerSession, register_server, register_worker
from replication.chain import Member
from tests.coordinator.conftest import Clients
from tests.coordinator.rack import Rack
from tests.coordinator.support import until, until_key
from tests.coordinator.test_adoption import view as made_view

NONSENSE = b"\0" * 40
A, B = Member("a", 3), Member("b", 1)


@asynccontextmanager
async def leading(store: Store, name: str = "c0", rack: Rack | None = None) -> AsyncIterator[asyncio.Task[None]]:
    """A coordinator that runs while the context lasts, and never ends by itself."""
    stop = asyncio.Event()
    dial = None if rack is None else rack.dial
    task = asyncio.create_task(run_coordinator(store, name=name, ttl_s=60, stop=stop, dial=dial))
    try:
        yield task
        assert not task.done()
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


async def server(store: Store, name: str) -> ServerSession:
    return await register_server(store, name=name, address="h:1", on_lost=lambda reason: None)


async def read(store: Store, key: str) -> Entry:
    entry = await store.get(key)
    assert entry is not None
    return entry


async def grown(store: Store) -> tuple[View, list[ServerSession]]:
    """A cluster of three servers with a roster; its view is not the first one."""
    await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
    sessions = [await server(store, "a")]
    await until_key(store, "view", lambda entry: entry is not None)
    sessions += [await server(store, "b"), await server(store, "c")]
    entry = await until_key(store, "view", lambda e: e is not None and len(View.decode(e.value).servers) == 3)
    assert entry is not None
    return View.decode(entry.value), sessions


async def damage(store: Store, key: str, value: bytes | None) -> int:
    """Writes a value under a key by hand, or deletes it; returns the revision that the key had before."""
    before = (await read(store, key)).revision
    if value is None:
        await store.delete(key)
    else:
        await store.put(key, value)
    return before


@pytest.mark.parametrize("value", [None, NONSENSE, b"", b"{}", b"null", b"[" * 100_000])
async def test_a_lost_view_is_put_back_as_it_was(clients: Clients, value: bytes | None) -> None:
    async with clients() as store, leading(store):
        view, sessions = await grown(store)
        assert view.epoch > 1
        await damage(store, "view", value)
        entry = await until_key(store, "view", lambda e: e is not None and e.value not in (value, b""))
        assert entry is not None
        assert View.decode(entry.value).epoch >= view.epoch
        await sessions[2].close()
        entry = await until_key(store, "view", lambda e: e is not None and len(View.decode(e.value).servers) == 2)
        assert entry is not None
        assert View.decode(entry.value).epoch > view.epoch
        for session in sessions[:2]:
            await session.close()


async def test_a_leader_does_not_continue_from_an_older_view() -> None:
    store = MemoryStore()
    async with leading(store):
        await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
        first = await server(store, "a")
        old = await until_key(store, "view", lambda entry: entry is not None)
        assert old is not None
        second = await server(store, "b")
        entry = await until_key(store, "view", lambda e: e is not None and len(View.decode(e.value).servers) == 2)
        assert entry is not None
        before = View.decode(entry.value).epoch
        await store.put("view", old.value)
        entry = await until_key(store, "view", lambda e: e is not None and e.value != old.value)
        assert entry is not None
        assert View.decode(entry.value).epoch >= before
        await first.close()
        await second.close()


async def test_a_standby_that_takes_over_after_the_loss_asks_the_servers(caplog: pytest.LogCaptureFixture) -> None:
    """It saw the key go, but cannot know whether a leader wrote once more: all servers must be heard."""
    store = MemoryStore()
    rack = Rack(store)
    async with leading(store.client(), "c1", rack):
        await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
        await rack.start("a", "b")
        await until(lambda: all(s.view is not None and s.view.epoch > 0 for s in rack.servers.values()))
    epoch = max(s.view.epoch for s in rack.servers.values() if s.view is not None)
    await store.delete("view")
    async with leading(store, "c2", rack):
        entry = await until_key(store, "view", lambda entry: entry is not None)
        assert entry is not None
        assert View.decode(entry.value).epoch >= epoch + UNHEARD
        rack.kill("b")
        await until(lambda: rack.servers["a"].view is not None and rack.servers["a"].view.epoch > epoch + UNHEARD)


@pytest.mark.parametrize("value", [None, NONSENSE])
async def test_a_leader_that_knows_no_view_refuses_loudly_where_a_server_cannot_be_heard(
    caplog: pytest.LogCaptureFixture, value: bytes | None
) -> None:
    store = MemoryStore()
    rack = Rack(store)
    async with leading(store.client(), "c1", rack):
        await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
        await rack.start("a", "b")
        await until(lambda: all(s.view is not None for s in rack.servers.values()))
    rack.kill("b")
    await rack.expire("b")
    await damage(store, "view", value)
    async with leading(store, "c2", rack):
        await until(lambda: "b may know a newer one" in caplog.text and "cluster adopt" in caplog.text)
        entry = await store.get("view")
        assert (entry and entry.value) == value


async def test_the_first_view_waits_for_reports_of_all_registered_servers() -> None:
    store = MemoryStore()
    rack = Rack(store)
    await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
    await rack.start("a", "b")
    rack.freeze("b")
    async with leading(store, "c", rack):
        await until(lambda: rack.servers["b"].calls > 2)
        assert await store.get("view") is None
        rack.freeze("b", frozen=False)
        await until_key(store, "view", lambda entry: entry is not None)


@pytest.mark.parametrize("value", [None, NONSENSE, b"{}"])
async def test_a_lost_roster_comes_back_with_a_higher_version(clients: Clients, value: bytes | None) -> None:
    async with clients() as store, leading(store):
        _, sessions = await grown(store)
        workers = [await register_worker(store, name=f"w{i}", app="default") for i in range(3)]
        entry = await until_key(store, "roster", lambda e: e is not None and len(Roster.decode(e.value).workers) == 3)
        assert entry is not None
        version = Roster.decode(entry.value).version
        await damage(store, "roster", value)
        entry = await until_key(store, "roster", lambda e: e is not None and e.value != value)
        assert entry is not None
        found = Roster.decode(entry.value)
        assert found.version > version
        assert [worker.name for worker in found.workers] == ["w0", "w1", "w2"]
        for worker in workers:
            await worker.close()
        for session in sessions:
            await session.close()


@pytest.mark.parametrize("value", [None, NONSENSE, b"{}", b"[]"])
async def test_a_lost_config_comes_back_and_no_number_is_given_twice(clients: Clients, value: bytes | None) -> None:
    async with clients() as store, leading(store):
        _, sessions = await grown(store)
        config = ClusterConfig.from_json((await read(store, "config")).value)
        number = await new_number(store)
        await damage(store, "config", value)
        entry = await until_key(store, "config", lambda e: e is not None and e.value != value)
        assert entry is not None
        found = ClusterConfig.from_json(entry.value)
        assert replace(found, base=0) == replace(config, base=0)
        assert await new_number(store) > number
        for session in sessions:
            await session.close()


async def test_a_config_with_changed_fixed_values_is_put_back() -> None:
    store = MemoryStore()
    async with leading(store):
        _, sessions = await grown(store)
        value = (await read(store, "config")).value
        config = ClusterConfig.from_json(value)
        for wrong in (replace(config, ranges=16), replace(config, replicas=3)):
            await store.put("config", wrong.to_json())
            await until_key(store, "config", lambda e: e is not None and e.value == value)
        for session in sessions:
            await session.close()


async def test_a_table_entry_lost_without_a_drop_is_put_back(clients: Clients) -> None:
    async with clients() as store, leading(store):
        _, sessions = await grown(store)
        remaining = json.dumps({"id": 9, "spec": "{}", "creator": 1, "by": "w", "ready": True}).encode()
        await store.put("tables/x/kept", remaining)
        await store.put("tables/x/dropped", remaining)
        await store.put("tables/x/dropped", json.dumps({**json.loads(remaining), "dropping": True}).encode())
        await store.delete("tables/x/dropped")
        await store.delete("tables/x/kept")
        entry = await until_key(store, "tables/x/kept", lambda entry: entry is not None)
        assert entry is not None
        assert entry.value == remaining
        assert await store.get("tables/x/dropped") is None
        for session in sessions:
            await session.close()


async def test_a_cluster_without_servers_may_be_given_up() -> None:
    """Else `cluster reset`, and whoever clears etcd by hand, would fight with the leader."""
    store = MemoryStore()
    async with leading(store):
        _, sessions = await grown(store)
        for session in sessions:
            await session.close()
        await until_key(store, "servers/a", lambda entry: entry is None)
        for key in ("view", "config"):
            await store.delete(key)
        await store.put("failover", b"{}")  # the leader has seen it when it has seen this
        for key in ("view", "config"):
            assert await store.get(key) is None


@pytest.mark.parametrize("key", ["view", "roster", "config"])
async def test_a_coordinator_that_starts_on_damaged_keys_runs_on_and_names_them(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    await create_cluster(store, ClusterConfig(ranges=8, replicas=2))
    await store.put(key, NONSENSE)
    async with leading(store):
        await until_key(store, ELECTION, lambda entry: entry is not None)
        session = await server(store, "a") if key != "config" else None
        await until(lambda: f"key={key}" in caplog.text and r"\\x00" in caplog.text)
        if session is not None:
            await session.close()


# -- the decision ------------------------------------------------------------------------------------------------------


def decide(ours: View | None, certain: bool, epochs: dict[Member, int], views: dict[Member, View]) -> Plan:
    return put_back(ours, certain, "view is gone", epochs, views)


def test_a_view_whose_deletion_the_leader_saw_is_put_back_without_reports() -> None:
    assert decide(made_view(7), True, {}, {}).view == made_view(7)


def test_a_remembered_view_is_put_back_with_a_higher_epoch_once_all_servers_report() -> None:
    found = decide(made_view(7), False, {A: 7, B: 6}, {}).view
    assert found is not None
    assert found.epoch == 7 + UNHEARD
    assert decide(made_view(7), False, {A: 7}, {}).view is None


def test_servers_that_agree_are_believed_if_no_coordinator_remembers_a_view() -> None:
    agreed: dict[Member, int] = {A: 9, B: 9}
    assert "are asked" in decide(None, False, agreed, {}).reason
    found = decide(made_view(7), False, agreed, {A: made_view(9)}).view
    assert found is not None
    assert found.epoch == 9 + UNHEARD


@pytest.mark.parametrize(
    ("epochs", "views", "why"),
    [
        ({A: 9, B: 8}, {A: made_view(9)}, "b follow an older one"),
        ({A: 9, B: 9}, {A: made_view(9), B: replace(made_view(9), reason="forged")}, "2 different ones"),
        ({A: 9}, {A: made_view(9)}, "b may know a newer one"),
        ({A: 0, B: 0}, {}, "no server follows any"),
    ],
)
def test_a_single_server_is_not_believed(epochs: dict[Member, int], views: dict[Member, View], why: str) -> None:
    found = decide(None, False, epochs, views)
    assert found.view is None
    assert why in found.reason
    assert "cluster adopt" in found.reason


def test_a_single_server_with_a_newer_view_blocks_no_recovery() -> None:
    assert not is_outdated(made_view(7), {A: 1 << 40, B: 7})
    assert not is_outdated(made_view(7), {})
    assert is_outdated(made_view(7), {A: 9, B: 9})
    assert not is_outdated(None, {A: 0})
    assert is_outdated(None, {A: 1, B: 0})
