"""Watches a long story from outside, by the machine's own clock: says how far it is, and ends it when its time is over.

What it does changes nothing of the story: the same seed gives the same events, watched or not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVENTS = 256  # the clock is read once in so many events
EVERY_S = 20.0


class OutOfTime(Exception):
    """The story was ended from outside: no promise was broken, and not all were looked at."""


class StoryMonitor:
    """Reports on a story in lines, one in `every_s` seconds of wall time. most_s: after so long the story is ended; 0:
    never."""

    def __init__(self, report: Callable[[str], None] = lambda text: None, most_s: float = 0.0) -> None:
        self.stage: Callable[[], str] = lambda: "begins"  # says how far the story is
        self.every_s = EVERY_S
        self._report = report
        self._most_s = most_s
        self._began_s = self._reported_s = time.perf_counter()
        self._events = 0

    def look(self) -> None:
        """Called after each event. Raises OutOfTime when the time is over."""
        self._events += 1
        if self._events % LOOK_EVENTS:
            return
        now = time.perf_counter()
        if now - self._reported_s >= self.every_s:
            self._reported_s = now
            self._report(f"{now - self._began_s:.0f} s: {self.stage()}; {memory_bytes() / 1e9:.1f} GB of memory")
        if self._most_s and now - self._began_s >= self._most_s:
            raise OutOfTime(f"ended after {self._most_s:.0f} s of wall time: {self.stage()}")


def memory_bytes() -> int:
    """Returns how much memory this process has resident; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    except (OSError, IndexError, ValueError):
        return 0
