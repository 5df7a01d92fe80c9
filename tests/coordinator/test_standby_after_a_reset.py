"""A coordinator outlives its cluster: what it was told of the one before counts for nothing in the next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from coordinator.adoption import reset
from coordinator.core.keys import VIEW
from coordinator.core.store import Entry
from coordinator.core.view import ClusterConfig, View
from coordinator.leader import run_coordinator
from coordinator.membership import create_cluster
from coordinator.memory import MemoryStore
from tests.coordinator.rack import FakeServer, Rack
from tests.coordinator.support import until_key


async def test_a_former_standby_promotes_replicas_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody purges what a standby has heard, and epochs begin at 1 again: newer fillings looked older than those."""

    def take(self: FakeServer, view: View) -> None:  # as servers do: each is one of its own cluster
        if view.cluster == clusters[0] and (self.view is None or view.epoch > self.view.epoch):
            self.view = view

    clusters = ["test@one"]
    monkeypatch.setattr(FakeServer, "take", take)
    store = MemoryStore("test")
    rack = Rack(store)
    await create_cluster(store, ClusterConfig(4, 2, min_servers=1, id="one"))
    stops = [asyncio.Event(), asyncio.Event()]

    async def lead(name: str, stop: asyncio.Event) -> asyncio.Task[None]:
        found = asyncio.create_task(run_coordinator(store, name=name, stop=stop, dial=rack.dial))
        await asyncio.sleep(0.1)
        return found

    async def until_view(what: Callable[[View], object]) -> View:
        def so(entry: Entry | None) -> bool:
            return entry is not None and bool(what(View.decode(entry.value)))

        entry = await until_key(store, VIEW, so)
        assert entry is not None
        return View.decode(entry.value)

    def whole(view: View) -> bool:
        return int(np.count_nonzero(view.chains >= 0)) == 8

    first, second = await lead("c0", stops[0]), await lead("c1", stops[1])
    await rack.start("a")
    await until_view(lambda view: view.epoch == 1)
    for _ in range(4):
        await rack.start("b")
        number = rack.servers["b"].info.incarnation
        await until_view(lambda view: whole(view) and view.servers[view.index("b")].incarnation == number)  # noqa: B023
    rack.kill("a", "b")
    await rack.expire("a", "b")
    await asyncio.sleep(0.2)
    await reset(store, "two")
    clusters[0] = "test@two"
    await rack.start("a")
    await until_view(lambda view: view.cluster == "test@two" and view.epoch == 1)
    stops[0].set()
    await first
    await rack.start("b")
    try:
        await asyncio.wait_for(until_view(whole), 8.0)
    finally:
        stops[1].set()
        await second
