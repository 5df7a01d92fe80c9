"""Learning rates that are set for all workers of an application while they train.

A rate is a property of the step, which its worker computes, so that servers need not know it. What `set_lr` was given
last is in etcd under `rates/<application>/<table>`, and every worker watches that: one that is started again follows,
too, whatever rate its script has.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, MutableMapping
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

from coordinator.core.keys import RATES
from coordinator.core.records import read
from coordinator.core.store import Entry, Put, Reset, Store
from elasticps.model.optimizers import Schedule, ServerOptimizer, number

log = logging.getLogger(__name__)


class SetRate(NamedTuple):
    """What was set for a table; lr None: nothing any more. revision: that of the write, 0 if nobody knows."""

    table: int  # its id
    lr: float | None
    revision: int


def with_rate(optimizer: ServerOptimizer, lr: float) -> ServerOptimizer:
    """The optimizer with another rate."""
    return replace(optimizer, lr=lr)  # type: ignore[type-var]  # all of them are dataclasses


def same_rate(one: object, other: object) -> bool:
    """Schedules are equal if their function is the same object."""
    if isinstance(one, Schedule) and isinstance(other, Schedule):
        return one.function is other.function
    return one == other


class SetRates:
    """What is set, by table. Coroutines are for the control loop, which alone changes anything; all threads ask `of`.

    heard(name) is called there for each change. belongings: what this worker puts back into a store that was made anew.
    """

    def __init__(
        self, store: Store, app: str, heard: Callable[[str], None], belongings: MutableMapping[str, bytes]
    ) -> None:
        self._store = store
        self._prefix = f"{RATES}{app}/"
        self._heard = heard
        self._belongings = belongings
        self._rates: dict[str, SetRate] = {}
        self._following: asyncio.Task[None] | None = None

    def of(self, name: str, table: int) -> SetRate | None:
        """What was set last for the table of that name and id."""
        rate = self._rates.get(name)
        return rate if rate is not None and rate.table == table else None

    async def follow(self) -> None:
        """Reads what is set, then hears of what others set."""
        listing = await self._store.list(self._prefix)
        for entry in listing.entries:
            self._take(entry)
        self._following = asyncio.create_task(self._watch(listing.revision), name="following rates")

    async def set(self, name: str, table: int, lr: float | None) -> None:
        """Writes it, for all workers; this one has heard of it when this returns."""
        key, value = self._prefix + name, json.dumps({"table": table, "lr": lr}).encode()
        while True:
            entry = await self._store.get(key)
            before = 0 if entry is None else entry.revision
            revision = await self._store.compare_and_set(key, value, expect=before)
            if revision is not None:
                self._take(Entry(key, value, revision, revision))
                return

    async def forget(self, name: str) -> None:
        """Of a table that is dropped."""
        self._belongings.pop(self._prefix + name, None)
        await self._store.delete(self._prefix + name)

    async def close(self) -> None:
        """Hears of nothing any more."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)

    async def _watch(self, after: int) -> None:
        async with aclosing(self._store.watch(self._prefix, after=after)) as changes:
            async for change in changes:
                if isinstance(change, Put):
                    self._take(change.entry)
                elif isinstance(change, Reset):  # maybe of a store made anew, whose revisions are lower
                    self._rates = {name: rate._replace(revision=0) for name, rate in self._rates.items()}
                    for entry in change.listing.entries:
                        self._take(entry)

    def _take(self, entry: Entry) -> None:
        name = entry.key.removeprefix(self._prefix)
        known = self._rates.get(name)
        if known is not None and known.revision >= entry.revision:
            return
        try:
            fields = read(entry.key, entry.value, table=int, lr=object)
            lr = None if fields["lr"] is None else number(fields["lr"], "lr")
            self._rates[name] = SetRate(fields["table"], lr, entry.revision)
            self._heard(name)
        except ValueError as error:
            log.warning("the learning rate under %s makes no sense: %s", entry.key, error)
        else:
            self._belongings[entry.key] = entry.value
