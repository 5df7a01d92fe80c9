"""The server's shell in the simulator: the real replica, a dict for a store, links for sockets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from chaos.control import PACE, Leader
from chaos.frames import AskFrame, JoinFrame, OperationFrame, PullFrame, PushFrame, ViewFrame
from chaos.network import Link, Process
from chaos.reads import Reads
from coordinator.health import Report
from coordinator.view import View
from replication.chain import Member, Ranges, place
from replication.effects import (
    Apply,
    Ask,
    ClocksReply,
    Effects,
    Erase,
    Hold,
    Install,
    Level,
    NeedRoster,
    NeedView,
    NextPiece,
    Push,
    Release,
    Reply,
    Send,
    SnapshotRange,
)
from replication.messages import Kind, Operation
from replication.replica import Replica

if TYPE_CHECKING:
    from chaos.simulator import World

KEYS_PER_RANGE = 12
"""Keys of range r are r * 1000 + 0 … 11; the number within the range stands for the key's hash."""

MODULUS = (1 << 61) - 1
BEAT_S = 0.01

Update = tuple[int, int]

Done = tuple[int, int]
"""An operation as observers know it. A part of a step: worker, and the progress that it leaves. Another: minus its
kind, and its number."""


def updated(values: dict[int, int], key: int, value: int) -> int:
    """The tiny store's optimizer: the order of updates shows in the value."""
    return (values.get(key, 0) * 3 + value) % MODULUS


class Content:
    """Updates (key, value) per range, as lists that belong to the caller or as a private copy."""

    def __init__(self, updates: dict[int, list[Update]]) -> None:
        self.updates = updates

    def private_copy(self) -> Content:
        """What the session keeps."""
        return Content({r: list(u) for r, u in self.updates.items()})

    def touches(self, ranges: Ranges) -> bool:
        """Whether it holds anything for these ranges."""
        return any(self.updates.get(r) for r in ranges.tolist())

    def cut(self, ranges: Ranges) -> Content:
        """The part that belongs to some ranges."""
        return Content({r: self.updates[r] for r in ranges.tolist() if r in self.updates})


class Control(NamedTuple):
    """The payload of an operation that is no push: its kind and number are all that there is to apply."""

    kind: Kind
    number: int

    @property
    def done(self) -> Done:
        """What observers call it."""
        return (-self.kind, self.number)

    def initial(self, r: int) -> Update:
        """An INIT puts this where nothing is yet."""
        return (r * 1000 + self.number % KEYS_PER_RANGE, -self.number)


class PieceContent(NamedTuple):
    """What a piece of a range carries: values, and the history that the checks follow."""

    values: dict[int, int]
    hashes: list[int]
    history: list[tuple[Done, ...]]
    done: dict[Done, None]
    reached: dict[int, int]


