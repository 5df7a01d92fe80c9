"""The invariants of the protocol, with names; each is checked when something happened that could break it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chaos.contents import Content, Control, Done, Update, updated
from chaos.decisions import DecisionChecks
from chaos.moves import MoveChecks
from chaos.readings import ReadChecks
from chaos.servers import Server
from chaos.shard_checks import ShardChecks
from chaos.sim.violation import Violation
from coordinator.view import View
from replication.chain import Chains, Member, Ranges, Role, unsafe_transition
from replication.messages import Operation, OperationKind
from replication.progress import after_part, touched_clock

if TYPE_CHECKING:
    from chaos.simulator import World
    from chaos.workers import Trainer


class Checks:
    """What an observer who sees everything knows: what was sent first, what was told, who was level, who is fenced."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.reads = ReadChecks(self)
        self.moves = MoveChecks(world)
        self.decisions = DecisionChecks(self)
        self.shards = ShardChecks(self)
        self.touched: list[int] = []
        self.level: dict[int, int] = {}
        self.fenced: dict[int, int] = {}
        self.commits = 0
        self.operations = 0
        self._views: dict[int, View] = {}
        self._first: dict[Done, Content] = {}
        self._parts: dict[tuple[int, int], list[Done]] = {}
        self._frames: dict[tuple[int, int], Done] = {}
        self._told: list[set[Done]] = [set() for _ in range(world.plan.ranges)]
        self._samples: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self._heads: dict[tuple[int, int], Member] = {}
        self._retired: set[int] = set()

    # -- one head per epoch, only the leader's views, the last full replica -------------------------------------------

    def on_publish(self, old: View | None, view: View) -> None:
        """A view was written."""
        new = view.as_chains
        if old is not None:
            text = unsafe_transition(old.as_chains, new, self.level)
            if text:
                raise Violation("safe transition", text)
            self.moves.on_publish(old, view)
        self._views[new.epoch] = view
        for r in range(new.ranges):
            if new.since[r] != new.epoch:
                continue
            if not any(self.world.known[m].alive for m in new.members_of(r)):
                raise Violation("last full replica", f"range {r} is left to the dead in epoch {new.epoch}")
            self._all_have(r, self._told[r], "under a new view")

    def on_adopt(self, view: View) -> None:
        """A server or worker follows a view."""
        if self._views.get(view.epoch) is not view:
            raise Violation("only the leader's views", f"epoch {view.epoch} was never written so")

    def on_level(self, r: int, fill: int) -> None:
        """A tail reported its joiner level; one of an older view may do so late."""
        self.level[r] = max(fill, self.level.get(r, 0))
        if self.world.chains.since[r] == fill:
            self._all_have(r, self._told[r], "when it was reported level")

    # -- exactly once, content, fences ---------------------------------------------------------------------------------

    def on_first_send(self, trainer: Trainer, clock: int, after: int, last: bool, content: Content) -> None:
        """A worker's program pushes a part for the first time."""
        done = (trainer.worker, after)
        self._first[done] = content
        self._parts.setdefault((trainer.worker, clock), []).append(done)
        if last:
            sample = trainer.sample_of[clock]
            self._samples.setdefault((trainer.name, sample), []).append(done)

    def on_sent(self, trainer: Trainer, frame: int, after: int) -> None:
        """A frame leaves a worker."""
        self._frames[trainer.worker, frame] = (trainer.worker, after)

    def on_apply(
        self, server: Server, event: str, operation: Operation, r: int, seq: int, updates: Sequence[Update]
    ) -> list[Done]:
        """A replica is about to apply a push: the parts that it has with this."""
        worker, after = operation.worker, operation.after
        where = f"{server.member} range {r} seq {seq} worker {worker} progress {after >> 16}.{after & 0xFFFF}"
        if (worker, after) in server.done[r]:
            raise Violation("exactly once", where)
        self._in_order(server, r, seq, where)
        before = server.reached[r].get(worker, 0)
        parts = [d for d in self._parts[worker, touched_clock(after)] if before < d[1] and d[1] <= after]
        first = tuple(u for done in parts for u in self._first[done].updates.get(r, ()))
        if tuple(updates) != first:
            raise Violation("content", f"{where}: {updates} was first sent as {first}")
        replica = server.replica
        if event == "push":
            if self._heads.setdefault((replica.epoch, r), server.member) != server.member:
                raise Violation("one head per epoch", f"{where} epoch {replica.epoch}")
            if server.roster >= self.fenced.get(worker, server.roster + 1):
                raise Violation("fence", f"{where}: roster {self.fenced[worker]} fenced it, {server.roster} is here")
        self.touched.append(r)
        return parts

    def on_control(self, server: Server, operation: Operation, r: int, seq: int) -> None:
        """A replica is about to apply another operation."""
        self._in_order(server, r, seq, f"{server.member} range {r} seq {seq} {operation}")
        self.touched.append(r)

    def _in_order(self, server: Server, r: int, seq: int, where: str) -> None:
        if seq != len(server.hashes[r]):
            raise Violation("prefix", f"{where} follows seq {len(server.hashes[r]) - 1}")

    def on_install(self, server: Server, r: int, values: dict[int, int]) -> None:
        """A joiner is about to put a piece in place."""
        early = values.keys() & server.values[r].keys()
        if early:
            raise Violation("content", f"{server.member} has keys {sorted(early)} of range {r} before their piece")

    def parts_of(self, worker: int, clock: int) -> set[Done]:
        """The parts of the last steps of a worker up to `clock`: of those that can be outstanding."""
        clocks = range(max(1, clock - self.world.plan.window + 1), clock + 1)
        return {done for c in clocks for done in self._parts.get((worker, c), ())}

    # -- ack safety ---------------------------------------------------------------------------------------------------

    def on_told(self, trainer: Trainer, frame: int, committed: Ranges) -> None:
        """A worker hears that a frame is committed in some ranges."""
        done = self._frames[trainer.worker, frame]
        for r in committed.tolist():
            self._tell(r, done)

    def on_committed(self, trainer: Trainer, clock: int) -> None:
        """A worker's session says that a step is committed."""
        self.commits += 1
        if not self.world.plan.rounds:
            self.shards.on_acknowledged(trainer, clock)
        for done in self._parts[trainer.worker, clock]:
            for r in range(self.world.plan.ranges):
                self._tell(r, done)

    def on_operation(self, kind: OperationKind, worker: int, number: int) -> None:
        """An operation of the ranges is committed at every head of one view."""
        self.operations += 1
        for r in range(self.world.plan.ranges):
            self._tell(r, Control(kind, number).done)

    def on_retire(self, worker: int) -> None:
        """Somebody begins to retire a worker: some server may have done so already."""
        self._retired.add(worker)

    def _tell(self, r: int, done: Done) -> None:
        if done not in self._told[r]:
            self._told[r].add(done)
            self._all_have(r, {done}, "when it was told to be committed")

    def _all_have(self, r: int, told: set[Done], when: str) -> None:
        for server in self.holders(r):
            missing = told - server.done[r].keys()
            if missing:
                raise Violation("ack safety", f"{server.member} lacks {_name(min(missing))} in range {r} {when}")

    def holders(self, r: int) -> list[Server]:
        """The full and level replicas of a range."""
        view = self.world.chains
        members = view.members_of(r)
        joiner = view.joiner_of(r)
        if joiner is not None and self.level.get(r) == view.since[r]:
            members = (*members, joiner)
        return [self.world.known[member] for member in members]

    # -- steps of rounds and shards -----------------------------------------------------------------------------------

    def contents(self, worker: int, clock: int) -> list[Content]:
        """What a worker pushed in a step, part by part."""
        return [self._first[done] for done in self._parts.get((worker, clock), ())]

    def on_settled(self, trainer: Trainer, clock: int) -> None:
        """A worker goes on after a round."""
        self.decisions.on_settled(trainer, clock)
        self.shards.on_acknowledged(trainer, clock)

    def lasting(self, worker: int, clock: int) -> bool:
        """Whether a step counts, and has come to everybody who must have it."""
        parts = {*self._parts.get((worker, clock), ())}
        if after_part(clock, 0, True) not in {after for _, after in parts} or not self._counts(worker, clock):
            return False
        return all(
            server.done[r].keys() >= parts and (not self.world.plan.rounds or server.closed[r] >= clock)
            for r in range(self.world.plan.ranges)
            for server in self.holders(r)
        )

    def _counts(self, worker: int, clock: int) -> bool:
        """Whether a committed step counts: under rounds, if its round was made with it."""
        return not self.world.plan.rounds or worker in self.decisions.made.get(clock, ())

    # -- prefix and equal state ---------------------------------------------------------------------------------------

    def after_event(self, server: Server) -> None:
        """Compares what an event touched with the other replicas of the range."""
        if not self.touched:
            return
        view = self.world.chains
        for r in self.touched:
            members = view.members_of(r)
            mine = server.member in members or (
                server.member == view.joiner_of(r)
                and server.replica.role[r] == Role.JOINING
                and bool(server.replica.filled[r])
                and server.replica.view is view
            )
            if mine:
                for member in members:
                    self._compare(r, server, self.world.known[member])
        self.touched.clear()

    def _compare(self, r: int, a: Server, b: Server) -> None:
        shorter = min(len(a.hashes[r]), len(b.hashes[r]))
        if a.hashes[r][shorter - 1] != b.hashes[r][shorter - 1]:
            raise Violation("prefix", f"range {r}: {a.member} and {b.member} differ at seq {shorter - 1}")
        if len(a.hashes[r]) == len(b.hashes[r]) and a.values[r] != b.values[r]:
            raise Violation("equal state", f"range {r}: {a.member} and {b.member} at seq {shorter - 1}")
        alike = not self.world.plan.scripted or a is b or len(a.hashes[r]) != len(b.hashes[r])
        if not alike and self.decisions.state(a, r) != self.decisions.state(b, r):
            text = f"range {r}: {a.member} and {b.member} know different things of rounds or shards at seq"
            raise Violation("equal state", f"{text} {shorter - 1}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def at_end(self) -> None:
        """Everything is quiet: full replicas are equal, hold what a plain replay gives, no sample is missing, and what
        tails have shown was part of this history."""
        view = self.world.chains
        for r in range(view.ranges):
            servers = [self.world.known[m] for m in view.members_of(r)]
            values = self._replay(r, servers[0])
            for server in servers:
                if server.hashes[r] != servers[0].hashes[r]:
                    raise Violation("equal state", f"range {r}: {server.member} differs from {servers[0].member}")
                if values != server.values[r]:
                    raise Violation("equal state", f"range {r}: {server.member} is not what its operations give")
            self._all_have(r, self._told[r], "at the end")
        self.moves.at_end()
        self.shards.at_end()
        if not self.world.plan.shards:
            self._check_samples(view)
        for worker in self._retired:
            for server in self.world.staying:
                if server.replica.clocks.known(worker) and server.replica.clocks.row(worker).any():
                    raise Violation("retired", f"{server.member} still has clocks of worker {worker}")

    def _check_samples(self, view: Chains) -> None:
        for (name, sample), attempts in self._samples.items():
            trainer = self.world.trainers[name]
            good = [d for d in attempts if self._counts(d[0], touched_clock(d[1])) and self._everywhere(d, view)]
            if not good and trainer.alive and sample < trainer.next_sample:
                raise Violation("no sample lost", f"sample {sample} of {name}")
            if len(good) > 1 and self.world.plan.rounds:
                raise Violation("no sample twice", f"sample {sample} of {name}: {good}")

    def _replay(self, r: int, server: Server) -> dict[int, int]:
        """The values that a replica's operations give; on the way, what tails have shown is compared."""
        values: dict[int, int] = {}
        shown, closed = self.reads.of(r), 0
        for seq, (digest, operation) in enumerate(zip(server.hashes[r], server.history[r], strict=True)):
            for done in operation:
                if done[0] == -OperationKind.INIT:
                    values.setdefault(*Control(OperationKind.INIT, done[1]).initial(r))
                elif done[0] == -OperationKind.BARRIER_CLOSE:
                    closed = self.decisions.replay(r, done, closed, values)
                content = self._first.get(done)
                if content is not None and not content.round:
                    for key, value in content.updates.get(r, ()):
                        values[key] = updated(values, key, value)
            for part in shown.pop(seq, ()):
                if part.digest != digest or any(values.get(k, 0) != v for k, v in part.values.items()):
                    raise Violation("reads of what stays", f"{part} was shown, and is not what seq {seq} became")
        if shown:
            raise Violation("reads of what stays", f"range {r} ends at seq {seq}, {max(shown)} was shown")
        return values

    def _everywhere(self, done: Done, view: Chains) -> bool:
        return all(done in self.world.known[view.members_of(r)[0]].done[r] for r in range(view.ranges))


def _name(done: Done) -> str:
    if done[0] < 0:
        return f"{OperationKind(-done[0]).name} {done[1]}"
    return f"{done[1] >> 16}.{done[1] & 0xFFFF} of worker {done[0]}"
