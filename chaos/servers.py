"""The server's shell in the simulator: the real replica, a dict for a store, links for sockets. Pure."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from chaos.contents import (
    KEYS_PER_ID,
    KEYS_PER_RANGE,
    TABLES,
    ChunkContent,
    Content,
    Control,
    Done,
    averaged,
    means_of,
    updated,
)
from chaos.control import CLUSTER, PACE, Leader
from chaos.frames import AskFrame, JoinFrame, OperationFrame, PullFrame, PushFrame, RequestFrame, ViewFrame
from chaos.home import Home
from chaos.network import Link, Process
from chaos.reads import Reads
from coordinator.health import Report
from coordinator.view import View
from elasticps.server.protocol.barrier_state import Rounds
from elasticps.server.protocol.data_shards_state import Claim, Shards, group_of
from elasticps.server.protocol.operations import RoundStep
from elasticps.server.protocol.replies import RequestTicket
from replication.chain import Member, Ranges, place
from replication.effects import (
    Apply,
    Ask,
    CaughtUp,
    ClocksReply,
    Effects,
    Erase,
    Hold,
    Install,
    NeedRoster,
    NeedView,
    NextChunk,
    Push,
    Release,
    Reply,
    Send,
    SnapshotRange,
)
from replication.messages import Operation, OperationKind
from replication.progress import PART_BITS
from replication.replica import Replica

if TYPE_CHECKING:
    from chaos.simulator import World

BEAT_S = 0.01


class Server(Process):
    """One incarnation of a server.

    Per range: values, the hash chain over its operations, which these were, how far workers came in it, and the last
    round that was closed there. `roster`: the version of the newest roster that it was given; `left`: it has drained
    and ended.
    """

    def __init__(self, world: World, member: Member) -> None:
        super().__init__(world.loop)
        self.world = world
        self.member = member
        self.key = member
        self.name = member.name
        plan = world.plan
        self.replica = Replica(member, plan.ranges, plan.budget_bytes)
        self.view: View | None = None
        self.roster = 0
        self.workers: frozenset[int] = frozenset()
        self.reads = Reads(self, plan.ranges)
        self.rounds = Rounds(plan.ranges)
        self.shards = Shards(plan.ranges)
        self.home = Home(self)
        self.values: list[dict[int, int]] = [{} for _ in range(plan.ranges)]
        self.hashes: list[list[int]] = [[0] for _ in range(plan.ranges)]
        self.history: list[list[tuple[Done, ...]]] = [[()] for _ in range(plan.ranges)]
        self.done: list[dict[Done, None]] = [{} for _ in range(plan.ranges)]
        self.reached: list[dict[int, int]] = [{} for _ in range(plan.ranges)]
        self.closed = [0] * plan.ranges
        self.links: dict[Any, Link] = {}
        self.leaders: dict[Any, Link] = {}
        self.was_member = False
        self.left = False
        self._neighbours: list[Member] = []
        self._cuts: dict[int, tuple[int, int]] = {}
        self.loop.after(BEAT_S * self.loop.rng.random(), self.run, self._beat)

    def _beat(self) -> None:
        """Now and then: the lease is kept, the leader hears, reads that waited too long end."""
        self.loop.after(BEAT_S, self.run, self._beat)
        if self.world.store.up:
            self.world.store.renew(self.member)
        self.tell_leaders()
        self.home.judge()
        if self.reads.waiting:
            self.reads.judge()

    # -- what comes in ----------------------------------------------------------------------------------------------

    def on_up(self, link: Link, peer: Process) -> None:
        """Accepts a connection, unless a later one to the same peer is up; an earlier one is over."""
        if isinstance(peer, Leader):
            if peer.key not in self.leaders or self.leaders[peer.key].number < link.number:
                self.leaders[peer.key] = link
                self.tell_leaders()
            return
        old = self.links.get(peer.key)
        if old is not None:
            if old.number > link.number:
                link.cut()
                return
            self._lose(peer)
        self.links[peer.key] = link
        if isinstance(peer, Server):
            self.perform("up", self.replica.peer_up(peer.member))
        elif self.view is not None:
            link.send(self, ViewFrame(self.view))

    def on_down(self, link: Link, peer: Process) -> None:
        """The connection is lost, unless a newer one has replaced it."""
        if self.links.get(peer.key) is link:
            self._lose(peer)
        elif self.leaders.get(peer.key) is link:
            del self.leaders[peer.key]

    def _lose(self, peer: Process) -> None:
        link = self.links.pop(peer.key)
        link.cut()
        self.reads.forget(link)
        self.home.forget(link)
        if isinstance(peer, Server):
            self.perform("down", self.replica.peer_down(peer.member))

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """The next message, from a peer, a worker, an operator or a leader."""
        if isinstance(message, ViewFrame):
            self.adopt(message.view)
        elif self.links.get(peer.key) is not link:
            return
        elif isinstance(peer, Server):
            self.perform(type(message).__name__, self.replica.receive(peer.member, message))
        elif isinstance(message, PushFrame):
            m = message
            push = Push(
                (link, m.frame), m.worker, m.epoch, m.clock, m.part, m.last, m.ranges, m.content, 100, m.base,
                m.roster, repeat=m.content is None, first=m.first,
            )  # fmt: skip
            self.perform("push", self.replica.push(push))
        elif isinstance(message, PullFrame):
            self.reads.pull(link, message)
        elif isinstance(message, JoinFrame):
            self.reads.join(link, message)
        elif isinstance(message, RequestFrame):
            self.home.request(link, cast(Any, peer), message.frame)
        elif isinstance(message, OperationFrame):
            self._operation(link, message)
        else:
            assert isinstance(message, AskFrame)
            ask = Ask((link, message.ask), message.worker, message.epoch, message.roster)
            self.perform("ask", self.replica.ask(ask))

    def _operation(self, link: Link, message: OperationFrame) -> None:
        m = message
        payload = Control(OperationKind(m.kind), m.number)
        push = Push((link, m.frame), m.worker, m.epoch, 0, 0, True, None, payload, 50, roster=m.roster, kind=m.kind)
        self.perform("push", self.replica.push(push))

    def adopt(self, view: View) -> None:
        """A view came, from the store, a leader or a peer."""
        if view.epoch <= self.replica.epoch:
            return
        self.world.checks.on_adopt(view)
        self.reads.follow(self.view, view)
        self.view = view
        chains = view.as_chains
        where = place(chains, self.member)
        self._neighbours = [chains.members[i] for i in sorted({*where.up.tolist(), *where.down.tolist()} - {-1})]
        self.perform("adopt", self.replica.adopt(chains))
        listed = chains.index(self.member) >= 0
        if self.was_member and not listed:
            self.world.left_out(self)
            return
        self.was_member |= listed
        for link in list(self.links.values()):
            if not isinstance(link.other(self), Server):
                link.send(self, ViewFrame(view))
        self.home.judge()

    def adopt_roster(self, version: int, workers: frozenset[int]) -> None:
        """A roster came."""
        if version >= self.roster:
            self.roster, self.workers = version, workers
            self.reads.roster(workers)
            self.home.roster(workers)
        self.perform("roster", self.replica.adopt_roster(version, workers))
        self.home.judge()

    # -- leaders ----------------------------------------------------------------------------------------------------

    def tell_leaders(self) -> None:
        """Tells every leader that is connected how things are."""
        if not self.leaders:
            return
        report = Report(self.replica.epoch, tuple(self.replica.levels()), self._suspects())
        for link in list(self.leaders.values()):
            link.send(self, report)

    def _suspects(self) -> dict[Member, float]:
        """Neighbours that cannot be reached, and for how many seconds."""
        suspects = {}
        for member in self._neighbours:
            since = self.world.unreachable_since(self, member)
            if since is not None:
                suspects[member] = (self.loop.now - since) * PACE
        return suspects

    # -- what goes out ----------------------------------------------------------------------------------------------

    def perform(self, event: str, effects: Effects) -> None:
        """Carries out the effects of one event, in order and at once."""
        world = self.world
        for effect in effects:
            if isinstance(effect, Send):
                link = self.links.get(effect.peer)
                if link is not None:
                    link.send(self, effect.message)
            elif isinstance(effect, Apply):
                self._apply(event, effect)
            elif isinstance(effect, (Reply, ClocksReply, Hold, Release)):
                self._answer(effect)
            elif isinstance(effect, NeedView):
                world.fetch_view(self, effect.epoch)
            elif isinstance(effect, NeedRoster):
                world.fetch_roster(self)
            elif isinstance(effect, SnapshotRange):
                self._cuts[effect.range] = (effect.serial, 0)
                self.loop.after(world.network.delay(), self.run, self._cut, effect.range, effect.serial)
            elif isinstance(effect, NextChunk):
                self.loop.after(world.network.delay(), self.run, self._cut, effect.range, effect.serial)
            elif isinstance(effect, Install):
                self._install(effect)
            elif isinstance(effect, Erase):
                for r in effect.ranges.tolist():
                    self.values[r], self.hashes[r], self.history[r] = {}, [0], [()]
                    self.done[r], self.reached[r], self.closed[r] = {}, {}, 0
                self.rounds.erase(effect.ranges)
                self.shards.erase(effect.ranges.tolist())
            else:
                assert isinstance(effect, CaughtUp)
                world.checks.on_level(effect.range, effect.fill)
                self.loop.after(0.0, self.run, self.tell_leaders)
        world.note(self.member, event, effects)
        world.checks.after_event(self)
        if self.reads.waiting:
            self.reads.judge()

    def _answer(self, effect: Reply | ClocksReply | Hold | Release) -> None:
        token = effect.token
        if not isinstance(token, tuple):
            ticket = cast(RequestTicket, token)
            if isinstance(effect, Reply):
                ticket.reply(effect)
            elif isinstance(effect, ClocksReply):
                ticket.clocks(effect)
            elif isinstance(effect, Hold):
                ticket.hold()
            else:
                ticket.release()
            return
        link = token[0]
        assert isinstance(link, Link)
        if isinstance(effect, (Hold, Release)):
            link.pause(self, isinstance(effect, Hold))
        elif self.links.get(link.other(self).key) is link:
            link.send(self, effect)

    # -- operations -------------------------------------------------------------------------------------------------

    def _apply(self, event: str, effect: Apply) -> None:
        operation, payload, checks = effect.operation, effect.operation.payload, self.world.checks
        inside = effect.inside or {}
        bounds = {r: inside.get(r, KEYS_PER_RANGE) for r in effect.ranges.tolist()}
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            if isinstance(payload, Control):
                checks.on_control(self, operation, r, seq)
                parts = [payload.done]
                self._control(payload, r, bounds[r])
            elif isinstance(payload, (RoundStep, Claim)):
                checks.on_control(self, operation, r, seq)
                parts = [(-operation.kind, checks.decisions.number(payload))]
            else:
                content = payload if isinstance(payload, Content) else Content({})
                parts = checks.on_apply(self, event, operation, r, seq, content.updates.get(r, []))
                if not content.round:
                    for key, value in content.updates.get(r, []):
                        if key % KEYS_PER_ID < bounds[r]:
                            self.values[r][key] = updated(self.values[r], key, value)
                self.reached[r][operation.worker] = operation.after
            self.done[r].update(dict.fromkeys(parts))
            self.history[r].append(tuple(parts))
            self.hashes[r].append(self._link_of(r, operation))
        if isinstance(payload, RoundStep):
            self._round(operation.kind, payload, effect.ranges, bounds)
        elif isinstance(payload, Claim):
            before = checks.shards.done_at(self)
            self.shards.take(payload)
            checks.shards.on_change(self, before)
        elif isinstance(payload, Content):
            if payload.mark is not None and np.count_nonzero(effect.ranges == group_of(payload.mark)):
                self.shards.note(payload.mark, operation.worker, operation.after >> PART_BITS)
            if payload.round:
                self.rounds.keep(CLUSTER, payload.round, operation.worker, effect.ranges, payload.blocks(bounds))

    def _round(self, kind: int, step: RoundStep, ranges: Ranges, bounds: dict[int, int]) -> None:
        if kind == OperationKind.BARRIER_JOIN:
            self.rounds.enter(step.app, step.clock, step.workers)
        elif kind == OperationKind.BARRIER_LEAVE:
            self.rounds.leave(step.app, step.workers[0])
        elif kind == OperationKind.BARRIER_DECISION:
            self.rounds.decide(step.app, step.clock, step.workers)
        else:
            means = means_of(self.rounds.close(step.app, step.clock, step.workers, ranges, TABLES))
            self.world.checks.decisions.on_close(self, step, bounds, means)
            for key, (mean, rate) in means.items():
                values = self.values[key // KEYS_PER_ID]
                values[key] = averaged(values, key, mean, rate)

    def _link_of(self, r: int, operation: Operation) -> int:
        payload = operation.payload
        number = payload.number if isinstance(payload, Control) else 0
        if isinstance(payload, (RoundStep, Claim)):
            number = self.world.checks.decisions.number(payload)
        return hash((self.hashes[r][-1], operation.kind, operation.worker, operation.after, number))

    def _control(self, control: Control, r: int, bound: int) -> None:
        if control.kind == OperationKind.INIT:
            key, value = control.initial(r)
            if key % KEYS_PER_ID < bound:
                self.values[r].setdefault(key, value)

    def _cut(self, r: int, serial: int) -> None:
        now, low = self._cuts.get(r, (0, 0))
        if now != serial:
            return
        step = -(-KEYS_PER_RANGE // self.world.plan.pieces)
        high = min(low + step, KEYS_PER_RANGE)
        self._cuts[r] = (serial, high)
        values = {k: v for k, v in self.values[r].items() if low <= k % KEYS_PER_ID < high}
        kept = copy.deepcopy(self.rounds.dump(r, low, high, TABLES))
        if low == 0:
            done, reached, shards = dict(self.done[r]), dict(self.reached[r]), copy.deepcopy(self.shards.dump(r))
            hashes, history, closed = list(self.hashes[r]), list(self.history[r]), self.closed[r]
            piece = ChunkContent(values, kept, shards, hashes, history, done, reached, closed)
        else:
            piece = ChunkContent(values, kept, {}, [], [], {}, {}, 0)
        self.perform("piece", self.replica.piece(r, serial, high, high == KEYS_PER_RANGE, piece))

    def _install(self, effect: Install) -> None:
        piece, r = effect.payload, effect.range
        assert isinstance(piece, ChunkContent)
        self.world.checks.on_install(self, r, piece.values)
        self.values[r].update(piece.values)
        if piece.hashes:  # the first piece brings the history
            self.hashes[r], self.history[r] = list(piece.hashes), list(piece.history)
            self.done[r], self.reached[r], self.closed[r] = dict(piece.done), dict(piece.reached), piece.closed
        self.rounds.load(r, copy.deepcopy(piece.rounds))
        self.shards.load(copy.deepcopy(piece.shards))
        self.world.checks.touched.append(r)
