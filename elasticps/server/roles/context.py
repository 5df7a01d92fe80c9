"""What the roles of one server share."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.core.view import ServerInfo
from elasticps.server.core.registered_tables import RegisteredTables
from elasticps.server.core.serving import Serving
from elasticps.server.core.view_exchange import HeldFrames, ViewNotifier
from elasticps.server.fast.path import FastPath
from elasticps.server.roles.executor import Executor
from elasticps.server.roles.updates import UpdateRequests


class LastServed:
    """When a worker's push or pull was last handled: for a moment after that, snapshots and checkpoints take a smaller
    share of the loop's time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._served_s = -math.inf

    def mark(self) -> None:
        """A push or pull is handled now."""
        self._served_s = self._clock()

    def within(self, seconds: float) -> bool:
        """Whether a worker was served in the last `seconds`."""
        return self._clock() - self._served_s < seconds


@dataclass(frozen=True)
class Context:
    """The parts of a server that most roles need. A role takes this, and beside it only what few others need.

    loop, clock: the event loop, and seconds that go on while the loop stands still.
    path: the compiled path, and what it has counted.
    executor: replica, store, rounds and shards, and the only way to change them.
    serving: the view and roster that are followed, and what may be done here under them.
    notifier: sends views and refusals.
    held: frames that wait for a newer view or roster.
    updates: asks for newer views, rosters and tables.
    registered: the tables that the coordination store has.
    last_served: when a worker was served.
    """

    me: ServerInfo
    cluster: str
    loop: asyncio.AbstractEventLoop
    clock: Callable[[], float]
    path: FastPath
    executor: Executor
    serving: Serving
    notifier: ViewNotifier
    held: HeldFrames
    updates: UpdateRequests
    registered: RegisteredTables
    last_served: LastServed
