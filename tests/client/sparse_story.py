"""A worker's session and servers' real replicas in random stories of sparse steps: views that move ranges, servers that
die, connections that break, lost answers, exceptions in the middle of an event, and what must hold in each.

Steps are judged by a dumb twin, which keeps for every part which ranges it has rows for.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

import numpy as np

from elasticps.client.core import heads, outstanding, session
from elasticps.client.core.session import RESEND_BYTES, Ask, Committed, Effect, Frame, NeedView, PushSession
from replication.chain import Chains, Member, Ranges
from replication.effects import Apply, ClocksReply, Effects, Erase, Install, Push, Reply, Send, SnapshotRange
from replication.effects import Ask as AskReplica
from replication.progress import after_part
from replication.replica import Replica
from replication.step_records import last_whole_step, step_is_whole
from tests.replication.views import form, plan_failover, plan_move, plan_repair

WORKER = 7
SESSION_FILES = {str(module.__file__) for module in (heads, outstanding, session)}


class Interrupted(BaseException):
    """What a signal handler raises."""


class Rows:
    """A part that has rows in some ranges."""

    def __init__(self, clock: int, part: int, touched: set[int], nbytes: int) -> None:
        self.name = clock, part
        self.touched, self.nbytes = touched, nbytes
        self._array = np.array(sorted(touched), np.int64)

    def touches(self, ranges: Ranges) -> bool:
        return bool(np.isin(ranges, self._array).any())

    def heads(self, epoch: int) -> None:
        return None


class Copy:
    """What a replica has of a range. applied: the worker's progress, as it went."""

    nbytes = 1

    def __init__(self, applied: list[int]) -> None:
        self.applied = list(applied)


