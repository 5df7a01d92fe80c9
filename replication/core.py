"""State of a replica and the steps that all its events are made of: log, forward, apply, commit, answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Ranges, Role
from replication.effects import Apply, Effects, Reply, Send, Status
from replication.log import Frame, Log
from replication.messages import Ack, Forward, Message, Seqs
from replication.neighbours import Neighbours
from replication.progress import Clocks, Progress, touched_clock
from replication.refusals import Refusals, Refused
from replication.retained import Retained
from replication.step_records import StepRecords, home_range

_PLANS_CACHED = 8

NO_RANGES: Ranges = np.empty(0, dtype=np.int64)
NO_RANGES.setflags(write=False)


class ProtocolError(RuntimeError):
    """What a correct leader cannot say, after which this copy is in doubt: the process must end."""


class PeerError(RuntimeError):
    """What a correct peer cannot say. Raised before anything has changed: only the link to it ends."""


class Part(NamedTuple):
    """Some ranges of a frame. chosen: which of them, a slice where they are adjacent; successor: the slot of
    the neighbour downstream that they concern, -1 for none."""

    successor: int
    chosen: slice | NDArray[np.int64]
    ranges: Ranges


class ForwardingPlan(NamedTuple):
    """What is done with the ranges of a frame.

    sent          forwarded, one message per successor, whatever else is done
    logged        held in the log until a successor acknowledges
    final         committed at once
    acknowledged  those of `final` of which the predecessors hear
    quiet         ranges being filled here: applied below the bound of what has come
    """

    sent: list[Part]
    logged: list[Part]
    final: Part | None
    acknowledged: Part | None
    quiet: Ranges


class Shared(NamedTuple):
    """The state by which a usual push, forward or acknowledgement is judged, int64 [P] each, for whoever does that on
    the same memory. `waits`: the successor has to acknowledge; `synced`: it gets operations; `quiet`: being filled
    here; `fed`: I am the tail and the successor a joiner; `counted`: acknowledgements wait for that joiner;
    `reported`: it was reported level. bounds: of ranges being filled, the place below which keys
    are there. orders: by epoch, the ranges headed here in the order of a push's keys."""

    up: Seqs
    down: Seqs
    since: Seqs
    waits: NDArray[np.bool_]
    synced: NDArray[np.bool_]
    quiet: NDArray[np.bool_]
    fed: NDArray[np.bool_]
    counted: NDArray[np.bool_]
    reported: Ranges
    bounds: dict[int, int]
    members: list[Member]
    linked: list[bool]
    orders: dict[int, Ranges]


class Waiter(NamedTuple):
    """A frame with ranges that repeat earlier pushes: it is done with them when `acked` reaches `seqs`."""

    frame: Frame
    ranges: Ranges
    seqs: Seqs


