"""Virtual time, processes that run, freeze, drag and die, and FIFO links between them. Pure: one seeded generator.

A link carries messages in order in each direction and may lose its end: what is behind the break is gone, and each side
sees it at its own time, perhaps after the next link is up. Different links reorder freely. A partition stalls links, as
TCP does. A receiver that reads no more stalls its link too.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

Call = tuple[Callable[..., None], tuple[Any, ...]]


class Loop:
    """Events in the order of virtual time; ties in the order they were made."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.rng = random.Random(f"loop {seed}")
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        """Calls back `delay_s` from now."""
        self._made += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._made, call, args))

    def run(self, until_s: float) -> None:
        """Runs every event up to a time."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, call, args = heapq.heappop(heap)
            self.events += 1
            call(*args)
        self.now = until_s


class Process:
    """Something that runs one event at a time. `key` tells it from every other, earlier incarnations included."""

    key: Hashable
    name: str

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.alive = True
        self.frozen = False
        self.drag_s = 0.0
        self.frozen_at = 0.0
        self.died_at = 0.0
        self._queue: deque[Call] = deque()
        self._busy = False

    @property
    def busy(self) -> bool:
        """Whether events wait for it, or will."""
        return bool(self._queue) or self.drag_s > 0

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """Runs an event now, or when the process gets to it."""
        if not self.alive:
            return
        if self.frozen or self._queue or self.drag_s:
            self._queue.append((call, args))
            self._wake()
        else:
            call(*args)

    def _wake(self) -> None:
        if self._queue and not self._busy and not self.frozen:
            self._busy = True
            self.loop.after(self.drag_s, self._next)

    def _next(self) -> None:
        self._busy = False
        if self.alive and not self.frozen and self._queue:
            call, args = self._queue.popleft()
            call(*args)
            self._wake()

    def freeze(self) -> None:
        """SIGSTOP."""
        self.frozen = True
        self.frozen_at = self.loop.now

    def thaw(self) -> None:
        """SIGCONT: everything that arrived meanwhile is there at once."""
        self.frozen = False
        self._wake()

    # What a process does when its links come, go and speak.

    def on_up(self, link: Link, peer: Process) -> None:
        """A link is established."""

    def on_down(self, link: Link, peer: Process) -> None:
        """A link is lost."""

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """The next message of a link."""


_UP, _DOWN = "up", "down"


class Link:
    """One connection between two processes. `number` is the dialler's count: the two ends may see connections come up
    in different orders, and both must keep the one with the higher number."""

    def __init__(self, network: Network, a: Process, b: Process, number: int) -> None:
        self.network = network
        self.number = number
        self.ends = (a, b)
        self.open = True
        self.paused = [False, False]
        self._wires: tuple[deque[Any], deque[Any]] = (deque(), deque())
        self._moving = [False, False]
        for to in (0, 1):
            self._put(to, _UP)

    def other(self, process: Process) -> Process:
        """The far end."""
        return self.ends[1] if process is self.ends[0] else self.ends[0]

    def send(self, source: Process, message: Any) -> None:
        """Queues a message; on a broken link it is lost."""
        if self.open:
            self._put(1 if source is self.ends[0] else 0, message)

    def pause(self, reader: Process, paused: bool) -> None:
        """Whether a process reads from the link."""
        to = 0 if reader is self.ends[0] else 1
        self.paused[to] = paused
        self.pump()

    def cut(self) -> None:
        """Breaks the link: of what is on the wire a part still arrives."""
        if not self.open:
            return
        self.open = False
        for to in (0, 1):
            wire = self._wires[to]
            keep = self.network.loop.rng.randint(0, len(wire))
            while len(wire) > keep:
                wire.pop()
            wire.append(_DOWN)
        self.pump()
        self.network.on_cut(self)

    def pump(self) -> None:
        """Goes on delivering, where nothing hinders it."""
        for to in (0, 1):
            self._move(to)

    def _put(self, to: int, message: Any) -> None:
        self._wires[to].append(message)
        self._move(to, first=len(self._wires[to]) == 1)

    def _move(self, to: int, first: bool = True) -> None:
        if self._moving[to] or not self._wires[to] or self._stalled(to):
            return
        self._moving[to] = True
        slow = first or self.network.one_frame
        self.network.loop.after(self.network.delay() if slow else 1e-6, self._arrive, to)

    def _stalled(self, to: int) -> bool:
        return self.open and (self.paused[to] or self.network.is_cut(*self.ends))

    def _arrive(self, to: int) -> None:
        self._moving[to] = False
        if self._stalled(to) or not self._wires[to]:
            return
        message = self._wires[to].popleft()
        here, there = self.ends[to], self.ends[1 - to]
        if message is _DOWN:
            here.run(here.on_down, self, there)
        elif message is _UP:
            here.run(here.on_up, self, there)
        else:
            here.run(here.on_message, self, there, message)
        self._move(to, first=False)


class Network:
    """All links, and which pairs of names cannot reach each other."""

    def __init__(self, loop: Loop, delay_s: float, one_frame: bool, on_cut: Callable[[Link], None]) -> None:
        self.loop = loop
        self.one_frame = one_frame
        self.on_cut = on_cut
        self.links: list[Link] = []
        self._delay_s = delay_s
        self._made = 0
        self._calm = False
        self._cuts: dict[tuple[str, str], float] = {}

    def delay(self) -> float:
        """How long something takes this time: mostly short, now and then long, unless all is calm."""
        rng = self.loop.rng
        return rng.uniform(0.1, 1.0) * self._delay_s * (20 if rng.random() < 0.02 and not self._calm else 1)

    def connect(self, a: Process, b: Process) -> Link | None:
        """A new link, if both live and can reach each other; a frozen process is connected to all the same."""
        if not (a.alive and b.alive) or self.is_cut(a, b):
            return None
        self.links = [link for link in self.links if link.open]
        self._made += 1
        link = Link(self, a, b, self._made)
        self.links.append(link)
        return link

    def is_cut(self, a: Process, b: Process) -> bool:
        """Whether a partition separates two processes."""
        return bool(self._cuts) and _pair(a.name, b.name) in self._cuts

    def cuts_of(self, name: str) -> list[tuple[tuple[str, str], float]]:
        """The pairs of names, one of them this, that a partition separates, and since when."""
        return [(pair, since) for pair, since in self._cuts.items() if name in pair]

    def cut_since(self, a: str, b: str) -> float | None:
        """When a partition began."""
        return self._cuts.get(_pair(a, b))

    def cut(self, a: str, b: str) -> None:
        """Separates two names."""
        self._cuts[_pair(a, b)] = self.loop.now

    def heal(self, a: str, b: str) -> None:
        """Joins them again."""
        self._cuts.pop(_pair(a, b), None)
        self._pump()

    def heal_all(self) -> None:
        """Ends every partition, and the network's tempers."""
        self._calm = True
        self._cuts.clear()
        self._pump()

    def _pump(self) -> None:
        for link in self.links:
            link.pump()

    def kill(self, process: Process) -> None:
        """SIGKILL: the process is gone, its links break."""
        process.alive = False
        process.died_at = self.loop.now
        for link in list(self.links):
            if process in link.ends:
                link.cut()


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)
