"""Replicas that are joined by hand-carried messages."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np

from replication.chain import Chains, Member
from replication.effects import (
    Apply,
    Push,
    Reply,
    Send,
    Status,
)
from replication.progress import before_part
from replication.replica import Replica
from tests.replication.views import form

P = 4


class Cluster:
    """Replicas, their links as queues, and what they asked of their shells."""

    def __init__(self, servers: int = 3, replicas: int = 2, budget_bytes: int = 1 << 20, alike: bool = False) -> None:
        self.members = [Member(f"s{i}", 1) for i in range(servers)]
        self.view = form(self.members[: max(replicas, servers - 1)], P, replicas)
        if alike:  # all ranges have the same chain
            self.view = replace(self.view, chains=np.repeat(self.view.chains[:1], P, axis=0))
        self.replicas = {m: Replica(m, P, budget_bytes) for m in self.members}
        self.queues: dict[tuple[Member, Member], deque[Any]] = {}
        self.effects: list[tuple[Member, Any]] = []
        self.applied: dict[Member, list[tuple[int, int, int]]] = {m: [] for m in self.members}
        self.adopt(self.view)
        for a in self.members:
            for b in self.members:
                if a != b:
                    self.take(a, self.replicas[a].peer_up(b))
        self.settle()

    def take(self, member: Member, effects: list[Any]) -> list[Any]:
        for effect in effects:
            if isinstance(effect, Send):
                self.queues.setdefault((member, effect.peer), deque()).append(effect.message)
            elif isinstance(effect, Apply):
                op = effect.operation
                self.applied[member] += [(op.worker, op.after, r) for r in effect.ranges.tolist()]
            self.effects.append((member, effect))
        return effects

    def adopt(self, view: Chains, *members: Member) -> None:
        self.view = view
        for member in members or self.members:
            if member in self.replicas:
                self.take(member, self.replicas[member].adopt(view))

    def deliver(self, a: Member, b: Member) -> None:
        """Everything from a to b."""
        queue = self.queues.get((a, b), deque())
        while queue and b in self.replicas:
            self.take(b, self.replicas[b].receive(a, queue.popleft()))

    def settle(self) -> None:
        while any(queue for (_, b), queue in self.queues.items() if b in self.replicas):
            for a, b in list(self.queues):
                self.deliver(a, b)

    def kill(self, member: Member) -> None:
        del self.replicas[member]
        for other in self.replicas:
            self.queues.pop((member, other), None)
            self.take(other, self.replicas[other].peer_down(member))

    def push(self, member: Member, clock: int, **more: Any) -> list[Any]:
        fields = {
            "token": ("t", clock), "worker": 1, "epoch": self.view.epoch, "clock": clock, "part": 0, "last": True,
            "ranges": None, "payload": None, "nbytes": 10, "prev": before_part(clock, more.get("part", 0)), **more,
        }  # fmt: skip
        return self.take(member, self.replicas[member].push(Push(**fields)))

    def replies(self) -> list[tuple[object, Status]]:
        return [(e.token, e.status) for _, e in self.effects if isinstance(e, Reply)]

    def head(self, r: int) -> Member:
        return self.view.members_of(r)[0]
