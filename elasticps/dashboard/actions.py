"""What may be changed from the page, where that is allowed at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from coordinator.errors import StoreUnavailable
from coordinator.membership import cancel_drain, request_drain
from coordinator.store import Store

TIMEOUT_S = 5.0


class Actions:
    """By whoever has the token; with the rights that the dashboard's own certificate has at the store."""

    def __init__(self, token: str, store: Callable[[], Store | None]) -> None:
        self.token = token
        self._store = store

    async def perform(self, act: str, server: str) -> str:
        """Says what was done. ValueError for what is not known, or as the store raises."""
        store = self._store()
        if store is None:
            raise StoreUnavailable("etcd was not reached yet")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if act == "drain":
                    await request_drain(store, server)
                    return f"{server} drains"
                if act == "cancel-drain":
                    there = await cancel_drain(store, server)
                    return f"{server} stays" if there else f"{server} was not asked to drain"
        except TimeoutError:
            raise StoreUnavailable("etcd does not answer") from None
        raise ValueError(f"no such act: {act!r}")
