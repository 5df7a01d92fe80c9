"""Follows a cluster from outside while a run goes on, through etcd: views, the leader, and the servers that drain."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass

from coordinator.connect import open_store
from coordinator.core.errors import CoordinationError
from coordinator.core.keys import ELECTION, VIEW
from coordinator.core.store import Listing, Put, Reset
from coordinator.core.view import View
from coordinator.membership import ViewFollower, read_drains
from elasticps.system import background
from replication.chain import Member

LOOK_S = 0.25  # between two reads of the leader and of the servers that drain
START_S = 60.0


@dataclass(frozen=True)
class Seen:
    """A view, and when it was seen, in seconds since the start of the load."""

    at: float
    epoch: int
    short: int
    joining: int
    reason: str


class Watch:
    """Follows the newest view, the leader, and the members that drain. seen: every view that etcd held, also one that
    is not newer than the one before, which no follower would adopt."""

    def __init__(self, url: str, began: Callable[[], float]) -> None:
        self.seen: list[Seen] = []
        self.leader = ""
        self.draining: frozenset[Member] = frozenset()
        self._began = began
        self._store = background.run(open_store(url, timeout_s=START_S))
        self._follower = ViewFollower(self._store)
        self._newest = b""
        self._tasks = background.run(self._start())

    @property
    def view(self) -> View | None:
        return self._follower.view

    def close(self) -> None:
        """Stops watching."""
        background.run(self._close())

    async def _start(self) -> list[asyncio.Task[None]]:
        await self._follower.start()
        listing = await self._store.list(VIEW)
        self._note(listing)
        return [asyncio.create_task(each) for each in (self._follow(listing.revision), self._look())]

    async def _follow(self, after: int) -> None:
        async with aclosing(self._store.watch(VIEW, after=after)) as changes:
            async for change in changes:
                if isinstance(change, Reset):
                    self._note(change.listing)
                elif isinstance(change, Put):
                    self._note(Listing((change.entry,), change.entry.revision))

    def _note(self, listing: Listing) -> None:
        for entry in listing.entries:
            if entry.key == VIEW and entry.value != self._newest:  # a watch that begins again repeats it
                self._newest, view = entry.value, View.decode(entry.value)
                short, joining = int((view.chains < 0).any(axis=1).sum()), int((view.joining >= 0).sum())
                self.seen.append(Seen(time.time() - self._began(), view.epoch, short, joining, view.reason))

    async def _look(self) -> None:
        while True:
            with suppress(CoordinationError):
                entry = await self._store.get(ELECTION)
                self.leader = "" if entry is None else str(json.loads(entry.value)["name"])
                self.draining = frozenset(await read_drains(self._store))
            await asyncio.sleep(LOOK_S)

    async def _close(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._follower.close()
        await self._store.close()
        for error in ended:
            if isinstance(error, Exception):  # from then on it has seen no view
                raise error
