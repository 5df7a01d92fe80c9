"""The end of draining servers: several drain together, or have too little time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from coordinator.core.errors import StoreUnavailable
from coordinator.core.keys import SERVERS, VIEW
from coordinator.core.store import Entry
from coordinator.core.view import ServerInfo
from coordinator.membership import read_drains, request_drain
from coordinator.memory import MemoryStore
from elasticps.server.process import draining
from elasticps.server.process.draining import drain
from elasticps.server.server import Server
from tests.coordinator.support import until_key
from tests.server.conftest import Group, Run, until

SOON_S = 0.05
STAYS = "stays, though its time is over"
A_AND_B = "16 of which have no copy at a server that stays (b has copies, but drains or does not answer)"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LOOK_S", 0.01)


class Store(MemoryStore):
    """A store that may fall silent."""

    silent = False

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        if self.silent and key == VIEW:
            await asyncio.Event().wait()
        if self.silent:
            raise StoreUnavailable("no answer", indefinite=False)
        return await super().get(key, timeout_s=timeout_s)


class Scene:
    """Servers a, b and c, which are registered; `show` gives every range a chain."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.store = Store("c")
        self.stop: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.draining: asyncio.Task[str] | None = None
        self.stay = {"b", "c"}
        self.checked = list[str]()
        self.successor: Entry | None = None

    async def _stays(self, server: ServerInfo) -> bool:
        self.checked.append(server.name)
        if self.successor is not None:
            await self.store.put(self.successor.key, self.successor.value)
        return server.name in self.stay

    async def show(self, *chain: str) -> None:
        view = self.group.make_view(lambda r: chain)
        await self.store.put(VIEW, view.encode())
        self.group.adopt(view)

    def drain_a(self, timeout_s: float = SOON_S) -> asyncio.Task[str]:
        server = self.group.servers["a"]
        self.draining = asyncio.create_task(drain(self.store, server, self.stop, timeout_s, self._stays))
        return self.draining


@asynccontextmanager
async def scene_of(group: Group, *chain: str) -> AsyncIterator[Scene]:
    scene = Scene(group)
    for name in ("a", "b", "c"):
        server = await group.start(name)
        await scene.store.put(SERVERS + name, server.me.to_json())
    await scene.show(*chain)
    try:
        yield scene
    finally:
        if scene.draining is not None:
            scene.draining.cancel()


def test_two_draining_servers_stay_until_a_third_has_their_shared_ranges(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            await request_drain(scene.store, "b", leaves=True)
            ends = scene.drain_a()
            await until(lambda: STAYS in caplog.text)
            assert A_AND_B in caplog.text
            assert not ends.done()
            await scene.show("a", "b", "c")
            assert await asyncio.wait_for(ends, 30) == "SIGTERM"

    run(test)


def test_a_draining_server_logs_the_ranges_it_waits_for(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            await request_drain(scene.store, "b")
            scene.drain_a(60)
            await until(lambda: f'hands over waits_for="16 ranges left, {A_AND_B}"' in caplog.text)

    run(test)


def test_a_draining_server_ends_on_time_if_another_has_all_its_ranges(run: Run) -> None:
    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b", "c") as scene:
            await request_drain(scene.store, "b", leaves=True)
            assert await asyncio.wait_for(scene.drain_a(), 30) == "SIGTERM"

    run(test)


def test_a_copy_at_a_server_that_does_not_answer_does_not_count(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """It may have died: its lease has not run out yet, and the view still lists it."""

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            scene.stay = {"c"}
            ends = scene.drain_a()
            await until(lambda: STAYS in caplog.text)
            assert f"{A_AND_B}; no answer from b" in caplog.text
            assert set(scene.checked) == {"b"}
            assert not ends.done()
            await scene.show("a", "b", "c")
            assert await asyncio.wait_for(ends, 30) == "SIGTERM"

    run(test)


def test_a_copy_does_not_count_where_another_incarnation_answers(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A server that was started again serves under its old name and address, without what it had."""

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            me = group.servers["b"].me
            again = replace(me, incarnation=me.incarnation + 1)
            scene.successor = Entry(SERVERS + "b", again.to_json(), 0, 0)
            ends = scene.drain_a()
            await until(lambda: STAYS in caplog.text)
            assert scene.checked == ["b"]
            assert not ends.done()

    run(test)


def test_servers_that_all_end_do_not_wait_for_each_other(run: Run) -> None:
    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            for name in ("b", "c"):
                await request_drain(scene.store, name, leaves=True)
            assert await asyncio.wait_for(scene.drain_a(600), 30) == "SIGTERM"

    run(test)


def test_a_server_drained_by_an_operator_is_waited_for(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """Its process does not end before it holds nothing: where all are asked to drain, it is the one that stays."""

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            await request_drain(scene.store, "b", leaves=True)
            await request_drain(scene.store, "c")
            ends = scene.drain_a()
            await until(lambda: STAYS in caplog.text)
            assert not ends.done()

    run(test)


def test_a_cancelled_drain_is_requested_again_as_the_process_ends_anyway(run: Run) -> None:
    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            ends = scene.drain_a(60)
            for _ in range(2):
                await until_key(scene.store, "drains/a", lambda entry: entry is not None)
                assert await read_drains(scene.store) == {group.servers["a"].member: True}
                await scene.store.delete("drains/a")
            assert not ends.done()

    run(test)


def test_a_draining_server_without_a_store_stays_until_a_second_signal(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows then which servers stay; nor does it have to wait out a question that is not answered."""

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b", "c") as scene:
            scene.store.silent = True
            ends = scene.drain_a()
            await until(lambda: STAYS in caplog.text)
            assert not ends.done()
            scene.stop.set_result("SIGTERM")
            assert await asyncio.wait_for(ends, 30) == ""

    run(test)


@pytest.mark.parametrize("sign", ["a server", "a coordinator"])
def test_a_draining_server_ends_at_once_if_the_whole_cluster_is_gone(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    """As when a namespace of Kubernetes is deleted."""
    monkeypatch.setattr(draining, "GONE_S", SOON_S)

    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b") as scene:
            scene.store.silent = True
            scene.stay = {"b"} if sign == "a server" else set()
            coordinator = Mock()
            leaders = group.servers["a"].leaders
            if sign == "a coordinator":
                leaders.add(coordinator)
            looks, look = 0, draining._ask

            async def count(store: Any, server: Server) -> Any:
                nonlocal looks
                looks += 1
                return await look(store, server)

            monkeypatch.setattr(draining, "_ask", count)
            ends = scene.drain_a(600)
            await until(lambda: looks > 10 * SOON_S / draining.LOOK_S)
            assert not ends.done()
            assert set(scene.checked) == ({"b", "c"} if sign == "a server" else set())
            scene.stay = set()
            leaders.remove(coordinator)
            assert await asyncio.wait_for(ends, 30) == "SIGTERM"
            assert "ends at once: no server stays" in caplog.text

    run(test)


def test_a_draining_server_waits_for_a_store_that_comes_back(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(group: Group) -> None:
        async with scene_of(group, "a", "b", "c") as scene:
            scene.store.silent = True
            scene.stay = set()
            ends = scene.drain_a(600)
            await until(lambda: bool(scene.checked))
            scene.store.silent = False
            await until_key(scene.store, "drains/a", lambda entry: entry is not None)
            assert not ends.done()

    run(test)