class Server(Process):
    """One incarnation of a server.

    Per range: values, the hash chain over its operations, which these were, and how far workers came in it. `roster`:
    the version of the newest roster that it was given; `left`: it has drained and ended.
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
        self.values: list[dict[int, int]] = [{} for _ in range(plan.ranges)]
        self.hashes: list[list[int]] = [[0] for _ in range(plan.ranges)]
        self.history: list[list[tuple[Done, ...]]] = [[()] for _ in range(plan.ranges)]
        self.done: list[dict[Done, None]] = [{} for _ in range(plan.ranges)]
        self.reached: list[dict[int, int]] = [{} for _ in range(plan.ranges)]
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
        elif isinstance(message, OperationFrame):
            self._operation(link, message)
        else:
            assert isinstance(message, AskFrame)
            ask = Ask((link, message.ask), message.worker, message.epoch, message.roster)
            self.perform("ask", self.replica.ask(ask))

    def _operation(self, link: Link, message: OperationFrame) -> None:
        m = message
        payload = Control(Kind(m.kind), m.number)
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

    def adopt_roster(self, version: int, workers: frozenset[int]) -> None:
        """A roster came."""
        if version >= self.roster:
            self.roster, self.workers = version, workers
            self.reads.roster(workers)
        self.perform("roster", self.replica.adopt_roster(version, workers))

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
            elif isinstance(effect, (Reply, ClocksReply)):
                link = _link(effect.token)
                if self.links.get(link.other(self).key) is link:
                    link.send(self, effect)
            elif isinstance(effect, (Hold, Release)):
                _link(effect.token).pause(self, isinstance(effect, Hold))
            elif isinstance(effect, NeedView):
                world.fetch_view(self, effect.epoch)
            elif isinstance(effect, NeedRoster):
                world.fetch_roster(self)
            elif isinstance(effect, SnapshotRange):
                self._cuts[effect.range] = (effect.serial, 0)
                self.loop.after(world.network.delay(), self.run, self._cut, effect.range, effect.serial)
            elif isinstance(effect, NextPiece):
                self.loop.after(world.network.delay(), self.run, self._cut, effect.range, effect.serial)
            elif isinstance(effect, Install):
                self._install(effect)
            elif isinstance(effect, Erase):
                for r in effect.ranges.tolist():
                    self.values[r], self.hashes[r], self.history[r] = {}, [0], [()]
                    self.done[r], self.reached[r] = {}, {}
            else:
                assert isinstance(effect, Level)
                world.checks.on_level(effect.range, effect.fill)
                self.loop.after(0.0, self.run, self.tell_leaders)
        world.note(self.member, event, effects)
        world.checks.after_event(self)
        if self.reads.waiting:
            self.reads.judge()

    def _apply(self, event: str, effect: Apply) -> None:
        operation, checks = effect.operation, self.world.checks
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            bound = KEYS_PER_RANGE if effect.inside is None else effect.inside.get(r, KEYS_PER_RANGE)
            if isinstance(operation.payload, Control):
                checks.on_control(self, operation, r, seq)
                parts = [operation.payload.done]
                self._control(operation.payload, r, bound)
            else:
                content = operation.payload
                updates = content.updates.get(r, []) if isinstance(content, Content) else []
                parts = checks.on_apply(self, event, operation, r, seq, updates)
                values = self.values[r]
                for key, value in updates:
                    if key % 1000 < bound:
                        values[key] = updated(values, key, value)
                self.reached[r][operation.worker] = operation.after
            self.done[r].update(dict.fromkeys(parts))
            self.history[r].append(tuple(parts))
            self.hashes[r].append(self._link_of(r, operation))

    def _link_of(self, r: int, operation: Operation) -> int:
        payload = operation.payload
        number = payload.number if isinstance(payload, Control) else 0
        return hash((self.hashes[r][-1], operation.kind, operation.worker, operation.after, number))

    def _control(self, control: Control, r: int, bound: int) -> None:
        if control.kind == Kind.INIT:
            key, value = control.initial(r)
            if key % 1000 < bound:
                self.values[r].setdefault(key, value)

    def _cut(self, r: int, serial: int) -> None:
        now, low = self._cuts.get(r, (0, 0))
        if now != serial:
            return
        step = -(-KEYS_PER_RANGE // self.world.plan.pieces)
        high = min(low + step, KEYS_PER_RANGE)
        self._cuts[r] = (serial, high)
        values = {k: v for k, v in self.values[r].items() if low <= k % 1000 < high}
        if low == 0:
            done, reached = dict(self.done[r]), dict(self.reached[r])
            piece = PieceContent(values, list(self.hashes[r]), list(self.history[r]), done, reached)
        else:
            piece = PieceContent(values, [], [], {}, {})
        self.perform("piece", self.replica.piece(r, serial, high, high == KEYS_PER_RANGE, piece))

    def _install(self, effect: Install) -> None:
        piece, r = effect.payload, effect.range
        assert isinstance(piece, PieceContent)
        self.world.checks.on_install(self, r, piece.values)
        self.values[r].update(piece.values)
        if piece.hashes:  # the first piece brings the history
            self.hashes[r], self.history[r] = list(piece.hashes), list(piece.history)
            self.done[r], self.reached[r] = dict(piece.done), dict(piece.reached)
        self.world.checks.touched.append(r)


def _link(token: object) -> Link:
    assert isinstance(token, tuple)
    link = token[0]
    assert isinstance(link, Link)
    return link
