"""The coordination store and the leader in the simulator: the real planner and failure detector, lines to servers as
links, compare-and-set with trouble. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from chaos.frames import ViewFrame
from chaos.network import Link, Process
from coordinator.health import TICK_S, Detector, Report
from coordinator.planner import Health, Members, plan
from coordinator.view import ServerInfo, View
from replication.chain import Member

if TYPE_CHECKING:
    from chaos.simulator import World

PACE = 10.0
"""Seconds of the failure detector per virtual second: its patience is made for networks slower than the simulated."""

SETTLE_S = 0.002
SECOND_TRY_S = 0.0005
AGAIN_S = 0.02
JUST_NOW_S = 0.025
CAS_TIMEOUT_S = 0.06
LEASE_S = 0.3
CLUSTER = "sim"


def info_of(member: Member) -> ServerInfo:
    """A server as the store knows it."""
    return ServerInfo(member.name, member.incarnation, f"{member.name}:1")


class Store:
    """The view, guarded by the leader's term, and the servers' keys under leases. While it is down nothing is read,
    written, renewed or watched."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.view: View
        self.term = 0
        self.up = True
        self.servers: dict[str, ServerInfo] = {}
        self.draining: set[Member] = set()
        self._renewed: dict[str, float] = {}

    @property
    def members(self) -> Members:
        """What the planner is told."""
        return Members(CLUSTER, tuple(self.servers.values()), frozenset(self.draining))

    def compare_and_set(self, view: View, expect: int, term: int) -> bool | None:
        """True: written; False: lost; None: no answer."""
        if not self.up:
            return None
        if self.view.epoch != expect or self.term != term:
            return False
        old, self.view = self.view, view
        self.world.publish(old, view)
        return True

    def renew(self, member: Member) -> None:
        """A server keeps its key, or takes it again; an older incarnation than the registered one cannot."""
        known = self.servers.get(member.name)
        if known is not None and known.incarnation > member.incarnation:
            return
        self._renewed[member.name] = self.world.loop.now
        if known is None or known.member != member:
            self.servers[member.name] = info_of(member)
            self.world.news()

    def drain(self, member: Member) -> None:
        """An operator wants an incarnation of a server to hand over what it has, and end."""
        self.draining.add(member)
        self.world.news()

    def withdraw(self, member: Member) -> None:
        """A server ends and gives up its key."""
        if member.name in self.servers and self.servers[member.name].member == member:
            del self.servers[member.name]
            self.world.news()

    def expire(self) -> None:
        """Keys whose leases have run out are gone."""
        self.world.loop.after(LEASE_S / 4, self.expire)
        late = self.world.loop.now - LEASE_S
        for name in [n for n in self.servers if self.up and self._renewed[n] < late]:
            del self.servers[name]
            self.world.news()


