"""Following views."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock, patch

import numpy as np
import pytest

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from coordinator.membership import ViewFollower
from coordinator.memory import MemoryStore
from tests.coordinator.conftest import Clients
from tests.coordinator.support import until


def view(epoch: int) -> View:
    return View(
        cluster="test",
        epoch=epoch,
        ranges=2,
        replicas=1,
        servers=(ServerInfo("a", 1, "h:1"),),
        chains=np.zeros((2, 1), np.int32),
        joining=np.full(2, -1, np.int32),
        since=np.ones(2, np.int64),
        reason=f"reason {epoch}",
    )


async def test_a_follower_sees_the_present_and_every_later_view(clients: Clients) -> None:
    async with clients() as store, clients() as writer:
        await writer.put("view", view(1).encode())
        await writer.put("viewpoint", b"not a view")
        follower = ViewFollower(store)
        await follower.start()
        assert follower.view == view(1)
        assert follower.roster is None
        epochs: list[int] = []
        versions: list[int] = []
        follower.subscribe(lambda new: epochs.append(new.epoch))
        follower.subscribe_roster(lambda new: versions.append(new.version))
        assert epochs == [1]
        assert versions == []
        await writer.put("view", view(3).encode())
        assert await follower.wait_for(lambda new: new.epoch >= 3, 10) == view(3)
        await writer.put("roster", Roster(1, (WorkerInfo(1, "w", 1, "x"),)).encode())
        await until(lambda: versions == [1])
        assert epochs == [1, 3]
        await follower.close()


async def test_a_follower_keeps_the_newest_view_and_survives_damaged_ones() -> None:
    store = MemoryStore()
    follower = ViewFollower(store)
    await follower.start()
    heard: list[int] = []

    def fail(new: View) -> None:
        raise RuntimeError("a subscriber's bug")

    follower.subscribe(fail)
    follower.subscribe(lambda new: heard.append(new.epoch))
    for value in (view(5).encode(), view(4).encode(), b"nonsense", view(5).encode(), view(6).encode()):
        await store.put("view", value)
    await follower.wait_for(lambda new: new.epoch == 6, 10)
    assert heard == [5, 6]
    store.compact()
    await store.put("view", view(7).encode())
    await follower.wait_for(lambda new: new.epoch == 7, 10)
    await follower.close()


async def test_a_timeout_without_a_view_names_the_cluster() -> None:
    store = MemoryStore("demo")
    follower = ViewFollower(store)
    await follower.start()
    with pytest.raises(TimeoutError, match=r"cluster demo .* no view yet"):
        await follower.wait_for(lambda new: True, 0.01)
    await store.put("view", view(1).encode())
    await follower.wait_for(lambda new: True, 10)
    with pytest.raises(TimeoutError, match="at epoch 1: reason 1"):
        await follower.wait_for(lambda new: new.epoch > 1, 0.01)
    await follower.close()


async def test_a_follower_whose_task_fails_reports_it() -> None:
    store, ended = MemoryStore(), asyncio.Queue[asyncio.Task[None]]()
    with patch.object(store, "watch", Mock(side_effect=LookupError("gone"))):
        follower = ViewFollower(store, ended.put_nowait)
        await follower.start()
        assert isinstance((await asyncio.wait_for(ended.get(), 10)).exception(), LookupError)
    await follower.close()


async def test_a_follower_that_starts_on_a_damaged_view_waits_for_a_good_one() -> None:
    store = MemoryStore()
    await store.put("view", b"nonsense")
    follower = ViewFollower(store)
    await follower.start()
    assert follower.view is None
    await store.put("view", view(1).encode())
    await until(lambda: follower.view is not None)
    await follower.close()
