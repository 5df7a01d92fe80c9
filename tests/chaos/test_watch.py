"""Views that the watcher of a run records."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from chaos.live import watch
from chaos.live.watch import Watch
from coordinator.core.keys import VIEW
from coordinator.core.view import View
from coordinator.memory import MemoryStore
from elasticps.system import background
from tests.chaos.scenes import view_of
from tests.coordinator.support import write

Eventually = Callable[[Callable[[], bool]], None]

CHAINS = [["s0", "s1"], ["s1", "s0"]]


def put(store: MemoryStore, view: View) -> None:
    async def put_it() -> None:
        await write(store, view)

    background.run(put_it())


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def watching(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    async def open_store(url: str, timeout_s: float) -> MemoryStore:
        return store.client()

    monkeypatch.setattr(watch, "open_store", open_store)
    put(store, view_of(CHAINS, epoch=4))
    watching = Watch("etcd://nowhere/c", lambda: 0.0)
    yield watching
    watching.close()


def epochs(watching: Watch) -> list[int]:
    return [seen.epoch for seen in watching.seen]


def test_an_older_view_is_noted_though_no_process_adopts_it(
    store: MemoryStore, watching: Watch, eventually: Eventually
) -> None:
    put(store, view_of(CHAINS, epoch=5))
    put(store, view_of(CHAINS, epoch=3))
    put(store, view_of([["s0"], ["s1", "s0"]], epoch=5))
    eventually(lambda: len(watching.seen) >= 4)
    assert epochs(watching) == [4, 5, 3, 5]
    assert watching.view is not None
    assert watching.view.epoch == 5


def test_a_view_that_is_read_again_is_seen_once(store: MemoryStore, watching: Watch, eventually: Eventually) -> None:
    background.run(written_again(store))
    put(store, view_of(CHAINS, epoch=6))
    eventually(lambda: len(watching.seen) >= 2)
    assert epochs(watching) == [4, 6]


async def written_again(store: MemoryStore) -> None:
    entry = await store.get(VIEW)
    assert entry is not None
    await write(store, View.decode(entry.value))
