"""Leaves in the store how the newest failover came about: for those who look, nothing else reads it."""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.records import read
from coordinator.core.store import Store
from coordinator.membership import FAILOVER

log = fields.logger(__name__)


class Failover(NamedTuple):
    """epoch: of the view that left lost servers out; detected, written: Unix time, by the leader's clock."""

    epoch: int
    detected: float
    written: float

    def to_json(self) -> bytes:
        """As the store has it."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, value: bytes) -> Failover:
        """The inverse of `to_json`. ValueError for anything else."""
        said = read(FAILOVER, value, epoch=int, detected=float, written=float)
        found = cls(said["epoch"], said["detected"], said["written"])
        if not 0 <= found.written - found.detected < 3600:
            raise ValueError(f"a failover was found at {found.detected}, and written at {found.written}")
        return found


class Failovers:
    """Writes beside the leader, who waits for none of it; what cannot be written is left out."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._newest: Failover | None = None
        self._news = asyncio.Event()

    def note(self, epoch: int, detected: float, written: float) -> None:
        """There was one."""
        self._newest = Failover(epoch, detected, written)
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            self._news.clear()
            assert self._newest is not None
            try:
                await self._store.put(FAILOVER, self._newest.to_json())
            except CoordinationError as error:
                log.info("a failover is not noted", epoch=self._newest.epoch, error=error)
