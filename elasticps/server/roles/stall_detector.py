"""Notices that this process was stopped for a while, before it handles what was sent to it meanwhile.

A view may have left it out. As a head it would log pushes that nobody else ever has, and its copies could not be taken
back as they are. So pushes wait for a moment, in which the view is read beside them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from elasticps.server.roles.executor import Executor

STOPPED_S = 0.5  # two beats left out; less than the silence for which a leader leaves a server out
DOUBT_S = 0.1


class StallDetector:
    """`beat` is called a few times a second, `look` before bytes are handled. clock: not that of a loop, which stands
    still until the loop has its next turn."""

    def __init__(self, clock: Callable[[], float], executor: Executor) -> None:
        self._clock = clock
        self._executor = executor
        self._beaten_s = math.inf  # nobody has begun to beat
        self._doubtful_s: float | None = None  # since when

    def beat(self) -> None:
        """Time passes as it should, or it did not."""
        self.look()
        now = self._beaten_s = self._clock()
        if self._doubtful_s is not None and now - self._doubtful_s > DOUBT_S:
            self._doubtful_s = None
            self._executor.perform(self._executor.replica.doubt, False)

    def look(self) -> None:
        """Has pushes wait if we were stopped."""
        now = self._clock()
        if now - self._beaten_s > STOPPED_S:
            self._beaten_s = self._doubtful_s = now
            self._executor.perform(self._executor.replica.doubt, True)
