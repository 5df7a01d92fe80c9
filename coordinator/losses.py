"""What was lost where ranges began anew, as the store keeps it.

The leader notes which ranges, and of each worker the steps that are missing, as far as servers know. A worker that
lives knows it exactly, and adds that; it has the last word on itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from coordinator.names import app_of_worker
from coordinator.records import read
from coordinator.store import Store

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
    """All that is told, the oldest first."""
    entries = [*(await store.list(LOSSES)).entries, *(await store.list(KNOWN)).entries]
    return merged({entry.key: entry.value for entry in entries})


def merged(entries: Mapping[str, bytes]) -> list[dict[str, Any]]:
    """The same of the store's entries, those below LOSSES and KNOWN."""
    found = []
    for key in sorted(key for key in entries if key.startswith(LOSSES)):
        told = read(key, entries[key], epoch=int, workers=list)
        for worker in told["workers"]:
            own = known_key(told["epoch"], worker["id"], worker["name"])
            with suppress(ValueError):  # the leader's word stays
                worker["to"] = read(own, entries.get(own, b""), committed=int)["committed"]
        found.append(told)
    return found


async def held_up(store: Store) -> str:
    """Why ranges that are lost do not come back; "" if nobody has said so."""
    entry = await store.get(HELD_UP)
    return "" if entry is None else str(json.loads(entry.value)["reason"])
