"""One time for all processes, and whose turn it is. Chance comes from the seed, and orders what happens at one moment.

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
    """Virtual time: what is to happen when. trace: what has happened, in words, unless nobody wants to know."""

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
        """One line of the trace, if there is one."""
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {text}")

    def chance(self, name: str) -> Random:
        """A source of chance of one's own: what others draw does not change what one draws."""
        return Random(f"{name} {self._seed}")

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls back at a moment; at once if that has passed."""
        self._serial += 1
        now = self.now
        entry = (when if when > now else now, self._draw(), self._serial, call, arguments)
        heappush(self._heap, entry)

    def after(self, delay_s: float, call: Callable[..., None], *arguments: Any) -> None:
        """Calls back after a while."""
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Lets everything happen up to a moment, or until `done()`, which is asked after each event."""
        heap = self._heap
        while heap and heap[0][0] <= until and not done():
            entry = heappop(heap)
            self.now = entry[0]
            self.events += 1
            entry[3](*entry[4])
        if not done():
            self.now = max(self.now, until)


class Process:
    """One process on a host. `turn` is called when it is its turn, and says when it wants the next one, or None."""

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
        """Asks for a turn at a moment, or now."""
        if when is None:
            when = self.clock.now
        if when < self._free_s:
            when = self._free_s
        if when < self._next_s and self.alive:
            self._next_s = when
            self.clock.at(when, self._takes_turn, when)

    def stall(self) -> None:
        """No turns from now on; sockets stay open, timers wait."""
        self.stalled = True

    def thaw(self) -> None:
        """It goes on where it was."""
        self.stalled = False
        if self._missed:
            self._missed = False
            self.wake()

    def kill(self) -> None:
        """It is gone in the middle of whatever it did."""
        if self.alive:
            self.alive = False
            for call in list(self.on_death):
                call()

    def revive(self) -> None:
        """Has turns again, whatever became of it: to clear up after a story."""
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