class Core:
    """The ranges of one replica, and the steps that all events are made of.

    Arrays are over the P ranges. Parts put what is to be carried out into `effects`, in order; the event takes it.
    """

    def __init__(self, me: Member, ranges: int, log: Log | None = None) -> None:
        self.me = me  # the member whose ranges these are
        self.ranges = ranges  # P
        self.effects: Effects = []  # of the event under way, in the order in which they are to be carried out
        self.failed = ""  # how an event ended in the midst: the copy is in doubt, and no other event is taken
        self.epoch = 0  # of the view that is followed
        self.view: Chains | None = None  # the view that is followed
        self.version = 0  # grows with every change of neighbours, links or fillings
        self.neighbours = Neighbours(ranges)  # who stands before and behind, and the links to them
        # acked <= seq, and the log holds every operation between them that has a successor to wait for.
        self.seq: Seqs = np.zeros(ranges, dtype=np.int64)  # the last operation applied
        self.acked: Seqs = np.zeros(ranges, dtype=np.int64)  # the last one known to be at the tail (and a level joiner)
        self.clocks = Clocks(ranges)  # each worker's progress in each range
        self.refusals = Refusals(ranges)  # rows that heads refused
        self.records = StepRecords(ranges)  # of sparse steps, at their workers' homes
        self.log = Log() if log is None else log  # operations that some successor has not acknowledged
        self.retained = Retained(ranges)  # what late copies lack
        self.role: NDArray[np.int8] = np.zeros(ranges, dtype=np.int8)  # a `Role`
        self.filled: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # all of the range is here
        self.bounds: dict[int, int] = {}  # of ranges being filled here: the hash below which keys are there
        self.joined: Seqs = np.full(ranges, -1, dtype=np.int64)  # how far the joiner is of which I am the tail
        self.synced: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # the successor gets operations
        self.waiting: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)  # acknowledgements wait for the joiner
        self.fed = False  # I am the tail of a range that has a joiner
        # Acknowledgements of some range wait for its joiner: what I have beyond `acked` there must not be shown:
        # the joiner may be the next to be read.
        self.guarded = False
        # Operations that no log bounds wait on a full link to a joiner that I fill: then no push is let in here, and
        # what I have as tail is not acknowledged, so that heads' logs fill up, and they let none in either.
        self.congested = False
        # Ranges whose predecessors have not heard of all that is committed.
        self.unacknowledged: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self.headed: Ranges = NO_RANGES  # in the order of a push's keys
        self.waiters: list[Waiter] = []  # repeats to be answered once what they repeat is committed
        self.code: NDArray[np.int64] = np.zeros(ranges, dtype=np.int64)  # what is done with an operation, see `recode`
        self._plans: deque[tuple[Ranges, ForwardingPlan]] = deque(maxlen=_PLANS_CACHED)  # by ranges, the newest
        # Why a content cannot be applied, "" if it can; set by the owner of the content.
        self.wrong: Callable[[Message], str] = lambda message: ""

    def take_effects(self) -> Effects:
        """The effects of the event that ends here."""
        effects, self.effects = self.effects, []
        return effects

    # -- links ------------------------------------------------------------------------------------------------------

    def send(self, slot: int, message: Message) -> None:
        if self.neighbours.linked[slot]:
            self.effects.append(Send(self.neighbours.members[slot], message))

    def check_content(self, slot: int, message: Message) -> None:
        """Its content can be applied. Only for what is heard: a deposed head may speak of tables that are long gone.
        Raises PeerError."""
        if why := self.wrong(message):
            raise PeerError(f"{self.me}: {self.neighbours.members[slot]} sent what cannot be: {why}")

    # -- forwarding plans ----------------------------------------------------------------------------------------------

    def recode(self) -> None:
        """Follows a change of neighbours, links or fillings: what is done with an operation, per range, as one int."""
        waits = self.waiting | (self.neighbours.down >= 0) & ~self.neighbours.tail
        quiet = (self.role == Role.JOINING) & ~self.filled
        self.code = (self.neighbours.down + 1) << 3 | quiet << 2 | self.synced << 1 | waits
        self._plans.clear()
        self.version += 1
        self.guarded = bool(np.count_nonzero(self.waiting))
        self.fed = bool(np.count_nonzero(self.neighbours.tail & (self.neighbours.down >= 0)))
        self.look_at_links()

    def look_at_links(self) -> None:
        fed = self.neighbours.tail & self.synced & ~self.waiting if self.neighbours.full else None
        self.congested = fed is not None and not self.neighbours.full.isdisjoint(self.neighbours.down[fed].tolist())

    def _forwarding_plan(self, ranges: Ranges) -> ForwardingPlan:
        """What is done with a frame of these ranges. What comes often is remembered, by identity."""
        for known, plan in self._plans:
            if known is ranges:
                return plan
        codes = self.code[ranges]
        successors = (codes >> 3) - 1
        final = codes & 1 == 0
        plan = ForwardingPlan(
            _by_successor(ranges, successors, codes & 2 != 0),
            _by_successor(ranges, successors, ~final),
            _part(ranges, -1, final),
            _part(ranges, -1, final & (codes & 4 == 0)),
            ranges[final & (codes & 4 != 0)],
        )
        self._plans.append((ranges, plan))
        return plan

    # -- the steps --------------------------------------------------------------------------------------------------

    def perform(self, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress) -> None:
        """One operation at one replica: forward it, log it, apply it; where nobody downstream is waited for, commit.

        The caller has set seq and the worker's progress.
        """
        operation = frame.operation
        if operation.refusal is not None:
            self.refusals.note(operation.worker, touched_clock(operation.after), ranges, operation.refusal)
        elif operation.after == 0 and self.refusals:
            self.refusals.forget(operation.worker, ranges)
        if operation.record is not None and (ranges == home_range(operation.worker, self.ranges)).any():
            self.records.note(operation.worker, operation.record)
        sent, logged, final, acknowledged, quiet = self._forwarding_plan(ranges)
        for successor, chosen, part in sent:
            self.send(successor, Forward(self.epoch, part, seqs[chosen], operation))
        for successor, chosen, part in logged:
            self.log.add(successor, frame, part, seqs[chosen], before if isinstance(before, int) else before[chosen])
        if self.retained.active:
            self.retained.add(operation, ranges, seqs, self.log.nbytes)
        inside = {r: self.bounds[r] for r in quiet.tolist()} if quiet.shape[0] else None
        self.effects.append(Apply(operation, ranges, seqs, inside))
        if final is not None:
            self.acked[final.ranges] = seqs[final.chosen]
            if acknowledged is not None and self.congested:
                self.unacknowledged[acknowledged.ranges] = True
            elif acknowledged is not None:
                self.acknowledge(acknowledged.ranges, seqs[acknowledged.chosen])

    def acknowledge(self, ranges: Ranges, seqs: Seqs) -> None:
        """Tells the predecessors that everything up to `seqs` is committed."""
        ups = self.neighbours.up[ranges]
        if np.count_nonzero(ups != ups[0]) == 0:
            if ups[0] >= 0:
                self.send(int(ups[0]), Ack(self.epoch, ranges, seqs))
            return
        for up in np.unique(ups[ups >= 0]).tolist():
            mask = ups == up
            self.send(up, Ack(self.epoch, ranges[mask], seqs[mask]))

    def commit(self, successor: int, ranges: Ranges, seqs: Seqs) -> None:
        """The neighbour downstream acknowledged `seqs`: pass it on, and release what waited for it."""
        seqs = np.maximum(self.acked[ranges], seqs)
        if np.count_nonzero(seqs > self.seq[ranges]):
            raise PeerError(
                f"{self.me}: {self.neighbours.members[successor]} acknowledged operations that it was never sent"
            )
        self.acked[ranges] = seqs
        self.acknowledge(ranges, seqs)
        for frame in self.log.release(successor, self.acked):
            self.finish(frame)
        if self.waiters:
            self.check_waiters()

    def finish(self, frame: Frame) -> None:
        """A frame waits for nothing more: answer whoever sent it."""
        if frame.token is None:
            return
        if not frame.moved:
            self.effects.append(
                Reply(frame.token, Status.COMMITTED, self.epoch, frame.ranges, NO_RANGES, frame.refused)
            )
            return
        moved = np.unique(np.concatenate(frame.moved))
        committed = frame.ranges[~np.isin(frame.ranges, moved)]
        refused = [cut for each in frame.refused if (cut := _cut(each, committed)) is not None]
        self.effects.append(Reply(frame.token, Status.COMMITTED, self.epoch, committed, moved, refused))

    def check_waiters(self) -> None:
        waiting: list[Waiter] = []
        for waiter in self.waiters:
            if np.count_nonzero(self.acked[waiter.ranges] < waiter.seqs):
                waiting.append(waiter)
            elif self.log.done(waiter.frame):
                self.finish(waiter.frame)
        self.waiters = waiting