class Leader(Process):
    """One candidacy: it plans while the store knows it as leader of its term."""

    def __init__(self, world: World, term: int) -> None:
        super().__init__(world.loop)
        self.world = world
        self.name = f"leader{term}"
        self.key = self.name
        self.term = term
        self.deposed = False
        self.in_flight: View | None = None
        self.detector = Detector()
        self._lines: dict[Member, Link] = {}
        self._welcomed: set[Member] = set()
        self._refusals: dict[Member, int] = {}
        self._watched: set[Member] = set()
        self._view: View | None = None
        self._moves: list[tuple[int, int]] = []
        self._due = True
        self._called = 0.0
        self.loop.after(world.network.delay(), self.run, self._tick)

    @property
    def _time(self) -> float:
        return self.loop.now * PACE

    def ring(self) -> None:
        """Something is to be planned, soon."""
        if not self._due:
            self._due = True
            self.loop.after(SETTLE_S * self.loop.rng.random(), self.run, self._decide)

    def move(self, r: int, to: int) -> None:
        """An operator wants a range moved."""
        self._moves.append((r, to))
        self.ring()

    def _tick(self) -> None:
        if self.deposed:
            for link in list(self._lines.values()):
                link.cut()
            return
        self.loop.after(TICK_S / PACE, self.run, self._tick)
        if self.detector.tick(self._time):
            self.ring()
        if self.loop.now - self._called > AGAIN_S:
            self._follow()
        self._decide()

    # -- lines to servers -------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Watches the servers of the view and those that are registered, and calls whoever is not connected."""
        store = self.world.store
        if not store.up or self._view is None:
            return
        self._called = self.loop.now
        registered = {s.member for s in store.servers.values()}
        self._watched = registered | {s.member for s in self._view.servers}
        self.detector.watch({m: m in registered for m in sorted(self._watched)}, self._time)
        for member in sorted(self._watched - self._lines.keys()):
            self._dial(member)
        for member in [m for m in self._lines if m not in self._watched]:
            self._welcomed.discard(member)
            self._lines.pop(member).cut()

    def _dial(self, member: Member) -> None:
        world = self.world
        if member in self._lines or member not in self._watched or self.deposed:
            return
        server = world.servers[member.name]
        if world.network.is_cut(self, server):
            return
        if server.alive and server.member == member:
            self._refusals[member] = 0
            link = world.network.connect(self, server)
            assert link is not None
            self._lines[member] = link
            return
        self._refusals[member] = self._refusals.get(member, 0) + 1
        if self._refusals[member] == 1:
            self.loop.after(SECOND_TRY_S, self.run, self._dial, member)
        elif self.detector.refused(member, "connection refused", self._time):
            self.ring()

    def on_down(self, link: Link, peer: Process) -> None:
        """A line ended; the next attempt tells why."""
        member = peer.key
        assert isinstance(member, Member)
        if self._lines.get(member) is not link:
            return
        del self._lines[member]
        link.cut()
        if member in self._welcomed:
            self._welcomed.discard(member)
            self.detector.lost(member, self._time)
        self._dial(member)

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """A server's report."""
        member = peer.key
        assert isinstance(member, Member)
        assert isinstance(message, Report)
        if self._lines.get(member) is not link:
            return
        if member not in self._welcomed:
            self._welcomed.add(member)
            self.detector.connected(member, self._time)
            if self._view is not None:
                link.send(self, ViewFrame(self._view))
        if self.detector.heard(member, message, self._time):
            self.ring()

    def reset_lines(self) -> None:
        """Every line breaks at once."""
        for link in list(self._lines.values()):
            link.cut()

    def doubts(self, member: Member) -> bool:
        """Whether a view without this member may be on its way, or soon will be: it has not been heard just now."""
        health = self.detector.health(self._view)
        if member in health.gone or any(member in pair for pair in health.cut) or member not in self._welcomed:
            return True
        return self._time - self.detector.heard_at(member) > JUST_NOW_S * PACE

    # -- planning ---------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        store = self.world.store
        if not self._due or self.deposed or self.in_flight is not None or not store.up:
            return
        self._due = False
        if self._view is None:
            if store.term != self.term:
                self.deposed = True
                return
            self._view = store.view
        self._follow()
        view = self._plan(self._view)
        if view is not None:
            self._write(view)

    def _plan(self, view: View) -> View | None:
        world = self.world
        health = self.detector.health(view)
        members = world.store.members
        decision = plan(view, members, world.config, health, world.limits)
        if decision is not None and decision.view is not None:
            world.checks.moves.on_plan(view, decision.view, members)
            return decision.view
        return self._next_move(view, health)

    def _next_move(self, view: View, health: Health) -> View | None:
        """The next wish of the operator that makes sense now: moves that the planner itself would not think of."""
        while self._moves:
            r, to = self._moves.pop()
            moved = move(view, r % view.ranges, to % len(view.servers), health, self.world.store.draining)
            if moved is not None:
                return moved
        return None

    # -- writing ----------------------------------------------------------------------------------------------------

    def _write(self, view: View) -> None:
        world = self.world
        self.in_flight = view
        trouble = world.training and world.loop.rng.random() < world.plan.cas_trouble
        kind = world.loop.rng.choice(("before", "after", "lost", "late")) if trouble else ""
        if kind == "before":
            world.replace_leader(crash=True)
            return
        delay = world.network.delay() * (30 if kind == "late" else 1)
        world.loop.after(delay, self._arrive, view, kind)
        if kind == "late":
            world.replace_leader(crash=False)

    def _arrive(self, view: View, kind: str) -> None:
        world = self.world
        outcome = world.store.compare_and_set(view, view.epoch - 1, self.term)
        if kind == "after":
            world.replace_leader(crash=True)
        elif outcome is None or kind == "lost":
            world.loop.after(CAS_TIMEOUT_S, self.run, self._read_back)
        else:
            world.loop.after(world.network.delay(), self.run, self._answered, view, outcome)

    def _answered(self, view: View, outcome: bool) -> None:
        if not outcome:
            self._read_back()
            return
        self.in_flight = None
        self._use(view)

    def _read_back(self) -> None:
        """The outcome is unknown, or the write was lost: what does the store say?"""
        store = self.world.store
        if not store.up:
            self.loop.after(CAS_TIMEOUT_S, self.run, self._read_back)
            return
        self.in_flight = None
        self.deposed = store.term != self.term
        self._use(store.view)

    def _use(self, view: View) -> None:
        """Tells the view to every server that is connected, and plans on."""
        self._view = view
        for member in sorted(self._welcomed):
            self._lines[member].send(self, ViewFrame(view))
        self.ring()


def move(view: View, r: int, to: int, health: Health, draining: Collection[Member]) -> View | None:
    """Starts to move range r to the server of index `to`: once it is level it takes the place of the oldest replica."""
    target, chain = view.servers[to].member, view.as_chains
    full = chain.members_of(r)
    if view.joining[r] >= 0 or target in full or not full or len(full) < view.replicas:
        return None
    if target in health.gone or target in health.pending or target in draining:
        return None
    if any(target in pair for pair in health.cut):
        return None
    joining, since = view.joining.copy(), view.since.copy()
    joining[r], since[r] = to, view.epoch + 1
    reason = f"range {r} moves to {target.name}"
    return dataclasses.replace(view, epoch=view.epoch + 1, joining=joining, since=since, reason=reason)
