"""What servers that come and go promise: those that drain are given nothing, ranges are never long without a head, and
where nothing goes wrong only what must move is copied. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.sim.violation import Violation
from coordinator.planner import Members
from coordinator.view import View
from replication.chain import Member, Role

if TYPE_CHECKING:
    from chaos.simulator import World

HEADLESS_S = 1.5
"""How long a range may have no head that serves it when nothing goes wrong any more: many times the detector's patience
and a few views."""

MOST_COPIES = 1.25
"""Copies for each one that the changes ask for; later changes undo some of what earlier ones began."""


class MoveChecks:
    """Copies that were begun, and how many the changes asked for."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.copies = 0
        self.ideal = 0.0
        self._gentle = world.plan.gentle
        self._without: dict[int, float] = {}

    def on_plan(self, old: View, new: View, members: Members) -> None:
        """The planner has decided, knowing who drains: fillings that begin are of others."""
        if all(server.member in members.draining for server in members.servers):
            return
        before, after = old.as_chains, new.as_chains
        for r in range(after.ranges):
            joiner = after.joiner_of(r)
            if joiner is None or f"{joiner.name} cannot be drained" in new.reason:
                continue
            if joiner in members.draining and joiner != before.joiner_of(r):
                raise Violation("drain", f"range {r} is given to {joiner}, which drains, in epoch {after.epoch}")

    def on_publish(self, old: View, new: View) -> None:
        """A view was written: counts the fillings that begin."""
        for r in range(new.ranges):
            if new.joining[r] >= 0 and new.since[r] == new.epoch:
                self.copies += 1
        draining = self.world.store.draining
        left = [s.member for s in old.servers if new.as_chains.index(s.member) < 0 and s.member not in draining]
        if left and self._gentle:
            raise Violation("drain", f"{left[0]} is left out of epoch {new.epoch}, and nobody asked for it")

    def on_join(self) -> None:
        """A server starts: it should get its share, and others may be nearer to theirs."""
        plan = self.world.plan
        self.ideal += 1 + plan.ranges * plan.replicas / len(self.world.staying)

    def on_drain(self, member: Member) -> None:
        """A server is asked to go: all that it has, or is getting, goes to others."""
        view = self.world.chains
        index = view.index(member)
        self.ideal += 1 + int((view.chains == index).sum()) + int((view.joining == index).sum())

    def watch(self) -> None:
        """Faults have ended: how long has each range had no head?"""
        world, view = self.world, self.world.chains
        for r in range(view.ranges):
            head = world.known[view.members_of(r)[0]]
            if head.alive and head.replica.role[r] == Role.FULL and head.replica.epoch >= view.since[r]:
                self._without.pop(r, None)
            elif world.loop.now - self._without.setdefault(r, world.loop.now) > HEADLESS_S:
                raise Violation("head", f"range {r} has no head that lives: {view.members_of(r)}")

    def at_end(self) -> None:
        """All has settled."""
        most = MOST_COPIES * self.ideal
        if self._gentle and self.copies > most:
            raise Violation("bounded movement", f"{self.copies} copies were begun, {self.ideal:.1f} are asked for")
