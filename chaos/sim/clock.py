"""One virtual time for all processes, which take turns. Chance comes from the seed, and orders events of one moment.

A `Process` is what an operating system would run: it has turns, in which its event loop and its threads go on. It can
be stalled (turns wait, its sockets stay open) and killed (no more turns).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any

TURN_S = 20e-6  # the mean of what a turn costs: nothing is instantaneous, so no two processes stay in step
_TURNS_PER_S = 1 / TURN_S
_NEVER = math.inf


class Clock:
    """Virtual time, and the events that are due. trace: what has happened, in words; None: no trace is kept."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.events = 0
        self.random = Random(f"clock {seed}")
        self._draw = self.random.random
        self.trace: list[str] | None = None
        self._seed = seed
        self._heap: list[tuple[float, float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    def note(self, text: str) -> None:
        """Adds a line to the trace, if one is kept."""
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {text}")

    def chance(self, name: str) -> Random:
        """Returns a random generator for `name`: what others draw does not change what it draws."""
        return Random(f"{name} {self._seed}")

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls back at a time, or at once if it has passed."""
        self._serial += 1
        now = self.now
        entry = (when if when > now else now, self._draw(), self._serial, call, arguments)
        heappush(self._heap, entry)

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls back after a while."""
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Runs all events up to a time, or until `done()`, which is called after each event."""
        heap = self._heap
        while heap and heap[0][0] <= until and not done():
            entry = heappop(heap)
            self.now = entry[0]
            self.events += 1
            entry[3](*entry[4])
        if not done():
            self.now = max(self.now, until)


class Process:
    """One process on a host. `turn` runs it, and returns when it wants its next turn, or None."""

    def __init__(self, clock: Clock, name: str, host: str) -> None:
        self.clock = clock
        self.name = name
        self.host = host
        self.alive = True
        self.stalled = False
        self.deaf = False  # it reads nothing from its sockets
        self.turn: Callable[[], float | None] = lambda: None
        self.on_death: dict[Callable[[], None], None] = {}
        self._draw = clock.chance(f"turns of {name}").random
        self._next_s = _NEVER  # the earliest turn asked for
        self._free_s = 0.0  # until then it is busy with its last turn
        self._missed = False
        self._takes_turn = self._turn

    def __repr__(self) -> str:
        return self.name

    def wake(self, when: float | None = None) -> None:
        """Asks for a turn at a time, by default now."""
        if when is None:
            when = self.clock.now
        if when < self._free_s:
            when = self._free_s
        if when < self._next_s and self.alive:
            self._next_s = when
            self.clock.at(when, self._takes_turn, when)

    def stall(self) -> None:
        """Suspends the process: it has no turns; its sockets stay open, its timers wait."""
        self.stalled = True

    def thaw(self) -> None:
        """Lets the process go on where it was."""
        self.stalled = False
        if self._missed:
            self._missed = False
            self.wake()

    def kill(self) -> None:
        """Ends the process in the middle of whatever it does."""
        if self.alive:
            self.alive = False
            for call in list(self.on_death):
                call()

    def revive(self) -> None:
        """Gives the process turns again, dead or suspended: to clear up after a story."""
        self.alive, self.stalled, self._next_s = True, False, _NEVER

    def _turn(self, when: float) -> None:
        if when != self._next_s or not self.alive:
            return  # an earlier turn came in between
        self._next_s = _NEVER
        if self.stalled:
            self._missed = True
            return
        self._free_s = self.clock.now - math.log(1.0 - self._draw()) / _TURNS_PER_S  # exponentially distributed
        again = self.turn()
        if again is not None:
            self.wake(again)
