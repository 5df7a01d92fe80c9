"""A worker's pushes until they are committed: which steps are outstanding, who lacks what, what to send again. Pure.

Events: push, adopt, connected, disconnected, reply, clocks. Each returns what the shell has to send, in order; the
frames of one head go out on one FIFO connection. Only this module repeats pushes, so retries never stack.

Why no step is lost and none counted twice: a step leaves only when every range of its last part is committed, as said
by a reply or by an answer to Ask that names it committed (applied is not enough: its replicas may die). A head that is
new, was cut off, or refused a frame is asked for the worker's clocks first, and gets everything outstanding that it
lacks in clock order before any new step. Frames in flight to such a head are forgotten: what they named under the old
view may not be what it heads now. What comes twice is recognised by its clock; what is sent again is byte for byte the
first send, because contents belong to the session and never change. So a view may also have everything outstanding sent
again to its new heads at once, in clock order, where it is so little that the question would take longer: they lack
nothing before it, for that is committed, which all replicas have. Ranges recovered from a checkpoint are an exception:
their heads are always asked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Ranges
from replication.effects import Status
from replication.progress import MAX_PARTS, PART_BITS, Progress, after_part, touched_clock

RESEND_BYTES = 256 << 10  # with so much outstanding a new head is asked what it has


class PartContent(Protocol):
    """What a part of a step carries; the shell cuts it per head. It must not change once it is pushed."""

    @property
    def nbytes(self) -> int:
        """About so many are sent for all heads."""

    def touches(self, ranges: Ranges) -> bool:
        """Whether it holds anything for these ranges. It may say yes where it does not, never the reverse."""


class Ask(NamedTuple):
    """Ask a head for this worker's clocks."""

    head: Member
    ask: int
    epoch: int


class Frame(NamedTuple):
    """Push one part to a head, and the tick of those from `first` on that hold nothing for it. ranges None: all that
    it heads at `epoch`. content None: it has been applied there, only the acknowledgement is wanted."""

    head: Member
    frame: int
    epoch: int
    clock: int
    first: int
    part: int
    last: bool
    ranges: Ranges | None
    content: PartContent | None


class Committed(NamedTuple):
    """Step `clock` is committed along every chain."""

    clock: int


class NeedView(NamedTuple):
    """Get a view of at least this epoch and have it adopted."""

    epoch: int


class Fenced(NamedTuple):
    """The roster no longer knows this worker: stop."""


Effect: TypeAlias = Ask | Frame | Committed | NeedView | Fenced


class _Head:
    """A server that heads ranges. `part`: the first part of the newest step that it has not been sent."""

    __slots__ = ("ask", "order", "part", "ready")

    def __init__(self, order: Ranges) -> None:
        self.order = order
        self.ready = False
        self.ask = 0
        self.part = 0


