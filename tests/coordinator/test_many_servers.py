"""Large clusters: the first view is planned beside the event loop, and costs grow with what moves or changes."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from coordinator import leader
from coordinator.core import balance
from coordinator.core.balance import even_out
from coordinator.core.keys import SERVERS, worker_key
from coordinator.core.planner import Plan, plan
from coordinator.core.ring import Node, place
from coordinator.core.share import Counts, Floats
from coordinator.core.store import Delete, Entry
from coordinator.core.view import ClusterConfig, ServerInfo
from coordinator.etcd import EtcdStore
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server, register_worker
from replication.chain import Member
from tests.coordinator.support import Etcd, FaultyStore, fresh_url, until, until_key
from tests.coordinator.test_leader import coordinator, following, leadership, servers

HELD_S = 20.0  # the longest that a test holds a planner up
RENEWED_S = 0.3  # a lease


class CountingStore(FaultyStore):
    """Counts calls."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.calls: Counter[str] = Counter()
        self.renewed = threading.Event()  # twice since the last `clear`

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        self.calls["get"] += 1
        return await super().get(key, timeout_s=timeout_s)

    async def keep_alive(self, lease: int) -> float:
        self.calls["keep_alive"] += 1
        if self.calls["keep_alive"] % 2 == 0:
            self.renewed.set()
        return await super().keep_alive(lease)


async def test_a_leader_renews_its_lease_while_the_first_view_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore(MemoryStore())

    def slow(*args: Any) -> Plan | None:
        if args[0] is not None:
            return plan(*args)
        store.renewed.clear()
        assert store.renewed.wait(HELD_S), "the lease of the office is not renewed meanwhile"
        return plan(*args)

    monkeypatch.setattr(leader, "plan", slow)
    await create_cluster(store, ClusterConfig(ranges=16, replicas=2, min_servers=2))
    async with coordinator(store, ttl_s=RENEWED_S), following(store) as follower, servers(store, "a", "b"):
        view = await follower.wait_for(lambda view: True, 2 * HELD_S)
        assert [server.name for server in view.servers] == ["a", "b"]


async def test_a_first_view_is_planned_again_if_a_server_leaves_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    store, left, planned = MemoryStore(), threading.Event(), list[int]()

    def slow(*args: Any) -> Plan | None:
        decision = plan(*args)
        if args[0] is None and decision is not None and decision.view is not None:
            planned.append(len(decision.view.servers))
            assert left.wait(HELD_S)
        return decision

    monkeypatch.setattr(leader, "plan", slow)
    await create_cluster(store, ClusterConfig(ranges=16, replicas=2, min_servers=2))
    async with servers(store, "a", "b", "c"), coordinator(store), following(store) as follower:
        await until(lambda: planned)
        async with aclosing(store.watch(SERVERS, after=(await store.list("")).revision)) as changes:
            await store.delete(SERVERS + "b")
            async for change in changes:  # the leader, which watched before, has seen it
                if isinstance(change, Delete):
                    break
        left.set()
        view = await follower.wait_for(lambda view: True, HELD_S)
        assert view.epoch == 1
        assert [server.name for server in view.servers] == ["a", "c"]
        assert planned == [3, 2]


async def test_members_that_nobody_touches_renew_their_leases_and_read_nothing() -> None:
    store = CountingStore(MemoryStore())
    lost = list[str]()
    worker = await register_worker(store, name="w", app="default", ttl_s=RENEWED_S, on_lost=lost.append)
    server = await register_server(store, name="s", address="h:1", ttl_s=RENEWED_S, on_lost=lost.append)

    async def renewals(count: int) -> int:
        until_calls, reads = store.calls["keep_alive"] + count, store.calls["get"]
        await until(lambda: store.calls["keep_alive"] >= until_calls)
        return store.calls["get"] - reads

    await renewals(6)  # the first ones read what may have changed before they watched
    assert await renewals(12) == 0
    assert await store.delete(worker_key("w"))
    await until_key(store, worker_key("w"), lambda entry: entry is not None and entry.value == worker.info.to_json())
    assert not lost
    await server.close()
    await worker.close()


@pytest.mark.parametrize(("count", "ranges"), [(50, 512), (100, 1024)])
def test_the_scores_of_a_move_do_not_grow_with_the_cluster(
    count: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, moves = list[int](), list[balance.Move]()
    scores, apply = balance._Field._scores, balance._Field.apply

    def counted(field: balance._Field, targets: Counts, rows: Counts) -> Floats:
        scored.append(len(targets) * len(rows))
        return scores(field, targets, rows)

    def applied(field: balance._Field, move: balance.Move) -> None:
        moves.append(move)
        apply(field, move)

    monkeypatch.setattr(balance._Field, "_scores", counted)
    monkeypatch.setattr(balance._Field, "apply", applied)
    nodes = {Member(f"s{i}", 1): Node(f"s{i}", zone=f"z{i % 3}") for i in range(count)}
    chains = even_out(place(list(nodes.values()), ranges, 2), tuple(nodes), nodes)
    assert np.bincount(chains.ravel()).max() <= 1.15 * 2 * ranges / count + 1
    assert moves
    assert sum(scored) <= 1000 * len(moves)


@pytest.mark.slow
async def test_hundreds_of_servers_that_register_at_once_get_a_first_view(new_etcd: Callable[..., Etcd]) -> None:
    """Planning it may take longer than a lease lasts."""
    count, ranges, store = 300, 4096, EtcdStore(fresh_url(new_etcd()), timeout_s=30)
    await create_cluster(store, ClusterConfig(ranges=ranges, replicas=2, min_servers=count))
    infos = [ServerInfo(f"s{i}", 1, f"127.0.0.1:{1000 + i}", zone=f"z{i % 3}") for i in range(count)]
    for at in range(0, count, 50):
        await asyncio.gather(*(store.put(SERVERS + info.name, info.to_json()) for info in infos[at : at + 50]))
    async with coordinator(store, ttl_s=3.0), following(store) as follower:
        view = await follower.wait_for(lambda view: True, 240)
        assert view.epoch == 1
        assert len(view.servers) == count
        assert np.bincount(view.chains.ravel()).max() <= 1.15 * 2 * ranges / count + 1
        entry = await leadership(store)
        await store.delete(SERVERS + "s7")
        view = await follower.wait_for(lambda view: view.index("s7") < 0, 60)
        assert view.chains[:, 0].min() >= 0
        assert await leadership(store) == entry, "the leader led all the time"
    await store.close()
