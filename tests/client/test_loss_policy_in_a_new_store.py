"""A worker outlives the store: it puts its tables' policies for lost ranges back into a new, empty store."""

from __future__ import annotations

from dataclasses import replace

from coordinator.core.view import ClusterConfig
from coordinator.memory import MemoryStore
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import Runtime
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import ASP
from tests.client.fake_cluster import chains
from tests.client.fakes import FakeServer
from tests.coordinator.support import until_key


def test_a_tables_policy_for_lost_ranges_is_put_back_into_a_new_store() -> None:
    """Without it a cluster that lost its store, and ranges later, waited for a person."""
    server = FakeServer("a")
    view = server.view = chains([server.info], [[0]])
    runtime, store = Runtime(), MemoryStore("fake")
    config = ClusterConfig(view.ranges)
    runtime.run(store.put("config", config.to_json()), 30.0)
    runtime.run(store.put("view", view.encode()), 30.0)
    try:
        with Client(Registry(store, runtime, "memory"), "w", ASP(), window=4, timeout=30.0, app="default") as ps:
            table = ps.table("t", dim=4, optimizer=Accumulate(), on_loss="restore")
            table.pull([1])
            key = "on-loss/default/t"

            async def replace_store() -> None:
                policy = await store.get(key)
                assert policy is not None
                for entry in (await store.list("")).entries:
                    await store.delete(entry.key)
                await store.put("view", view.encode())
                await store.put("config", replace(config, base=1000).to_json())
                await until_key(store, "tables/default/t", lambda entry: entry is not None)
                await until_key(store, "last-worker/default/w", lambda entry: entry is not None)
                found = await store.get(key)
                assert found is not None, "nobody knows any more that it is to come back by itself"
                assert found.value == policy.value

            runtime.run(replace_store(), 30.0)
    finally:
        server.kill()