class _Step:
    """One step. Where it is committed is kept as the heads that said so for all their ranges; only when somebody speaks
    for some of them, or heads change, per range (bool [P])."""

    __slots__ = ("count", "parts", "ranges", "whole")

    def __init__(self, parts: list[PartContent], count: int) -> None:
        self.parts = parts
        self.count = count  # of parts when the last one is known, else 0
        self.whole: set[_Head] = set()
        self.ranges: NDArray[np.bool_] | None = None

    @property
    def closed(self) -> bool:
        """Whether its last part is there."""
        return len(self.parts) == self.count

    def by_range(self, ranges: int) -> NDArray[np.bool_]:
        """Where it is committed, from now on per range."""
        if self.ranges is None:
            self.ranges = np.zeros(ranges, dtype=np.bool_)
            for head in self.whole:
                self.ranges[head.order] = True
            self.whole.clear()
        return self.ranges


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
        self.headless = 0
        self._ranges = ranges
        self.window = window
        self._steps: OrderedDict[int, _Step] = OrderedDict()
        self._heads: dict[Member, _Head] = {}
        self._connected: set[Member] = set()
        self._frames: dict[int, Frame] = {}
        self._head_of_ask: dict[int, Member] = {}  # by the number of an Ask that has no answer yet
        self._number = 0

    @property
    def heads(self) -> tuple[Member, ...]:
        """The servers to keep connected."""
        return tuple(self._heads)

    @property
    def outstanding(self) -> int:
        """Steps begun and not committed."""
        return len(self._steps)

    @property
    def open(self) -> bool:
        """Whether the newest step waits for more parts."""
        return bool(self._steps) and not next(reversed(self._steps.values())).closed

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

    def holds(self, clock: int) -> bool:
        """Whether a step is outstanding."""
        return clock in self._steps

    def start_at(self, base: int) -> None:
        """Sets the clock that the worker goes on above; only while no step is outstanding, and never backwards."""
        if self._steps or base < self.clock:
            raise RuntimeError(
                f"clock {base} cannot be a base: at {self.clock}, {len(self._steps)} steps are begun and not committed"
            )
        self.base = self.clock = self.committed = base

    def push(self, content: PartContent, last: bool = True) -> list[Effect]:
        """The next part of the step under way, or the first of a new one; `last` ticks the clock.

        A part that holds nothing for a head is not sent to it on its own: the head's next frame covers it. One call of
        a container makes the part outstanding, so an exception from a signal handler comes before it or after it.
        """
        step = next(reversed(self._steps.values())) if self._steps else None
        begins = step is None or len(step.parts) == step.count
        if begins:
            if len(self._steps) >= self.window:
                raise RuntimeError(f"{self.window} steps are outstanding; wait for one before the next")
            part = 0
            self._steps[self.clock + 1] = _Step([content], 1 if last else 0)
            self.clock += 1
        else:
            assert step is not None
            part = len(step.parts)
            if part == MAX_PARTS - 1 and not last:
                raise RuntimeError(f"a step has at most {MAX_PARTS} parts")
            step.count = part + 1 if last else 0
            step.parts.append(content)
        out: list[Effect] = []
        for member, head in self._heads.items():
            if begins:
                head.part = 0
            if head.ready and (last or content.touches(head.order)):
                self._number = number = self._number + 1
                frame = Frame(member, number, self.epoch, self.clock, head.part, part, last, None, content)
                self._frames[number] = frame
                out.append(frame)
                head.part = part + 1
        return out

    def owing(self) -> dict[Member, int]:
        """Head -> the oldest step that it has not committed in all its ranges."""
        owed: dict[Member, int] = {}
        for clock, step in self._steps.items():
            done = step.by_range(self._ranges)
            for member, head in self._heads.items():
                if member not in owed and not done[head.order].all():
                    owed[member] = clock
        return owed

    # -- views and connections --------------------------------------------------------------------------------------

    def adopt(self, view: Chains) -> list[Effect]:
        """Follows a view. Heads whose ranges did not change keep their frames; the others start afresh."""
        out: list[Effect] = []
        if view.epoch <= self.epoch:
            return out
        recovered = view.recovery_epoch > self.epoch
        begun_again = bool(recovered.any())
        if begun_again:  # these ranges have lost what they had of outstanding steps
            for step in self._steps.values():
                step.by_range(self._ranges)[recovered] = False
        self.epoch = view.epoch
        heads: dict[Member, _Head] = {}
        for index, order in view.headed().items():
            member = view.members[index]
            head = self._heads.get(member)
            if head is not None and _same(head.order, order) and not (begun_again and recovered[order].any()):
                head.order = order
            else:
                head = _Head(order)
            heads[member] = head
        changed = {member: head for member, head in self._heads.items() if heads.get(member) is not head}
        if changed:
            for step in self._steps.values():
                step.by_range(self._ranges)
        self._heads = heads
        self.headless = int(np.count_nonzero(view.heads < 0))
        self._forget(changed.keys())
        for head in changed.values():
            self._head_of_ask.pop(head.ask, None)
        contents = (part for step in self._steps.values() for part in step.parts)
        again = not begun_again and sum(part.nbytes for part in contents) < RESEND_BYTES
        for member, head in heads.items():
            if again and not head.ready and member in self._connected:
                self._send_again(member, head, out)
            elif not head.ready:
                self._begin(member, head, out)
        return out

    def connected(self, member: Member) -> list[Effect]:
        """A fresh connection to a server."""
        out: list[Effect] = []
        self._connected.add(member)
        head = self._heads.get(member)
        if head is not None:
            self._restart(member, head, out)
        return out

    def disconnected(self, member: Member) -> list[Effect]:
        """It is gone; what was in flight on it may have arrived or not."""
        self._connected.discard(member)
        self._forget({member})
        head = self._heads.get(member)
        if head is not None:
            head.ready = False
        return []

    def recover(self, view: Chains) -> list[Effect]:
        """Begins afresh after an event that an exception cut short: which steps are outstanding is known, everything
        else is asked again. No connection is left."""
        self.clock = max(self.clock, next(reversed(self._steps), 0))
        self.committed = next(iter(self._steps)) - 1 if self._steps else self.clock
        for step in self._steps.values():
            step.by_range(self._ranges)
            step.whole.clear()
        self._connected.clear()
        self._frames.clear()
        self._head_of_ask.clear()
        self._heads = {}
        self.epoch = 0
        return self.adopt(view)

    def _forget(self, members: Collection[Member]) -> None:
        """Forgets what is in flight to these heads."""
        if members:
            self._frames = {n: frame for n, frame in self._frames.items() if frame.head not in members}

    def _restart(self, member: Member, head: _Head, out: list[Effect]) -> None:
        self._forget({member})
        head.ready = False
        self._begin(member, head, out)

    def _begin(self, member: Member, head: _Head, out: list[Effect]) -> None:
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

    def _send_again(self, member: Member, head: _Head, out: list[Effect]) -> None:
        """Sends a head all that is outstanding, but for what is known to be committed."""
        for clock, step in self._steps.items():
            lacks = head.order[~step.by_range(self._ranges)[head.order]]
            ranges = None if lacks.shape[0] == head.order.shape[0] else lacks
            for part in range(len(step.parts) if lacks.shape[0] else 0):
                self._send(member, clock, part, part, ranges, step.parts[part], out)
        head.ready, head.part = True, self.parts

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
                step.whole.add(self._heads[sent.head])
                if len(step.whole) == len(self._heads) and not self.headless:
                    self._commit(sent.clock, out)
            elif sent.last:
                named = self._heads[sent.head].order if sent.ranges is None else sent.ranges
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
        head = None if member is None else self._heads.get(member)
        if member is None or head is None or head.ask != ask or head.ready:
            return out
        if status != Status.COMMITTED:
            self._refused(member, epoch, out)
            return out
        for clock, step in list(self._steps.items()):
            for part in range(len(step.parts)):
                last = step.closed and part == len(step.parts) - 1
                after = after_part(clock, part, last)
                if last:
                    self._mark(clock, ranges[committed >= after], out)
                    if clock not in self._steps:  # committed everywhere, also where this head has forgotten us since
                        break
                    again = ranges[(applied >= after) & ~step.by_range(self._ranges)[ranges]]
                    if again.shape[0]:
                        self._send(member, clock, part, part, again, None, out)
                lacks = ranges[applied < after]
                if lacks.shape[0]:
                    whole = lacks.shape[0] == ranges.shape[0]
                    self._send(member, clock, part, part, None if whole else lacks, step.parts[part], out)
        head.ready, head.part = True, self.parts
        return out

    def _refused(self, member: Member, epoch: int, out: list[Effect]) -> None:
        """A head answers for other ranges than I think, or lacks a step: ask it, once I have its view."""
        head = self._heads.get(member)
        if head is None:
            return
        if epoch > self.epoch:
            self._forget({member})
            head.ready = False
            self._head_of_ask.pop(head.ask, None)
            head.ask = 0
            out.append(NeedView(epoch))
        else:
            self._restart(member, head, out)

    def _send(
        self,
        member: Member,
        clock: int,
        first: int,
        part: int,
        ranges: Ranges | None,
        content: PartContent | None,
        out: list[Effect],
    ) -> None:
        step = self._steps[clock]
        last = step.closed and part == len(step.parts) - 1
        self._number += 1
        frame = Frame(member, self._number, self.epoch, clock, first, part, last, ranges, content)
        self._frames[self._number] = frame
        out.append(frame)

    def _mark(self, clock: int, ranges: Ranges, out: list[Effect]) -> None:
        step = self._steps.get(clock)
        if step is None:
            return
        done = step.by_range(self._ranges)
        done[ranges] = True
        if np.count_nonzero(done) == self._ranges:
            self._commit(clock, out)

    def _commit(self, clock: int, out: list[Effect]) -> None:
        del self._steps[clock]
        out.append(Committed(clock))
        self.committed = next(iter(self._steps)) - 1 if self._steps else self.clock


def _same(ranges: Ranges, others: Ranges) -> bool:
    """Whether these are the same ranges, in any order."""
    if len(ranges) != len(others):
        return False
    return bool((ranges == others).all()) or bool((np.sort(ranges) == np.sort(others)).all())


def resume(applied: Progress, committed: Progress, base: int = 0) -> tuple[int, int]:
    """(base, trained) for the successor of a worker, from its progress in every range and the clock that it started
    above: the clock to start above, and the last clock whose samples need not be trained again.

    A range that the worker has not pushed to yet knows nothing of its base, so neither can be below that.
    """
    return max(base, touched_clock(int(applied.max()))), max(base, int(committed.min()) >> PART_BITS)
