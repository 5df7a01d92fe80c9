"""Random stories of a worker's session: views change, ranges are lost, connections break, calls are interrupted.

Servers are those of `session_twin`. After each story every part is exactly once, and in order, in every range that it
has rows for; what was reported as committed is in every range that its step ticks; and when nothing fails any more
everything becomes committed soon.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from elasticps.client.core.session import Ask, Committed, Effect, Frame, NeedView, PushSession, resume
from replication.chain import Chains, Member, Ranges
from replication.effects import Status
from replication.progress import PART_BITS, digest_of
from replication.step_records import StepRecord, StepRecords, home_range
from tests.client.session_twin import (
    Broken,
    Clocks,
    Interrupted,
    Link,
    Piece,
    RangeLog,
    Rows,
    Server,
    random_rows,
    view_of,
)  # fmt: skip

SOON = 12  # rounds in which everything is delivered, after which nothing is outstanding any more


def array(numbers: tuple[int, ...] | list[int]) -> Ranges:
    return np.array(numbers, np.int64)


class Sent:
    """A frame of which pieces are not answered yet."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.left = list(pieces)
        self.whole = True  # so far every piece was answered with OK
        self.epoch = 0
        self.committed: list[int] = []
        self.moved: list[int] = []


class Story:
    """A worker and its servers. parts: the content of each part that was pushed; closed: steps with a last part."""

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.ranges = random.choice((2, 4, 8))
        self.worker = random.randrange(1, 100)
        self.home = home_range(self.worker, self.ranges)
        self.logs = [RangeLog() for _ in range(self.ranges)]
        self.lossy = random.random() < 0.5
        base = random.choice((0, 0, 7))
        self.session = PushSession(self.worker, self.ranges, random.choice((1, 2, 4)), base)
        self.members = [Member(f"s{i}", 1) for i in range(random.choice((1, 2, 3, 5)))]
        self.heads = [random.randrange(len(self.members)) for _ in range(self.ranges)]
        self.servers = {member: Server(member, self.logs) for member in self.members}
        self.links: dict[Member, Link] = {}  # those that the session knows of
        self.views: list[Chains] = []
        self.new_view()
        self.view = self.views[0]  # what the session has adopted last
        self.parts: dict[tuple[int, int], Rows] = {}
        self.closed: dict[int, int] = {}  # by clock, the number of its last part
        self.sent: dict[int, Sent] = {}  # by number of the frame
        self.before: dict[tuple[int, int, int], int] = {}  # by clock, part and range: what frames said it follows
        self.records: dict[int, StepRecord | None] = {}  # by clock, as home was told; None: it ticks all ranges
        self.committed: set[int] = set()
        self.owed: list[set[int]] = [set() for _ in self.logs]  # steps outstanding as the session saw a loss
        self.seen_loss = [0] * self.ranges  # its clock then
        for server in self.servers.values():
            server.adopt(self.view)
        self.call(lambda: self.session.adopt(self.view))

    # --- the worker -------------------------------------------------------------------------------------------------

    def call(self, event: Callable[[], list[Effect]]) -> None:
        """Something happens to the session. Now and then an exception cuts it short: before what it wants is done."""
        try:
            effects = event()
            if self.random.random() < 0.005:
                raise Interrupted
        except Interrupted:
            self.links.clear()
            self.sent.clear()
            for rows in self.parts.values():
                rows.fuse = -1
            effects = self.session.recover(self.view)
            for clock in [c for c in self.closed if c not in self.committed and not self.session.holds(c)]:
                self.report(clock)
        for effect in effects:
            if isinstance(effect, Committed):
                self.report(effect.clock)
            elif isinstance(effect, Frame):
                self.send(effect)
            elif isinstance(effect, Ask):
                self.links[effect.head].there.append(effect)
            elif not isinstance(effect, NeedView):
                raise Broken(f"{effect} comes of nothing that has happened")

    def push(self, last: bool | None = None) -> None:
        """Pushes a part."""
        session = self.session
        if not session.open and not session.room:
            return
        rows = random_rows(self.random, self.ranges, self.view)
        last = self.random.random() < 0.7 if last is None else last
        also = self.random.randrange(self.ranges) if last and self.random.random() < 0.1 else None

        def push() -> list[Effect]:
            effects = []
            try:
                effects = session.push(rows, last, also)
            finally:
                if session.outstanding and session.contents and session.contents[-1] is rows:
                    self.note(rows, last)
            return effects

        self.call(push)

    def note(self, rows: Rows, last: bool) -> None:
        """A part is outstanding from now on."""
        clock, part = self.session.clock, self.session.parts - 1
        self.parts[clock, part] = rows
        if last:
            self.closed[clock] = part

    def send(self, frame: Frame) -> None:
        """Looks whether a frame says what it has to, and queues it, perhaps in pieces."""
        clock, part = frame.clock, frame.part
        ranges = self.headed(frame.head) if frame.ranges is None else tuple(frame.ranges.tolist())
        if frame.head not in self.links:
            raise Broken(f"{frame} is for a server without a connection")
        if not set(ranges) <= set(self.headed(frame.head)) or len(set(ranges)) < max(len(ranges), 1):
            raise Broken(f"{frame} is for ranges that {frame.head} does not head")
        if frame.content is not None and frame.content is not self.parts[clock, part]:
            raise Broken(f"{frame} brings other content than was pushed")
        if frame.last != (self.closed.get(clock) == part):
            raise Broken(f"{frame} says wrongly whether it is the last part")
        for r in ranges:
            if self.before.setdefault((clock, part, r), frame.prev) != frame.prev:
                raise Broken(f"{frame}: in range {r} it followed {self.before[clock, part, r]:#x}")
        if frame.last and self.home in ranges:
            before = self.records.setdefault(clock, frame.record)
            if frame.record is None:
                again = before is None
            elif before is None:  # the same of a step that ticks all ranges
                again = bool(self.logs[self.home].recoveries) and len(frame.record.ranges) == self.ranges
                self.records[clock] = frame.record
            else:  # a home that came back from a checkpoint is told what is committed by then
                again = before.bits == frame.record.bits and before.committed <= frame.record.committed < clock
            if not again:
                raise Broken(f"{frame} has another record than before")
        elif frame.record is not None:
            raise Broken(f"{frame} brings a record that is none of its ranges' business")
        known, cuts = min(self.session.committed, clock - 1), [None if frame.ranges is None else ranges]
        if len(ranges) > 1 and self.random.random() < 0.1:
            cut = self.random.randrange(1, len(ranges))
            cuts = [ranges[:cut], ranges[cut:]]
        pieces = [Piece(frame, known, some) for some in cuts]
        self.sent[frame.frame] = Sent(pieces)
        self.links[frame.head].there.extend(pieces)

    def headed(self, member: Member) -> tuple[int, ...]:
        """The ranges of a head in the view of the session."""
        return tuple(self.view.headed_by(self.view.index(member)).tolist())

    def hear(self, link: Link) -> None:
        """The session hears an answer."""
        answer = link.back.popleft()
        if isinstance(answer, Clocks):
            status, numbers = answer.status, [array(each) for each in answer[3:]]
            self.call(lambda: self.session.clocks(answer.ask.ask, status, answer.epoch, *numbers))
            return
        frame, epoch = answer.piece.frame.frame, answer.epoch
        sent = self.sent.get(frame)
        if sent is None:
            return
        if answer.status != Status.COMMITTED:
            del self.sent[frame]
            none = array(())
            self.call(lambda: self.session.reply(frame, answer.status, epoch, none, none))
            return
        sent.left.remove(answer.piece)
        sent.committed += answer.committed
        sent.moved += answer.moved
        if answer.moved or self.random.random() < 0.1:
            sent.whole, sent.epoch = False, max(sent.epoch, epoch)
        if not sent.left:
            del self.sent[frame]
            committed = None if sent.whole else array(sent.committed)
            self.call(lambda: self.session.reply(frame, Status.COMMITTED, sent.epoch, committed, array(sent.moved)))

    def connect(self, member: Member) -> None:
        """The session gets a connection."""
        server = self.servers.get(member)
        if server is not None and member not in self.links:
            self.links[member] = link = Link()
            server.links.append(link)
            self.call(lambda: self.session.connected(member))

    def cut(self, member: Member) -> None:
        """The session loses a connection; what is under way there may still arrive, but no answer comes back."""
        del self.links[member]
        self.sent = {n: sent for n, sent in self.sent.items() if sent.left[0].frame.head != member}
        self.call(lambda: self.session.disconnected(member))

    def follow(self, view: Chains) -> None:
        """The session follows a view."""
        if view.epoch <= self.view.epoch:
            return
        for r in np.flatnonzero(view.recovery_epoch > self.view.epoch).tolist():
            self.seen_loss[r] = self.session.clock
            self.owed[r] = {clock for clock, _ in self.parts if self.session.holds(clock)}
        self.view = view
        self.call(lambda: self.session.adopt(view))
        for member in [m for m in self.links if m not in view.members]:
            if member in self.links:
                self.cut(member)

    # --- the cluster ------------------------------------------------------------------------------------------------

    def new_view(self) -> None:
        """Makes a view of how things are."""
        recoveries = [max(log.recoveries, default=0) for log in self.logs]
        self.views.append(view_of(len(self.views) + 1, self.members, self.heads, recoveries, self.random))

    def move(self) -> None:
        """Some ranges get other heads, or none for now."""
        for r in self.random.sample(range(self.ranges), self.random.randint(0, self.ranges)):
            self.change_head(r, self.some_head())
        self.new_view()

    def some_head(self) -> int:
        """The next head of a range, -1 for none."""
        return -1 if self.random.random() < 0.2 else self.random.randrange(len(self.members))

    def change_head(self, r: int, head: int) -> None:
        log = self.logs[r]
        if head != self.heads[r]:
            log.change_head(self.random.randint(log.safe, len(log.entries)))
        self.heads[r] = head

    def lose(self) -> None:
        """A server dies, and another comes in its place. Of its ranges some are lost, and have no head for a while."""
        at = self.random.randrange(len(self.members))
        del self.servers[self.members[at]]
        self.members[at] = member = self.members[at]._replace(incarnation=self.members[at].incarnation + 1)
        self.servers[member] = Server(member, self.logs)
        for r in [r for r, head in enumerate(self.heads) if head == at]:
            log = self.logs[r]
            if self.lossy and self.random.random() < 0.3:
                log.recover(len(self.views) + 1, self.random.randint(0, log.safe))
                self.heads[r] = -1
            else:
                log.change_head(self.random.randint(log.safe, len(log.entries)))
                self.heads[r] = self.some_head()
        self.new_view()

    def replicate(self) -> None:
        """Some ranges' replicas come further."""
        for log in self.random.sample(self.logs, self.random.randint(1, self.ranges)):
            log.replicate(self.random.randint(log.safe, len(log.entries)))
        for server in self.servers.values():
            server.settle()

    # --- a story ----------------------------------------------------------------------------------------------------

    def event(self) -> None:
        """Something happens."""
        random, what = self.random, self.random.random()
        if what < 0.22:
            self.push()
        elif what < 0.40:
            for server in self.servers.values():
                for link in random.sample(server.links, len(server.links)):
                    for _ in range(random.randint(0, len(link.there))):
                        server.take(link)
        elif what < 0.58:
            for link in list(self.links.values()):
                for _ in range(random.randint(0, len(link.back))):
                    self.hear(link) if link.back else None
        elif what < 0.72:
            self.replicate()
        elif what < 0.82:
            for member in self.session.heads:
                self.connect(member) if random.random() < 0.7 else None
        elif what < 0.835 and self.links:
            self.cut(random.choice(list(self.links)))
        elif what < 0.845:
            self.move()
        elif what < 0.85:
            self.lose()
        elif what < 0.88 and min(self.heads) < 0:
            self.heads = [head if head >= 0 else random.randrange(len(self.members)) for head in self.heads]
            self.new_view()
        elif what < 0.94:
            for server in self.servers.values():
                newer = [view for view in self.views[-2:] if view.epoch > server.epoch]
                server.adopt(random.choice(newer)) if newer and random.random() < 0.7 else None
        else:
            self.follow(random.choice(self.views[-2:]))

    def play(self) -> None:
        """Plays, lets everything come to rest, and looks whether all is as it has to be."""
        for _ in range(self.random.randrange(30, 600)):
            self.event()
            self.check_successor()
        self.rest()
        self.check()

    def rest(self) -> None:
        """Nothing fails any more."""
        if self.session.open:
            self.push(last=True)
        self.heads = [head if head >= 0 else 0 for head in self.heads]
        self.new_view()
        for _ in range(SOON):
            if self.session.open:
                self.push(last=True)  # an exception has cut it short
            for server in self.servers.values():
                if server.epoch < len(self.views):
                    server.adopt(self.views[-1])
            self.follow(self.views[-1])
            for member in self.session.heads:
                self.connect(member)
            for server in self.servers.values():
                for link in server.links:
                    while link.there:
                        server.take(link)
            for log in self.logs:
                log.replicate(len(log.entries))
            for server in self.servers.values():
                server.settle()
            for link in list(self.links.values()):
                while link.back:
                    self.hear(link)
            if not self.session.outstanding:
                return
        raise Broken(f"{self.session.outstanding} steps are not committed after {SOON} rounds")

    # --- what has to hold -------------------------------------------------------------------------------------------

    def ticked(self, clock: int) -> list[int]:
        """The ranges that a step ticks, as its record says."""
        if clock not in self.records:
            raise Broken(f"step {clock}: home was never sent it")
        record = self.records[clock]
        return list(range(self.ranges)) if record is None else record.ranges.tolist()

    def report(self, clock: int) -> None:
        """The session says that a step is committed: all replicas have it, since the last loss that it has seen."""
        if clock in self.committed or clock not in self.closed:
            raise Broken(f"step {clock} is reported as committed twice, or before it is complete")
        self.committed.add(clock)
        ticked = self.ticked(clock)
        touched = {r for part in range(self.closed[clock] + 1) for r in self.parts[clock, part].having}
        if not touched | {self.home} <= set(ticked):
            raise Broken(f"step {clock} has rows in {sorted(touched)}, and ticks {ticked}")
        for r in ticked:
            log = self.logs[r]
            life = sum(epoch <= self.view.epoch for epoch in log.recoveries)
            if not any(clock << PART_BITS in safe for safe in log.was_safe[life:]):
                raise Broken(f"step {clock} is reported as committed, and range {r} may lose it")

    def check_successor(self) -> None:
        """Whoever goes on for this worker now repeats no step that was reported, and leaves none out."""
        if any(log.recoveries for log in self.logs):
            return
        records = StepRecords(self.ranges)
        for entry in self.logs[self.home].entries:
            if entry.record is not None:
                records.note(self.worker, entry.record)
        applied = np.array([log.progress() for log in self.logs])
        committed = np.array([log.progress(log.safe) for log in self.logs])
        first = self.session.base
        _, trained = resume(applied, committed, self.home, records.of(self.worker), first)
        for clock in range(first + 1, trained + 1):
            for r in self.ticked(clock):
                if clock << PART_BITS not in self.logs[r].was_safe[0]:
                    raise Broken(f"step {clock} counts as trained, and range {r} may lose it")
        for clock in range(first + 1, self.session.committed + 1):
            if clock > trained:
                raise Broken(f"step {clock} was reported as committed, and is trained again")

    def check(self) -> None:
        """Everything is where it has to be."""
        if self.committed != self.closed.keys() or self.session.committed != self.session.clock:
            raise Broken(f"of {sorted(self.closed)} only {sorted(self.committed)} were reported as committed")
        for r, log in enumerate(self.logs):
            found = [(entry.clock, entry.part) for entry in log.entries]
            if found != sorted(set(found)):
                raise Broken(f"range {r} has parts twice or out of order: {found}")
            must = [
                each for each, rows in sorted(self.parts.items())
                if r in rows.having or (self.closed[each[0]] == each[1] and r in self.ticked(each[0]))
            ]  # fmt: skip
            if log.recoveries:
                must = [each for each in must if each[0] in self.owed[r] or each[0] > self.seen_loss[r]]
            elif any(entry.jumped for entry in log.entries):
                raise Broken(f"range {r} was never lost, and has a part that does not follow what it had")
            lacking = set(must) - set(found)
            if lacking:
                raise Broken(f"range {r} lacks {sorted(lacking)}")
            if not log.recoveries and self.session.progress[r] != log.progress():
                raise Broken(f"range {r} is at {log.progress():#x}, and not at {self.session.progress[r]:#x}")
        never = [r for r, log in enumerate(self.logs) if not log.recoveries]
        digest = digest_of(self.worker, array(never), np.array([self.logs[r].progress() for r in never], np.int64))
        if self.session.digest != digest:
            raise Broken("the digest is not that of what the ranges have")
