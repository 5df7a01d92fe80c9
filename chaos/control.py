"""The coordination store and the leader in the simulator: real planning, compare-and-set with trouble. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chaos.network import Process
from coordinator.failover import plan_failover, plan_move, plan_repair
from replication.chain import Chains, Member
from replication.effects import Level

if TYPE_CHECKING:
    from chaos.simulator import World

PLAN_S = 0.01
SILENCE_S = 0.08
CAS_TIMEOUT_S = 0.06


class Store:
    """One key with the view, guarded by the leader's term. While it is down nothing is read, written or watched."""

    def __init__(self, world: World, view: Chains) -> None:
        self.world = world
        self.view = view
        self.term = 0
        self.up = True

    def compare_and_set(self, view: Chains, expect: int, term: int) -> bool | None:
        """True: written; False: lost; None: no answer."""
        if not self.up:
            return None
        if self.view.epoch != expect or self.term != term:
            return False
        old, self.view = self.view, view
        self.world.publish(old, view)
        return True


class Leader(Process):
    """One candidacy: it plans while the store knows it as leader of its term."""

    def __init__(self, world: World, term: int) -> None:
        super().__init__(world.loop)
        self.world = world
        self.name = f"leader{term}"
        self.key = self.name
        self.term = term
        self.deposed = False
        self.in_flight: Chains | None = None
        self._levels: dict[int, tuple[int, Member]] = {}
        self._view: Chains | None = None
        self._moves: list[tuple[int, int]] = []
        self.loop.after(world.network.delay(), self.run, self._tick)

    def on_level(self, level: Level) -> None:
        """A tail reports."""
        if self._levels.get(level.range, (0, None))[0] <= level.fill:
            self._levels[level.range] = (level.fill, level.joiner)

    def move(self, r: int, to: int) -> None:
        """An operator wants a range moved."""
        self._moves.append((r, to))

    def _tick(self) -> None:
        if self.deposed:
            return
        self.loop.after(PLAN_S, self.run, self._tick)
        store = self.world.store
        if self.in_flight is not None or not store.up:
            return
        if self._view is None:
            if store.term != self.term:
                self.deposed = True
                return
            self._view = store.view
        view = self._plan(self._view)
        if view is not None:
            self._write(view)

    def _plan(self, view: Chains) -> Chains | None:
        plan = self.world.plan
        live = self._live()
        gone = self._gone(view, live)
        level = {
            r: fill for r, (fill, joiner) in self._levels.items() if view.joiner_of(r) == joiner and joiner not in gone
        }
        decision = plan_failover(view, gone, level)
        if decision is None:
            decision = plan_repair(view, [m for m in live if m not in gone], level, plan.replicas, plan.fills)
        if decision is None and self._moves and live:
            r, to = self._moves.pop()
            target = live[to % len(live)]
            if target not in gone:
                decision = plan_move(view, r % view.ranges, target)
        return None if decision is None else decision.chains

    def _live(self) -> list[Member]:
        return sorted(s.member for s in self.world.servers.values() if s.alive and not self._silent(s.member))

    def _silent(self, member: Member) -> bool:
        server = self.world.servers.get(member.name)
        if server is None or server.member != member:
            return True
        now = self.loop.now
        if not server.alive:
            return now - server.died_at > 0.005
        since = self.world.network.cut_since(self.name, member.name)
        return (server.frozen and now - server.frozen_at > SILENCE_S) or (since is not None and now - since > SILENCE_S)

    def _gone(self, view: Chains, live: list[Member]) -> set[Member]:
        """Dead, silent, or cut off from a peer; if that is everybody, it is the leader that is ill."""
        gone = {m for m in view.members if self._silent(m)}
        if len(gone) == len(view.members):
            return set()
        for i, a in enumerate(view.members):
            for b in view.members[i + 1 :]:
                since = self.world.network.cut_since(a.name, b.name)
                if since is not None and self.loop.now - since > SILENCE_S:
                    gone.add(b)
        return gone

    # -- writing ----------------------------------------------------------------------------------------------------

    def _write(self, view: Chains) -> None:
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

    def _arrive(self, view: Chains, kind: str) -> None:
        world = self.world
        outcome = world.store.compare_and_set(view, view.epoch - 1, self.term)
        if kind == "after":
            world.replace_leader(crash=True)
        elif outcome is None or kind == "lost":
            world.loop.after(CAS_TIMEOUT_S, self.run, self._read_back)
        else:
            world.loop.after(world.network.delay(), self.run, self._answered, view, outcome)

    def _answered(self, view: Chains, outcome: bool) -> None:
        self.in_flight = None
        if outcome:
            self._view = view
        else:
            self._read_back()

    def _read_back(self) -> None:
        """The outcome is unknown, or the write was lost: what does the store say?"""
        store = self.world.store
        if not store.up:
            self.loop.after(CAS_TIMEOUT_S, self.run, self._read_back)
            return
        self.in_flight = None
        self._view = store.view
        self.deposed = store.term != self.term
