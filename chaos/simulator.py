"""A whole cluster under one seed, in virtual time: real replicas, sessions, parking, rounds, shards, planning and
failure detection, a simulated everything else.

The same seed gives the same trace, byte for byte. Invariants are checked after every event; when the faults have ended,
everything outstanding must finish within a bound, with no new pushes to help it along. Pure.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from chaos.checks import Checks
from chaos.control import CLUSTER, Leader, Store, info_of
from chaos.faults import Plan, random_plan
from chaos.injection import Injector
from chaos.network import Link, Loop, Network
from chaos.operators import Operator
from chaos.servers import Server
from chaos.sim.violation import Violation
from chaos.workers import Trainer
from coordinator.planner import Health, Members, plan
from coordinator.repair import Limits
from coordinator.view import ClusterConfig, View
from elasticps.client.protocol.join import Past
from elasticps.sharding import ShardSpec
from replication.chain import Chains, Member

WATCH_S = 0.02
RECONNECT_S = 0.004
REGISTER_S = 0.02
OFFICE_S = 0.08
BOUND_S = 4.0
WORKER_LEASE_S = 0.1

_MOMENT = struct.Struct("<dI")


@dataclass(frozen=True)
class Result:
    """How a seed went. rounds: how many were decided; shards: how many were done; trace: lines, if
    they were asked for; digest: CRC-32 of when what had how many effects."""

    seed: int
    invariant: str
    story: str
    events: int
    commits: int
    epochs: int
    virtual_s: float
    digest: int
    trace: tuple[str, ...] = ()
    pulls: int = 0
    operations: int = 0
    rounds: int = 0
    shards: int = 0

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return not self.invariant

    def __str__(self) -> str:
        if self.ok:
            trained = f"{self.commits} steps, {self.rounds} rounds, {self.shards} shards"
            return f"seed {self.seed}: {trained} committed, {self.epochs} views, {self.events} events"
        return f"seed {self.seed}: {self.story}\nreplay it: elasticps sim --protocol --seed {self.seed}"

    @property
    def steps(self) -> int:
        """What workers committed."""
        return self.commits

    @property
    def views(self) -> int:
        """How many there were."""
        return self.epochs


class World:
    """Everything that exists, and how it hears of each other."""

    def __init__(self, plan: Plan, trace: bool) -> None:
        self.plan = plan
        self.loop = Loop(plan.seed)
        self.network = Network(self.loop, plan.delay_s, plan.one_frame, self._on_cut)
        self.config = ClusterConfig(plan.ranges, plan.replicas, min_servers=plan.servers)
        self.limits = Limits(plan.fills, max(1, plan.fills // 2))
        self.store = Store(self)
        self.checks = Checks(self)
        self.training = True
        self.digest = 0
        self.trace: list[str] | None = [] if trace else None
        self.known: dict[Member, Server] = {}
        self.servers: dict[str, Server] = {}
        self.trainers: dict[str, Trainer] = {}
        self.incarnations: dict[int, Trainer] = {}
        self.roster_version = 0
        self.dropped: set[int] = set()
        self._down_s = 0.0  # when the store was last seen to be down: leases count from then
        self.pasts: dict[str, Past] = {}
        self.spec = ShardSpec(max(1, plan.shards), 1, plan.epochs, None)
        self._values = 0
        self._worker_ids = 0
        self.leader = self._elect()
        self._begin()
        self.operator = Operator(self, "operator")
        for i in range(plan.workers):
            self.start_worker(f"w{i}", None)
        if plan.scripted:
            self._expire_workers()
        self.injector = Injector(self)

    def _begin(self) -> None:
        """The first servers, and the view that the planner makes of them."""
        first = [Member(f"s{i}", 1) for i in range(self.plan.servers)]
        decision = plan(None, Members(CLUSTER, tuple(map(info_of, first))), self.config)
        assert decision is not None
        assert decision.view is not None
        self.store.view = decision.view
        for member in first:
            self._start_server(member)
            self.store.renew(member)
        self.store.expire()
        self.publish(None, decision.view)

    @property
    def chains(self) -> Chains:
        """The chains of the view that stands."""
        return self.store.view.as_chains

    def fresh(self) -> int:
        """A value that no update has had."""
        self._values += 1
        return self._values

    def note(self, who: object, event: str, effects: Sequence[object]) -> None:
        """One line of the trace."""
        self.digest = zlib.crc32(_MOMENT.pack(self.loop.now, len(effects)), self.digest)
        if self.trace is not None:
            names = " ".join([type(e).__name__ for e in effects])
            self.trace.append(f"{self.loop.now:.6f} {who} {event}: {names}")

    # -- servers ------------------------------------------------------------------------------------------------------

    def _start_server(self, member: Member) -> None:
        server = Server(self, member)
        self.known[member] = self.servers[member.name] = server
        self.note(member, "starts", ())
        for other in list(self.servers.values()):
            if other is not server and other.alive:
                self.loop.after(self.network.delay(), self._join, server, other)
        self.loop.after(self.network.delay(), self._watch, server)
        self.fetch_roster(server)

    def left_out(self, server: Server) -> None:
        """A server that is out of the view starts afresh under its name, or ends if it was asked to."""
        if not server.alive:
            return
        self.network.kill(server)
        if self.store.up and server.member in self.store.draining:
            server.left = True
            self.note(server.member, "has drained", ())
            self.store.withdraw(server.member)
        else:
            self.restart_later(server)

    def restart_later(self, server: Server) -> None:
        """A server that died comes back under its name, empty."""
        member = Member(server.name, server.member.incarnation + 1)
        self.loop.after(REGISTER_S * self.loop.rng.uniform(0.5, 3), self._start_server, member)

    def start_server(self, name: str) -> None:
        """A server joins: a new one, or one that has left before."""
        before = self.servers.get(name)
        self._start_server(Member(name, 1 if before is None else before.member.incarnation + 1))

    @property
    def staying(self) -> list[Server]:
        """Every server that has not left for good."""
        return [server for server in self.servers.values() if not server.left]

    def _on_cut(self, link: Link) -> None:
        a, b = link.ends
        if isinstance(a, Server) and isinstance(b, Server):
            self.loop.after(RECONNECT_S * self.loop.rng.uniform(0.05, 2), self._join, a, b)

    def _join(self, a: Server, b: Server) -> None:
        if not (a.alive and b.alive) or any(a in k.ends and b in k.ends for k in self.network.links if k.open):
            return
        if self.network.connect(a, b) is None:
            self.loop.after(RECONNECT_S, self._join, a, b)

    def connect(self, client: Trainer | Operator, member: Member) -> None:
        """A worker, or an operator, dials a server."""
        server = self.servers.get(member.name)
        if server is None or server.member != member:
            return
        if not any(client in k.ends and server in k.ends for k in self.network.links if k.open):
            self.network.connect(client, server)

    def unreachable_since(self, server: Server, peer: Member) -> float | None:
        """When a server began to hear nothing of a peer."""
        other = self.known[peer]
        if not other.alive:
            return other.died_at
        if other.frozen:
            return other.frozen_at
        return self.network.cut_since(server.name, other.name)

    # -- workers ------------------------------------------------------------------------------------------------------

    def start_worker(self, name: str, before: Trainer | None) -> None:
        """A worker starts, perhaps in the place of an older incarnation, which is fenced by the new roster."""
        self._worker_ids += 1
        self.roster_version += 1
        if name in self.trainers:
            self.checks.fenced.setdefault(self.trainers[name].worker, self.roster_version)
        trainer = Trainer(self, name, self._worker_ids, self.roster_version, before)
        self.trainers[name] = self.incarnations[self._worker_ids] = trainer
        self.checks.reads.parts.on_start(self.trainers[name])
        self.note(name, f"starts as {self._worker_ids}", ())
        for server in self.servers.values():
            self.loop.after(self.loop.rng.uniform(0, self.plan.roster_lag_s), self.fetch_roster, server)

    def renew(self, trainer: Trainer) -> None:
        """A worker keeps its place, as long as it has one."""
        if self.store.up and self.counted(trainer.worker):
            trainer.renewed_s = self.loop.now

    def fences(self, trainer: Trainer) -> bool:
        """Whether a worker learns from the store that it has no place any more, and ends."""
        if not self.plan.scripted or not self.store.up or self.counted(trainer.worker):
            return False
        self.network.kill(trainer)
        return True

    def registered(self, trainer: Trainer) -> bool:
        """Whether a worker's lease lives, as far as it knows."""
        return self.loop.now < trainer.renewed_s + WORKER_LEASE_S

    def _expire_workers(self) -> None:
        """Workers whose leases have run out are in the roster no more."""
        self.loop.after(WORKER_LEASE_S / 4, self._expire_workers)
        if not self.store.up:
            self._down_s = self.loop.now
        for trainer in self.trainers.values():
            if trainer.worker not in self.dropped and self.loop.now > WORKER_LEASE_S + max(
                trainer.renewed_s, self._down_s
            ):
                self.roster_version += 1
                self.dropped.add(trainer.worker)
                self.checks.fenced.setdefault(trainer.worker, self.roster_version)
                self.note(trainer.name, "is dropped from the roster", ())
                for server in self.servers.values():
                    self.loop.after(self.loop.rng.uniform(0, self.plan.roster_lag_s), self.fetch_roster, server)

    def counts(self, trainer: Trainer) -> bool:
        """Whether a worker lives, and the roster has it."""
        return trainer.alive and self.counted(trainer.worker)

    def counted(self, worker: int) -> bool:
        """Whether the newest roster has a worker, which it then always had."""
        return worker not in self.checks.fenced

    def of_worker(self, worker: int) -> Trainer:
        """A worker incarnation."""
        return self.incarnations[worker]

    def keep(self, name: str, past: Past) -> Past | None:
        """Writes who took part last under a name, if nobody else has since it was read."""
        known = self.pasts.get(name)
        if (0 if known is None else known.revision) != past.revision:
            return None
        self.pasts[name] = past._replace(revision=past.revision + 1)
        return self.pasts[name]

    def resumed(self, trainer: Trainer, before: Trainer) -> None:
        """A successor knows where to go on: nobody needs its predecessor's clocks any more."""
        self.operator.retire(before.worker, trainer.roster)

    def fetch_roster(self, server: Server) -> None:
        """The roster reaches a server."""
        self.loop.after(self.network.delay(), self._give_roster, server)

    def _give_roster(self, server: Server) -> None:
        workers = frozenset(t.worker for t in self.trainers.values()) - self.dropped
        server.run(server.adopt_roster, self.roster_version, workers)

    # -- views --------------------------------------------------------------------------------------------------------

    def publish(self, old: View | None, new: View) -> None:
        """A view was written: watchers hear of it, each in its own time; some only of a later one."""
        self.note("store", f"epoch {new.epoch} {new.chains.tolist()} + {new.joining.tolist()} {new.reason}", ())
        self.checks.on_publish(old, new)
        for server in self.servers.values():
            self.loop.after(self.loop.rng.uniform(0, WATCH_S), self._watch, server)

    def _watch(self, server: Server) -> None:
        if self.store.up:
            server.run(server.adopt, self.store.view)
        elif server.alive:
            self.loop.after(WATCH_S, self._watch, server)

    def fetch_view(self, process: Server | Trainer | Operator, epoch: int) -> None:
        """A process asks for a view of at least `epoch`: the store's, or while it is down that of a peer."""
        self.loop.after(self.network.delay(), self._give_view, process, epoch)

    def _give_view(self, process: Server | Trainer | Operator, epoch: int) -> None:
        if self.store.up:
            process.run(process.adopt, self.store.view)
            return
        views = [s.view for s in self.servers.values() if s.alive and not s.frozen and s.view is not None]
        views += [t.newest for t in self.trainers.values() if t.newest is not None]
        newest = max(views, key=lambda v: v.epoch, default=None)
        if newest is not None and newest.epoch >= epoch:
            process.run(process.adopt, newest)
        else:
            self.loop.after(WATCH_S, self._give_view, process, epoch)

    # -- leaders ------------------------------------------------------------------------------------------------------

    def news(self) -> None:
        """A server's key came, changed or went: the leader's watch tells it."""
        self.loop.after(self.network.delay(), self.leader.run, self.leader.ring)

    def _elect(self) -> Leader:
        self.store.term += 1
        return Leader(self, self.store.term)

    def replace_leader(self, crash: bool) -> None:
        """The leader dies, or only loses its lease and may write once more."""
        old = self.leader
        if crash:
            self.network.kill(old)
        self.loop.after(OFFICE_S * self.loop.rng.uniform(0.1, 1), self._succeed, old)

    def _succeed(self, old: Leader) -> None:
        if self.leader is not old:
            return
        if not self.store.up:
            self.loop.after(OFFICE_S, self._succeed, old)
            return
        self.leader = self._elect()

    # -- the end of faults --------------------------------------------------------------------------------------------

    def end_faults(self) -> None:
        """Faults stop, and so do new steps: what is outstanding must finish by itself."""
        self.training = False
        self.note("fault", "faults end", ())
        self.network.heal_all()
        self.store.up = True
        for server in self.servers.values():
            server.drag_s = 0.0
            server.thaw()
        for trainer in self.trainers.values():
            trainer.thaw()
        self.leader.thaw()

    def unfinished(self) -> str:
        """What is not as it should be when nothing goes wrong any more; "" if all is."""
        view = self.chains
        for trainer in self.trainers.values():
            if not trainer.finished:
                return f"{trainer.name} has steps or pulls outstanding, or never learned where to start"
        if self.operator.tasks:
            return f"operation {self.operator.tasks[0].number} is not committed everywhere"
        replicas = min(self.plan.replicas, sum(s.member not in self.store.draining for s in self.staying) or 1)
        for r in range(view.ranges):
            if len(view.members_of(r)) < replicas or view.joiner_of(r) is not None:
                return f"range {r} is not repaired: {view.members_of(r)} + {view.joiner_of(r)}"
        for server in self.staying:
            replica = server.replica
            if replica.epoch < view.epoch:
                return f"{server.member} is at epoch {replica.epoch} of {view.epoch}"
            if len(replica.log) or replica.log.nbytes or replica.parked:
                return f"{server.member} keeps {len(replica.log)} entries, {replica.log.nbytes} bytes"
        wanted = plan(self.store.view, self.store.members, self.config, Health(), self.limits)
        if wanted is not None and wanted.view is not None:
            return f"the planner has not come to an end: {wanted.reason}"
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
            world.checks.moves.watch()
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
        world.checks.reads.count,
        world.checks.operations,
        len(world.checks.decisions.made),
        world.checks.shards.count,
    )
