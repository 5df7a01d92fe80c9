"""Notices that this process was stopped for a while, before it handles what was sent to it meanwhile.

A view may have left this server out. As a head it would log pushes that no other server ever has, and its copies could
not be used again as they are. So pushes wait for a moment, in which the view is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elasticps.server.roles.executor import Executor

STOPPED_S = 0.5  # two missed beats; a leader waits longer before it leaves a server out
DOUBT_S = 0.1


class StallDetector:
    """`beat` is called a few times a second, `look` before bytes are handled. clock: not the loop's, which stands still
    until the next turn."""

    def __init__(self, clock: Callable[[], float], executor: Executor) -> None:
        self._clock = clock
        self._executor = executor
        self._beaten_s = math.inf  # before the first beat
        self._doubtful_s: float | None = None  # since when pushes wait

    def beat(self) -> None:
        """Notes that the process runs; pushes go on DOUBT_S after a stop."""
        self.look()
        now = self._beaten_s = self._clock()
        if self._doubtful_s is not None and now - self._doubtful_s > DOUBT_S:
            self._doubtful_s = None
            self._executor.perform(self._executor.replica.doubt, False)

    def look(self) -> None:
        """Makes pushes wait if this process was stopped."""
        now = self._clock()
        if now - self._beaten_s > STOPPED_S:
            self._beaten_s = self._doubtful_s = now
            self._executor.perform(self._executor.replica.doubt, True)
