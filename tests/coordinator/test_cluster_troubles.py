"""Troubles of a cluster are found and reported with advice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from aetcd import rpc

from coordinator.core.errors import CoordinationError, NotPermitted, WritesRefused
from coordinator.core.view import ClusterConfig
from coordinator.etcd import EtcdStore
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.trouble import NO_LEADER, check_writes, find_lost_view, find_trouble
from tests.coordinator.conftest import Clients
from tests.coordinator.support import Etcd, FaultyStore, fresh_url
from tests.coordinator.test_adoption import view


async def healthy() -> MemoryStore:
    store = MemoryStore()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=2))
    await store.put("election", b'{"name": "c0"}')
    await store.put("view", view(7).encode())
    return store


async def test_no_trouble_is_found_in_a_healthy_cluster_or_without_one() -> None:
    assert await find_trouble(await healthy()) == []
    assert await find_trouble(MemoryStore()) == []


async def test_a_cluster_without_a_leader_is_reported() -> None:
    store = await healthy()
    await store.delete("election")
    assert await find_trouble(store) == [NO_LEADER]


@pytest.mark.parametrize("value", [b"\0" * 40, b"", b"[]", b"[" * 100_000])
@pytest.mark.parametrize("key", ["config", "view", "roster"])
async def test_a_damaged_key_is_named_with_its_value(key: str, value: bytes) -> None:
    store = await healthy()
    await store.put(key, value)
    (found,) = await find_trouble(store)
    assert f"the key {key} in etcd holds {value[:20]!r}"[:40] in found
    assert "cluster adopt" in found


async def test_a_missing_config_beside_a_view_is_reported() -> None:
    store = await healthy()
    await store.delete("config")
    (found,) = await find_trouble(store)
    assert found.startswith("etcd has lost the key config")


@pytest.mark.parametrize(
    ("there", "epochs", "lost"),
    [(None, [17, 17], True), (3, [17, 17], True), (17, [17, 17], False), (3, [17, 3], False), (None, [0], False)],
)
async def test_servers_with_a_newer_view_than_the_store_are_reported(
    there: int | None, epochs: list[int], lost: bool
) -> None:
    store = MemoryStore()
    if there is not None:
        await store.put("view", view(there).encode())
    assert ("etcd has lost the key view" in await find_lost_view(store, epochs)) == lost


async def test_a_probe_for_writes_leaves_nothing(clients: Clients) -> None:
    async with clients() as store:
        revision = await store.put("a", b"")
        await check_writes(store)
        assert await store.put("a", b"") == revision + 1
        assert [entry.key for entry in (await store.list("")).entries] == ["a"]


class Closed(FaultyStore):
    async def compare_and_set(self, key: str, value: bytes, **options: Any) -> int | None:
        raise NotPermitted("etcd refused: permission denied")


async def test_a_reader_without_the_right_to_write_finds_no_trouble_with_writes() -> None:
    assert await find_trouble(Closed(await healthy())) == []


async def test_an_etcd_without_space_is_reported_at_once(new_etcd: Callable[..., Etcd]) -> None:
    etcd = new_etcd()
    store = EtcdStore(fresh_url(etcd), timeout_s=3600)  # a test of its own would end before that
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1))
    async with grpc.aio.insecure_channel(etcd.endpoint) as channel:
        activate = rpc.AlarmRequest(action=rpc.AlarmRequest.ACTIVATE, memberID=1, alarm=rpc.NOSPACE)
        await rpc.MaintenanceStub(channel).Alarm(activate)
    for refused in (check_writes(store), store.put("a", b""), store.grant(3.0)):
        with pytest.raises(WritesRefused, match=r"etcd takes no writes.*etcdctl alarm disarm") as caught:
            await refused
        assert not caught.value.indefinite
        assert isinstance(caught.value, CoordinationError)
    assert await store.get("config") is not None
    assert any("etcd takes no writes" in each for each in await find_trouble(store))
    await store.close()
