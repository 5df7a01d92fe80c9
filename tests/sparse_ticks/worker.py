"""A worker's session under sparse ticks: what is outstanding, and how far the worker is in each range."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from tests.sparse_ticks.ranges import MASK, PART, Range, Tick, after, digest


@dataclass
class Step:
    """A step that is not committed. prev: by range and part. done: ranges that have acknowledged its last part."""

    parts: list[dict[int, int]] = field(default_factory=list)  # touched ranges, and the worker's progress there before
    ticks: dict[int, int] = field(default_factory=dict)  # what the last part ticks, and the progress there before
    closed: bool = False
    done: set[int] = field(default_factory=set)
    shard: int | None = None

    @property
    def touched(self) -> set[int]:
        """The ranges that its parts touch."""
        return {r for part in self.parts for r in part}


class Cluster(Protocol):
    """What a worker sees of the others, and the judge who notes what it is told."""

    random: Random
    mistake: str
    ranges: list[Range]
    group: int
    lost: list[set[tuple[int, int, int]]]
    answered_wrongly: dict[tuple[int, int], int]

    def deliver(self, tick: Tick, r: int) -> str:
        """A frame reaches a head; returns what the head does with it."""

    def begin(self, id: int, clock: int, step: Step) -> None:
        """A worker begins a part of a step."""

    def commit(self, id: int, clock: int) -> None:
        """A worker learns that a step is committed."""

    def parts_in(self, id: int, clock: int, r: int) -> list[tuple[int, int, int]]:
        """The parts of a step that touch a range."""

    def shuffled(self, ranges: Iterable[int]) -> list[int]:
        """The same ranges in some order."""


class Worker:
    """A worker's session: what is outstanding, and how far it is in each range."""

    def __init__(self, cluster: Cluster, id: int, home: int, base: int) -> None:
        self.cluster = cluster
        self.id, self.home = id, home
        self.clock = self.committed = self.base = base
        self.last: dict[int, int] = {}
        self.steps: dict[int, Step] = {}
        self.links: dict[int, deque[Tick]] = {}
        self.seen: dict[int, tuple[int, int]] = {}  # by range: changes of its head, recoveries
        self.broken: set[int] = set()
        self.alive = self.present = True
        self.held = 0  # the newest cut that it holds for

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the newest step waits for more parts."""
        return self.clock in self.steps and not self.steps[self.clock].closed

    def push(self, touched: set[int], last: bool, shard: int | None = None) -> None:
        """The next part of the step, or the first of a new one."""
        if not self.open:
            self.clock += 1
            self.steps[self.clock] = Step()
        step = self.steps[self.clock]
        part = len(step.parts)
        now = after(self.clock, part, False)
        step.parts.append({r: self.last.get(r, 0) for r in sorted(touched)})
        if shard is not None:
            step.shard = shard
        named = set(touched)
        if last:
            step.closed = True
            now = after(self.clock, part, True)
            earlier = step.touched if self.cluster.mistake != "only the last part's ranges tick" else set(touched)
            named = earlier | touched | {self.home}
            step.ticks = {r: self.last.get(r, 0) for r in sorted(named)}
        self.cluster.begin(self.id, self.clock, step)
        for r in named:
            self.last[r] = now
        for r in self.cluster.shuffled(named):
            self.send(self.clock, part, r)

    def tick(self, clock: int, part: int, r: int, again: bool = False) -> Tick | None:
        """The frame of a part for a range, None if the part has nothing for it."""
        step = self.steps[clock]
        last = step.closed and part == len(step.parts) - 1
        prevs = step.ticks if last else step.parts[part]
        if r not in prevs:
            return None
        prev = prevs[r]
        committed = self.committed
        if self.cluster.mistake == "a record claims its own step":
            committed = clock
        if again and self.cluster.mistake == "prev is read at the resend":
            prev = self.last[r]
        at_home = last and r == self.home
        names = frozenset(step.touched) if at_home else None
        shard = step.shard if last and r == self.cluster.group else None
        return Tick(self.id, clock, part, last, prev, committed, r in step.parts[part], names, shard)

    def send(self, clock: int, part: int, r: int, again: bool = False) -> None:
        """Queues a frame; now and then its connection breaks instead."""
        tick = self.tick(clock, part, r, again)
        if tick is None or r in self.broken:
            return
        if self.cluster.random.random() < 0.97:
            self.links.setdefault(r, deque()).append(tick)
        else:
            self.links.pop(r, None)
            self.broken.add(r)

    def ask(self, r: int) -> None:
        """A range whose head is new, was cut off, or reported a gap: learns what it has, and sends what it lacks."""
        range_ = self.cluster.ranges[r]
        link = self.links.pop(r, deque())
        for sent in list(link)[: self.cluster.random.randint(0, len(link))]:  # what arrives before the connection ends
            self.cluster.deliver(sent, r)
        self.broken.discard(r)
        heads, recoveries = self.seen.get(r, (0, 0))
        self.seen[r] = range_.heads, range_.recoveries
        if self.cluster.mistake == "prev is forgotten with the view" and heads != range_.heads:
            self.last.pop(r, None)
        if recoveries != range_.recoveries:
            for clock, step in self.steps.items():
                self.cluster.lost[r] -= set(self.cluster.parts_in(self.id, clock, r))  # they will be sent again
                if self.cluster.mistake != "a recovered range keeps its marks":
                    step.done.discard(r)
        if range_.roster is not None and self.id not in range_.roster:
            return
        has = range_.head.progress.get(self.id, 0)
        self.acknowledge(r)
        newest = has
        for clock, step in list(self.steps.items()):
            for part in range(len(step.parts)):
                lacked = self.tick(clock, part, r)
                if lacked is not None and has < lacked.after:
                    newest = lacked.after
                    self.send(clock, part, r, again=True)
        if recoveries != range_.recoveries and newest:
            self.last[r] = newest  # a committed step may be lost there, which no later one follows any more
        elif recoveries != range_.recoveries:
            self.last.pop(r, None)

    def acknowledge(self, r: int) -> None:
        """The range's head says what is committed there."""
        range_ = self.cluster.ranges[r]
        if self.seen.get(r, (0, 0)) != (range_.heads, range_.recoveries):
            return
        safe = range_.acknowledged(self.id)
        if self.cluster.mistake == "a duplicate is answered at once":
            safe = range_.head.progress.get(self.id, 0)
        if self.cluster.mistake == "a gap is a duplicate":
            safe = max(safe, self.cluster.answered_wrongly.get((self.id, r), 0))
        for clock, step in list(self.steps.items()):
            if step.closed and r in step.ticks and clock << PART <= safe:
                step.done.add(r)
                need = step.ticks.keys() if self.cluster.mistake != "home alone commits" else {self.home}
                if need <= step.done:
                    self.steps.pop(clock)
                    self.committed = next(iter(self.steps)) - 1 if self.steps else self.clock
                    self.cluster.commit(self.id, clock)

    def digest(self) -> int:
        """Of its progress in all ranges."""
        return sum(digest(r, self.id, progress) for r, progress in self.last.items()) & MASK
