"""The leader: forms views, gathers changes, hands over, and cannot write once deposed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from coordinator.core.errors import StoreUnavailable, TooLarge
from coordinator.core.health import ServerLink
from coordinator.core.keys import ELECTION
from coordinator.core.store import Entry, Guard, Store
from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.etcd import EtcdStore
from coordinator.leader import _Alarm, run_coordinator
from coordinator.membership import ViewFollower, create_cluster
from coordinator.memory import MemoryStore
from coordinator.server_links import ServerLinks
from coordinator.sessions import register_server, register_worker
from replication.chain import Member
from tests.coordinator.conftest import Clients
from tests.coordinator.support import Etcd, FaultyStore, fresh_url, until, until_key

SHORT_S = 0.6  # a term of office that is to run out


@asynccontextmanager
async def coordinator(
    store: Store, name: str = "c0", *, ttl_s: float = 60, settle_s: float = 0.02
) -> AsyncIterator[None]:
    """A coordinator that runs while the context lasts. Its office outlasts the test, however busy the machine is."""
    stop = asyncio.Event()
    task = asyncio.create_task(run_coordinator(store, name=name, ttl_s=ttl_s, settle_s=settle_s, stop=stop))
    try:
        yield
    finally:
        stop.set()
        await asyncio.wait_for(task, 20)


@asynccontextmanager
async def following(store: Store) -> AsyncIterator[ViewFollower]:
    """A follower that runs while the context lasts."""
    follower = ViewFollower(store)
    await follower.start()
    try:
        yield follower
    finally:
        await follower.close()


@asynccontextmanager
async def servers(store: Store, *names: str) -> AsyncIterator[None]:
    """Servers that are registered while the context lasts."""
    async with AsyncExitStack() as closing:
        for session in await asyncio.gather(
            *(register_server(store, name=name, address="h:1", on_lost=lambda reason: None) for name in names)
        ):
            closing.push_async_callback(session.close)
        yield


async def leadership(store: Store) -> Entry | None:
    return await store.get(ELECTION)


async def until_leader(store: Store, name: str) -> Entry:
    entry = await until_key(store, ELECTION, lambda entry: entry is not None and name.encode() in entry.value)
    assert entry is not None
    return entry


async def test_a_leader_writes_the_first_view_and_the_roster(clients: Clients) -> None:
    async with clients() as store, coordinator(store), following(store) as follower:
        config = await create_cluster(store, ClusterConfig(ranges=16, replicas=2, min_servers=3))
        async with servers(store, "a", "b"):
            worker = await register_worker(store, name="w", app="default")
            await until(lambda: follower.roster is not None)
            assert follower.roster is not None
            assert follower.roster.workers == (worker.info,)
            assert follower.view is None
            async with servers(store, "c"):
                view = await follower.wait_for(lambda view: True, 20)
                assert view.epoch == 1
                assert view.cluster == follower.roster.cluster == f"{store.cluster}@{config.id}"
                assert [server.name for server in view.servers] == ["a", "b", "c"]
                await worker.close()
                await until(lambda: follower.roster is not None and follower.roster.workers == ())
                assert follower.view == view


async def test_changes_are_gathered_into_one_view() -> None:
    store = MemoryStore()
    async with coordinator(store, settle_s=0.2), following(store) as follower, servers(store, "a"):
        await create_cluster(store, ClusterConfig(ranges=4))
        await follower.wait_for(lambda view: view.epoch == 1, 20)
        async with servers(store, *"bcdefg"):
            view = await follower.wait_for(lambda view: len(view.servers) == 7, 20)
            assert view.epoch == 2


async def test_a_standby_takes_over_at_once_when_the_leader_stops(clients: Clients) -> None:
    async with clients() as one, clients() as other, following(one) as follower, AsyncExitStack() as standby:
        await create_cluster(one, ClusterConfig(ranges=4, min_servers=1))
        async with coordinator(one, "c0", ttl_s=3600), servers(one, "a"):
            await until_leader(one, "c0")
            await standby.enter_async_context(coordinator(other, "c1"))
            await follower.wait_for(lambda view: view.epoch == 1, 20)
        async with servers(one, "b"):
            await until_leader(one, "c1")
            view = await follower.wait_for(lambda view: view.index("b") >= 0, 20)
            assert view.epoch in (2, 3)  # perhaps one in between that says that a is gone
        await standby.aclose()
        assert await leadership(one) is None


class Held(FaultyStore):
    """A store whose writes of the view wait at a gate: a leader that freezes just before it writes."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.waiting = False
        self.gate = asyncio.Event()
        self.outcomes: list[int | None] = []

    async def compare_and_set_all(self, writes: Mapping[str, tuple[bytes, int | None]], **how: Any) -> int | None:
        if "view" not in writes:
            return await super().compare_and_set_all(writes, **how)
        self.waiting = True
        await self.gate.wait()
        self.outcomes.append(await super().compare_and_set_all(writes, **how))
        return self.outcomes[-1]


