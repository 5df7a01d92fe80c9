"""A worker's pushes until they are committed: which steps are outstanding, who lacks what, what to send again. Pure.

Events: push, adopt, connected, disconnected, reply, clocks. Each returns what the shell has to send, in order; the
frames of one head go out on one FIFO connection. Only this module repeats pushes, so retries never stack.

Which ranges a step ticks. A part goes to the heads of ranges that it has rows for, and ticks all that these head. The
last part ticks all that its step has touched, and the worker's home range, with a record of them unless they are all
(see `replication.step_records`). A home that ever came back from a checkpoint, and has lost older records, gets one of
each step. So a step costs what it touches, not what there is.

Why no step is lost and none counted twice. A frame names the worker's progress before it in the ranges that it ticks,
`prev`, fixed when the part is first sent. A head takes a frame only at that progress; so it takes what it was sent in
order, without a hole, though steps between are none of its business. A step leaves only when every range of its last
part is committed, as said by a reply or by an answer to Ask that names it committed (applied is not enough: its
replicas may die). A head that is new, was cut off, or refused a frame is asked for the worker's clocks first, and gets
everything outstanding that it lacks in clock order before any new step. Frames in flight to such a head are forgotten:
what they named under the old view may not be what it heads now. What comes twice is recognised by its clock; what is
sent again is byte for byte the first send, because contents belong to the session and never change. So a view may also
have everything outstanding sent again to its new heads at once, in clock order, where it is so little that the question
would take longer: they lack nothing before it, for that is committed, which all replicas have. Ranges recovered from a
checkpoint are an exception: their heads are always asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.heads import Head, Heads, by_progress
from elasticps.client.core.outstanding import OutstandingStep, PartContent, Ticks
from replication.chain import Chains, Member, Ranges
from replication.effects import Status
from replication.progress import MAX_PARTS, PART_BITS, Progress, after_part, digest_of, touched_clock
from replication.step_records import StepRecord, home_range, last_whole_step, record_of

RESEND_BYTES = 256 << 10  # with so much outstanding a new head is asked what it has


class Ask(NamedTuple):
    """Ask a head for this worker's clocks."""

    head: Member
    ask: int
    epoch: int


class Frame(NamedTuple):
    """Push one part to a head. ranges None: it ticks all that the head heads at `epoch`. prev: the worker's progress
    there before it, which is the same in all of them. content None: it has been applied there, only the
    acknowledgement is wanted. record: of the step, if the worker's home is among the ranges."""

    head: Member
    frame: int
    epoch: int
    clock: int
    part: int
    last: bool
    ranges: Ranges | None
    prev: int
    content: PartContent | None
    record: StepRecord | None


class Committed(NamedTuple):
    """Step `clock` is committed along every chain."""

    clock: int


class NeedView(NamedTuple):
    """Get a view of at least this epoch and have it adopted."""

    epoch: int


class Fenced(NamedTuple):
    """The roster no longer knows this worker: stop."""


Effect: TypeAlias = Ask | Frame | Committed | NeedView | Fenced


