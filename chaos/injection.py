"""How a fault plan happens to a world: each kind of fault as an act on its processes, links and store. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from chaos.faults import Fault, Kind
from chaos.network import Process
from chaos.servers import Server
from coordinator.view import View

if TYPE_CHECKING:
    from chaos.simulator import World
    from chaos.workers import Trainer

MOST_SERVERS = 7

PATIENCE_S = 0.001
"""How often a fault that waits for its moment looks for it."""

UNNOTICED_S = 0.05
"""Two peers may be cut off from each other for so long before anybody acts on it."""


class Injector:
    """Carries out the faults of the world's plan."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._acts: dict[Kind, Callable[[Fault], None]] = {
            Kind.CRASH_SERVER: self._crash_server,
            Kind.CRASH_TWO: self._crash_two,
            Kind.CRASH_IN_OUTAGE: self._crash_in_outage,
            Kind.CRASH_CUT_OFF: self._crash_cut_off,
            Kind.STRIKE_FILLING: self._strike_filling,
            Kind.FREEZE_SERVER: self._freeze_server,
            Kind.SLOW_SERVER: self._slow_server,
            Kind.RESET_LINK: self._reset_link,
            Kind.RESET_ALL_LINKS: self._reset_all_links,
            Kind.RESET_LINES: lambda fault: world.leader.reset_lines(),
            Kind.PARTITION: self._partition,
            Kind.CRASH_LEADER: lambda fault: world.replace_leader(crash=True),
            Kind.FREEZE_LEADER: self._freeze_leader,
            Kind.STORE_OUTAGE: self._store_outage,
            Kind.RESTART_WORKER: self._restart_worker,
            Kind.MOVE_RANGE: lambda fault: world.leader.run(world.leader.move, fault.a, fault.b),
            Kind.JOIN_SERVER: self._join_server,
            Kind.DRAIN_SERVER: self._drain_server,
            Kind.KILL_WORKER: self._kill_worker,
            Kind.FREEZE_WORKER: self._freeze_worker,
        }
        for fault in world.plan.faults:
            world.loop.after(fault.at_s, self._inject, fault)

    def _inject(self, fault: Fault) -> None:
        if self.world.training:
            self.world.note("fault", str(fault), ())
            self._acts[fault.kind](fault)

    def _server(self, number: int) -> Server:
        names = sorted(self.world.servers)
        return self.world.servers[names[number % len(names)]]

    # -- servers ------------------------------------------------------------------------------------------------------

    def _crash_server(self, fault: Fault) -> None:
        self._crash(self._server(fault.a))

    def _crash(self, server: Server) -> None:
        if server.alive and self._spare(server):
            self.world.network.kill(server)
            self.world.restart_later(server)

    def _crash_two(self, fault: Fault) -> None:
        self._crash(self._server(fault.a))
        self.world.loop.after(fault.lasts_s / 10, self._crash, self._server(fault.b))

    def _crash_in_outage(self, fault: Fault) -> None:
        self._store_outage(fault)
        self.world.loop.after(fault.lasts_s / 2, self._crash, self._server(fault.a))

    def _crash_cut_off(self, fault: Fault) -> None:
        """Peers hear nothing of a server, a worker's successor still asks it for clocks, and then it dies."""
        world, victim = self.world, self._server(fault.a)
        for name in sorted(world.servers):
            if name != victim.name:
                world.network.cut(victim.name, name)
        self._restart_worker(fault)
        world.loop.after(min(fault.lasts_s, UNNOTICED_S), self._end_cut_off, victim)

    def _end_cut_off(self, victim: Server) -> None:
        self._crash(victim)
        for name in sorted(self.world.servers):
            self.world.network.heal(victim.name, name)

    def _strike_filling(self, fault: Fault) -> None:
        """Waits for a filling and kills who is filled, who fills it, or the leader; at once, or a little later."""
        world = self.world
        view = world.chains
        filling = [r for r in range(view.ranges) if view.joiner_of(r) is not None]
        if not world.training:
            return
        if not filling:
            world.loop.after(PATIENCE_S, self._strike_filling, fault)
            return
        r = filling[fault.a % len(filling)]
        joiner, source = view.joiner_of(r), view.members_of(r)[-1]
        assert joiner is not None
        victim = (joiner, source, None)[fault.b % 3]
        delay = fault.lasts_s / 20
        if victim is None:
            world.loop.after(delay, world.replace_leader, True)
        else:
            world.loop.after(delay, self._crash, world.known[victim])

    def _freeze_server(self, fault: Fault) -> None:
        server = self._server(fault.a)
        server.freeze()
        self.world.loop.after(fault.lasts_s, server.thaw)

    def _slow_server(self, fault: Fault) -> None:
        server = self._server(fault.a)
        server.drag_s = fault.lasts_s / 100
        self.world.loop.after(fault.lasts_s, self._hurry, server)

    def _hurry(self, process: Process) -> None:
        process.drag_s = 0.0

    def _spare(self, victim: Server) -> bool:
        """Whether every range has another full replica that nobody can suspect, in this view and any that is next.

        One that is frozen or cut off may be on its way out of the view: to kill the other then is to kill both.
        """
        world = self.world
        views = [world.store.view]
        if world.leader.in_flight is not None and world.leader.in_flight.epoch > world.store.view.epoch:
            views.append(world.leader.in_flight)
        return all(self._survives(view, r, victim) for view in views for r in range(view.ranges))

    def _survives(self, view: View, r: int, victim: Server) -> bool:
        world, chains = self.world, view.as_chains
        members = chains.members_of(r)
        left = [members]
        joiner = chains.joiner_of(r)
        if joiner is not None and world.checks.level.get(r) == chains.since[r]:
            leavers = members if len(members) == world.plan.replicas else (joiner,)
            left += [(*(m for m in members if m != leaver), joiner) for leaver in leavers]
        stays = tuple(m for m in members if m not in world.store.draining)
        if joiner is None and stays:
            left.append(stays)
        for chain in left:
            others = [world.known[m] for m in chain if m != victim.member]
            if victim.member in chain and not any(self._sound(other, victim) for other in others):
                return False
        return True

    def _sound(self, server: Server, victim: Server) -> bool:
        world = self.world
        return (
            server.alive
            and not server.frozen
            and not server.busy
            and all(
                victim.name in pair and world.loop.now - since < 1.5 * UNNOTICED_S
                for pair, since in world.network.cuts_of(server.name)
            )
            and not world.leader.doubts(server.member)
        )

    def _join_server(self, fault: Fault) -> None:
        """A new server, or one that has left comes back."""
        world = self.world
        if len(world.staying) < MOST_SERVERS:
            back = sorted(name for name, server in world.servers.items() if server.left)
            name = back[fault.a % len(back)] if back and fault.b % 2 else f"s{len(world.servers)}"
            world.checks.moves.on_join()
            world.start_server(name)

    def _drain_server(self, fault: Fault) -> None:
        """One that is listed; seldom so that there are fewer than replicas, and never all."""
        world, server = self.world, self._server(fault.a)
        others = [s for s in world.staying if s is not server and s.member not in world.store.draining]
        if not world.store.up or not server.alive or world.chains.index(server.member) < 0:
            return
        if len(others) >= (1 if fault.b % 4 == 0 else world.plan.replicas):
            world.checks.moves.on_drain(server.member)
            world.store.drain(server.member)

    # -- links --------------------------------------------------------------------------------------------------------

    def _reset_link(self, fault: Fault) -> None:
        links = [k for k in self.world.network.links if k.open]
        if links:
            links[fault.a % len(links)].cut()

    def _reset_all_links(self, fault: Fault) -> None:
        for link in [k for k in self.world.network.links if k.open]:
            link.cut()

    def _partition(self, fault: Fault) -> None:
        world = self.world
        a = self._server(fault.a)
        others = [*sorted(world.servers), *sorted(world.trainers), world.leader.name]
        other = others[fault.b % len(others)]
        if other != a.name:
            world.network.cut(a.name, other)
            world.loop.after(fault.lasts_s, world.network.heal, a.name, other)

    # -- leaders, the store, workers ----------------------------------------------------------------------------------

    def _freeze_leader(self, fault: Fault) -> None:
        leader = self.world.leader
        leader.freeze()
        self.world.loop.after(fault.lasts_s, leader.thaw)
        self.world.replace_leader(crash=False)

    def _store_outage(self, fault: Fault) -> None:
        self.world.store.up = False
        self.world.loop.after(fault.lasts_s, self._store_up)

    def _store_up(self) -> None:
        self.world.store.up = True

    def _restart_worker(self, fault: Fault) -> None:
        world = self.world
        workers = sorted(world.trainers)
        trainer = world.trainers[workers[fault.a % len(workers)]]
        if fault.b % 2:
            world.network.kill(trainer)
        else:  # the old one does not know yet that it was replaced
            world.loop.after(fault.lasts_s, world.network.kill, trainer)
        world.start_worker(trainer.name, trainer.heir_of)

    def _kill_worker(self, fault: Fault) -> None:
        """A worker dies; it is started again under its name, or its lease runs out and nobody comes in its place."""
        world = self.world
        workers = sorted(world.trainers)
        trainer = world.trainers[workers[fault.a % len(workers)]]
        again = fault.b % 2 == 1
        if world.counts(trainer) and (again or self._others(trainer)):
            world.network.kill(trainer)
            trainer.returns = again
            if again:
                world.loop.after(fault.lasts_s, self._come_back, trainer)

    def _come_back(self, trainer: Trainer) -> None:
        if self.world.trainers[trainer.name] is trainer:
            self.world.start_worker(trainer.name, trainer)

    def _freeze_worker(self, fault: Fault) -> None:
        """A worker stands still, perhaps for longer than its lease."""
        world = self.world
        workers = sorted(world.trainers)
        trainer = world.trainers[workers[fault.a % len(workers)]]
        if world.counts(trainer) and self._others(trainer):
            trainer.freeze()
            world.loop.after(fault.lasts_s, trainer.thaw)

    def _others(self, trainer: Trainer) -> bool:
        """Whether training goes on without this worker."""
        world = self.world
        return any(world.counts(t) and not t.frozen for t in world.trainers.values() if t is not trainer)
