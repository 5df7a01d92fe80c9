"""A worker's own record in the store is damaged while it trains: it is put back, and the worker goes on."""

from __future__ import annotations

from coordinator.membership import create_cluster, register_worker
from coordinator.memory import MemoryStore
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