class PushSession:
    """The outstanding steps of one worker incarnation, at most `window`. `base`: the clock it starts above."""

    def __init__(self, worker: int, ranges: int, window: int, base: int = 0) -> None:
        if window < 1:
            raise ValueError(f"the window must be at least 1 step, got {window}")
        self.worker = worker
        self.base = base
        self.clock = base
        self.committed = base
        self.epoch = 0
        self._ranges = ranges
        self.window = window
        self._home = home_range(worker, ranges)
        self._steps: OrderedDict[int, OutstandingStep] = OrderedDict()
        self._heads = Heads(ranges, self._home)
        self._connected: set[Member] = set()
        self.unreached: set[Member] = set()  # heads that outstanding steps go to, and that are not connected
        self._frames: dict[int, Frame] = {}
        self._head_of_ask: dict[int, Member] = {}  # by the number of an Ask that has no answer yet
        self._number = 0

    @property
    def heads(self) -> tuple[Member, ...]:
        """The servers to keep connected."""
        return tuple(self._heads.by_member)

    @property
    def headless(self) -> int:
        """Ranges without a head."""
        return len(self._heads.nowhere)

    @property
    def outstanding(self) -> int:
        """Steps begun and not committed."""
        return len(self._steps)

    @property
    def open(self) -> bool:
        """Whether the newest step waits for more parts."""
        step = next(reversed(self._steps.values())) if self._steps else None
        return step is not None and len(step.parts) != step.count

    @property
    def parts(self) -> int:
        """Parts of the newest step so far."""
        return len(next(reversed(self._steps.values())).parts) if self._steps else 0

    @property
    def contents(self) -> list[PartContent]:
        """The parts of the newest step, which is outstanding, as they come; they stay when it is committed."""
        return next(reversed(self._steps.values())).parts

    @property
    def room(self) -> bool:
        """Whether a new step may begin."""
        return len(self._steps) < self.window

    @property
    def progress(self) -> Progress:
        """How far this worker has pushed, by range, int64 [P]."""
        return self._heads.progress

    @property
    def digest(self) -> int:
        """A digest of `progress` in all ranges but those that ever came back from a checkpoint: how far these are only
        their heads know."""
        ranges = np.flatnonzero(~self._heads.recovered)
        return digest_of(self.worker, ranges, self.progress[ranges])

    def holds(self, clock: int) -> bool:
        """Whether a step is outstanding."""
        return clock in self._steps

    def unread(self) -> int | Progress:
        """What a pull has to see of this worker's steps so far, but for an open one: the clock that all ranges must
        have reached; or if that is not the same, progress by range, int64 [P], 0 where nothing is outstanding."""
        if not self._steps:
            return 0
        steps = [(clock, step) for clock, step in self._steps.items() if step.closed]
        if not steps or steps[-1][1].everywhere:
            return steps[-1][0] if steps else 0
        progress = np.zeros(self._ranges, np.int64)
        for clock, step in steps:
            progress[step.ticked(self._ranges)] = clock << PART_BITS
        return progress

    def start_at(self, base: int) -> None:
        """Sets the clock that the worker goes on above; only while no step is outstanding, and never backwards."""
        if self._steps or base < self.clock:
            raise RuntimeError(
                f"clock {base} cannot be a base: at {self.clock}, {len(self._steps)} steps are begun and not committed"
            )
        self.base = self.clock = self.committed = base

    def push(self, content: PartContent, last: bool = True, also: int | None = None) -> list[Effect]:
        """The next part of the step under way, or the first of a new one; `last` ticks the clock. also: a range that
        the last part has to tick, too.

        One call of a container makes the part outstanding, so an exception from a signal handler comes before it or
        after it.
        """
        step = next(reversed(self._steps.values())) if self._steps else None
        begins = step is None or len(step.parts) == step.count
        if begins and len(self._steps) >= self.window:
            raise RuntimeError(f"{self.window} steps are outstanding; wait for one before the next")
        step = OutstandingStep() if step is None or begins else step
        clock, part = self.clock + begins, len(step.parts)
        if part == MAX_PARTS - 1 and not last:
            raise RuntimeError(f"a step has at most {MAX_PARTS} parts")
        heads = self._ticked_heads(content, step, last)
        nowhere = len(self._heads.nowhere) > 0
        step.elsewhere |= nowhere and self._ticks_elsewhere(content)
        if last:
            for head in (self._heads.home,) if also is None else (self._heads.home, self._heads.of(also)):
                if head is None:
                    step.elsewhere = True
                else:
                    heads[head] = None
        groups = [(head.order, head.last) for head in heads if head.last is not None]
        if len(groups) < len(heads):  # a head's ranges are not all at the same progress
            groups = [group for head in heads for group in self._heads.groups(head)]
        if step.elsewhere:
            groups += self._heads.groups_nowhere()
        step.ticks[part:] = [Ticks(groups)]
        step.heads = heads if last else step.heads | heads
        if last:
            step.everywhere = len(heads) == len(self._heads.by_member) and step.elsewhere == nowhere
            step.record = None  # an exception may have come before this part was outstanding, and it is another now
            if not step.everywhere or self._heads.recovered[self._home]:
                ticked = np.zeros(self._ranges, np.bool_)
                ticked[np.concatenate([group for group, _ in groups])] = True
                step.record = record_of(clock, min(self.committed, clock - 1), ticked)
        step.count = part + 1 if last else 0
        step.parts.append(content)
        if begins:
            self._steps[clock] = step
            self.clock = clock
        after = after_part(clock, part, last)
        out: list[Effect] = []
        for head in heads:
            if not head.ready:
                if head.member not in self._connected:
                    self.unreached.add(head.member)
            elif (prev := head.last) is not None:  # as mostly: not by way of a method
                self._number = number = self._number + 1
                record = step.record if last and head is self._heads.home else None
                frame = Frame(head.member, number, self.epoch, clock, part, last, None, prev, content, record)
                out.append(frame)
                self._frames[number] = frame
            else:
                for ranges, prev in self._heads.groups(head):
                    whole = len(ranges) == len(head.order)
                    self._send(head, step, clock, part, last, None if whole else ranges, prev, content, out)
            head.last = after
        if step.elsewhere:
            self._heads.ticked_nowhere(after)
        return out

    def _ticked_heads(self, content: PartContent, step: OutstandingStep, last: bool) -> dict[Head, None]:
        """The heads whose ranges a part ticks."""
        members = content.heads(self.epoch)
        by_member = self._heads.by_member
        if members is None:
            members = [member for member, head in by_member.items() if content.touches(head.order)]
        found = dict.fromkeys(map(by_member.__getitem__, members))
        return found | step.heads if last and step.heads else found

    def _ticks_elsewhere(self, content: PartContent) -> bool:
        """Whether a part ticks the ranges that have no head now: all of them, or none."""
        return content.touches(self._heads.nowhere)

    def owing(self) -> dict[Member, int]:
        """Head -> the oldest step that it has not committed in all its ranges."""
        owed: dict[Member, int] = {}
        for clock, step in self._steps.items():
            lacking = step.ticked(self._ranges) & ~step.by_range(self._ranges)
            for member, head in self._heads.by_member.items():
                if member not in owed and lacking[head.order].any():
                    owed[member] = clock
        return owed

    @property
    def outstanding_heads(self) -> set[Member]:
        """The heads of ranges that outstanding steps tick."""
        return {head.member for step in self._steps.values() for head in step.heads}

    # -- views and connections --------------------------------------------------------------------------------------

    def adopt(self, view: Chains) -> list[Effect]:
        """Follows a view. Heads whose ranges did not change keep their frames; the others start afresh."""
        out: list[Effect] = []
        if view.epoch <= self.epoch:
            return out
        recovered = view.recovery_epoch > self.epoch
        begun_again = bool(recovered.any())
        if begun_again:  # these ranges have lost what they had of outstanding steps
            for clock, step in self._steps.items():
                step.by_range(self._ranges)[recovered] = False
                if step.closed and recovered[self._home]:  # nothing else there says that those before are whole
                    step.record = record_of(clock, self.committed, step.ticked(self._ranges))
        self.epoch = view.epoch
        gone, fresh = self._heads.follow(view, recovered)
        if gone or fresh:
            for step in self._steps.values():
                self._follow(step)
        self.unreached = self.outstanding_heads - self._connected
        self._forget({head.member for head in gone})
        for head in gone:
            self._head_of_ask.pop(head.ask, None)
        contents = (part for step in self._steps.values() for part in step.parts)
        again = not begun_again and sum(part.nbytes for part in contents) < RESEND_BYTES
        for member, head in self._heads.by_member.items():
            if again and not head.ready and member in self._connected:
                self._send_again(head, out)
            elif not head.ready:
                self._begin(member, head, out)
        return out

    def _follow(self, step: OutstandingStep) -> None:
        """Looks which heads have the ranges that a step ticks, now that heads have changed."""
        step.by_range(self._ranges)
        ticked = step.ticked(self._ranges)
        step.heads = {head: None for head in self._heads.by_member.values() if ticked[head.order].any()}
        step.elsewhere = bool(ticked[self._heads.nowhere].any())

    def connected(self, member: Member) -> list[Effect]:
        """A fresh connection to a server."""
        out: list[Effect] = []
        self._connected.add(member)
        self.unreached.discard(member)
        if (head := self._heads.by_member.get(member)) is not None:
            self._restart(member, head, out)
        return out

    def disconnected(self, member: Member) -> list[Effect]:
        """It is gone; what was in flight on it may have arrived or not."""
        self._connected.discard(member)
        self._forget({member})
        if (head := self._heads.by_member.get(member)) is not None:
            head.ready = False
        return []

    def recover(self, view: Chains) -> list[Effect]:
        """Begins afresh after an event that an exception cut short: which steps are outstanding is known (`holds`),
        everything else is asked again. No connection is left."""
        self.clock = max(self.clock, next(reversed(self._steps), 0))
        progress = self._heads.progress
        for clock, step in list(self._steps.items()):
            done = step.by_range(self._ranges)
            step.whole.clear()
            for part, ticks in enumerate(step.ticks[: len(step.parts)]):
                after = after_part(clock, part, step.closed and part == len(step.parts) - 1)
                for group, _ in ticks.groups:
                    progress[group] = np.maximum(progress[group], after)
            if step.closed and not np.count_nonzero(step.ticked(self._ranges) & ~done):
                del self._steps[clock]  # the last answer was cut short: nobody would be asked any more
        self.committed = next(iter(self._steps)) - 1 if self._steps else self.clock
        self._heads.forget(progress)
        self._connected.clear()
        self._frames.clear()
        self._head_of_ask.clear()
        self.epoch = 0
        return self.adopt(view)

    def _forget(self, members: Collection[Member]) -> None:
        """Forgets what is in flight to these heads."""
        self._frames = {n: frame for n, frame in self._frames.items() if frame.head not in members}

    def _restart(self, member: Member, head: Head, out: list[Effect]) -> None:
        self._forget({member})
        head.ready = False
        self._begin(member, head, out)

    def _begin(self, member: Member, head: Head, out: list[Effect]) -> None:
        """Learns what a head has. With nothing outstanding there is nothing to learn: all is committed everywhere."""
        if member not in self._connected:
            return
        if not self._steps:
            head.ready = True
            return
        self._number += 1
        self._head_of_ask.pop(head.ask, None)
        head.ask = self._number
        self._head_of_ask[head.ask] = member
        out.append(Ask(member, head.ask, self.epoch))

    def _send_again(self, head: Head, out: list[Effect]) -> None:
        """Sends a head all that is outstanding, but for what is known to be committed."""
        for clock, step in self._steps.items():
            done = step.by_range(self._ranges)[head.order]
            for part, content in enumerate(step.parts):
                ticked = step.ticks[part].prev(self._ranges)[head.order] >= 0
                self._send_some(head, step, clock, part, head.order, ticked & ~done, content, out)
        head.ready = True

    # -- answers ----------------------------------------------------------------------------------------------------

    def reply(self, frame: int, status: Status, epoch: int, committed: Ranges | None, moved: Ranges) -> list[Effect]:
        """A head answered a frame. committed None: in all ranges that the frame named."""
        out: list[Effect] = []
        sent = self._frames.pop(frame, None)
        if sent is None:
            return out
        if status == Status.COMMITTED:
            step = self._steps.get(sent.clock)
            if sent.last and committed is None and sent.ranges is None and step is not None and step.ranges is None:
                step.whole.add(self._heads.by_member[sent.head])
                if len(step.whole) == len(step.heads) and not step.elsewhere:
                    self._commit(sent.clock, out)
            elif sent.last:
                named = self._heads.by_member[sent.head].order if sent.ranges is None else sent.ranges
                self._mark(sent.clock, named if committed is None else committed, out)
            if moved.shape[0]:
                self._refused(sent.head, epoch, out)
        elif status == Status.FENCED:
            out.append(Fenced())
        else:
            self._refused(sent.head, epoch, out)
        return out

    def clocks(
        self, ask: int, status: Status, epoch: int, ranges: Ranges, applied: Progress, committed: Progress
    ) -> list[Effect]:
        """A head answered an Ask: it gets everything outstanding that it lacks, oldest first."""
        out: list[Effect] = []
        member = self._head_of_ask.pop(ask, None)
        head = None if member is None else self._heads.by_member.get(member)
        if member is None or head is None or head.ask != ask or head.ready:
            return out
        if status != Status.COMMITTED:
            self._refused(member, epoch, out)
            return out
        for clock, step in list(self._steps.items()):
            for part, content in enumerate(step.parts):
                last = step.closed and part == len(step.parts) - 1
                after = after_part(clock, part, last)
                ticked = step.ticks[part].prev(self._ranges)[ranges] >= 0
                if last:
                    self._mark(clock, ranges[committed >= after], out)
                    if clock not in self._steps:  # committed everywhere, also where this head has forgotten us since
                        break
                    again = ticked & (applied >= after) & ~step.by_range(self._ranges)[ranges]
                    self._send_some(head, step, clock, part, ranges, again, None, out)
                self._send_some(head, step, clock, part, ranges, ticked & (applied < after), content, out)
        head.ready = True
        return out

    def _refused(self, member: Member, epoch: int, out: list[Effect]) -> None:
        """A head answers for other ranges than I think, or lacks a step: ask it, once I have its view."""
        if (head := self._heads.by_member.get(member)) is None:
            return
        if epoch > self.epoch:
            self._forget({member})
            head.ready = False
            self._head_of_ask.pop(head.ask, None)
            head.ask = 0
            out.append(NeedView(epoch))
        else:
            self._restart(member, head, out)

    def _send_some(
        self, head: Head, step: OutstandingStep, clock: int, part: int, ranges: Ranges, chosen: NDArray[np.bool_],
        content: PartContent | None, out: list[Effect],
    ) -> None:  # fmt: skip
        """Sends a part for the chosen ones of a head's ranges, if there are any."""
        some, last = ranges[chosen], step.closed and part == len(step.parts) - 1
        for group, prev in by_progress(some, step.ticks[part].prev(self._ranges)[some]):
            whole = content is not None and len(group) == len(ranges)
            self._send(head, step, clock, part, last, None if whole else group, prev, content, out)

    def _send(
        self, head: Head, step: OutstandingStep, clock: int, part: int, last: bool, ranges: Ranges | None, prev: int,
        content: PartContent | None, out: list[Effect],
    ) -> None:  # fmt: skip
        """Sends a part to a head, for all its ranges if `ranges` is None."""
        record = step.record if last else None
        if record is not None and (head is not self._heads.home or not _names(ranges, self._home)):
            record = None
        self._number = number = self._number + 1
        frame = Frame(head.member, number, self.epoch, clock, part, last, ranges, prev, content, record)
        self._frames[number] = frame
        out.append(frame)

    def _mark(self, clock: int, ranges: Ranges, out: list[Effect]) -> None:
        step = self._steps.get(clock)
        if step is None:
            return
        done = step.by_range(self._ranges)
        done[ranges] = True
        if step.closed and not np.count_nonzero(step.ticked(self._ranges) & ~done):
            self._commit(clock, out)

    def _commit(self, clock: int, out: list[Effect]) -> None:
        del self._steps[clock]
        out.append(Committed(clock))
        self.committed = next(iter(self._steps)) - 1 if self._steps else self.clock


def _names(ranges: Ranges | None, r: int) -> bool:
    """Whether range r is among some ranges; None: all that its head has."""
    return ranges is None or bool((ranges == r).any())


def resume(
    applied: Progress, committed: Progress, home: int, records: Iterable[StepRecord], base: int = 0
) -> tuple[int, int]:
    """(base, trained) for the successor of a worker, from its progress in every range, its home range, the records
    there and the clock that it started above: the clock to start above, and the last clock whose samples need not be
    trained again.

    A range that the worker has not pushed to yet knows nothing of its base, so neither can be below that.
    """
    return max(base, touched_clock(int(applied.max()))), last_whole_step(base, home, committed, records)
