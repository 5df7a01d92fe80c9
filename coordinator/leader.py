"""The leader: campaign for the office, plan, write views and the roster, step down.

The office is the key `election` under a lease; its create revision is the fencing token. Every write of the leader is a
compare-and-set over the revision that it planned from, guarded by that token: a deposed leader cannot write, however
late its message arrives. So the leader needs no clock to be safe, and rides out an outage of the store in office.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from coordinator.errors import Fenced, LeaseLost, StoreUnavailable
from coordinator.membership import CONFIG, ROSTER, SERVERS, VIEW, WORKERS
from coordinator.names import check_name
from coordinator.planner import Members, plan, plan_roster
from coordinator.store import Change, Delete, Entry, Guard, Listing, Put, Reset, Store
from coordinator.view import ClusterConfig, Roster, ServerInfo, View, WorkerInfo

log = logging.getLogger(__name__)

ELECTION = "election"

_Info = TypeVar("_Info", ServerInfo, WorkerInfo)

_RETRY_S = 0.2  # pause after an outage; each attempt waits for the store's time-out as well


async def run_coordinator(
    store: Store, *, name: str, ttl_s: float = 3.0, settle_s: float = 0.02, stop: asyncio.Event
) -> None:
    """Leads the cluster, or stands by to, until `stop` is set; then gives the office up so that a standby takes over.

    `ttl_s` is how long the office stays with a leader that has gone silent; changes are gathered for `settle_s` before
    a view is written. Waits for the cluster's config. ValueError if the store holds a view or config of another kind.
    """
    check_name("coordinator", name)
    await _first_of(_serve(store, name, ttl_s, settle_s), stop.wait())


async def _serve(store: Store, name: str, ttl_s: float, settle_s: float) -> None:
    while True:
        try:
            lease, guard = await _campaign(store, name, ttl_s)
            try:
                log.info("%s leads cluster %s", name, store.cluster)
                await _first_of(_keep_office(store, lease, ttl_s), _lead(store, guard, settle_s))
            finally:
                await _resign(store, lease)
        except Fenced as error:
            log.warning("%s steps down: %s", name, error)
        except StoreUnavailable as error:
            log.warning("%s waits for the store: %s", name, error)
            await asyncio.sleep(_RETRY_S)


async def _campaign(store: Store, name: str, ttl_s: float) -> tuple[int, Guard]:
    """Waits until the office is ours; returns its lease and its fencing token."""
    while True:
        listing = await store.list(ELECTION)
        if listing.entries:
            await _vacancy(store, listing)
            continue
        lease = await store.grant(ttl_s)
        with suppress(LeaseLost):
            token = await store.compare_and_set(ELECTION, json.dumps({"name": name}).encode(), expect=0, lease=lease)
            if token is not None:
                return lease, Guard(ELECTION, token)
        await store.revoke(lease)


async def _vacancy(store: Store, listing: Listing) -> None:
    async with aclosing(store.watch(ELECTION, after=listing.revision)) as changes:
        async for change in changes:
            if not isinstance(change, Put):
                return


async def _keep_office(store: Store, lease: int, ttl_s: float) -> None:
    while True:
        await asyncio.sleep(ttl_s / 3)
        try:
            await store.keep_alive(lease)
        except LeaseLost as error:
            raise Fenced(f"the office ran out: {error}") from error
        except StoreUnavailable as error:
            log.warning("the office cannot be renewed, trying on: %s", error)


async def _resign(store: Store, lease: int) -> None:
    with suppress(StoreUnavailable):  # then the lease runs out by itself
        await store.revoke(lease)


async def _lead(store: Store, guard: Guard, settle_s: float) -> None:
    """Plans and writes at each change until fenced. After a lost race or an outage it starts from a fresh listing."""
    while True:
        try:
            await _lead_from(await store.list(""), store, guard, settle_s)
        except StoreUnavailable as error:
            log.warning("the store is out; the view stands as it is: %s", error)
            await asyncio.sleep(_RETRY_S)


async def _lead_from(listing: Listing, store: Store, guard: Guard, settle_s: float) -> None:
    world = _World(store.cluster, listing)

    async def write() -> None:
        while True:
            world.changed.clear()
            world.check_office(guard)
            if not await world.write_next(store, guard):
                return
            await world.changed.wait()
            await asyncio.sleep(settle_s)

    await _first_of(write(), world.follow(store))


class _World:
    """What the leader knows of its cluster: the store's keys, parsed as they come."""

    def __init__(self, cluster: str, listing: Listing) -> None:
        self.changed = asyncio.Event()
        self._cluster = cluster
        self._said = ""
        self._reset(listing)

    def _reset(self, listing: Listing) -> None:
        self._seen = listing.revision
        self._config: ClusterConfig | None = None
        self._view: View | None = None
        self._roster: Roster | None = None
        self._revisions = {VIEW: 0, ROSTER: 0}
        self._term = 0
        self._servers: dict[str, ServerInfo] = {}
        self._workers: dict[str, WorkerInfo] = {}
        for entry in listing.entries:
            self._put(entry)

    async def follow(self, store: Store) -> None:
        """Keeps this up to date; ends only with the store or an error."""
        async with aclosing(store.watch("", after=self._seen)) as changes:
            async for change in changes:
                if self._apply(change):
                    self.changed.set()

    def check_office(self, guard: Guard) -> None:
        """Fenced if the office is no longer ours."""
        if self._term != guard.create_revision:
            raise Fenced("somebody else has the office" if self._term else "the office is vacant")

    async def write_next(self, store: Store, guard: Guard) -> bool:
        """Writes what the planner wants, if anything. False if a race was lost: then this is out of date."""
        if self._config is None:
            self._say(f"cluster {self._cluster} has no config yet")
            return True
        decision = plan(self._view, Members(self._cluster, tuple(self._servers.values())), self._config)
        if decision is not None and decision.view is not None:
            if not await self._write(store, guard, VIEW, decision.view.encode()):
                return False
            self._view = decision.view
            log.info("view %d of cluster %s: %s", decision.view.epoch, self._cluster, decision.reason)
        else:
            self._say("" if decision is None else decision.reason)
        roster = plan_roster(self._roster, self._workers.values())
        if roster is not None:
            if not await self._write(store, guard, ROSTER, roster.roster.encode()):
                return False
            self._roster = roster.roster
            log.info("roster %d of cluster %s: %s", roster.roster.version, self._cluster, roster.reason)
        return True

    async def _write(self, store: Store, guard: Guard, key: str, value: bytes) -> bool:
        revision = await store.compare_and_set(key, value, expect=self._revisions[key], guard=guard)
        if revision is None:
            return False
        self._revisions[key] = revision
        return True

    def _apply(self, change: Change) -> bool:
        """Takes a change in. True if there may be something to plan."""
        if isinstance(change, Reset):
            self._reset(change.listing)
            return True
        if isinstance(change, Put):
            return self._put(change.entry)
        return self._delete(change)

    def _put(self, entry: Entry) -> bool:
        key = entry.key
        if key in self._revisions:
            if entry.revision <= self._revisions[key]:
                return False  # our own write, known since it was answered
            self._revisions[key] = entry.revision
            if key == VIEW:
                self._view = View.decode(entry.value)
            else:
                self._roster = Roster.decode(entry.value)
        elif key == CONFIG:
            self._config = ClusterConfig.from_json(entry.value)
        elif key == ELECTION:
            self._term = entry.create_revision
        elif key.startswith(SERVERS):
            _register(self._servers, key, lambda: ServerInfo.from_json(entry.value))
        elif key.startswith(WORKERS):
            _register(self._workers, key, lambda: WorkerInfo.from_json(entry.value))
        else:
            return False
        return True

    def _delete(self, change: Delete) -> bool:
        if change.key == ELECTION:
            self._term = 0
            return True
        return (self._servers.pop(change.key, None) or self._workers.pop(change.key, None)) is not None

    def _say(self, reason: str) -> None:
        """Logs why nothing is written, when the reason changes."""
        if reason and reason != self._said:
            log.warning("cluster %s: %s", self._cluster, reason)
        self._said = reason


def _register(members: dict[str, _Info], key: str, parse: Callable[[], _Info]) -> None:
    """One member whose entry makes no sense must not keep the leader from serving the others."""
    try:
        info = parse()
        if not key.endswith("/" + info.name):
            raise ValueError(f"it is named {info.name}")
    except ValueError:
        log.exception("the entry under %s is ignored", key)
        members.pop(key, None)
    else:
        members[key] = info


async def _first_of(*work: Coroutine[Any, Any, object]) -> None:
    """Runs all until the first ends, cancels the others, and raises what the first raised."""
    tasks = [asyncio.create_task(part) for part in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
