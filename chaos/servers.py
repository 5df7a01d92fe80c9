"""The server's shell in the simulator: the real replica, a dict for a store, links for sockets. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from chaos.network import Link, Process
from replication.chain import Chains, Member, Ranges
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
from replication.replica import Replica

if TYPE_CHECKING:
    from chaos.simulator import World

KEYS_PER_RANGE = 12
"""Keys of range r are r * 1000 + 0 … 11; the number within the range stands for the key's hash."""

MODULUS = (1 << 61) - 1

Update = tuple[int, int]

Done = tuple[int, int]
"""A part of a step as replicas know it: worker, and the progress that it leaves."""


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
        """Every part goes to every head, so that each is one operation everywhere, which the checks count."""
        return True

    def cut(self, ranges: Ranges) -> Content:
        """The part that belongs to some ranges."""
        return Content({r: self.updates[r] for r in ranges.tolist() if r in self.updates})


class PieceContent(NamedTuple):
    """What a piece of a range carries: values, and the history that the checks follow."""

    values: dict[int, int]
    hashes: list[int]
    done: dict[Done, None]


class PushFrame(NamedTuple):
    """A worker's push on the wire."""

    frame: int
    worker: int
    epoch: int
    clock: int
    part: int
    last: bool
    ranges: Ranges | None
    base: int
    roster: int
    content: Content | None


class AskFrame(NamedTuple):
    """A worker's question on the wire."""

    ask: int
    worker: int
    epoch: int
    roster: int


class ViewFrame(NamedTuple):
    """A server tells a worker the view."""

    view: Chains


class Server(Process):
    """One incarnation of a server."""

    def __init__(self, world: World, member: Member) -> None:
        super().__init__(world.loop)
        self.world = world
        self.member = member
        self.key = member
        self.name = member.name
        plan = world.plan
        self.replica = Replica(member, plan.ranges, plan.budget_bytes)
        self.values: list[dict[int, int]] = [{} for _ in range(plan.ranges)]
        self.hashes: list[list[int]] = [[0] for _ in range(plan.ranges)]
        self.done: list[dict[Done, None]] = [{} for _ in range(plan.ranges)]
        self.links: dict[Any, Link] = {}
        self.was_member = False
        self._cuts: dict[int, tuple[int, int]] = {}

    # -- what comes in ----------------------------------------------------------------------------------------------

    def on_up(self, link: Link, peer: Process) -> None:
        """Accepts a connection, unless a later one to the same peer is up; an earlier one is over."""
        old = self.links.get(peer.key)
        if old is not None:
            if old.number > link.number:
                link.cut()
                return
            self._lose(peer)
        self.links[peer.key] = link
        if isinstance(peer, Server):
            self.perform("up", self.replica.peer_up(peer.member))
        elif self.replica.view is not None:
            link.send(self, ViewFrame(self.replica.view))

    def on_down(self, link: Link, peer: Process) -> None:
        """The connection is lost, unless a newer one has replaced it."""
        if self.links.get(peer.key) is link:
            self._lose(peer)

    def _lose(self, peer: Process) -> None:
        link = self.links.pop(peer.key)
        link.cut()
        if isinstance(peer, Server):
            self.perform("down", self.replica.peer_down(peer.member))

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """The next message, from a peer or a worker."""
        if self.links.get(peer.key) is not link:
            return
        if isinstance(peer, Server):
            self.perform(type(message).__name__, self.replica.receive(peer.member, message))
        elif isinstance(message, PushFrame):
            m = message
            push = Push(
                (link, m.frame), m.worker, m.epoch, m.clock, m.part, m.last, m.ranges, m.content, 100, m.base,
                m.roster, repeat=m.content is None,
            )  # fmt: skip
            self.perform("push", self.replica.push(push))
        else:
            ask = Ask((link, message.ask), message.worker, message.epoch, message.roster)
            self.perform("ask", self.replica.ask(ask))

    def adopt(self, view: Chains) -> None:
        """A view came, from the store or from a peer."""
        if view.epoch <= self.replica.epoch:
            return
        self.world.checks.on_adopt(view)
        self.perform("adopt", self.replica.adopt(view))
        member = view.index(self.member) >= 0
        if self.was_member and not member:
            self.world.register_again(self)
            return
        self.was_member |= member
        for link in list(self.links.values()):
            if not isinstance(link.other(self), Server):
                link.send(self, ViewFrame(view))

    def adopt_roster(self, version: int, workers: frozenset[int]) -> None:
        """A roster came."""
        self.perform("roster", self.replica.adopt_roster(version, workers))

    def tell_levels(self) -> None:
        """A leader asks: what was reported stands until a view ends it."""
        for level in self.replica.levels():
            self.world.give_level(level)

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
                    self.values[r], self.hashes[r], self.done[r] = {}, [0], {}
            else:
                assert isinstance(effect, Level)
                world.report_level(self, effect)
        world.note(self.member, event, effects)
        world.checks.after_event(self)

    def _apply(self, event: str, effect: Apply) -> None:
        operation = effect.operation
        content = operation.payload
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            updates = content.updates.get(r, []) if isinstance(content, Content) else []
            self.world.checks.on_apply(self, event, operation, r, seq, updates)
            bound = KEYS_PER_RANGE if effect.inside is None else effect.inside.get(r, KEYS_PER_RANGE)
            values = self.values[r]
            for key, value in updates:
                if key % 1000 < bound:
                    values[key] = updated(values, key, value)
            self.hashes[r].append(hash((self.hashes[r][-1], operation.worker, operation.after)))
            self.done[r][operation.worker, operation.after] = None

    def _cut(self, r: int, serial: int) -> None:
        now, low = self._cuts.get(r, (0, 0))
        if now != serial:
            return
        step = -(-KEYS_PER_RANGE // self.world.plan.pieces)
        high = min(low + step, KEYS_PER_RANGE)
        self._cuts[r] = (serial, high)
        values = {k: v for k, v in self.values[r].items() if low <= k % 1000 < high}
        piece = PieceContent(values, list(self.hashes[r]), dict(self.done[r]))
        self.perform("piece", self.replica.piece(r, serial, high, high == KEYS_PER_RANGE, piece))

    def _install(self, effect: Install) -> None:
        piece = effect.payload
        assert isinstance(piece, PieceContent)
        self.world.checks.on_install(self, effect.range, piece.values)
        self.values[effect.range].update(piece.values)
        if len(self.hashes[effect.range]) == 1:  # the first piece brings the history
            self.hashes[effect.range] = list(piece.hashes)
            self.done[effect.range] = dict(piece.done)
        self.world.checks.touched.append(effect.range)


def _link(token: object) -> Link:
    assert isinstance(token, tuple)
    link = token[0]
    assert isinstance(link, Link)
    return link
