"""What was lost where ranges began anew, as the store keeps it.

The leader notes which ranges, and of each worker the steps that are missing, as far as servers know. A worker that
lives knows it exactly, and adds that; it has the last word on itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from coordinator.core.names import app_of_worker
from coordinator.core.records import check, left_out, read
from coordinator.core.store import Store

LOSSES = "losses/"  # below it, by the epoch in which the ranges began anew
KNOWN = "losses-known/"  # <application>/<that epoch>/<worker id>: up to which clock it knew its steps committed
WAIT, RESTORE = "wait", "restore"  # what a table's `on_loss` may be
HELD_UP = "losses-held-up"  # why ranges that are lost do not come back


def key_of(epoch: int) -> str:
    """Where a loss is told."""
    return f"{LOSSES}{epoch:012d}"


def known_key(epoch: int, worker: int, name: str) -> str:
    """Where the worker with this id and name adds what it knows."""
    return f"{KNOWN}{app_of_worker(name)}/{epoch:012d}/{worker}"


async def losses_of(store: Store) -> list[dict[str, Any]]:
    """All that is told, the oldest first, without what makes no sense."""
    found = {}
    for entry in [*(await store.list(LOSSES)).entries, *(await store.list(KNOWN)).entries]:
        with left_out():
            if entry.key.startswith(LOSSES):
                read(entry.key, entry.value, ranges=list, cut=int, url=str, rows=int, lacking=list)
            merged({entry.key: entry.value})
            found[entry.key] = entry.value
    return merged(found)


def merged(entries: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The same of the store's entries, those below LOSSES and KNOWN. ValueError for what makes no sense."""
    found = []
    for key in sorted(key for key in entries if key.startswith(LOSSES)):
        told = read(key, entries[key], epoch=int, workers=list)
        for worker in told["workers"]:
            if not isinstance(worker, dict):
                raise ValueError(f"{key} has a worker that is no JSON object")
            check(key, worker, id=int, name=str, have=int, to=int)
            own = known_key(told["epoch"], worker["id"], worker["name"])
            with suppress(ValueError):  # the leader's word stays
                worker["to"] = read(own, entries.get(own, b""), committed=int)["committed"]
        found.append(told)
    return found


async def held_up(store: Store) -> str:
    """Why ranges that are lost do not come back; "" if nobody has said so."""
    entry = await store.get(HELD_UP)
    if entry is None:
        return ""
    try:
        return str(read(HELD_UP, entry.value, reason=str)["reason"])
    except ValueError as error:
        return str(error)
