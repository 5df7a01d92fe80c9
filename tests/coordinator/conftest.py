"""Coordination's fixtures: tests that are coroutines, an etcd of their own, and stores on either backend."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import uvloop

from coordinator.core.store import Store
from coordinator.etcd import EtcdStore
from coordinator.memory import MemoryStore
from tests.coordinator.support import Etcd, fresh_url

TEST_LIMIT_S = 120.0

Clients: TypeAlias = Callable[[], AbstractAsyncContextManager[Store]]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine, in a loop of its own that must end with no task left.

    On etcd that is uvloop, as in the real processes; in memory asyncio's own, whose stack traces tell more.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    on_etcd = {"shared_etcd", "new_etcd"} & set(pyfuncitem.fixturenames) or "etcd" in pyfuncitem.name
    _run(test, uvloop.new_event_loop() if on_etcd else asyncio.new_event_loop())
    return True


def _run(test: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test, TEST_LIMIT_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:  # grpc ends its own a moment after a channel is closed
            _, left = await asyncio.wait(left, timeout=20)
        assert not left, f"tasks left running: {left}"

    try:
        loop.run_until_complete(limited())
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
            loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    """One etcd for all tests that leave it running."""
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    etcd.start()
    try:
        yield etcd
    finally:
        etcd.kill()


@pytest.fixture
def new_etcd(tmp_path: Path) -> Iterator[Callable[..., Etcd]]:
    """Starts etcds that one test may kill as it likes; they end with it."""
    with ExitStack() as ending:

        def start(**settings: Any) -> Etcd:
            etcd = Etcd(tmp_path / "etcd", **settings)
            ending.callback(etcd.kill)
            etcd.start()
            return etcd

        yield start


@pytest.fixture(params=["memory", "etcd"])
def clients(request: pytest.FixtureRequest) -> Clients:
    """Opens clients of one new cluster, on each backend in turn."""
    if request.param == "memory":
        first = MemoryStore()

        @asynccontextmanager
        async def memory() -> AsyncIterator[Store]:
            store = first.client()
            yield store
            await store.close()

        return memory
    url = fresh_url(request.getfixturevalue("shared_etcd"))

    @asynccontextmanager
    async def etcd() -> AsyncIterator[Store]:
        store = EtcdStore(url)
        try:
            yield store
        finally:
            await store.close()

    return etcd
