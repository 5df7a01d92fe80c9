"""Damaged keys in the store are left out by every reader and end no process."""

from __future__ import annotations

import asyncio
import json

import pytest

from coordinator.cluster_tracker import ClusterTracker
from coordinator.core.errors import Damaged, UnknownServer
from coordinator.core.keys import Failover, known_key, loss_key, merge_losses
from coordinator.core.store import Entry, Listing, Put
from coordinator.core.view import ClusterConfig, View
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster, list_drains, request_drain
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server
from elasticps.checkpoint.range_recovery import RangeRecovery
from elasticps.checkpoint.restore import RestorePlan, keep_restoring
from elasticps.checkpoint.schedule import CheckpointSchedule
from elasticps.dashboard.core.model import Model
from elasticps.metrics.cluster import ClusterMetrics
from elasticps.system.coordination import read_servers
from tests.coordinator.support import until, until_key

DEEP = b"[" * 100_000
KEYS = (
    "last-worker/default/w",
    "drains/s",
    "begin-anew",
    "workers/default/w",
    "workers/x/y/z",
    "workers/",
    "servers/s",
    "tables/ads/x",
    "tables/x",
    "checkpoints/wanted/ads/1",
)
VALUES = (
    DEEP, b"", b"[]", b"null", b'{"id": 1e999, "incarnation": 1e999, "ranges": [1e999], "given_up": []}',
    b'{"id": "x", "incarnation": [], "ranges": 3, "given_up": {}}', b'{"ranges": [], "given_up": [7]}',
)  # fmt: skip


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("value", VALUES)
async def test_a_coordinator_keeps_leading_beside_damaged_keys(value: bytes, first: bool) -> None:
    """Workers may write some of these keys: one that is hostile would end every coordinator, and each that starts."""
    store, stop = MemoryStore(), asyncio.Event()
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1, min_servers=1))
    if first:
        for key in KEYS:
            await store.put(key, value)
    schedule = CheckpointSchedule(store, None, 0.0)
    leads = asyncio.create_task(run_coordinator(store, name="c", stop=stop, while_leading=schedule.run))
    try:
        if not first:
            await until_key(store, "election", lambda entry: entry is not None)
            for key in KEYS:
                await store.put(key, value)
        session = await register_server(store, name="a", address="h:1", on_lost=lambda reason: None)
        entry = await until_key(store, "view", lambda entry: entry is not None or leads.done())
        assert entry is not None
        assert not leads.done()
        assert [server.name for server in View.decode(entry.value).servers] == ["a"]
        await session.close()
    finally:
        stop.set()
        await asyncio.wait_for(leads, 20)


async def test_damaged_server_entries_are_left_out_of_the_list() -> None:
    store = MemoryStore()
    session = await register_server(store, name="a", address="h:1", on_lost=lambda reason: None)
    for name, value in enumerate(VALUES):
        await store.put(f"servers/{name}", value)
    await store.put("servers/z", session.info.to_json())  # which would hide the one of that name
    assert [server.name for server in await read_servers(store)] == ["a"]
    with pytest.raises(UnknownServer, match="is no server: servers/z names a server 'a'"):
        await request_drain(store, "z")
    await session.close()


async def test_a_request_to_drain_that_is_too_deep_is_left_out() -> None:
    store = MemoryStore()
    await store.put("drains/a", DEEP)
    await store.put("drains/b", b'{"incarnation": 2}')
    assert await list_drains(store) == {"b": 2}


@pytest.mark.parametrize("name", ["\x01", "@", "", "a/b"])
async def test_a_request_to_drain_an_impossible_server_is_left_out(name: str) -> None:
    """The leader deletes those about servers that are gone, and the store refuses keys that are none."""
    entry = Entry(f"drains/{name}", b'{"incarnation": 1}', 1, 1)
    assert ClusterTracker("c", Listing((entry,), 1)).drains_done() == []
    store = MemoryStore()
    store._data.entries[entry.key] = entry
    assert await list_drains(store) == {}


@pytest.mark.parametrize("value", [DEEP, b'{"epoch": 1e999, "detected": 1, "written": 2}'])
def test_a_damaged_failover_is_reported(value: bytes) -> None:
    with pytest.raises(ValueError, match="failover"):
        Failover.from_json(value)


@pytest.mark.parametrize(
    "value", [DEEP, b"[]", b"null", b"{}", b'{"committed": "x"}', b'{"committed": 1e999}', b"\xff"]
)
def test_a_damaged_entry_of_a_worker_about_a_loss_ends_no_coordinator(value: bytes) -> None:
    """Its metrics read it as it comes, and what fails there ends it."""
    loss = {"epoch": 3, "workers": [{"id": 5, "name": "w", "have": 2, "to": 7}]}
    entries = {loss_key(3): json.dumps(loss).encode(), known_key(3, 5, "w"): value}
    assert merge_losses(entries) == [loss]
    metrics = ClusterMetrics(MemoryStore(), "c0")
    for revision, (key, found) in enumerate(entries.items(), 1):
        metrics._note(Put(Entry(key, found, revision, revision)))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rates/ads/t", b'{"table": 1e999, "lr": 1}'),
        ("rates/ads/t", DEEP),
        ("tables/ads/t", json.dumps({"id": 3, "spec": DEEP.decode()}).encode()),
        ("checkpoints/newest", b'{"cut": 1e999, "time": 1}'),
        ("election", DEEP),
    ],
)
def test_damaged_keys_end_no_dashboard(key: str, value: bytes) -> None:
    model = Model("c", 0.0)
    model.follow(1.0, Put(Entry(key, value, 1, 1)))
    model.follow(2.0, Put(Entry("rates/ads/u", b'{"table": 4, "lr": 1}', 2, 2)))


@pytest.mark.parametrize("value", [*VALUES, b"{}", b'{"tables": {"t": 7}}', b"\0" * 40])
async def test_a_coordinator_survives_a_damaged_restore_request(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """One with --restore ended, each time that it was started."""
    for read in (RestorePlan.from_json, RangeRecovery.from_json):
        with pytest.raises(Damaged, match=r"in etcd holds .* makes no sense .*: delete it"):
            read(value)
    store = MemoryStore()
    await store.put("restoring", value)
    restoring = asyncio.create_task(keep_restoring(store))
    await until(lambda: "a restore cannot go on" in caplog.text)
    await store.delete("restoring")
    await asyncio.wait_for(restoring, 20)
    assert caplog.text.count("a restore cannot go on") == 1
