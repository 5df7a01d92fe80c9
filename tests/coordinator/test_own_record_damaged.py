"""A member's own record in the store is damaged while it works: it is put back, and the member goes on."""

from __future__ import annotations

import pytest

from coordinator.errors import CoordinationError
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server, register_worker
from coordinator.view import ClusterConfig
from tests.coordinator.support import until, until_key


async def test_a_worker_goes_on_whose_record_was_damaged() -> None:
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    session = await register_worker(store, name="w", app="x", ttl_s=0.3, on_lost=lost.append)
    record = b'{"id": %d}' % session.info.id
    await store.put("last-worker/w", record)
    session.took_part = True
    session.belongings["last-worker/w"] = record
    await store.put("last-worker/w", b'{"id": ')
    kept = session.deadline
    await until(lambda: lost or session.deadline > kept + 0.5)
    assert lost == []
    await until_key(store, "last-worker/w", lambda entry: entry is not None and entry.value == record)
    await session.close()


async def test_a_server_goes_on_whose_count_of_incarnations_was_damaged() -> None:
    store, lost = MemoryStore("test"), list[str]()
    await create_cluster(store, ClusterConfig(2, id="one"))
    first = await register_server(store, name="s", address="127.0.0.1:1", on_lost=lost.append)
    await first.close()
    session = await register_server(store, name="s", address="127.0.0.1:1", ttl_s=0.3, on_lost=lost.append)
    await store.put("incarnations/servers/s", b"2x")
    await until_key(store, "incarnations/servers/s", lambda entry: entry is not None and entry.value == b"2")
    kept = session.deadline
    await until(lambda: lost or session.deadline > kept + 0.5)
    assert lost == []
    await session.close()


async def test_one_that_starts_is_told_what_to_put_there() -> None:
    store = MemoryStore("test")
    await create_cluster(store, ClusterConfig(2, id="one"))
    await store.put("incarnations/servers/s", b"2x")
    with pytest.raises(CoordinationError, match=r"incarnations/servers/s holds b'2x', which is no number: put there"):
        await register_server(store, name="s", address="127.0.0.1:1", on_lost=lambda reason: None)
