"""Finds what keeps a cluster from changing while training goes on: no leader, an etcd that takes no writes, lost
keys."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from coordinator.core.errors import CoordinationError, Unreadable, WritesRefused
from coordinator.core.keys import CONFIG, ELECTION, RESTORING, ROSTER, VIEW, config_of, roster_of, shown, view_of
from coordinator.core.lost_keys import REMEDY
from coordinator.core.records import read
from coordinator.core.store import Store
from coordinator.core.view import View

NO_LEADER = (
    "no coordinator leads: training goes on, but no server that dies is replaced, none that comes is used, and no "
    "worker can join. Start a coordinator, or see in the logs of those that run why they cannot lead"
)
PROBE = "probe"  # never there
_NEVER = 1 << 62  # a revision that no key has


async def check_writes(store: Store, timeout_s: float = 0.0) -> None:
    """Makes sure that the store takes writes, by one whose condition never holds: it passes through all that a write
    does, and leaves nothing. Raises WritesRefused, or another error of the store, if not."""
    await store.compare_and_set(PROBE, b"", expect=_NEVER, timeout_s=timeout_s)


async def find_trouble(store: Store) -> list[str]:
    """Says what is wrong, and for each what to do; empty if all is well, or there is no cluster. Raises
    StoreUnavailable if the store does not answer."""
    keys = ELECTION, CONFIG, VIEW, ROSTER, RESTORING
    election, config, view, roster, restoring = await asyncio.gather(*map(store.get, keys))
    found = []
    for entry, decode in ((config, config_of), (view, view_of), (roster, roster_of)):
        try:
            if entry is not None:
                decode(entry)
        except Unreadable as error:
            found.append(str(error))
    if restoring is not None:
        try:
            read(RESTORING, restoring.value, url=str, cut=int)
        except ValueError as error:
            text = f"the key {RESTORING} in etcd holds {shown(restoring.value)}, which makes no sense ({error})"
            found.append(f"{text}: no worker can join until it is deleted")
    if config is None and view is not None:
        found.append(
            f"etcd has lost the key {CONFIG}: no server and no worker can start. The coordinator that leads puts it "
            f"back, and any that is started; else {REMEDY}"
        )
    if election is None and config is not None:
        found.append(NO_LEADER)
    try:
        await check_writes(store)
    except WritesRefused as error:
        found.append(str(error))
    except CoordinationError:  # the caller may have no right to write there: then the probe says nothing
        pass
    return found


async def find_lost_view(store: Store, epochs: Collection[int]) -> str:
    """Says that servers follow newer views than etcd has; "" if they do not. epochs: of the views that servers follow,
    as they answered before this call."""
    heard = [epoch for epoch in epochs if epoch]
    if not heard:
        return ""
    entry = await store.get(VIEW)
    try:
        view: View | None = None if entry is None else view_of(entry)
    except Unreadable:
        return ""  # `find_trouble` says so
    if view is not None and min(heard) <= view.epoch:
        return ""
    there = "is gone" if view is None else f"is of epoch {view.epoch}"
    return (
        f"etcd has lost the key {VIEW}: it {there}, and servers follow epoch {max(heard)}. No server that dies is "
        f"replaced until it is put back, as the coordinator that leads does if all servers are heard; else {REMEDY}"
    )
