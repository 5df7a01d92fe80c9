"""Limits how often events are logged that others cause, so that no peer fills a disk, or hides a line among many."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

KINDS_MAX = 256  # kinds that are told apart; when there are more, counts begin again


class Sparing:
    """Lets `most` events of each kind through in any `every_s` seconds, and counts those that it leaves out."""

    def __init__(self, most: int, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._every_s = every_s
        self._clock = clock
        self._kinds: dict[Hashable, tuple[float, int, int]] = {}  # when its window began, let through, left out

    def due(self, kind: Hashable) -> int | None:
        """Counts one more event of a kind. Returns None if it is not to be logged, else how many were left out since
        the last one."""
        now = self._clock()
        began, through, left_out = self._kinds.get(kind, (now, 0, 0))
        if now - began >= self._every_s:
            began, through = now, 0
        if through == self._most:
            self._kinds[kind] = began, through, left_out + 1
            return None
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        self._kinds[kind] = began, through + 1, 0
        return left_out
