"""Following views."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import Mock, patch

import numpy as np
import pytest

from coordinator.core.store import Entry
from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from coordinator.membership import ViewFollower, newest_roster, newest_view
from coordinator.memory import MemoryStore
from tests.coordinator.conftest import Clients
from tests.coordinator.support import FaultyStore, until, write


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
        await write(writer, view(1))
        await writer.put("changes", b"no change")
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
        await write(writer, view(3), view(1))
        assert await follower.wait_for(lambda new: new.epoch >= 3, 10) == view(3)
        await write(writer, Roster(1, (WorkerInfo(1, "w", 1, "x"),)))
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
    await write(store, view(5))
    await follower.wait_for(lambda new: new.epoch == 5, 10)
    await write(store, view(4))
    for key in ("view", "changes/view/3", "changes/roster/3", "changes/other"):
        await store.put(key, b"nonsense")
    await write(store, view(5))
    await write(store, view(6))
    await follower.wait_for(lambda new: new.epoch == 6, 10)
    assert heard == [5, 6]
    store.compact()
    await write(store, view(7))
    await follower.wait_for(lambda new: new.epoch == 7, 10)
    await follower.close()


async def test_a_timeout_without_a_view_names_the_cluster() -> None:
    store = MemoryStore("demo")
    follower = ViewFollower(store)
    await follower.start()
    with pytest.raises(TimeoutError, match=r"cluster demo .* no view yet"):
        await follower.wait_for(lambda new: True, 0.01)
    await write(store, view(1))
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
    await write(store, view(1))
    await until(lambda: follower.view is not None)
    await follower.close()


class CountingStore(FaultyStore):
    """Notes which keys are read."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reads: list[str] = []

    async def get(self, key: str, *, timeout_s: float = 0.0) -> Entry | None:
        self.reads.append(key)
        return await super().get(key, timeout_s=timeout_s)


def big_view(epoch: int) -> View:
    """A view that takes more than its difference from the one before."""
    one = view(epoch)
    ranges = np.random.default_rng(1).integers(1, epoch, 64, endpoint=True)
    servers = tuple(ServerInfo(f"server-{i}", 1, "h:1") for i in range(40))
    chains, joining = np.zeros((64, 1), np.int32), np.full(64, -1, np.int32)
    return View("test", epoch, 64, 1, servers, chains, joining, ranges, one.reason)


def of_epoch(epoch: int, view: View) -> bool:
    return view.epoch == epoch


async def test_a_follower_reads_nothing_whole_unless_there_is_a_gap() -> None:
    memory = MemoryStore()
    store = CountingStore(memory)
    views = {epoch: replace(big_view(5), epoch=epoch, reason=str(epoch)) for epoch in range(5, 20)}
    rosters = [Roster(i, tuple(WorkerInfo(j, f"w{j}", 1, "x") for j in range(1, i))) for i in range(1, 6)]
    await write(memory, views[5])
    await write(memory, rosters[0])
    follower = ViewFollower(store)
    await follower.start()
    store.reads.clear()
    for epoch in range(6, 16):
        await write(memory, views[epoch], views[epoch - 1])
        assert await follower.wait_for(partial(of_epoch, epoch), 10) == views[epoch]
    for before, after in pairwise(rosters):
        await write(memory, after, before)
    await until(lambda: follower.roster == rosters[-1])
    assert not store.reads
    store.out = True
    await write(memory, views[18], views[17])
    await until(lambda: store.refused > 0)
    store.out = False
    assert await follower.wait_for(lambda new: new.epoch == 18, 10) == views[18]
    assert store.reads[-1] == "view"
    await follower.close()


async def test_a_follower_whose_owner_has_the_newer_view_does_not_read_it() -> None:
    memory = MemoryStore()
    store, known = CountingStore(memory), [None, view(1)]
    follower = ViewFollower(store, known=lambda: known.pop(0) if len(known) > 1 else known[0])
    await follower.start()
    store.reads.clear()
    await write(memory, view(1))
    await follower.wait_for(lambda new: new.epoch == 1, 10)
    assert not store.reads
    await follower.close()


async def test_a_newer_view_is_read_by_its_differences_where_they_suffice() -> None:
    store = CountingStore(MemoryStore())
    views = {epoch: replace(big_view(5), epoch=epoch, reason=str(epoch)) for epoch in range(5, 20)}
    assert await newest_view(store, None) is None
    for epoch in range(5, 16):
        await write(store, views[epoch], views.get(epoch - 1))
    store.reads.clear()
    for known, reads in ((15, []), (10, []), (6, ["view"]), (19, ["view"])):
        assert await newest_view(store, views[known]) == views[15]
        assert store.reads == reads
        store.reads.clear()
    await store.put("changes/view/3", b"nonsense")
    assert await newest_view(store, views[10]) == views[15]
    rosters = [Roster(i, tuple(WorkerInfo(j, f"w{j}", 1, "x") for j in range(1, i))) for i in range(1, 6)]
    assert await newest_roster(store, rosters[0]) is None
    for before, after in pairwise(rosters):
        await write(store, after, before)
    store.reads.clear()
    assert await newest_roster(store, rosters[0]) == rosters[-1]
    assert not store.reads
