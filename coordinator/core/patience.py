"""When level replicas take their capacity: together, so that one view serves for many. Pure.

Each view ends the sleep of every client that waits at a tail, so few large ones are better than many small ones. But
what is level holds up acknowledgements until a view lets it in, so it does not wait long for the others.
"""

from __future__ import annotations

import numpy as np

from coordinator.core.planner import Health
from coordinator.core.view import View
from replication.chain import CopyState

PATIENCE_S = 1.0


class Pace:
    """Remembers since when something in the present view has been level."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._first: tuple[int, float] | None = None  # epoch, time

    def complete(self, health: Health, view: View) -> bool:
        """Whether every filling under way is level, and there is one."""
        filling = int(np.count_nonzero((view.joining >= 0) & (view.copy_state != CopyState.LATE)))
        return 0 < filling <= len(health.level)

    def wait(self, health: Health, view: View, now: float) -> float:
        """How many seconds what is level should still wait; 0: no longer."""
        if not health.level:
            self._first = None
            return 0.0
        if self._first is None or self._first[0] != view.epoch:
            self._first = view.epoch, now
        if self.complete(health, view):
            return 0.0
        return max(0.0, self._first[1] + self._patience_s - now)
