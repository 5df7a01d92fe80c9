"""Registering, keeping a name through outages, losing it to a newer incarnation; requests to drain."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from coordinator.connect import insist
from coordinator.core.errors import OtherCluster, StoreUnavailable, UnknownServer
from coordinator.core.store import Entry, Guard, Store
from coordinator.core.view import PROTOCOL, ClusterConfig, ServerInfo, WorkerInfo
from coordinator.etcd import EtcdStore
from coordinator.membership import cancel_drain, create_cluster, list_drains, new_number, read_drains, request_drain
from coordinator.memory import MemoryStore
from coordinator.sessions import ServerSession, register_server, register_worker
from tests.coordinator.conftest import Clients
from tests.coordinator.support import WAIT_S, Etcd, FaultyStore, fresh_url, until, until_key

BRIEF_S = 0.3
"""A lease for who is to notice something soon, or to lose its key. A loop that stands still for longer lets it run out:
such a key may be away for a moment at any time."""


async def serve(store: Store, name: str = "s0", ttl_s: float = 60.0) -> tuple[ServerSession, list[str]]:
    """A registered server, and the list that gets the reason when it is lost."""
    lost: list[str] = []
    session = await register_server(store, name=name, address="127.0.0.1:7001", ttl_s=ttl_s, on_lost=lost.append)
    return session, lost


async def registered(store: Store, name: str = "s0") -> ServerInfo | None:
    entry = await store.get(f"servers/{name}")
    return None if entry is None else ServerInfo.from_json(entry.value)


async def until_registered(store: Store, incarnation: int) -> None:
    def same(entry: Entry | None) -> bool:
        return entry is not None and ServerInfo.from_json(entry.value).incarnation == incarnation

    await until_key(store, "servers/s0", same)


async def test_a_cluster_is_created_once(clients: Clients) -> None:
    async with clients() as store:
        config = ClusterConfig(ranges=64, replicas=2, min_servers=3)
        configs = await asyncio.gather(*(create_cluster(store, config) for _ in range(5)))
        made = configs[0]
        assert made.id
        assert configs == [replace(config, id=made.id)] * 5
        assert await create_cluster(store, ClusterConfig(ranges=64, replicas=2, min_servers=1)) == made
        with pytest.raises(ValueError, match=r"ranges=64.*ranges=128"):
            await create_cluster(store, ClusterConfig(ranges=128, replicas=2))


async def test_a_cluster_of_another_protocol_is_refused(clients: Clients) -> None:
    async with clients() as store:
        other = replace(ClusterConfig(), protocol=PROTOCOL - 1, id="x")
        await store.put("config", other.to_json())
        with pytest.raises(ValueError, match=rf"speaks version {PROTOCOL - 1} of the protocol.* version {PROTOCOL}:"):
            await create_cluster(store, other)


async def test_a_server_is_registered_until_it_closes(clients: Clients) -> None:
    async with clients() as store:
        session = await register_server(
            store, name="s0", address="h:1", admin="h:2", zone="z", weight=2.0, on_lost=lambda reason: None
        )
        assert session.info == ServerInfo("s0", 1, "h:1", "h:2", "z", 2.0)
        assert await registered(store) == session.info
        assert session.lease
        assert session.deadline > asyncio.get_running_loop().time()
        await session.close()
        assert await registered(store) is None
        again, _ = await serve(store)
        assert again.info.incarnation == 2
        await again.close()


async def test_a_server_ends_though_the_store_does_not_answer(clients: Clients) -> None:
    async with clients() as store:
        faulty = FaultyStore(store)
        session, _ = await serve(faulty)
        faulty.stuck = "revoke"
        async with asyncio.timeout(WAIT_S):
            await session.close()
        assert faulty.waiting == 1


async def test_a_call_is_repeated_until_the_store_answers() -> None:
    faulty = FaultyStore(MemoryStore())
    faulty.out = True
    with pytest.raises(StoreUnavailable):
        await insist(lambda: faulty.get("config"), 0.05)
    asking = asyncio.create_task(insist(lambda: faulty.get("config"), WAIT_S))
    refused = faulty.refused
    await until(lambda: faulty.refused > refused + 1)
    faulty.out = False
    assert await asking is None


async def test_renewing_keeps_the_name(clients: Clients) -> None:
    async with clients() as store:
        session, lost = await serve(store, ttl_s=1.0)
        first = session.deadline
        await until(lambda: session.deadline > first + 1.0)
        await until_registered(store, session.info.incarnation)
        assert not lost
        await session.close()


async def test_a_newer_incarnation_fences_the_older_one(clients: Clients) -> None:
    async with clients() as one, clients() as other:
        old, old_lost = await serve(one, ttl_s=BRIEF_S)
        new, new_lost = await serve(other)
        await until(lambda: old_lost)
        assert old_lost == ["servers/s0 now belongs to incarnation 2; this is 1"]
        assert await registered(one) == new.info
        await old.close()
        assert await registered(one) == new.info
        assert not new_lost
        await new.close()


async def test_only_the_newest_of_several_servers_of_a_name_stays(clients: Clients) -> None:
    async with clients() as store:
        attempts = await asyncio.gather(*(serve(store, ttl_s=BRIEF_S) for _ in range(5)), return_exceptions=True)
        sessions = [attempt for attempt in attempts if not isinstance(attempt, BaseException)]
        incarnations = [session.info.incarnation for session, _ in sessions]
        assert len(set(incarnations)) == len(incarnations)
        assert max(incarnations) == 5
        await until(lambda: sum(not lost for _, lost in sessions) == 1)
        await until_registered(store, 5)
        for session, _ in sessions:
            await session.close()


async def test_a_lease_that_ended_is_replaced_under_the_same_incarnation(clients: Clients) -> None:
    async with clients() as store:
        session, lost = await serve(store, ttl_s=BRIEF_S)
        before = session.lease
        await store.revoke(before)
        await until_registered(store, 1)
        await until(lambda: session.lease != before)
        assert not lost
        await session.close()
        assert await registered(store) is None


async def test_a_key_that_was_deleted_is_put_back(clients: Clients) -> None:
    async with clients() as store:
        session, lost = await serve(store, ttl_s=BRIEF_S)
        await store.delete("servers/s0")
        await until_registered(store, 1)
        assert not lost
        await session.close()


async def test_a_key_that_was_damaged_is_put_back(clients: Clients) -> None:
    async with clients() as store:
        session = await register_server(store, name="s0", address="h:1", ttl_s=1.0, on_lost=lambda reason: None)
        await store.put("servers/s0", b'{"name": "s0"')
        entry = await until_key(store, "servers/s0", lambda entry: entry and entry.value == session.info.to_json())
        assert entry is not None
        await session.close()
        assert await store.get("servers/s0") is None  # under its lease again


async def test_an_outage_longer_than_the_lease_costs_nothing() -> None:
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    session, lost = await serve(faulty, ttl_s=BRIEF_S)
    faulty.out = True
    await until_key(memory, "servers/s0", lambda entry: entry is None)
    faulty.out = False
    await until_registered(memory, 1)
    assert not lost
    await session.close()


async def test_a_name_taken_during_an_outage_is_lost() -> None:
    memory = MemoryStore()
    faulty = FaultyStore(memory.client())
    old, lost = await serve(faulty, ttl_s=BRIEF_S)
    faulty.out = True
    new, _ = await serve(memory)
    faulty.out = False
    await until(lambda: lost)
    assert "incarnation 2" in lost[0]
    assert await registered(memory) == new.info
    await old.close()
    await new.close()


async def test_registering_without_a_store_is_an_error() -> None:
    faulty = FaultyStore(MemoryStore())
    faulty.out = True
    with pytest.raises(StoreUnavailable):
        await serve(faulty)


async def test_the_deadline_counts_from_when_the_renewal_was_sent() -> None:
    class Slow(FaultyStore):
        sent = 0.0

        async def grant(self, ttl_s: float) -> int:  # of another lease, if the first one has run out
            self.sent = asyncio.get_running_loop().time()
            return await super().grant(ttl_s)

        async def keep_alive(self, lease: int) -> float:
            self.sent = asyncio.get_running_loop().time()
            left = await super().keep_alive(lease)
            await asyncio.sleep(0.1)
            return left

    slow = Slow(MemoryStore())
    session, _ = await serve(slow, ttl_s=0.5)
    first = session.deadline
    await until(lambda: session.deadline > first)
    assert session.deadline <= slow.sent + 0.5
    await session.close()


async def test_a_bug_while_renewing_is_a_loss_not_a_silence() -> None:
    class Broken(FaultyStore):
        async def keep_alive(self, lease: int) -> float:
            raise ZeroDivisionError("a bug")

    session, lost = await serve(Broken(MemoryStore()), ttl_s=BRIEF_S)
    await until(lambda: lost)
    assert lost == ["a bug"]
    await session.close()


async def test_leases_and_names_outlive_a_restart_of_etcd(new_etcd: Callable[..., Etcd]) -> None:
    etcd = new_etcd()
    store = EtcdStore(fresh_url(etcd))
    session, lost = await serve(store, ttl_s=2)
    worker = await register_worker(store, name="w", app="default", ttl_s=2, on_lost=lost.append)
    etcd.kill()
    await until(lambda: session.deadline < asyncio.get_running_loop().time())
    await asyncio.to_thread(etcd.start)
    await until(lambda: session.deadline > asyncio.get_running_loop().time())
    await until_registered(store, 1)
    assert not lost
    await session.close()
    await worker.close()
    await store.close()


async def test_bad_arguments_cost_no_incarnation(clients: Clients) -> None:
    async with clients() as store:
        with pytest.raises(ValueError, match="no usable server name"):
            await register_server(store, name="a/b", address="h:1", on_lost=lambda reason: None)
        with pytest.raises(ValueError, match="server address"):
            await register_server(store, name="a", address="h", on_lost=lambda reason: None)
        with pytest.raises(ValueError, match="no usable worker name"):
            await register_worker(store, name="", app="default")
        with pytest.raises(ValueError, match="no usable app name"):
            await register_worker(store, name="w", app="a b")
        assert (await store.list("")).entries == ()


async def test_worker_ids_are_never_used_again(clients: Clients) -> None:
    async with clients() as store:
        first = await register_worker(store, name="w0", app="default")
        second = await register_worker(store, name="w1", app="default")
        await first.close()
        third = await register_worker(store, name="w0", app="default")
        infos = [session.info for session in (first, second, third)]
        assert 0 < infos[0].id < infos[1].id < infos[2].id
        assert infos == [
            WorkerInfo(i.id, n, i.id, a)
            for i, n, a in zip(infos, ("w0", "w1", "w0"), ("default", "default", "default"), strict=True)
        ]
        entry = await store.get("workers/default/w0")
        assert entry is not None
        assert WorkerInfo.from_json(entry.value) == third.info
        await second.close()
        await third.close()


class Counting(FaultyStore):
    """Counts requests, each of which lets the others go on."""

    requests = 0

    async def put(self, key: str, value: bytes, *, lease: int | None = None) -> int:
        self.requests += 1
        await asyncio.sleep(0)
        return await super().put(key, value, lease=lease)

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        self.requests += 1
        await asyncio.sleep(0)
        return await super().get(key, timeout_s=timeout_s)

    async def compare_and_set(self, *arguments: Any, **options: Any) -> int | None:
        self.requests += 1
        await asyncio.sleep(0)
        return await super().compare_and_set(*arguments, **options)


async def test_many_workers_that_start_at_once_need_few_requests() -> None:
    store = Counting(MemoryStore())
    await create_cluster(store, ClusterConfig(4))
    workers = await asyncio.gather(*(register_worker(store, name=f"w{i}", app="default") for i in range(200)))
    assert len({worker.info.id for worker in workers}) == 200
    assert store.requests <= 200 * 10
    for worker in workers:
        await worker.close()


async def test_an_older_incarnation_of_a_worker_never_comes_back(clients: Clients) -> None:
    """Neither while the newer one is registered, nor after that has left, nor when the cluster has forgotten both."""
    async with clients() as store:
        await create_cluster(store, ClusterConfig(4))
        for remembered in (True, False):
            lost: list[str] = []
            faulty = FaultyStore(store)  # else it might look while the newer one is still there
            old = await register_worker(faulty, name="w", app="default", ttl_s=0.6, on_lost=lost.append)
            old.took_part = faulty.out = True
            await store.put("last-worker/default/w", json.dumps({"id": old.info.id}).encode())
            new = await register_worker(store, name="w", app="default")
            if remembered:
                await store.put("last-worker/default/w", json.dumps({"id": new.info.id}).encode())
            else:
                await store.delete("last-worker/default/w")
            await new.close()
            faulty.out = False
            await until(partial(len, lost))
            assert ("now belongs to" if remembered else "forgotten") in lost[0]
            await old.close()


async def test_registration_in_another_cluster_of_the_same_name_is_refused(
    clients: Clients, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with clients() as store:
        first = await create_cluster(store, ClusterConfig(4))
        session, lost = await serve(store, ttl_s=0.6)
        assert session.cluster == first.identity(store.cluster)
        await store.delete("config")
        second = await create_cluster(store, ClusterConfig(4))
        assert second.id != first.id
        await store.revoke(session.lease)  # as in a store that was made anew
        await store.put("probe", b"")
        with pytest.raises(OtherCluster, match=f"holds cluster {store.cluster}@{second.id}, not"):
            await register_server(
                store, name="s1", address="h:1", on_lost=lost.append, cluster=first.identity(store.cluster)
            )
        before, refused = session.deadline, Counter[str]()
        ours = session.our_cluster

        async def counted() -> Guard | None:
            try:
                return await ours()
            except OtherCluster:
                refused["tries"] += 1
                raise

        monkeypatch.setattr(session, "our_cluster", counted)
        await until(lambda: refused["tries"] >= 3)
        assert await registered(store) is None
        assert session.deadline == before
        await store.put("config", first.to_json())  # somebody has taken ours over
        await until_registered(store, 1)
        assert not lost
        await session.close()


async def test_numbers_start_above_the_base(clients: Clients) -> None:
    async with clients() as store:
        await create_cluster(store, ClusterConfig(4, base=5000))
        numbers = await asyncio.gather(*(new_number(store) for _ in range(20)))
        assert len(set(numbers)) == 20
        assert min(numbers) > 5000


async def test_a_workers_own_keys_are_put_back_into_a_replaced_store() -> None:
    store = MemoryStore()
    config = await create_cluster(store, ClusterConfig(4))
    lost: list[str] = []
    worker = await register_worker(store, name="w", app="default", ttl_s=0.3, on_lost=lost.append)
    worker.took_part = True
    worker.belongings |= {
        "last-worker/default/w": b'{"id": %d}' % worker.info.id,
        "tables/x/t": b"a table",
        "tables/x/u": b"another",
    }
    for entry in (await store.list("")).entries:
        await store.delete(entry.key)
    await store.put("tables/x/u", b"somebody has it already")
    await store.put("config", replace(config, base=worker.info.id).to_json())
    await until_key(store, "tables/x/t", lambda entry: entry is not None and entry.value == b"a table")
    await until_key(store, "tables/x/u", lambda entry: entry is not None and entry.value.startswith(b"somebody"))
    assert not lost
    await worker.close()


class StopsOnce(FaultyStore):
    """A store that does not answer the first write of a key."""

    first = "rates/x/t"

    async def compare_and_set(self, key: str, value: bytes, **how: Any) -> int | None:
        if key == self.first:
            self.first = ""
            raise StoreUnavailable("the test lets this one not through", indefinite=True)
        return await super().compare_and_set(key, value, **how)


async def test_a_worker_restores_its_keys_after_a_new_store_was_frozen() -> None:
    """Many others do the same just then. Its tables, rates that were set and what becomes of losses were forgotten."""
    store = StopsOnce(MemoryStore())
    config = await create_cluster(store, ClusterConfig(4))
    worker = await register_worker(store, name="w", app="default", ttl_s=0.3, on_lost=lambda reason: None)
    worker.took_part = True
    record = b'{"id": %d}' % worker.info.id
    worker.belongings |= {"last-worker/default/w": record, "rates/x/t": b"a rate", "tables/x/t": b"a table"}
    for entry in (await store.list("")).entries:
        await store.delete(entry.key)
    await store.put("config", replace(config, base=worker.info.id).to_json())
    for key, value in worker.belongings.items():
        await until_key(store, key, lambda entry, value=value: entry is not None and entry.value == value)  # type: ignore[misc]
    await worker.close()


async def test_a_request_to_drain_names_the_incarnation_and_can_be_taken_back(clients: Clients) -> None:
    async with clients() as store:
        session, _ = await serve(store)
        assert await request_drain(store, "s0") == session.info
        assert await request_drain(store, "s0") == session.info
        assert await list_drains(store) == {"s0": 1}
        assert await cancel_drain(store, "s0")
        assert not await cancel_drain(store, "s0")
        assert await list_drains(store) == {}
        await session.close()


async def test_a_request_remembers_that_the_process_is_about_to_end() -> None:
    store = MemoryStore()
    session, _ = await serve(store)
    member = session.info.member
    await request_drain(store, "s0")
    assert await read_drains(store) == {member: False}
    await request_drain(store, "s0", leaves=True)
    assert await read_drains(store) == {member: True}
    await request_drain(store, "s0")  # an operator who asks for it as well
    assert await read_drains(store) == {member: True}
    await session.close()


async def test_a_server_that_is_not_there_cannot_be_drained() -> None:
    store = MemoryStore()
    with pytest.raises(UnknownServer, match="cluster test has no server s1 registered; there are none"):
        await request_drain(store, "s1")
    session, _ = await serve(store)
    with pytest.raises(UnknownServer, match="there are s0"):
        await request_drain(store, "s1")
    with pytest.raises(ValueError, match="no usable server name"):
        await request_drain(store, "a/b")
    await session.close()


async def test_a_request_is_about_the_newest_incarnation() -> None:
    store = MemoryStore()
    one, _ = await serve(store)
    await request_drain(store, "s0")
    other, _ = await serve(store)
    assert await request_drain(store, "s0") == other.info
    assert await list_drains(store) == {"s0": 2}
    await store.put("drains/bad", b"[1]")
    assert await list_drains(store) == {"s0": 2}
    await other.close()
    await one.close()
