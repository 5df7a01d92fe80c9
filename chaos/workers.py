"""The worker's shell in the simulator: the real session, and a trainer that pushes numbered samples. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from chaos.contents import KEYS_PER_ID, KEYS_PER_RANGE, Content, Update
from chaos.frames import AnswerFrame, AskFrame, JoinReply, PullReply, PushFrame, ViewFrame
from chaos.network import Link, Process
from chaos.programs import Training
from chaos.readers import Reader
from chaos.servers import Server
from chaos.taking_part import Part
from coordinator.view import View
from elasticps.client.protocol.session import Ask, Committed, Effect, Fenced, Frame, NeedView, Session, resume
from replication.chain import Chains, Member
from replication.effects import ClocksReply, Reply, Status
from replication.progress import after_part

if TYPE_CHECKING:
    from chaos.simulator import World

TICK_S = 0.002
IDLE_S = 0.01
REFRESH_S = 0.05


class Trainer(Process):
    """One incarnation of a worker. It trains samples in order; its successor goes on from what is committed. `returns`:
    it has died, and will be started again."""

    def __init__(self, world: World, name: str, worker: int, roster: int, before: Trainer | None) -> None:
        super().__init__(world.loop)
        self.world = world
        self.name = name
        self.key = (name, worker)
        self.worker = worker
        self.roster = roster
        self.newest: View | None = None
        self.view: Chains | None = None
        self.reader = Reader(self)
        self.part = Part(self)
        self.links: dict[Member, Link] = {}
        self.session: Session | None = None
        self.wanted: list[Member] = []
        self.sample_of: dict[int, int] = {}
        self.next_sample = 0
        self.base = 0
        self._before = before
        self._parts_left = 0
        self._rate = 0
        self._refreshed = 0.0
        plan = world.plan
        self._applied = np.full(plan.ranges, -1, dtype=np.int64)
        self._committed = np.full(plan.ranges, -1, dtype=np.int64)
        self.training: Training | None = None
        self.renewed_s = self.loop.now
        self.returns = False
        if before is None or plan.scripted:
            self.session = Session(worker, plan.ranges, plan.window)
            if plan.scripted:
                self.training = Training(self, self.session)
        self.loop.after(0.0, self.run, self._tick)

    @property
    def finished(self) -> bool:
        """Whether everything pushed is committed, and every pull answered; or nobody counts on it."""
        if self.training is not None and not self.alive:
            return not self.returns and self.worker in self.world.dropped
        if self.training is not None and not self.training.finished:
            return False
        return self.session is not None and self.session.outstanding == 0 and not self.reader.pulls

    # -- training ---------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        world = self.world
        if self.loop.now - self._refreshed > REFRESH_S or self.view is None:
            self._refreshed = self.loop.now
            world.fetch_view(self, 0)
            if world.fences(self):
                return
        self._connect()
        world.renew(self)
        if self.training is not None:
            self.training.tick()
        elif self.session is not None:
            self.part.look(self.session)
            more = self.part.active and self.session.room and self.next_sample < world.plan.steps
            if self.session.open or more:
                self.push(self.session)
        if world.training and not world.plan.rounds and (self.training is None or self.part.active):
            self.reader.tick()
        pace = TICK_S if world.training or (self.session is not None and self.session.open) else IDLE_S
        self.loop.after(pace * world.loop.rng.uniform(0.2, 2.0), self.run, self._tick)

    def push(self, session: Session) -> None:
        """Pushes the next part of the step under way, or the first one of the next sample."""
        world, rng = self.world, self.loop.rng
        if not session.open:
            self._parts_left = rng.choice((1, 1, 1, 2, 3))
            self.sample_of[session.clock + 1] = self.next_sample
            if world.plan.shards:
                world.checks.shards.on_step(self, session.clock + 1, self.next_sample)
            self.next_sample += 1
            self._rate = rng.randint(1, 3)
            part = 0
        else:
            part = session.parts
        self._parts_left = max(self._parts_left - 1, 0) if world.training else 0
        last = self._parts_left == 0
        density = rng.choice((0.7, 0.7, 0.15, 0.0))  # a part may have nothing for a head
        updates: dict[int, list[Update]] = {}
        for r in range(world.plan.ranges):
            if rng.random() < density:
                keys = rng.sample(range(KEYS_PER_RANGE), rng.randint(1, 3))
                updates[r] = [(r * KEYS_PER_ID + key, world.fresh()) for key in keys]
        clock = session.clock if session.open else session.clock + 1
        after = after_part(clock, part, last)
        content = Content(updates)
        if self.training is not None:
            content.round, content.rate = (clock, self._rate) if world.plan.rounds else (0, 0)
            if last:
                content.mark, self.training.next_mark = self.training.next_mark, None
        world.checks.on_first_send(self, clock, after, last, content.exact_copy())
        self._perform(session.push(content.private_copy(), last))
        for mine in updates.values():  # the caller may change its arrays at once
            mine[0] = (mine[0][0], -1)

    # -- links ------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        for member in self.wanted:
            if member not in self.links:
                self.world.connect(self, member)

    def on_up(self, link: Link, peer: Process) -> None:
        """A server took the connection."""
        assert isinstance(peer, Server)
        old = self.links.get(peer.member)
        if old is not None:
            if old.number > link.number:
                link.cut()
                return
            self.on_down(old, peer)
        self.links[peer.member] = link
        self.part.connected(link)
        self.reader.connected(peer.member)
        if self.training is not None:
            self.training.connected(peer.member)
        if self.session is not None:
            self._perform(self.session.connected(peer.member))
        else:
            self._ask_again()

    def on_down(self, link: Link, peer: Process) -> None:
        """A connection is lost."""
        assert isinstance(peer, Server)
        if self.links.get(peer.member) is not link:
            return
        del self.links[peer.member]
        link.cut()
        self.reader.disconnected(peer.member)
        if self.session is not None:
            self._perform(self.session.disconnected(peer.member))
        self.world.fetch_view(self, 0)

    def on_message(self, link: Link, peer: Process, message: Any) -> None:
        """An answer, or a view."""
        assert isinstance(peer, Server)
        if self.links.get(peer.member) is not link:
            return
        if isinstance(message, ViewFrame):
            self.adopt(message.view)
        elif isinstance(message, AnswerFrame):
            assert self.training is not None
            self.training.answer(message.frame)
        elif isinstance(message, JoinReply):
            self.part.answered(peer.member, message.serial)
        elif isinstance(message, PullReply):
            self.reader.answer(message)
        elif isinstance(message, Reply):
            frame = message.token[1]  # type: ignore[index]
            if self.session is not None:
                if message.status == Status.COMMITTED:
                    self.world.checks.on_told(self, frame, message.committed)
                m = message
                committed = m.committed if m.moved.shape[0] else None
                self._perform(self.session.reply(frame, m.status, m.epoch, committed, m.moved))
        else:
            assert isinstance(message, ClocksReply)
            self._clocks(message)
        if self.training is not None:
            self.training.advance()
        self.world.note(self.key, type(message).__name__, ())

    def adopt(self, view: View) -> None:
        """A view came."""
        if self.view is not None and view.epoch <= self.view.epoch:
            return
        self.newest, self.view = view, view.as_chains
        if self.training is not None:
            self.training.adopt(view)
        used = np.unique(view.chains if self.world.plan.anywhere else (view.heads, view.tails))
        self.wanted = [view.servers[i].member for i in used.tolist() if i >= 0]
        if self.session is not None:
            self._perform(self.session.adopt(self.view))
        self._connect()
        self.reader.adopt()
        self._ask_again()

    # -- a successor asks how far its predecessor came ---------------------------------------------------------------

    def _ask_again(self) -> None:
        if self.session is not None or self._before is None or self.view is None:
            return
        for link in self.links.values():
            link.send(self, AskFrame(-1, self._before.worker, self.view.epoch, self.roster))

    def _clocks(self, message: ClocksReply) -> None:
        m = message
        ask = m.token[1]  # type: ignore[index]
        if ask >= 0 and self.session is not None:
            self._perform(self.session.clocks(ask, m.status, m.epoch, m.ranges, m.applied, m.committed))
        elif ask < 0 and self.session is None:
            self._learn(m)

    def _learn(self, message: ClocksReply) -> None:
        """How far the predecessor came in some ranges; when all are known, training goes on from there."""
        m = message
        if m.status != Status.COMMITTED:
            self.world.fetch_view(self, m.epoch)
            return
        self._applied[m.ranges] = m.applied
        self._committed[m.ranges] = m.committed
        if self._applied.min() < 0:
            return
        assert self._before is not None
        before = self._before
        base, trained = resume(self._applied, self._committed)
        self.base = max(base, before.base)
        self.next_sample = max((s + 1 for c, s in before.sample_of.items() if c <= trained), default=0)
        if not before.sample_of or trained <= before.base:
            self.next_sample = min(before.sample_of.values(), default=before.next_sample)
        plan = self.world.plan
        self.session = Session(self.worker, plan.ranges, plan.window, self.base)
        for member in self.links:
            self._perform(self.session.connected(member))
        if self.view is not None:
            self._perform(self.session.adopt(self.view))
        self.world.resumed(self, before)

    @property
    def heir_of(self) -> Trainer | None:
        """Whom a successor has to ask about: me, or my predecessor if I never got to push."""
        return self._before if self.session is None else self

    # -- what the session wants -------------------------------------------------------------------------------------

    def _perform(self, effects: list[Effect]) -> None:
        assert self.session is not None
        for effect in effects:
            if isinstance(effect, Frame):
                self._send_frame(effect)
            elif isinstance(effect, Ask):
                self._send(effect.head, AskFrame(effect.ask, self.worker, effect.epoch, self.roster))
            elif isinstance(effect, Committed):
                self.world.checks.on_committed(self, effect.clock)
            elif isinstance(effect, NeedView):
                self.world.fetch_view(self, effect.epoch)
            else:
                assert isinstance(effect, Fenced)
                self.world.network.kill(self)

    def _send_frame(self, frame: Frame) -> None:
        assert self.view is not None
        ranges = frame.ranges
        if ranges is None:
            ranges = self.view.headed_by(self.view.index(frame.head))
        content = frame.content
        assert content is None or isinstance(content, Content)
        after = after_part(frame.clock, frame.part, frame.last)
        self.world.checks.on_sent(self, frame.frame, after)
        self._send(
            frame.head,
            PushFrame(
                frame.frame,
                self.worker,
                frame.epoch,
                frame.clock,
                frame.first,
                frame.part,
                frame.last,
                frame.ranges,
                self.base,
                self.roster,
                content.cut(ranges) if content is not None else None,
            ),
        )

    def _send(self, head: Member, message: Any) -> None:
        link = self.links.get(head)
        if link is not None:
            link.send(self, message)
