"""Drains a server that has been asked to end. It ends when all its ranges have moved, or when its time is over and
servers that stay have copies of all its ranges.

A draining server first writes its request to the store, then reads which other servers drain: of two that drain at the
same time at least one sees the other. So they never both leave with the last copies of a range; both stay until a third
server has it. Only where no server stays at all is there nothing to wait for.

A server that has died is in the store and in the view until its lease has run out. So before a server ends with ranges
still held, it asks the servers whose copies it counts on. A copy at a server that does not answer does not count.

While the store does not answer, a draining server cannot know which servers stay, and waits. But where a whole cluster
is taken away, store first, it would wait for ever: it ends after GONE_S without a sign of life from the store, from any
coordinator, and from any server of its view that stays.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from coordinator.core import fields
from coordinator.core.errors import CoordinationError
from coordinator.core.handover import Handover, find_handover
from coordinator.core.keys import SERVERS, VIEW, server_of
from coordinator.core.reasons import names
from coordinator.core.store import Entry, Store
from coordinator.core.view import ServerInfo, View
from coordinator.membership import read_drains, request_drain
from elasticps.server.server import Server
from replication.chain import Member

log = fields.logger(__name__)

LOOK_S = 0.5
LOG_EVERY_S = 5.0  # between log lines about what a draining server waits for
GONE_S = 30.0

Stays = Callable[[ServerInfo], Awaitable[bool]]
"""Asks another server whether it serves and does not leave; False if it does not answer."""


@dataclass(frozen=True)
class _Found:
    """What a look at the store has found. unknown: why the handover could not be determined, or ""; ends: no server
    stays, and none that drains lives on; view: in the store; silent: servers that did not answer."""

    unknown: str = ""
    handover: Handover | None = None
    ends: bool = False
    view: View | None = None
    silent: frozenset[Member] = frozenset()

    @property
    def safe(self) -> bool:
        """Whether a server that stays has a copy of all that is still here."""
        return self.handover is not None and not self.handover.last.size

    @property
    def reason(self) -> str:
        """The reason of the view."""
        return "" if self.view is None else self.view.reason

    def __str__(self) -> str:
        text = self.unknown or str(self.handover)
        return f"{text}; no answer from {names(sorted(each.name for each in self.silent))}" if self.silent else text


async def drain(store: Store, server: Server, stop: asyncio.Future[str], timeout_s: float, stays: Stays) -> str:
    """Asks the leader to move everything off this server, and waits until it has, or for `stop`, or for `timeout_s`.
    Returns why the server is to end; "" if it was left out of the view, or is to stop.

    When the time is over it stays until servers that stay, and answer, have copies of all that is here; unless there
    was to be no time at all.
    """
    log.info("draining", ranges_held=server.admin.status()["ranges_held"], timeout_s=timeout_s)
    if not server.serving.listed:
        return "SIGTERM, before any view knew it"
    loop = asyncio.get_running_loop()
    drain_log = _DrainLog(loop.time() + timeout_s)
    signs = _SignsOfLife(server, stays)
    while timeout_s > 0 and not (stop.done() or server.removed.done()):
        over = loop.time() >= drain_log.until
        looking = asyncio.create_task(_look(store, server, signs, over))
        await asyncio.wait((looking, stop, server.removed), return_when=asyncio.FIRST_COMPLETED)
        if not looking.done():
            looking.cancel()
            break
        found, left = looking.result(), drain_log.until - loop.time()
        if found.ends:
            log.warning("ends at once: no server stays that could take what it holds")
            break
        if over and found.safe:
            break
        if left <= 0 and not over:
            continue
        drain_log.tell(found, loop.time())
        wait_s = LOOK_S if left <= 0 else min(left, LOOK_S)
        await asyncio.wait((stop, server.removed), timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
    if stop.done() or server.removed.done():
        return ""
    held = server.admin.status()["ranges_held"]
    log.warning("ends with ranges still held: what has no other replica is lost", ranges_held=held)
    return "SIGTERM"


async def _look(store: Store, server: Server, signs: _SignsOfLife, over: bool) -> _Found:
    """Makes sure that the request to drain is in the store, then reads which servers stay. over: the time is over, and
    servers have to confirm the copies that are counted on."""
    found = await _ask(store, server)
    if over and found.safe:
        # Once more: a server that has answered may be another incarnation, which the store knows then.
        found = await _ask(store, server, await signs.silent(found))
    return replace(found, ends=await signs.ended()) if found.unknown else signs.seen(found)


async def _ask(store: Store, server: Server, silent: frozenset[Member] = frozenset()) -> _Found:
    try:
        await request_drain(store, server.me.name, leaves=True)
        # In this order: a server that was not asked to drain when these were read will see that this one was.
        drains, listing, entry = await read_drains(store), await store.list(SERVERS), await store.get(VIEW)
        view = None if entry is None else View.decode(entry.value)
    except (CoordinationError, ValueError) as error:  # or what is there cannot be read
        return _Found(f"cannot ask to be drained, or who else drains: {error}")
    if view is None or view.cluster != server.cluster:
        return _Found("the store has no view of this cluster")
    registered = {_member(each) for each in listing.entries}
    ends = all(drains.get(member) for member in registered.union(other.member for other in view.servers))
    handover = find_handover(view, server.member, registered - drains.keys() - silent)
    return _Found("", handover, ends, view, silent)


def _member(entry: Entry) -> Member:
    """The registered server; for an unreadable entry, an incarnation that never exists."""
    try:
        return server_of(entry.key, entry.value).member
    except ValueError:
        return Member(entry.key.removeprefix(SERVERS), 0)


class _SignsOfLife:
    """When a draining server last saw a sign of life of another process."""

    def __init__(self, server: Server, stays: Stays) -> None:
        self._server = server
        self._stays = stays
        self._loop = asyncio.get_running_loop()
        self._seen_at = self._loop.time()

    def seen(self, found: _Found) -> _Found:
        """Notes that the store has answered."""
        self._seen_at = self._loop.time()
        return found

    async def silent(self, found: _Found) -> frozenset[Member]:
        """Asks the servers whose copies are counted on; returns those that do not confirm that they stay."""
        assert found.view is not None
        assert found.handover is not None
        holders = [each for each in found.view.servers if each.member in found.handover.holders]
        answers = await asyncio.gather(*map(self._stays, holders))
        return frozenset(each.member for each, stays in zip(holders, answers, strict=True) if not stays)

    async def ended(self) -> bool:
        """Looks for signs of life other than the store's; whether there was none for GONE_S."""
        view = self._server.serving.view
        others = () if view is None else [each for each in view.servers if each.member != self._server.member]
        if self._server.leaders.present or any(await asyncio.gather(*map(self._stays, others))):
            self._seen_at = self._loop.time()
        return self._loop.time() - self._seen_at >= GONE_S


class _DrainLog:
    """Logs from time to time what a draining server waits for. until: loop time at which its time is over."""

    def __init__(self, until: float) -> None:
        self.until = until
        self._logged_at = float("-inf")
        self._over = False

    def tell(self, found: _Found, now: float) -> None:
        """Logs what was found now, if it is time."""
        over = now >= self.until
        if over and not self._over:
            log.error(
                "stays, though its time is over: its data may be the last; SIGTERM again ends it",
                waits_for=str(found),
                view=found.reason,
            )
        elif now - self._logged_at < LOG_EVERY_S:
            return
        elif found.unknown:
            log.warning("cannot hand over, trying on", reason=found.unknown)
        else:
            log.info("hands over", waits_for=str(found), left_s=round(self.until - now, 1), view=found.reason)
        self._logged_at, self._over = now, over