def _cut(refused: Refused, ranges: Ranges) -> Refused | None:
    """What of it is in these ranges."""
    if refused.rows is None:
        return refused if len(ranges) else None
    rows = refused.rows.part(ranges)
    return refused._replace(rows=rows) if len(rows) else None


def _by_successor(ranges: Ranges, successors: NDArray[np.int64], mask: NDArray[np.bool_]) -> list[Part]:
    """One part per successor of the ranges in the mask: while ranges move, adjacent ones may go different ways, and a
    message costs much more than a range of it."""
    chosen = successors[mask]
    if chosen.shape[0] == 0:
        return []
    every = [int(chosen[0])] if np.count_nonzero(chosen != chosen[0]) == 0 else np.unique(chosen).tolist()
    parts = [_part(ranges, successor, mask & (successors == successor)) for successor in every]
    return [part for part in parts if part is not None]


def _part(ranges: Ranges, successor: int, mask: NDArray[np.bool_]) -> Part | None:
    """The ranges in the mask, None if there are none."""
    index = np.flatnonzero(mask)
    if index.shape[0] == 0:
        return None
    if index.shape[0] == ranges.shape[0]:
        return Part(successor, slice(0, index.shape[0]), ranges)
    first, last = int(index[0]), int(index[-1])
    chosen = slice(first, last + 1) if last - first + 1 == index.shape[0] else index
    return Part(successor, chosen, ranges[chosen])