class SparseStory:
    """One worker, a cluster of replicas with FIFO links, and the twin."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.ranges = random.choice((1, 2, 4, 8, 16))
        self.nbytes = random.choice((1, RESEND_BYTES))
        self.members = [Member(f"s{i}", 1) for i in range(random.randint(3, 6))]
        self.view = form(self.members[: random.randint(2, len(self.members))], self.ranges, 2)
        self.seen = self.view
        self.replicas = {m: Replica(m, self.ranges) for m in self.members}
        self.queues: dict[tuple[Member, Member], deque[Any]] = defaultdict(deque)
        self.there: dict[Member, deque[Any]] = defaultdict(deque)
        self.back: dict[Member, deque[Any]] = defaultdict(deque)
        self.up: set[Member] = set()
        self.fillings: deque[tuple[Member, int, int]] = deque()
        self.applied: dict[tuple[Member, int], list[int]] = defaultdict(list)  # by replica and range, progress
        self.rows: dict[tuple[int, int], set[int]] = {}  # the twin: by clock and part
        self.closed: set[int] = set()
        self.committed: set[int] = set()
        self.prevs: dict[tuple[int, int, int], int] = {}  # by clock, part and range: what was said first
        self.session = PushSession(WORKER, self.ranges, random.choice((1, 2, 4)))
        for replica in self.replicas.values():
            replica.adopt_roster(1, frozenset({WORKER}))
        for member in self.members:
            self.carry_out(member, self.replicas[member].adopt(self.view))
        for a in self.members:
            for b in self.members:
                if a != b:
                    self.carry_out(a, self.replicas[a].peer_up(b))
        self.do(self.session.adopt(self.view))
        self.connect_all()

    # -- what carries what -----------------------------------------------------------------------------------------

    def do(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Frame):
                self.check_frame(effect)
            if isinstance(effect, Frame | Ask):
                assert effect.head in self.up, "it is not connected"
                known = min(self.session.committed, effect.clock - 1) if isinstance(effect, Frame) else 0
                self.there[effect.head].append((effect, known))
            elif isinstance(effect, Committed):
                self.committed.add(effect.clock)
                self.check_committed(effect.clock)
            elif isinstance(effect, NeedView):
                self.look()

    def check_frame(self, frame: Frame) -> None:
        """A part says the same `prev` of a range whenever it is sent."""
        headed = self.seen.headed_by(self.seen.index(frame.head)) if frame.ranges is None else frame.ranges
        for r in headed.tolist():
            first = self.prevs.setdefault((frame.clock, frame.part, r), frame.prev)
            assert first == frame.prev, f"part {frame.part} of step {frame.clock} in range {r}"

    def carry_out(self, member: Member, effects: Effects) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self.queues[member, effect.peer].append(effect.message)
            elif isinstance(effect, Apply) and effect.operation.worker == WORKER:
                for r in effect.ranges.tolist():
                    self.applied[member, r].append(effect.operation.after)
            elif isinstance(effect, SnapshotRange):
                self.fillings.append((member, effect.range, effect.serial))
            elif isinstance(effect, Erase):
                for r in effect.ranges.tolist():
                    self.applied.pop((member, r), None)
            elif isinstance(effect, Install) and isinstance(effect.payload, Copy):
                self.applied[member, effect.range] = list(effect.payload.applied)
            elif isinstance(effect, Reply | ClocksReply) and member in self.up:
                self.back[member].append(effect)

    def serve(self, member: Member) -> None:
        message, known = self.there[member].popleft()
        replica = self.replicas[member]
        if isinstance(message, Ask):
            self.carry_out(member, replica.ask(AskReplica(message, WORKER, message.epoch)))
            return
        push = Push(
            message, WORKER, message.epoch, message.clock, message.part, message.last, message.ranges, None, 1,
            message.prev, known, repeat=message.content is None, record=message.record,
        )  # fmt: skip
        self.carry_out(member, replica.push(push))

    def answer(self, member: Member) -> None:
        message: Any = self.back[member].popleft()
        if isinstance(message, ClocksReply):
            answers = message.status, message.epoch, message.ranges, message.applied, message.committed
            ask: Any = message.token
            effects = self.cut_short(lambda: self.session.clocks(ask.ask, *answers))
        else:
            whole = message.committed if message.moved.size or message.token.ranges is not None else None
            answer = message.token.frame, message.status, message.epoch, whole, message.moved
            effects = self.cut_short(lambda: self.session.reply(*answer))
        if effects is None:
            self.recover()
        else:
            self.do(effects)

    def deliver(self, a: Member, b: Member) -> None:
        self.carry_out(b, self.replicas[b].receive(a, self.queues[a, b].popleft()))

    # -- what happens ----------------------------------------------------------------------------------------------

    def push(self) -> None:
        """A part of a step, of rows in few ranges or in all."""
        pushes, random = self.session, self.random
        if not pushes.open and not pushes.room:
            return
        clock, part = pushes.clock + (not pushes.open), pushes.parts if pushes.open else 0
        few = random.choice((0, 1, 1, 2, self.ranges))
        touched = {random.randrange(self.ranges) for _ in range(few)}
        also = random.choice((None, None, random.randrange(self.ranges)))
        last = random.random() < 0.6
        rows = Rows(clock, part, touched, self.nbytes)
        effects = self.cut_short(lambda: pushes.push(rows, last, also if last else None))
        if pushes.holds(clock) and rows in pushes.contents:
            self.rows[clock, part] = touched | ({also} if last and also is not None else set())
            if last:
                self.closed.add(clock)
        if effects is None:
            self.recover()
        else:
            self.do(effects)

    def cut_short(self, event: Callable[[], list[Effect]]) -> list[Effect] | None:
        """An event of the session; None if an exception cuts it short, as one of a signal handler does."""
        if self.random.random() < 0.9:
            return event()
        lines = self.random.randrange(60)

        def local(frame: FrameType, what: str, _: object) -> Any:
            nonlocal lines
            lines -= what == "line"
            if lines < 0:
                raise Interrupted
            return local

        def trace(frame: FrameType, what: str, _: object) -> Any:
            return local if frame.f_code.co_filename in SESSION_FILES else None

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            return event()
        except Interrupted:
            return None
        finally:
            sys.settrace(before)

    def connect_all(self) -> None:
        for member in self.session.heads:
            if member not in self.up and member in self.replicas:
                self.up.add(member)
                self.do(self.session.connected(member))

    def cut_off(self, member: Member) -> None:
        """A connection breaks: what is on it arrives in part, answers are lost."""
        if member in self.up:
            for _ in range(self.random.randint(0, len(self.there[member]))):
                self.serve(member)
            self.up.discard(member)
            self.there[member].clear()
            self.back[member].clear()
            self.do(self.session.disconnected(member))

    def adopt(self, view: Chains) -> None:
        """All servers follow a view, in some order; the worker may look later."""
        self.view = view
        for member in self.random.sample(sorted(self.replicas), len(self.replicas)):
            self.carry_out(member, self.replicas[member].adopt(view))
        if self.random.random() < 0.5:
            self.look()

    def look(self) -> None:
        if self.view.epoch > self.seen.epoch:
            self.seen = self.view
            effects = self.cut_short(lambda: self.session.adopt(self.view))
            if effects is None:
                self.recover()
            else:
                self.do(effects)
                self.connect_all()

    def lose(self) -> None:
        """A server dies, unless a range would be lost."""
        here = [m for m in self.view.members if m in self.replicas]
        member = self.random.choice(here)
        decision = plan_failover(self.view, {member}, {})
        if decision is None or (decision.chains.heads < 0).any() or len(self.replicas) < 3:
            return
        rows = decision.chains.chains
        if any(decision.chains.members[i] == member for i in rows[rows >= 0].tolist()):
            return
        for _ in range(self.random.randint(0, len(self.there[member]))):
            self.serve(member)
        if member in self.up:
            self.up.discard(member)
            self.there[member].clear()
            self.back[member].clear()
            self.do(self.session.disconnected(member))
        del self.replicas[member]
        for other in sorted(self.replicas):
            for ends in ((member, other), (other, member)):
                self.queues.pop(ends, None)
            self.carry_out(other, self.replicas[other].peer_down(member))
        self.adopt(decision.chains)

    def fill(self) -> None:
        """The source of a filling sends what it has of the range, in one piece."""
        member, r, serial = self.fillings.popleft()
        if member in self.replicas:
            self.carry_out(member, self.replicas[member].piece(r, serial, 100, True, Copy(self.applied[member, r])))

    def repair(self) -> None:
        """What is level takes its place, and a range moves: most often to another head."""
        live = sorted(self.replicas)
        level = {each.range: each.fill for replica in self.replicas.values() for each in replica.levels()}
        decision = plan_repair(self.view, live, level, 2, 4)
        decision = decision or plan_move(self.view, self.random.randrange(self.ranges), self.random.choice(live))
        if decision is not None:
            self.adopt(decision.chains)

    def recover(self) -> None:
        """An exception cut an event short: the session begins afresh."""
        for member in sorted(self.up):
            for _ in range(self.random.randint(0, len(self.there[member]))):
                self.serve(member)
            self.there[member].clear()
            self.back[member].clear()
        self.up.clear()
        self.seen = self.view
        while (effects := self.cut_short(lambda: self.session.recover(self.view))) is None:
            pass
        for clock in sorted(self.closed - self.committed):
            if not self.session.holds(clock):  # an answer that said so was cut short
                self.committed.add(clock)
                self.check_committed(clock)
        self.do(effects)
        self.connect_all()

    def turn(self) -> None:
        what, random = self.random.random(), self.random
        if what < 0.25:
            self.push()
        elif what < 0.5:
            if members := [m for m in sorted(self.up) if self.there[m]]:
                self.serve(random.choice(members))
        elif what < 0.65:
            if members := [m for m in sorted(self.up) if self.back[m]]:
                self.answer(random.choice(members))
        elif what < 0.88:
            if links := [link for link in sorted(self.queues) if self.queues[link]]:
                self.deliver(*random.choice(links))
        elif what < 0.91 and self.fillings:
            self.fill()
        elif what < 0.94:
            self.repair()
        elif what < 0.96 and self.session.heads:
            self.cut_off(random.choice(self.session.heads))
        elif what < 0.98:
            self.connect_all()
            self.look()
        elif what < 0.99:
            self.lose()
        elif what < 0.995:
            self.recover()

    def settle(self) -> None:
        """Everything arrives."""
        for _ in range(30):
            self.look()
            self.connect_all()
            if self.session.open:
                self.push()
            while self.fillings:
                self.fill()
            for link in list(self.queues):
                while self.queues.get(link):
                    self.deliver(*link)
            for member in sorted(self.up):
                while self.there[member]:
                    self.serve(member)
                while self.back[member]:
                    self.answer(member)
            if not self.session.outstanding:
                return
        raise AssertionError(f"steps from {self.session.committed + 1} on are never committed")

    def play(self) -> int:
        for _ in range(self.random.randrange(50, 500)):
            self.turn()
            self.check_successor()
        self.settle()
        self.check_all()
        return self.session.clock

    # -- what must hold --------------------------------------------------------------------------------------------

    def after(self, clock: int, part: int) -> int:
        last = clock in self.closed and (clock, part + 1) not in self.rows
        return after_part(clock, part, last)

    def touched_by(self, r: int, upto: int) -> list[int]:
        """The progress that parts of steps up to a clock, which have rows for a range, leave there, in order."""
        return [self.after(clock, part) for (clock, part), rows in self.rows.items() if r in rows and clock <= upto]

    def check_committed(self, clock: int) -> None:
        """All replicas of the ranges that a committed step has rows for have it, and all before it there, once."""
        for r in {r for (c, _), rows in self.rows.items() if c == clock for r in rows}:
            for i in self.view.chains[r][self.view.chains[r] >= 0].tolist():
                member = self.view.members[i]
                if member in self.replicas:
                    self.check_range(member, r, clock)

    def check_range(self, member: Member, r: int, upto: int) -> None:
        found = self.applied[member, r]
        assert found == sorted(set(found)), f"{member} has parts in range {r} twice or in disorder: {found}"
        missing = set(self.touched_by(r, upto)) - set(found)
        assert not missing, f"{member} lacks {sorted(missing)} in range {r}"

    def check_successor(self) -> None:
        """Whoever went on for the worker now would not train too little again, nor begin at a clock that is used."""
        heads = self.view.heads
        members = [self.view.members[i] for i in heads.tolist()]
        if any(member not in self.replicas for member in members):
            return
        applied, committed = np.zeros(self.ranges, np.int64), np.zeros(self.ranges, np.int64)
        for r, member in enumerate(members):
            core = self.replicas[member].core
            applied[r] = core.clocks.of(WORKER, np.array([r]))[0] if core.clocks.known(WORKER) else 0
            committed[r] = min(
                self.applied_at(m, r) for m in (self.view.members[i] for i in self.view.chains[r] if i >= 0)
            )
        home = self.session._home
        records = self.replicas[members[home]].core.records.of(WORKER)
        whole = last_whole_step(0, home, committed, records)
        for clock in range(1, whole + 1):
            assert clock in self.closed, f"step {clock} counts as whole, and is open"
            self.check_committed(clock)
            assert step_is_whole(clock, home, applied, committed, records)
        assert whole >= self.session.committed, f"only {whole} count as whole, {self.session.committed} are committed"

    def applied_at(self, member: Member, r: int) -> int:
        if member not in self.replicas:
            return 1 << 62
        clocks = self.replicas[member].core.clocks
        return int(clocks.of(WORKER, np.array([r]))[0]) if clocks.known(WORKER) else 0

    def check_all(self) -> None:
        last = self.session.clock
        assert self.closed == self.committed == set(range(1, last + 1))
        self.check_committed(last)
