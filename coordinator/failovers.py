"""Writes into the store how long the newest failover took: for people, nothing else reads it."""

from __future__ import annotations

import asyncio

from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import FAILOVER, Failover
from coordinator.core.store import Store

log = fields.logger(__name__)


class Failovers:
    """Writes failovers beside the leader, which waits for none of it; a failover that cannot be written is left out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: Failover | None = None
        self._noted = asyncio.Event()

    def note(self, epoch: int, detected: float, written: float) -> None:
        """Notes a failover, to be written."""
        self._newest = Failover(epoch, detected, written)
        self._noted.set()

    async def run(self) -> None:
        """Writes noted failovers until cancelled."""
        while True:
            await self._noted.wait()
            self._noted.clear()
            assert self._newest is not None
            try:
                await self._store.put(FAILOVER, self._newest.to_json())
            except CoordinationError as error:
                log.info("a failover is not noted", epoch=self._newest.epoch, error=error)
