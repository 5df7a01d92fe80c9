"""The damaged record of a running member is put back, and the member continues."""

from __future__ import annotations

import pytest

from coordinator.core.errors import CoordinationError, Fenced
from coordinator.core.view import ClusterConfig, Roster
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server, register_worker
from tests.coordinator.support import until, until_key


@pytest.mark.parametrize("damaged", [b'{"id": ', None])
async def test_a_worker_goes_on_whose_record_was_damaged_or_deleted(damaged: bytes | None) -> None:
    """A worker that the roster lists was told that it had been away for so long that the cluster had forgotten it."""
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    session = await register_worker(store, name="w", app="default", ttl_s=0.3, on_lost=lost.append)
    record = b'{"id": %d}' % session.info.id
    await store.put("last-worker/default/w", record)
    session.took_part = True
    session.belongings["last-worker/default/w"] = record
    await store.put("roster", Roster(1, (session.info,), "one").encode())
    if damaged is None:
        await store.delete("last-worker/default/w")
    else:
        await store.put("last-worker/default/w", damaged)
    remaining = session.deadline
    await until(lambda: lost or session.deadline > remaining + 0.5)
    assert lost == []
    await until_key(store, "last-worker/default/w", lambda entry: entry is not None and entry.value == record)
    await session.close()


@pytest.mark.parametrize("damaged", [b"2x", b"9" * 5000, b"9" * 30])
async def test_a_server_goes_on_whose_count_of_incarnations_was_damaged(damaged: bytes) -> None:
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    first = await register_server(store, name="s", address="127.0.0.1:1", on_lost=lost.append)
    await first.close()
    session = await register_server(store, name="s", address="127.0.0.1:1", ttl_s=0.3, on_lost=lost.append)
    await store.put("incarnations/servers/s", damaged)
    await until_key(store, "incarnations/servers/s", lambda entry: entry is not None and entry.value == b"2")
    remaining = session.deadline
    await until(lambda: lost or session.deadline > remaining + 0.5)
    assert lost == []
    await session.close()


async def test_incarnations_are_not_reused_in_a_new_store() -> None:
    """It was in no view as `cluster adopt` asked those that are: the next one of its name was another first one."""
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    for _ in range(2):
        await (await register_server(store, name="s", address="h:1", on_lost=lost.append)).close()
    session = await register_server(store, name="s", address="h:1", ttl_s=0.3, on_lost=lost.append)
    for entry in (await store.list("")).entries:
        await store.delete(entry.key)
    await create_cluster(store, ClusterConfig(2, id="one"))
    await until_key(store, "incarnations/servers/s", lambda entry: entry is not None and entry.value == b"3")
    again = await register_server(store, name="s", address="h:2", on_lost=lost.append)
    assert again.info.incarnation == 4
    await until(lambda: lost)
    assert "now belongs to incarnation 4" in lost[-1]
    await session.close()
    await again.close()


async def test_a_server_back_in_a_new_store_does_not_displace_a_newer_one() -> None:
    """Its numbers count from 1 again. It had been frozen, say, and the newer one has ranges by now; later on both could
    have had one number."""
    store, new = MemoryStore("test"), MemoryStore("test")
    lost, ended = list[str](), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    for _ in range(2):
        await (await register_server(store, name="s", address="h:1", on_lost=lost.append)).close()
    session = await register_server(store, name="s", address="h:1", on_lost=lost.append)
    await create_cluster(new, ClusterConfig(2, id="one"))
    newer = await register_server(new, name="s", address="h:2", ttl_s=0.3, on_lost=ended.append)
    assert newer.info.incarnation == 1
    session._store = new
    with pytest.raises(Fenced, match="belongs to incarnation 1, of a store that was made anew; this is 3"):
        await session._renew_once()
    remaining = newer.deadline
    await until(lambda: ended or newer.deadline > remaining + 0.5)
    assert ended == []
    await session.close()
    await newer.close()


async def test_a_server_that_cannot_start_names_the_incarnation_to_write() -> None:
    store = MemoryStore("test")
    await create_cluster(store, ClusterConfig(2, id="one"))
    await store.put("incarnations/servers/s", b"2x")
    with pytest.raises(CoordinationError, match=r"incarnations/servers/s holds b'2x', which is no number: put there"):
        await register_server(store, name="s", address="127.0.0.1:1", on_lost=lambda reason: None)


@pytest.mark.parametrize("key", ["config", "roster", "view"])
async def test_members_outlast_a_damaged_key_of_the_cluster(key: str) -> None:
    """Nobody leads who would put it back; a lease runs out meanwhile."""
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    server = await register_server(store, name="s", address="h:1", ttl_s=0.3, on_lost=lost.append)
    worker = await register_worker(store, name="w", app="default", ttl_s=0.3, on_lost=lost.append)
    good = await store.get(key)
    await store.put(key, b"\0" * 40)
    for session in (server, worker):
        await store.revoke(session.lease)
    leases = server.lease, worker.lease
    await until(lambda: lost or (server.lease, worker.lease) > leases)
    await store.put(key, b"" if good is None else good.value)
    await until_key(store, "workers/default/w", lambda entry: lost or entry is not None)
    await until_key(store, "servers/s", lambda entry: lost or entry is not None)
    assert lost == []
    await server.close()
    await worker.close()
