"""What members read and write in the store: the cluster, its numbers, requests to drain, views and rosters.

How a process becomes a member, and stays one, is in `sessions`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, TypeVar

from coordinator.core import fields
from coordinator.core.differences import (
    ROSTER_CHANGES,
    VIEW_CHANGES,
    RosterDifference,
    ViewDifference,
    apply_encoded,
    apply_encoded_roster,
    follow_roster,
    follow_view,
)
from coordinator.core.errors import StoreUnavailable, UnknownServer, Unreadable
from coordinator.core.keys import (
    CHANGES,
    CONFIG,
    DRAINS,
    KNOWN,
    LAST_WORKER,
    LEAVES,
    LOSSES,
    NUMBERS,
    ROSTER,
    SERVERS,
    VIEW,
    config_of,
    drained,
    leaves,
    merge_losses,
    number_of,
    other_cluster,
    roster_of,
    server_of,
    view_of,
)
from coordinator.core.names import check_name, worker_name
from coordinator.core.records import left_out, read
from coordinator.core.store import Entry, Put, Reset, Store
from coordinator.core.view import ClusterConfig, Roster, ServerInfo, View
from replication.chain import Member

log = fields.logger(__name__)

_T = TypeVar("_T")

LEASE_S = 5.0  # how long a member stays registered without a word from it

_ARRIVES_S = 0.03  # within this a view mostly comes from elsewhere, too
_READ_AGAIN_S = 0.2  # pause while the store does not answer
AT_ONCE = 64  # requests under way to the store, of one caller
FAREWELL_S = 1.0  # a lease that the store does not take back by then runs out by itself


async def farewell(store: Store, lease: int) -> None:
    """Gives a lease back, if the store takes it within `FAREWELL_S`: a process that ends waits no longer."""
    with suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(FAREWELL_S):
            await store.revoke(lease)


async def create_cluster(store: Store, config: ClusterConfig) -> ClusterConfig:
    """Creates the cluster, or returns the config of the one that exists.

    Raises ValueError if the existing one differs in more than `min_servers`.
    """
    made = config if config.id else replace(config, id=secrets.token_hex(6))
    while (entry := await store.get(CONFIG)) is None:
        if await store.compare_and_set(CONFIG, made.to_json(), expect=0) is not None:
            return made
    found = config_of(entry)
    found.check_protocol(store.cluster)
    if (found.ranges, found.replicas) != (config.ranges, config.replicas):
        raise ValueError(f"cluster {store.cluster} exists with {found}, which differs from {config}")
    return found


async def new_number(store: Store) -> int:
    """Returns a number above 0 that this cluster never gives out again, above all that it gave out before."""
    entry = await store.get(CONFIG)
    while True:
        revision = await store.put(NUMBERS, b"")
        before, entry = entry, await store.get(CONFIG)
        if entry == before:
            break  # else the store may have been replaced in between, and numbers count from another base
    return number_of(entry, revision)


async def new_numbers(store: Store, count: int) -> tuple[list[int], Entry | None]:
    """Returns many numbers at once, as `new_number` gives them, and the config that they count from: they hold as long
    as it has not changed."""
    entry = await store.get(CONFIG)
    revisions: list[int] = []
    while len(revisions) < count:
        several = min(AT_ONCE, count - len(revisions))
        revisions += await asyncio.gather(*(store.put(NUMBERS, b"") for _ in range(several)))
    return [number_of(entry, revision) for revision in revisions], entry


async def request_drain(store: Store, name: str, *, leaves: bool = False) -> ServerInfo:
    """Asks for everything that a server holds to be moved to others; returns the incarnation that is to drain.

    leaves: the server's process has been asked to end, so that it does not stay, whatever becomes of this request. A
    request that the others cannot fulfil, such as for the last server, waits, and the view's reason says so. When
    nothing is left at the server, a view leaves it out. Raises UnknownServer if none of that name is registered.
    """
    while True:
        entry = await store.get(SERVERS + check_name("server", name))
        if entry is None:
            names = [e.key.removeprefix(SERVERS) for e in (await store.list(SERVERS)).entries]
            there = f"there are {', '.join(names)}" if names else "there are none"
            raise UnknownServer(f"cluster {store.cluster} has no server {name} registered; {there}")
        try:
            server = server_of(entry.key, entry.value)
        except ValueError as error:
            raise UnknownServer(f"what cluster {store.cluster} has registered is no server: {error}") from None
        request = await store.get(DRAINS + name)
        before = {} if request is None else _drains([request])
        if server.member in before and before[server.member] >= leaves:
            return server
        value = json.dumps({"incarnation": server.incarnation, **({LEAVES: True} if leaves else {})}).encode()
        expect = 0 if request is None else request.revision
        if await store.compare_and_set(DRAINS + name, value, expect=expect) is not None:
            return server


async def cancel_drain(store: Store, name: str) -> bool:
    """Takes a request to drain back; ranges that have moved stay where they are. Returns False if there was none."""
    return await store.delete(DRAINS + check_name("server", name))


async def list_drains(store: Store) -> dict[str, int]:
    """Returns the servers that are asked to drain, and which incarnation of each."""
    return {member.name: member.incarnation for member in await read_drains(store)}


async def read_drains(store: Store) -> dict[Member, bool]:
    """Returns the members that are asked to drain, and for each whether its process is about to end, as after SIGTERM.
    A server whose process is not serves on as long as it holds anything."""
    return _drains((await store.list(DRAINS)).entries)


def _drains(entries: Iterable[Entry]) -> dict[Member, bool]:
    found = {}
    for entry in entries:
        with suppress(ValueError):  # the leader logs what makes no sense
            found[drained(entry.key, entry.value)] = leaves(entry.value)
    return found


async def newest_view(store: Store, known: View | None, timeout_s: float = 0.0) -> View | None:
    """Reads the newest view; from one that is known by the differences in the store, where these suffice. None if there
    is none. Raises Unreadable if it makes no sense. timeout_s: of each call, as for `Store.get`."""
    return await _newest(store, VIEW, VIEW_CHANGES, known, follow_view, view_of, timeout_s)


async def newest_roster(store: Store, known: Roster | None) -> Roster | None:
    """Reads the newest roster, as `newest_view` does the newest view."""
    return await _newest(store, ROSTER, ROSTER_CHANGES, known, follow_roster, roster_of, 0.0)


async def _newest(
    store: Store,
    key: str,
    changes: str,
    known: _T | None,
    follow: Callable[[_T, Iterable[bytes]], _T | None],
    decode: Callable[[Entry], _T],
    timeout_s: float,
) -> _T | None:
    if known is not None:
        entries = (await store.list(changes, timeout_s=timeout_s)).entries
        with suppress(ValueError):
            if (newer := follow(known, [entry.value for entry in entries])) is not None:
                return newer
    entry = await store.get(key, timeout_s=timeout_s)
    return None if entry is None else decode(entry)


class ViewFollower:
    """Follows the newest view and roster in the store, by their differences; whole they are read where there is a gap.
    Callbacks run in the event loop, in order.

    ended: called with the task that follows, when it is over; known: returns the newest view that its owner has, which
    others send it, too
    """

    def __init__(
        self,
        store: Store,
        ended: Callable[[asyncio.Task[None]], object] = lambda task: None,
        known: Callable[[], View | None] | None = None,
    ) -> None:
        self._ended = ended
        self._known = known
        self.view: View | None = None
        self.roster: Roster | None = None
        self._store = store
        self._on_view: list[Callable[[View], None]] = []
        self._on_roster: list[Callable[[Roster], None]] = []
        self._changed = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Reads the present view and roster, then follows them."""
        revision = (await self._store.list(CHANGES)).revision
        await self._read(VIEW)
        await self._read(ROSTER)
        task = asyncio.create_task(self._follow(revision), name="following views and rosters")
        task.add_done_callback(self._ended)
        self._tasks.append(task)

    def subscribe(self, callback: Callable[[View], None]) -> None:
        """Calls back for each newer view, and at once if there is one already. Views between may be left out."""
        self._on_view.append(callback)
        if self.view is not None:
            callback(self.view)

    def subscribe_roster(self, callback: Callable[[Roster], None]) -> None:
        """Calls back for each newer roster, and at once if there is one already."""
        self._on_roster.append(callback)
        if self.roster is not None:
            callback(self.roster)

    async def wait_for(self, predicate: Callable[[View], bool], timeout_s: float) -> View:
        """Waits for a view, from the present one on, that satisfies `predicate`. Raises TimeoutError, which says what
        the newest view is."""

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while self.view is None or not predicate(self.view):
                    await self._changed.wait()
                return self.view
        except TimeoutError:
            at = "no view yet" if self.view is None else f"at epoch {self.view.epoch}: {self.view.reason}"
            raise TimeoutError(f"cluster {self._store.cluster} did not get there in {timeout_s:g} s; {at}") from None

    async def close(self) -> None:
        """Stops following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, after: int) -> None:
        async with aclosing(self._store.watch(CHANGES, after=after)) as changes:
            async for change in changes:
                if isinstance(change, Reset):
                    await self._read_again(VIEW)
                    await self._read_again(ROSTER)
                elif isinstance(change, Put) and (key := self._gap(change.entry)):
                    if key == VIEW and self._known is not None:
                        await asyncio.sleep(_ARRIVES_S)
                        key = self._gap(change.entry)
                    if key:
                        await self._read_again(key)
                async with self._changed:
                    self._changed.notify_all()

    def _gap(self, entry: Entry) -> str:
        """Follows a difference. Returns the key that has to be read if there is a gap, else ""."""
        try:
            if entry.key.startswith(VIEW_CHANGES):
                return "" if self._follow_view(entry.value) else VIEW
            if entry.key.startswith(ROSTER_CHANGES):
                return "" if self._follow_roster(entry.value) else ROSTER
        except ValueError as error:
            log.warning("not adopted", key=entry.key, revision=entry.revision, why=error)
            return VIEW if entry.key.startswith(VIEW_CHANGES) else ROSTER
        return ""

    def _follow_view(self, data: bytes) -> bool:
        epoch, known = ViewDifference.decode(data).epoch, None if self._known is None else self._known()
        if known is not None and (self.view is None or known.epoch > self.view.epoch):
            self._take_view(known)
        if self.view is None or self.view.epoch >= epoch:
            return self.view is not None
        view = apply_encoded(self.view, data)
        if view is not None:
            self._take_view(view)
        return view is not None

    def _follow_roster(self, data: bytes) -> bool:
        difference = RosterDifference.decode(data)
        if self.roster is None or self.roster.version >= difference.version:
            return self.roster is not None
        roster = apply_encoded_roster(self.roster, data)
        if roster is not None:
            self._take_roster(roster)
        return roster is not None

    async def _read_again(self, key: str) -> None:
        """Reads a view or roster whole, as soon as the store answers."""
        while True:
            try:
                return await self._read(key)
            except StoreUnavailable:
                await asyncio.sleep(_READ_AGAIN_S)

    async def _read(self, key: str) -> None:
        entry = await self._store.get(key)
        if entry is None:
            return
        try:
            if key == VIEW:
                self._take_view(view_of(entry))
            else:
                self._take_roster(roster_of(entry))
        except Unreadable as error:  # one bad value must not end the following
            log.warning("not adopted", key=entry.key, revision=entry.revision, why=error)

    def _take_view(self, view: View) -> None:
        if self.view is not None and view.cluster != self.view.cluster:
            log.warning("a view is ignored", reason=other_cluster(self.view.cluster, view.cluster))
        elif self.view is None or view.epoch > self.view.epoch:
            self.view = view
            _tell(self._on_view, view)

    def _take_roster(self, roster: Roster) -> None:
        known = self.roster
        if known is None or (roster.cluster == known.cluster and roster.version > known.version):
            self.roster = roster
            _tell(self._on_roster, roster)


def _tell(callbacks: list[Callable[[_T], None]], value: _T) -> None:
    for callback in callbacks:
        try:
            callback(value)
        except Exception:  # any: a subscriber's failure is its own, and the others must get the value
            log.exception("a subscriber failed")


async def last_workers(store: Store) -> dict[str, Entry]:
    """Returns the records below `last-worker/` by the workers' names. Of two records of one name, the one that an
    earlier version wrote is older."""
    entries = (await store.list(LAST_WORKER)).entries
    paths = sorted((entry.key.removeprefix(LAST_WORKER) for entry in entries), key=lambda path: "/" in path)
    by_path = {entry.key.removeprefix(LAST_WORKER): entry for entry in entries}
    return {worker_name(path): by_path[path] for path in paths}


async def losses_of(store: Store) -> list[dict[str, Any]]:
    """Returns the records of what range recoveries lost, oldest first, without those that make no sense."""
    found = {}
    for entry in [*(await store.list(LOSSES)).entries, *(await store.list(KNOWN)).entries]:
        with left_out():
            if entry.key.startswith(LOSSES):
                read(entry.key, entry.value, ranges=list, cut=int, url=str, rows=int, lacking=list)
            merge_losses({entry.key: entry.value})
            found[entry.key] = entry.value
    return merge_losses(found)
