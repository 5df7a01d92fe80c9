"""A server that leaves, with a store that others also write."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from coordinator.core.view import ClusterConfig, ServerInfo, View
from coordinator.membership import LEASE_S, create_cluster
from coordinator.memory import MemoryStore
from coordinator.sessions import register_server
from elasticps.errors import ConfigError
from elasticps.server.core.operations import CutMark
from elasticps.server.process import names
from elasticps.server.process.draining import drain
from elasticps.server.process.lifecycle import ServerRegistration, Surroundings, build_server, serve_until
from elasticps.server.process.names import wait_for_name
from elasticps.server.server import Server
from replication.messages import OperationKind
from tests.coordinator.support import until_key
from tests.server.conftest import Group, Run

DAMAGED = b'{"name": "b", "incarnation": 1'


async def nobody(server: ServerInfo) -> bool:
    """No other server answers."""
    return False


@asynccontextmanager
async def drained(group: Group, damaged: str, ttl_s: float) -> AsyncIterator[tuple[Server, asyncio.Task[str]]]:
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
    draining = asyncio.create_task(drain(store, server, stop, 60, nobody))
    try:
        await until_key(store, "drains/a", lambda entry: entry is not None or draining.done())
        assert not draining.done(), draining.exception()
        yield server, draining
    finally:
        draining.cancel()
        await session.close()


def without(view: View, name: str) -> View:
    """The next view, which one of the servers is left out of; others have all it had."""
    index = view.index(name)
    servers = tuple(info for info in view.servers if info.name != name)
    chains = np.array([[c - (c > index) for c in chain if c not in (index, -1)] or [0] for chain in view.chains])
    shape = len(chains), view.replicas
    padded = np.full(shape, -1, np.int32)
    padded[:, : chains.shape[1]] = chains
    epoch = view.epoch + 1
    return View(view.cluster, epoch, view.ranges, view.replicas, servers, padded, np.full(shape[0], -1, np.int32),
                np.full(shape[0], epoch, np.int64), "left out")  # fmt: skip


def test_a_server_left_out_of_a_view_ignores_later_ones(run: Run) -> None:
    """Its leader may not know yet that it has given up, and lets it join again; what it would be given, it drops."""

    async def test(group: Group) -> None:
        server = await group.start("a")
        await group.start("b")
        first = group.make_view(lambda r: ["b"], lambda r: "a")
        server.adopt(first)
        second = without(first, "a")
        server.adopt(second)
        assert server.removed.done()
        group.view = second
        server.adopt(group.make_view(lambda r: ["b"], lambda r: "a"))
        assert server.serving.epoch == second.epoch
        assert not server.serving.listed

    run(test)


def test_operations_logged_by_a_server_left_out_are_never_committed(run: Run) -> None:
    """Its copy is void: a task under way, such as a cut or a restore, must not take it for one that has the ranges."""

    async def test(group: Group) -> None:
        server = await group.start("a")
        await group.start("b")
        view = group.make_view(lambda r: ["a"])
        server.adopt(view)
        ranges, mark = server.serving.headed, CutMark(1, 0, "a", 1, "")
        assert server.executor.log(server.serving.epoch, OperationKind.CUT, ranges[:1], mark, 64).future.done()
        server.adopt(without(view, "a"))
        assert len(server.serving.headed), "the replica has not followed that view"
        ticket = server.executor.log(server.serving.epoch, OperationKind.CUT, ranges[1:], mark, 64)
        taking = asyncio.create_task(server.admin.cuts.take(2, 0, ""))
        await asyncio.sleep(0)
        assert not ticket.future.done()
        taking.cancel()
        (outcome,) = await asyncio.gather(taking, return_exceptions=True)
        assert isinstance(outcome, asyncio.CancelledError), "the cut is not taken here"

    run(test)


def test_a_server_left_out_ends_though_the_store_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader that reaches it would give it ranges again meanwhile, and count on its copies (seed 4223)."""
    store = MemoryStore("c")
    closed = asyncio.Event()
    draining = asyncio.Event()

    async def never(store: object, session: object) -> bool:
        draining.set()
        await asyncio.Event().wait()
        return False

    monkeypatch.setattr("elasticps.server.process.lifecycle._drained", never)

    def build(*around: Any) -> Server:
        server = build_server(*around)
        monkeypatch.setattr(server.restoring, "close", closed.set)
        return server

    async def test() -> None:
        loop = asyncio.get_running_loop()
        config = await create_cluster(store, ClusterConfig(ranges=2, replicas=1))
        shown: asyncio.Queue[Server | None] = asyncio.Queue()
        stop: asyncio.Future[str] = loop.create_future()
        leave: asyncio.Future[str] = loop.create_future()
        with socket.create_server(("127.0.0.1", 0)) as sock:
            address = f"127.0.0.1:{sock.getsockname()[1]}"
            around = Surroundings(store, config, sock, build, shown.put, nobody)
            living = asyncio.create_task(
                serve_until(around, ServerRegistration("a", address), stop, leave, wait_s=5, drain_timeout_s=5)
            )
            try:
                server = await asyncio.wait_for(shown.get(), 30)
                assert server is not None
                infos = (server.me, ServerInfo("b", 1, "127.0.0.1:1"))
                chains = np.array([[0], [1]], np.int32)
                none = np.full(2, -1, np.int32)
                view = View(server.cluster, 1, 2, 1, infos, chains, none, np.ones(2, np.int64), "first")
                server.adopt(view)
                server.adopt(without(view, "a"))
                await asyncio.wait_for(draining.wait(), 30)
                assert closed.is_set()
            finally:
                living.cancel()
                await asyncio.gather(living, return_exceptions=True)

    asyncio.run(test())


def test_a_damaged_entry_ends_no_draining_server(run: Run) -> None:
    """It would go with ranges that nobody else has."""

    async def test(group: Group) -> None:
        async with drained(group, "servers/b", LEASE_S) as (server, draining):
            moved = without(group.make_view(lambda r: ["b"]), "a")
            await asyncio.sleep(0)
            server.adopt(moved)
            assert await asyncio.wait_for(draining, 30) == ""

    run(test)


def test_a_server_with_a_damaged_entry_requests_its_drain_again(run: Run) -> None:
    """It writes its entry anew when it renews its lease."""

    async def test(group: Group) -> None:
        async with drained(group, "servers/a", 0.3):
            pass

    run(test)


def test_a_name_with_a_damaged_entry_is_refused_with_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "_LEASE_S", 0.0)

    async def test() -> None:
        store = MemoryStore("c")
        await store.put("servers/a", DAMAGED)
        with pytest.raises(ConfigError, match=r"under servers/a cannot be read: not a server: .* --take-over"):
            await wait_for_name(store, "a", "127.0.0.1:1", 5)

    asyncio.run(test())
