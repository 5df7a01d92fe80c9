"""`elasticps status` tells what is wrong instead of ending in a stack."""

from __future__ import annotations

import json

import pytest

from coordinator.connect import open_store
from coordinator.core.view import ClusterConfig
from coordinator.membership import create_cluster
from elasticps.cli.status import _render, look
from elasticps.system import background
from tests.conftest import NewUrl
from tests.coordinator.test_adoption import view

KEYS = (
    "config", "view", "roster", "election", "numbers", "servers/a", "workers/default/w", "incarnations/servers/a",
    "last-worker/default/w", "tables/default/t", "drains/a", "rates/default/t", "on-loss/default/t", "restoring",
    "begin-anew", "restore-fills", "failover", "losses/000000000003", "losses-known/default/000000000003/1",
    "losses-held-up", "checkpoints/newest", "checkpoints/wanted/1", "checkpoints/last", "restored",
)  # fmt: skip
VALUES = (b"\0" * 40, b"", b"[]", b"{}", b"null", b"7", b'{"epoch": 3, "workers": [7]}', b"[" * 100_000)


async def _fill(url: str, key: str, value: bytes) -> None:
    store = await open_store(url)
    await create_cluster(store, ClusterConfig(ranges=2, replicas=2))
    await store.put("view", view(7, store.cluster).encode())
    await store.put(key, value)
    await store.close()


@pytest.mark.parametrize("key", KEYS)
def test_status_works_with_damaged_values_under_every_key(etcd_url: NewUrl, key: str) -> None:
    for value in VALUES:
        url = etcd_url()
        background.run(_fill(url, key, value))
        found = background.run(look(url, 1.0))
        json.dumps(found)
        _render(found)
        assert not found["healthy"]
        if key in ("config", "view", "roster", "restoring") and value == VALUES[0]:
            assert any(f"the key {key} in etcd holds b'\\x00" in line for line in found["trouble"])
        if key not in ("election", "config"):
            assert any("no coordinator leads" in line for line in found["trouble"])