async def test_a_deposed_leader_cannot_write(clients: Clients) -> None:
    async with clients() as one, clients() as other, following(other) as follower:
        held = Held(one)
        await create_cluster(other, ClusterConfig(ranges=4, min_servers=1))
        async with servers(other, "a"), coordinator(held, "c0"):
            await until(lambda: held.waiting)
            # It still believes in its office; everybody else knows better.
            await other.delete(ELECTION)
            async with coordinator(other, "c1"):
                await until_leader(other, "c1")
                await follower.wait_for(lambda view: view.epoch == 1, 20)
                async with servers(other, "b"):
                    second = await follower.wait_for(lambda view: view.epoch == 2, 20)
                    held.gate.set()
                    await until(lambda: held.outcomes)
                    assert held.outcomes == [None]
                    entry = await other.get("view")
                    assert entry is not None
                    assert View.decode(entry.value) == second
            # c1 is gone: c0 may lead again, from what it reads now.
            await until_leader(other, "c0")
            async with servers(other, "c"):
                view = await follower.wait_for(lambda view: view.index("c") >= 0, 20)
            assert view.epoch > second.epoch
            # Others may see what is written before its writer has the answer.
            await until(lambda: held.outcomes[-1] is not None)


async def test_a_write_with_the_old_token_is_refused_even_at_the_right_revision(clients: Clients) -> None:
    async with clients() as store:
        old = await store.compare_and_set(ELECTION, b"c0", expect=0)
        assert old is not None
        await store.delete(ELECTION)
        new = await store.compare_and_set(ELECTION, b"c1", expect=0)
        assert new is not None
        assert await store.compare_and_set("view", b"by c0", expect=0, guard=Guard(ELECTION, old)) is None
        assert await store.compare_and_set("view", b"by c1", expect=0, guard=Guard(ELECTION, new)) is not None


@pytest.mark.parametrize("key", ["view", "roster", ELECTION, "config"])
async def test_a_write_of_unknown_outcome_is_read_back(key: str) -> None:
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    await create_cluster(memory, ClusterConfig(ranges=4, min_servers=1))
    faulty.lose_next_write = key
    async with coordinator(faulty, ttl_s=SHORT_S), following(memory) as follower, servers(memory, "a"):
        worker = await register_worker(memory, name="w", app="default")
        await follower.wait_for(lambda view: True, 20)
        await until(lambda: follower.roster is not None)
        async with servers(memory, "b"):
            view = await follower.wait_for(lambda view: len(view.servers) == 2, 20)
        assert view.epoch == 2
        assert follower.roster is not None
        assert follower.roster.version == 1
        await worker.close()


async def test_a_leader_stays_the_leader_through_an_outage_of_the_store() -> None:
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    await create_cluster(memory, ClusterConfig(ranges=4, min_servers=1))
    async with coordinator(faulty), following(memory) as follower, servers(memory, "a"):
        first = await follower.wait_for(lambda view: True, 20)
        term = await leadership(memory)
        faulty.out = True
        async with servers(memory, "b"):
            await until(lambda: faulty.refused)  # the leader wants to write, and finds the store out
            assert follower.view == first
            faulty.out = False
            await follower.wait_for(lambda view: view.epoch == 2, 20)
        assert await leadership(memory) == term


async def test_a_leader_deposed_in_an_outage_campaigns_again() -> None:
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    await create_cluster(memory, ClusterConfig(ranges=4, min_servers=1))
    async with coordinator(faulty, ttl_s=SHORT_S), following(memory) as follower, servers(memory, "a"):
        await follower.wait_for(lambda view: True, 20)
        before = await until_leader(memory, "c0")  # which it may lose on a machine that is busy, and seek again
        faulty.out = True
        await until_key(memory, ELECTION, lambda entry: entry is None)
        faulty.out = False
        after = await until_leader(memory, "c0")
        assert after.create_revision > before.create_revision
        async with servers(memory, "b"):
            await follower.wait_for(lambda view: view.epoch == 2, 20)


async def test_history_lost_by_compaction_does_not_stop_the_leader() -> None:
    memory = MemoryStore()
    await create_cluster(memory, ClusterConfig(ranges=4, min_servers=1))
    async with coordinator(memory.client()), following(memory) as follower, servers(memory, "a"):
        await follower.wait_for(lambda view: True, 20)
        async with servers(memory, "b"):
            memory.compact()
            view = await follower.wait_for(lambda view: len(view.servers) == 2, 20)
            assert view.epoch == 2


async def test_damaged_entries_are_ignored(caplog: pytest.LogCaptureFixture) -> None:
    memory = MemoryStore()
    await create_cluster(memory, ClusterConfig(ranges=4, min_servers=1))
    await memory.put("servers/bad", b"nonsense")
    await memory.put("workers/default/worse", b'{"id":1,"name":"other","incarnation":1,"app":"x"}')
    async with coordinator(memory), following(memory) as follower, servers(memory, "a"):
        view = await follower.wait_for(lambda view: True, 20)
        assert [server.name for server in view.servers] == ["a"]
    assert "an entry is ignored key=servers/bad" in caplog.text
    assert "an entry is ignored key=workers/default/worse" in caplog.text


