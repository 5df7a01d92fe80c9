"""A whole cluster under one seed, in virtual time: real replicas, sessions and planning, a simulated everything else.

The same seed gives the same trace, byte for byte. Invariants are checked after every event; when the faults have ended,
everything outstanding must finish within a bound, with no new pushes to help it along. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.checks import Checks, Violation
from chaos.control import Leader, Store
from chaos.faults import Fault, Kind, Plan, random_plan
from chaos.network import Link, Loop, Network, Process
from chaos.servers import Server
from chaos.workers import Trainer
from coordinator.failover import form
from replication.chain import Chains, Member
from replication.effects import Level

WATCH_S = 0.02
RECONNECT_S = 0.004
REGISTER_S = 0.02
LEASE_S = 0.08
BOUND_S = 4.0


@dataclass(frozen=True)
class Result:
    """How a seed went. trace: lines, if they were asked for; digest: CRC-32 of all lines."""

    seed: int
    invariant: str
    story: str
    events: int
    commits: int
    epochs: int
    virtual_s: float
    digest: int
    trace: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.invariant

    def __str__(self) -> str:
        if self.ok:
            return f"seed {self.seed}: {self.commits} steps committed, {self.epochs} views, {self.events} events"
        return f"seed {self.seed}: {self.story}\nreplay it: elasticps sim --seed {self.seed}"


class World:
    """Everything that exists, and what the environment does to it."""

    def __init__(self, plan: Plan, trace: bool) -> None:
        self.plan = plan
        self.loop = Loop(plan.seed)
        self.network = Network(self.loop, plan.delay_s, plan.one_frame, self._on_cut)
        self.checks = Checks(self)
        self.training = True
        self.digest = 0
        self.trace: list[str] | None = [] if trace else None
        self.known: dict[Member, Server] = {}
        self.servers: dict[str, Server] = {}
        self.trainers: dict[str, Trainer] = {}
        self.roster_version = 0
        self._values = 0
        self._worker_ids = 0
        first = [Member(f"s{i}", 1) for i in range(plan.servers)]
        view = form(first, plan.ranges, plan.replicas)
        self.store = Store(self, view)
        for member in first:
            self._start_server(member)
        self.publish(None, view)
        self.leader = self._elect()
        for i in range(plan.workers):
            self._start_worker(f"w{i}", None)
        for fault in plan.faults:
            self.loop.after(fault.at_s, self._inject, fault)

    def fresh(self) -> int:
        """A value that no update has had."""
        self._values += 1
        return self._values

    def note(self, who: object, event: str, effects: Sequence[object]) -> None:
        """One line of the trace."""
        line = f"{self.loop.now:.6f} {who} {event}: {' '.join([type(e).__name__ for e in effects])}"
        self.digest = zlib.crc32(line.encode(), self.digest)
        if self.trace is not None:
            self.trace.append(line)

    # -- servers ------------------------------------------------------------------------------------------------------

    def _start_server(self, member: Member) -> None:
        server = Server(self, member)
        self.known[member] = self.servers[member.name] = server
        self.note(member, "starts", ())
        for other in list(self.servers.values()):
            if other is not server and other.alive:
                self.loop.after(self.network.delay(), self._join, server, other)
        self.loop.after(self.network.delay(), self._watch, server)

    def register_again(self, server: Server) -> None:
        """A server that is out of the view starts afresh under its name."""
        if server.alive:
            self.network.kill(server)
            self._restart_later(server)

    def _restart_later(self, server: Server) -> None:
        member = Member(server.name, server.member.incarnation + 1)
        self.loop.after(REGISTER_S * self.loop.rng.uniform(0.5, 3), self._start_server, member)

    def _on_cut(self, link: Link) -> None:
        a, b = link.ends
        if isinstance(a, Server) and isinstance(b, Server):
            self.loop.after(RECONNECT_S * self.loop.rng.uniform(0.05, 2), self._join, a, b)

    def _join(self, a: Server, b: Server) -> None:
        if not (a.alive and b.alive) or any(a in k.ends and b in k.ends for k in self.network.links if k.open):
            return
        if self.network.connect(a, b) is None:
            self.loop.after(RECONNECT_S, self._join, a, b)

    def connect(self, trainer: Trainer, member: Member) -> None:
        """A worker dials a server."""
        server = self.servers.get(member.name)
        if server is None or server.member != member:
            return
        if not any(trainer in k.ends and server in k.ends for k in self.network.links if k.open):
            self.network.connect(trainer, server)

    # -- workers ------------------------------------------------------------------------------------------------------

    def _start_worker(self, name: str, before: Trainer | None) -> None:
        self._worker_ids += 1
        self.roster_version += 1
        self.trainers[name] = Trainer(self, name, self._worker_ids, self.roster_version, before)
        self.note(name, f"starts as {self._worker_ids}", ())
        for server in self.servers.values():
            self.loop.after(self.loop.rng.uniform(0, WATCH_S), self.fetch_roster, server)

    def fetch_roster(self, server: Server) -> None:
        """The roster reaches a server."""
        self.loop.after(self.network.delay(), self._give_roster, server)

    def _give_roster(self, server: Server) -> None:
        workers = frozenset(t.worker for t in self.trainers.values())
        server.run(server.adopt_roster, self.roster_version, workers)

    # -- views --------------------------------------------------------------------------------------------------------

    def publish(self, old: Chains | None, new: Chains) -> None:
        """A view was written: watchers hear of it, each in its own time; some only of a later one."""
        self.note("store", f"epoch {new.epoch} {new.chains.tolist()} + {new.joining.tolist()} {new.members}", ())
        self.checks.on_publish(old, new)
        for server in self.servers.values():
            self.loop.after(self.loop.rng.uniform(0, WATCH_S), self._watch, server)

    def _watch(self, server: Server) -> None:
        if self.store.up:
            server.run(server.adopt, self.store.view)
        elif server.alive:
            self.loop.after(WATCH_S, self._watch, server)

    def fetch_view(self, process: Server | Trainer, epoch: int) -> None:
        """A process asks for a view of at least `epoch`: the store's, or while it is down that of a peer."""
        self.loop.after(self.network.delay(), self._give_view, process, epoch)

    def _give_view(self, process: Server | Trainer, epoch: int) -> None:
        if self.store.up:
            process.run(process.adopt, self.store.view)
            return
        views = [
            s.replica.view for s in self.servers.values() if s.alive and not s.frozen and s.replica.view is not None
        ]
        views += [t.view for t in self.trainers.values() if t.view is not None]
        newest = max(views, key=lambda v: v.epoch, default=None)
        if newest is not None and newest.epoch >= epoch:
            process.run(process.adopt, newest)
        else:
            self.loop.after(WATCH_S, self._give_view, process, epoch)

    def report_level(self, server: Server, level: Level) -> None:
        """A tail tells the leader; whoever leads when it arrives hears it."""
        self.checks.on_level(level.range, level.fill)
        self.give_level(level)

    def give_level(self, level: Level) -> None:
        """A report is on its way."""
        self.loop.after(self.network.delay(), self._arrive_level, level)

    def _arrive_level(self, level: Level) -> None:
        self.leader.run(self.leader.on_level, level)

    # -- leaders ------------------------------------------------------------------------------------------------------

    def _elect(self) -> Leader:
        self.store.term += 1
        for server in self.servers.values():  # each tells what it knows as soon as it hears of the new leader
            self.loop.after(LEASE_S * self.loop.rng.uniform(0.1, 1), server.run, server.tell_levels)
        return Leader(self, self.store.term)

    def replace_leader(self, crash: bool) -> None:
        """The leader dies, or only loses its lease and may write once more."""
        old = self.leader
        if crash:
            self.network.kill(old)
        self.loop.after(LEASE_S * self.loop.rng.uniform(0.1, 1), self._succeed, old)

    def _succeed(self, old: Leader) -> None:
        if self.leader is not old:
            return
        if not self.store.up:
            self.loop.after(LEASE_S, self._succeed, old)
            return
        self.leader = self._elect()

    # -- faults -------------------------------------------------------------------------------------------------------

    def _spare(self, victim: Server) -> bool:
        """Whether every range has another full replica that nobody can suspect, in this view and any that is next.

        One that is frozen or cut off may be on its way out of the view: to kill the other then is to kill both.
        """
        views = [self.store.view]
        views += [v for v in self.writing if v.epoch > self.store.view.epoch]
        for view in views:
            for r in range(view.ranges):
                members = view.members_of(r)
                left = [members]
                joiner = view.joiner_of(r)
                if joiner is not None and self.checks.level.get(r) == view.since[r]:
                    left.append((*members[max(0, len(members) + 1 - self.plan.replicas) :], joiner))
                for chain in left:
                    others = [self.known[m] for m in chain if m != victim.member]
                    if victim.member in chain and not any(map(self._sound, others)):
                        return False
        return True

    def _sound(self, server: Server) -> bool:
        return server.alive and not server.frozen and not self.network.touches_cut(server.name)

    @property
    def writing(self) -> list[Chains]:
        """Views on their way to the store."""
        return [self.leader.in_flight] if self.leader.in_flight is not None else []

    def _inject(self, fault: Fault) -> None:
        if not self.training:
            return
        names = sorted(self.servers)
        a = self.servers[names[fault.a % len(names)]]
        self.note("fault", str(fault), ())
        after = self.loop.after
        if fault.kind == Kind.CRASH_SERVER:
            if a.alive and self._spare(a):
                self.network.kill(a)
                self._restart_later(a)
        elif fault.kind == Kind.FREEZE_SERVER:
            a.freeze()
            after(fault.lasts_s, a.thaw)
        elif fault.kind == Kind.SLOW_SERVER:
            a.drag_s = fault.lasts_s / 100
            after(fault.lasts_s, self._hurry, a)
        elif fault.kind == Kind.RESET_LINK:
            links = [k for k in self.network.links if k.open]
            if links:
                links[fault.a % len(links)].cut()
        elif fault.kind == Kind.RESET_ALL_LINKS:
            for link in [k for k in self.network.links if k.open]:
                link.cut()
        elif fault.kind == Kind.PARTITION:
            others = [*names, *sorted(self.trainers), self.leader.name]
            other = others[fault.b % len(others)]
            if other != a.name:
                self.network.cut(a.name, other)
                after(fault.lasts_s, self.network.heal, a.name, other)
        elif fault.kind == Kind.CRASH_LEADER:
            self.replace_leader(crash=True)
        elif fault.kind == Kind.FREEZE_LEADER:
            leader = self.leader
            leader.freeze()
            after(fault.lasts_s, leader.thaw)
            self.replace_leader(crash=False)
        elif fault.kind == Kind.STORE_OUTAGE:
            self.store.up = False
            after(fault.lasts_s, self._store_up)
        elif fault.kind == Kind.RESTART_WORKER:
            workers = sorted(self.trainers)
            trainer = self.trainers[workers[fault.a % len(workers)]]
            if fault.b % 2:
                self.network.kill(trainer)
            else:  # the old one does not know yet that it was replaced
                after(fault.lasts_s, self.network.kill, trainer)
            self._start_worker(trainer.name, trainer.heir_of)
        else:
            self.leader.run(self.leader.move, fault.a, fault.b)

    def _hurry(self, process: Process) -> None:
        process.drag_s = 0.0

    def _store_up(self) -> None:
        self.store.up = True

    def end_faults(self) -> None:
        """Faults stop, and so do new steps: what is outstanding must finish by itself."""
        self.training = False
        self.note("fault", "faults end", ())
        self.network.heal_all()
        self._store_up()
        for server in self.servers.values():
            server.drag_s = 0.0
            server.thaw()
        self.leader.thaw()

    def unfinished(self) -> str:
        """What is not as it should be when nothing goes wrong any more; "" if all is."""
        view = self.store.view
        for trainer in self.trainers.values():
            if not trainer.finished:
                return f"{trainer.name} has steps outstanding, or never learned where to start"
        for r in range(view.ranges):
            if len(view.members_of(r)) < self.plan.replicas or view.joiner_of(r) is not None:
                return f"range {r} is not repaired: {view.members_of(r)} + {view.joiner_of(r)}"
        for server in self.servers.values():
            replica = server.replica
            if replica.epoch < view.epoch:
                return f"{server.member} is at epoch {replica.epoch} of {view.epoch}"
            if len(replica.log) or replica.log.nbytes or replica.parked:
                return f"{server.member} keeps {len(replica.log)} entries, {replica.log.nbytes} bytes"
        return ""


def run(seed: int, trace: bool = False, plan: Plan | None = None) -> Result:
    """Runs the scenario of a seed (or another plan) to its end."""
    world = World(plan or random_plan(seed), trace)
    invariant = story = ""
    try:
        world.loop.run(world.plan.faults_end_s)
        world.end_faults()
        while world.unfinished():
            if world.loop.now > world.plan.faults_end_s + BOUND_S:
                raise Violation("progress", world.unfinished())
            world.loop.run(world.loop.now + 0.02)
        world.checks.at_end()
    except Violation as violation:
        invariant, story = violation.invariant, f"at {world.loop.now:.6f} s {violation}"
    except Exception as error:  # a replica or session that gives up breaks a promise too
        invariant, story = type(error).__name__, f"at {world.loop.now:.6f} s {type(error).__name__}: {error}"
        if trace:
            raise
    return Result(
        world.plan.seed,
        invariant,
        story,
        world.loop.events,
        world.checks.commits,
        world.store.view.epoch,
        world.loop.now,
        world.digest,
        tuple(world.trace or ()),
    )
