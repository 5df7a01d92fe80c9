"""The office of the leader: how a coordinator gets it, keeps it, and ends the term of one that the servers have lost.

The office is the key `election` under a lease; its create revision, the term, is the fencing token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from coordinator.cluster_tracker import ClusterTracker
from coordinator.core import fields
from coordinator.core.errors import Fenced, LeaseLost, StoreUnavailable
from coordinator.core.health import TICK_S
from coordinator.core.keys import ELECTION
from coordinator.core.lost_keys import LastGood
from coordinator.core.store import Guard, Store
from coordinator.server_links import ServerLinks
from coordinator.sparing import Sparing

log = fields.logger(__name__)

_SPARING = Sparing(2, 60.0)
RENEW_S = 1.0  # how often a leader renews its lease, at least
OTHERS_FIRST_S = 1.0  # for so long a coordinator that hears too few servers leaves a vacant office to others


async def campaign(
    store: Store, name: str, ttl_s: float, lines: ServerLinks | None, last_good: LastGood
) -> tuple[int, Guard]:
    """Waits until this coordinator has the office; returns its lease and its fencing token. Keeps `last_good` up to
    date."""
    while True:
        await _vacancy(store, lines, last_good)
        if lines is not None and lines.ill:
            await asyncio.sleep(OTHERS_FIRST_S)
        lease = await store.grant(ttl_s)
        with suppress(LeaseLost):
            token = await store.compare_and_set(ELECTION, json.dumps({"name": name}).encode(), expect=0, lease=lease)
            if token is not None:
                return lease, Guard(ELECTION, token)
        await store.revoke(lease)


async def _vacancy(store: Store, lines: ServerLinks | None, last_good: LastGood) -> None:
    """Stands by until the office is vacant."""
    tracker, vacant = ClusterTracker(store.cluster, await store.list(""), last_good), asyncio.Event()

    def changed(_: object = None) -> None:
        if lines is not None:
            lines.look_at(tracker)
        if not tracker.state.term:
            vacant.set()

    changed()
    if not vacant.is_set():
        depose = [] if lines is None else [_depose(store, tracker, lines)]
        await first_of(tracker.follow(store, changed), vacant.wait(), *depose)


async def _depose(store: Store, tracker: ClusterTracker, lines: ServerLinks) -> None:
    """Ends the term of a leader that the servers have lost."""
    while True:
        term = lines.lost_term()
        if term and term == tracker.state.term and await store.delete(ELECTION, expect=term):
            log.warning("deposes the leader: half of the servers or more have lost it, none has it", term=term)
            return
        await asyncio.sleep(TICK_S / 2)


async def keep_leadership(store: Store, lease: int, ttl_s: float, answered: Callable[[], None]) -> None:
    """Renews the lease of the office. Raises Fenced when it is lost. answered: called at each answer of the store."""
    while True:
        await asyncio.sleep(min(RENEW_S, ttl_s / 3))
        try:
            await store.keep_alive(lease)
            answered()
        except LeaseLost as error:
            raise Fenced(f"the office ran out: {error}") from error
        except StoreUnavailable as error:
            if (left_out := _SPARING.due("renew")) is not None:
                log.warning("the office cannot be renewed, trying on", error=error, left_out=left_out)


async def first_of(*work: Coroutine[Any, Any, object]) -> None:
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
