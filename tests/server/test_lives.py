"""A server that is to go, in a store that others write too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from coordinator.membership import LEASE_S, create_cluster, register_server
from coordinator.memory import MemoryStore
from coordinator.view import ClusterConfig, View
from elasticps.errors import ConfigError
from elasticps.server import names
from elasticps.server.lives import _drain
from elasticps.server.names import wait_for_name
from elasticps.server.server import Server
from tests.coordinator.support import until_key
from tests.server.conftest import Group, Run

DAMAGED = b'{"name": "b", "incarnation": 1'


@asynccontextmanager
async def drained(group: Group, damaged: str, ttl_s: float) -> AsyncIterator[tuple[Server, asyncio.Task[None], Any]]:
    """Server "a", which holds all and is to go beside "b", with a damaged entry in the store: when it has asked to be
    drained."""
    server = await group.start("a")
    await group.start("b")
    group.adopt(group.make_view(lambda r: ["a"]))
    store, address = MemoryStore("c"), server.me.address
    await create_cluster(store, ClusterConfig(ranges=2, replicas=1))
    session = await register_server(store, name="a", address=address, ttl_s=ttl_s, on_lost=lambda reason: None)
    await store.put(damaged, DAMAGED)
    stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    draining = asyncio.create_task(_drain(store, server, stop, 60))
    try:
        await until_key(store, "drains/a", lambda entry: entry is not None or draining.done())
        assert not draining.done(), draining.exception()
        yield server, draining, stop
    finally:
        draining.cancel()
        await session.close()


def test_an_entry_that_cannot_be_read_ends_no_server_that_drains(run: Run) -> None:
    """It would go with ranges that nobody else has."""

    async def test(group: Group) -> None:
        async with drained(group, "servers/b", LEASE_S) as (server, draining, stop):
            moved = group.make_view(lambda r: ["b"])
            servers = tuple(info for info in moved.servers if info.name == "b")
            moved = View("c", moved.epoch, moved.ranges, moved.replicas, servers, moved.chains - (moved.chains >= 0),
                         moved.joining, moved.since, "moved")  # fmt: skip
            await asyncio.sleep(0)
            server.adopt(moved)
            await asyncio.wait_for(draining, 30)
            assert not stop.done()

    run(test)


def test_a_server_whose_own_entry_cannot_be_read_asks_again(run: Run) -> None:
    """It writes its entry anew when it renews its lease."""

    async def test(group: Group) -> None:
        async with drained(group, "servers/a", 0.3):
            pass

    run(test)


def test_a_name_whose_entry_cannot_be_read_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_LEASE_S", 0.0)

    async def test() -> None:
        store = MemoryStore("c")
        await store.put("servers/a", DAMAGED)
        with pytest.raises(ConfigError, match=r"under servers/a cannot be read: not a server: .* --take-over"):
            await wait_for_name(store, "a", "127.0.0.1:1", 5)

    asyncio.run(test())
