"""Keeps a busy server's loop awake between requests that follow each other closely.

A sender has to wake a process that sleeps: on a virtual machine that costs the sender 20-70 µs and the answer as much
again, more than a small request itself. So when requests come at short intervals the loop polls for a moment before it
sleeps. It does so only while most requests come within such a moment: with twenty servers on two cores few did, and
polls in vain took a third of all servers' time. Nor does it poll when more processes want to run than there are cores:
it would take the core from the very process that it waits for.
(Three servers with two replicas and a worker on two cores: 30 % less CPU time per push without.)
"""

from __future__ import annotations

import asyncio
import time

from elasticps.system.cpu_contention import CpuContention

POLL_S = 120e-6
LATE_COUNTS = 2  # a request that a poll would have missed weighs as much as so many that it would have found
MOST = 8  # requests of one kind that count: after so many it takes as many of the other kind to be noticed


class BusyPoll:
    """`touched()` at each request: the loop then stays awake for POLL_S if most of the last requests came that soon."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._last_s = 0.0
        self._until_s = 0.0
        self._awake = False
        self._score = 0  # above 0 while polls find requests, or would
        self._contention = CpuContention()

    def touched(self) -> None:
        """A request has come, or an answer."""
        now = time.monotonic()
        if now - self._last_s < POLL_S:
            self._score = min(self._score + 1, MOST)
        else:
            self._score = max(self._score - LATE_COUNTS, -MOST)
        contended = self._contention.contended(now)  # asked each time: after a while without it takes that as a whole
        if self._score > 0 and not contended:
            self._until_s = now + POLL_S
            if not self._awake:
                self._awake = True
                self._loop.call_soon(self._turn)
        self._last_s = now

    def _turn(self) -> None:
        if time.monotonic() < self._until_s:
            self._loop.call_soon(self._turn)
        else:
            self._awake = False
