"""The two waits of a leader before it writes: for more level replicas, and for workers that may come back. Pure.

`Pace` gathers level replicas, so that one view promotes many: each view ends the sleep of every client that waits at a
tail, so a few large views are better than many small ones. But a level replica holds up acknowledgements until a view
promotes it, so it does not wait long for others.

`LeaseGrace` judges leases after an outage of the store. A lease that ran out says that its holder is gone only if the
holder could have renewed it. During an outage no holder can, and afterwards all leases have run out together. So after
an outage, and at the beginning of a term, when the leader does not know what went before, every worker of the roster
has the time of a whole lease to come back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from coordinator.core.planner import Health
from coordinator.core.view import Roster, View, WorkerInfo
from replication.chain import CopyState

PATIENCE_S = 1.0  # the longest that a level replica waits for others
COME_BACK_S = 6.0  # a lease, and a second for the worker to find out that it was lost
AWAY_S = 2.0  # the leader asks the store every second: after so long without an answer the store was away


class Pace:
    """Remembers since when the present view has had level replicas."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._first: tuple[int, float] | None = None  # epoch of that view, and since when

    def complete(self, health: Health, view: View) -> bool:
        """Whether replicas are being filled and all of them are level."""
        filling = int(np.count_nonzero((view.joining >= 0) & (view.copy_state != CopyState.LATE)))
        return 0 < filling <= len(health.level)

    def wait(self, health: Health, view: View, now: float) -> float:
        """Returns for how many more seconds the level replicas should wait; 0 if they should be promoted now."""
        if not health.level:
            self._first = None
            return 0.0
        if self._first is None or self._first[0] != view.epoch:
            self._first = view.epoch, now
        if self.complete(health, view):
            return 0.0
        return max(0.0, self._first[1] + self._patience_s - now)


class LeaseGrace:
    """Follows when the store answers, and says which workers still count as present."""

    def __init__(self, now: float) -> None:
        self._answered = now
        self._until = now + COME_BACK_S

    def answered(self, now: float) -> None:
        """Notes that the store has answered a request made just before."""
        if now - self._answered > AWAY_S:
            self._until = now + COME_BACK_S
        self._answered = now

    def left_s(self, now: float) -> float:
        """Returns for how many seconds missing workers may still come back; 0 if they have left."""
        if now - self._answered > AWAY_S:
            return COME_BACK_S
        return max(0.0, self._until - now)

    def present(
        self, roster: Roster | None, registered: Iterable[WorkerInfo], signed_off: Collection[str], now: float
    ) -> list[WorkerInfo]:
        """Returns the workers to list: the registered ones, and those of the roster that may still come back, without
        any that signed off."""
        present = list(registered)
        if roster is not None and self.left_s(now) > 0:
            taken = {worker.name for worker in present}.union(signed_off)
            present += [worker for worker in roster.workers if worker.name not in taken]
        return present