async def test_the_reason_for_waiting_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    memory = MemoryStore()
    async with coordinator(memory), following(memory) as follower:
        await until(lambda: "no config yet" in caplog.text)
        await create_cluster(memory, ClusterConfig(ranges=4, min_servers=2))
        async with servers(memory, "a"):
            worker = await register_worker(memory, name="w", app="default")
            await until(lambda: follower.roster is not None)
            await until(lambda: "waiting for servers: 1 of 2 registered" in caplog.text)
            await worker.close()
            await until(lambda: follower.roster is not None and not follower.roster.workers)
            assert caplog.text.count("1 of 2 registered") == 1


async def test_a_coordinator_needs_a_usable_name() -> None:
    memory = MemoryStore()
    with pytest.raises(ValueError, match="no usable coordinator name"):
        await run_coordinator(memory, name="", stop=asyncio.Event())


async def test_a_coordinator_stops_while_the_store_is_out() -> None:
    faulty = FaultyStore(MemoryStore())
    faulty.out = True
    async with coordinator(faulty):
        with pytest.raises(StoreUnavailable):
            await faulty.get("a")


async def test_leader_servers_and_followers_outlive_a_restart_of_etcd(new_etcd: Callable[..., Etcd]) -> None:
    etcd = new_etcd()
    url = fresh_url(etcd)
    mine, leading = EtcdStore(url), EtcdStore(url)
    await create_cluster(mine, ClusterConfig(ranges=16, min_servers=2))
    async with coordinator(leading), following(mine) as follower, servers(mine, "a", "b"):
        before = await follower.wait_for(lambda view: True, 20)
        etcd.kill()
        await asyncio.to_thread(etcd.start)
        worker = await register_worker(mine, name="w", app="default")
        await until(lambda: follower.roster is not None and follower.roster.workers == (worker.info,))
        async with servers(mine, "c"):
            after = await follower.wait_for(lambda view: view.index("c") >= 0, 20)
        assert after.epoch == before.epoch + 1
        assert after.servers[:2] == before.servers
        assert isinstance(after, View)
        await worker.close()
    await mine.close()
    await leading.close()


@pytest.mark.parametrize("turns", range(5))
async def test_a_leader_that_is_stopped_as_the_alarm_rings_stops(turns: int) -> None:
    alarm = _Alarm()
    alarm.ring(False)
    waiting = asyncio.create_task(alarm.wait(3600))
    await asyncio.sleep(0.01)
    alarm.ring(True)
    for _ in range(turns):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting


class Narrow(FaultyStore):
    """A store that takes no view while it is narrow."""

    narrow = False

    async def compare_and_set_all(self, writes: Mapping[str, tuple[bytes, int | None]], **how: Any) -> int | None:
        if self.narrow and "view" in writes:
            raise TooLarge("the test takes no view")
        return await super().compare_and_set_all(writes, **how)


async def test_a_view_too_large_to_write_ends_no_term(caplog: pytest.LogCaptureFixture) -> None:
    store = Narrow(MemoryStore())
    await create_cluster(store, ClusterConfig(ranges=4, min_servers=1))
    async with coordinator(store), following(store) as follower, servers(store, "a"):
        await follower.wait_for(lambda view: True, 20)
        before = await leadership(store)
        store.narrow = True
        async with servers(store, "b"):
            await until(lambda: "cannot be written: the test takes no view" in caplog.text)
            store.narrow = False
            async with servers(store, "c"):
                await follower.wait_for(lambda view: view.index("c") >= 0, 20)
        assert await leadership(store) == before


async def test_only_the_newest_of_the_departed_workers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.cluster_tracker.REMEMBERED", 3)
    monkeypatch.setattr("coordinator.cluster_tracker.AT_ONCE", 2)
    memory = MemoryStore()
    await create_cluster(memory, ClusterConfig(ranges=4))
    here = await register_worker(memory, name="here", app="default")
    await memory.put("last-worker/default/here", b'{"id": 1}')
    for i in range(2, 12):
        await memory.put(f"last-worker/default/w{i}", b'{"id": %d}' % i)
    async with coordinator(memory):
        await until_key(memory, "last-worker/default/w8", lambda entry: entry is None)
        left = {entry.key for entry in (await memory.list("last-worker/")).entries}
        assert left == {f"last-worker/default/{name}" for name in ("here", "w9", "w10", "w11")}
    await here.close()


def test_a_failing_server_link_ends_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server would be silent for this leader from then on, and nobody would know why."""

    def fail(self: ServerLinks, member: Member, why: str) -> None:
        raise RuntimeError("nobody has thought of this")

    def dial(server: ServerInfo, cluster: str) -> AbstractAsyncContextManager[ServerLink]:
        raise PermissionError("another answers")

    monkeypatch.setattr(ServerLinks, "_refused", fail)

    async def story() -> None:
        store = MemoryStore()
        await create_cluster(store, ClusterConfig(ranges=8))
        async with servers(store.client(), "s0"):
            with pytest.raises(RuntimeError, match="nobody has thought of this"):
                await asyncio.wait_for(run_coordinator(store, name="c0", stop=asyncio.Event(), dial=dial), 20)

    asyncio.run(story())
