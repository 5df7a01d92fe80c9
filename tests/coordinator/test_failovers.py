"""Records of the newest failover in the store."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from coordinator.core.errors import StoreUnavailable
from coordinator.core.keys import FAILOVER, Failover
from coordinator.core.store import Guard
from coordinator.failovers import Failovers
from coordinator.memory import MemoryStore
from tests.coordinator.support import until, until_key


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b"null", b'{"epoch": 1, "detected": 2, "written": 1}',
                                   b'{"epoch": 1, "detected": NaN, "written": 1}'])  # fmt: skip
def test_a_damaged_failover_record_is_refused(value: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        Failover.from_json(value)


async def test_the_newest_failover_is_stored_though_an_outage_loses_one(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore("c")
    refused: list[str] = []
    put = store.put

    async def fails(key: str, value: bytes, **more: Guard | None) -> None:
        refused.append(key)
        raise StoreUnavailable("it is out")

    failovers = Failovers(store)
    task = asyncio.create_task(failovers.run())

    try:
        failovers.note(3, 1.25, 1.5)
        entry = await until_key(store, FAILOVER, bool)
        assert entry is not None
        assert Failover.from_json(entry.value) == Failover(3, 1.25, 1.5)
        monkeypatch.setattr(store, "put", fails)
        failovers.note(4, 2.0, 2.5)
        await until(lambda: bool(refused))
        monkeypatch.setattr(store, "put", put)
        failovers.note(5, 3.0, 3.5)
        await until_key(store, FAILOVER, lambda entry: entry and entry.value == Failover(5, 3.0, 3.5).to_json())
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
