"""State of a replica and the steps that all its events are made of: log, forward, apply, commit, answer."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from replication.chain import Chains, Member, Ranges, Role
from replication.effects import Apply, Effects, Reply, Send, Status
from replication.log import Frame, Log
from replication.messages import Ack, Forward, Message, Operation, Seqs
from replication.progress import Clocks, Progress

_RUNS_KEPT = 8

NO_RANGES: Ranges = np.empty(0, dtype=np.int64)
NO_RANGES.setflags(write=False)


class ProtocolError(RuntimeError):
    """What a correct peer or leader cannot say. The process must end: it may no longer vouch for its copy."""


class Run(NamedTuple):
    """Ranges of a frame that are treated alike. chosen: which of its ranges, a slice where they are neighbours; lane:
    the neighbour downstream, -1 for none."""

    chosen: slice | NDArray[np.int64]
    ranges: Ranges
    lane: int
    sending: bool
    waits: bool
    quiet: bool


class Waiter(NamedTuple):
    """A frame with ranges that repeat earlier pushes: it is done with them when `acked` reaches `seqs`."""

    frame: Frame
    ranges: Ranges
    seqs: Seqs


class Core:
    """Arrays over the P ranges, a slot per member ever heard of, and the steps on them.

    seq: the last operation applied; acked: the last one that the tail (and a level joiner) is known to have.
    acked <= seq, and the log holds every operation between them that has a neighbour downstream to wait for.
    _fed: whether I am the tail of a range that someone joins. guarded: whether acknowledgements of some range wait for
    its joiner: what I have beyond `acked` there must not be shown, because the joiner may be the next to be read.
    """

    def __init__(self, me: Member, ranges: int) -> None:
        self.me = me
        self.epoch = 0
        self.ranges = ranges
        self.view: Chains | None = None
        self.seq: Seqs = np.zeros(ranges, dtype=np.int64)
        self.acked: Seqs = np.zeros(ranges, dtype=np.int64)
        self.clocks = Clocks(ranges)
        self.log = Log()
        self.role: NDArray[np.int8] = np.zeros(ranges, dtype=np.int8)
        self.filled: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self.waiting: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._joined: Seqs = np.full(ranges, -1, dtype=np.int64)
        self._since: NDArray[np.int64] = np.zeros(ranges, dtype=np.int64)
        self._up: NDArray[np.int64] = np.full(ranges, -1, dtype=np.int64)
        self._down: NDArray[np.int64] = np.full(ranges, -1, dtype=np.int64)
        self._head: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._tail: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._synced: NDArray[np.bool_] = np.zeros(ranges, dtype=np.bool_)
        self._code: NDArray[np.int64] = np.zeros(ranges, dtype=np.int64)
        self._newest_since = 0
        self._fed = False
        self.guarded = False
        self._headed: Ranges = NO_RANGES
        self._run_cache: deque[tuple[Ranges, list[Run]]] = deque(maxlen=_RUNS_KEPT)
        self._members: list[Member] = []
        self._slots: dict[Member, int] = {}
        self._linked: list[bool] = []
        self._bounds: dict[int, int] = {}
        self._waiters: list[Waiter] = []

    # -- members and links ------------------------------------------------------------------------------------------

    def _slot(self, member: Member) -> int:
        slot = self._slots.get(member)
        if slot is None:
            slot = self._slots[member] = len(self._members)
            self._members.append(member)
            self._linked.append(False)
        return slot

    def _send(self, slot: int, message: Message, out: Effects) -> None:
        if self._linked[slot]:
            out.append(Send(self._members[slot], message))

    def _heard(self, slot: int, epoch: int, ranges: Ranges, neighbour: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which ranges of a message are heard: its sender is the neighbour now, and was when it spoke."""
        ok: NDArray[np.bool_] = neighbour[ranges] == slot
        if epoch < self._newest_since:
            ok &= self._since[ranges] <= epoch
        return ok

    # -- runs -------------------------------------------------------------------------------------------------------

    def _recode(self) -> None:
        """Follows a change of neighbours, links or fillings: what is done with an operation, per range, as one int."""
        waits = self.waiting | (self._down >= 0) & ~self._tail
        quiet = (self.role == Role.JOINING) & ~self.filled
        self._code = (self._down + 1) << 3 | quiet << 2 | self._synced << 1 | waits
        self._run_cache.clear()
        self.guarded = bool(np.count_nonzero(self.waiting))
        self._fed = bool(np.count_nonzero(self._tail & (self._down >= 0)))

    def _runs(self, ranges: Ranges) -> list[Run]:
        """Groups a frame's ranges by their treatment. What is grouped often is remembered, by identity."""
        for known, runs in self._run_cache:
            if known is ranges:
                return runs
        n = ranges.shape[0]
        if n == 0:
            return []
        codes = self._code[ranges]
        runs = list[Run]()
        # One run per treatment, not per stretch: while ranges move, every other one may be treated in another way.
        for code in [int(codes[0])] if np.count_nonzero(codes != codes[0]) == 0 else np.unique(codes).tolist():
            index = _neighbours(np.flatnonzero(codes == code))
            part = ranges[index]
            flags = bool(code & 2), bool(code & 1), bool(code & 4)
            runs.append(Run(index, ranges if part.shape[0] == n else part, (code >> 3) - 1, *flags))
        self._run_cache.append((ranges, runs))
        return runs

    # -- the steps --------------------------------------------------------------------------------------------------

    def _perform(
        self, frame: Frame, ranges: Ranges, seqs: Seqs, before: int | Progress, runs: list[Run], out: Effects
    ) -> None:
        """One operation at one replica: forward it, log it, apply it; where nobody downstream is waited for, commit.

        The caller has set seq and the worker's progress.
        """
        operation = frame.operation
        inside: dict[int, int] | None = None
        final = False
        for index, part, lane, sending, waits, quiet in runs:
            if sending:
                self._send(lane, Forward(self.epoch, part, seqs[index], operation), out)
            if waits:
                self.log.add(lane, frame, part, seqs[index], before if isinstance(before, int) else before[index])
            else:
                final = True
                if quiet:
                    inside = inside or {}
                    inside.update((r, self._bounds[r]) for r in part.tolist())
        out.append(Apply(operation, ranges, seqs, inside))
        if final:
            for index, part, _, _, waits, quiet in runs:
                if not waits:
                    self.acked[part] = seqs[index]
                    if not quiet:
                        self._vouch(part, seqs[index], out)

    def _vouch(self, ranges: Ranges, seqs: Seqs, out: Effects) -> None:
        """Tells the predecessors that everything up to `seqs` is committed."""
        ups = self._up[ranges]
        if np.count_nonzero(ups != ups[0]) == 0:
            if ups[0] >= 0:
                self._send(int(ups[0]), Ack(self.epoch, ranges, seqs), out)
            return
        for up in np.unique(ups[ups >= 0]).tolist():
            mask = ups == up
            self._send(up, Ack(self.epoch, ranges[mask], seqs[mask]), out)

    def _commit(self, lane: int, ranges: Ranges, seqs: Seqs, out: Effects) -> None:
        """The neighbour downstream vouched for `seqs`: pass it on, and let go of what was kept for it."""
        seqs = np.maximum(self.acked[ranges], seqs)
        if np.count_nonzero(seqs > self.seq[ranges]):
            raise ProtocolError(f"{self.me}: {self._members[lane]} acknowledged operations that it was never sent")
        self.acked[ranges] = seqs
        self._vouch(ranges, seqs, out)
        for frame in self.log.release(lane, self.acked):
            self._finish(frame, out)
        if self._waiters:
            self._check_waiters(out)

    def _finish(self, frame: Frame, out: Effects) -> None:
        """A frame waits for nothing more: answer whoever sent it."""
        if frame.token is None:
            return
        if not frame.moved:
            out.append(Reply(frame.token, Status.COMMITTED, self.epoch, frame.ranges, NO_RANGES))
            return
        moved = np.unique(np.concatenate(frame.moved))
        committed = frame.ranges[~np.isin(frame.ranges, moved)]
        out.append(Reply(frame.token, Status.COMMITTED, self.epoch, committed, moved))

    def _check_waiters(self, out: Effects) -> None:
        kept: list[Waiter] = []
        for waiter in self._waiters:
            if np.count_nonzero(self.acked[waiter.ranges] < waiter.seqs):
                kept.append(waiter)
            elif self.log.done(waiter.frame):
                self._finish(waiter.frame, out)
        self._waiters = kept

    def _frame(self, operation: Operation, token: object, ranges: Ranges) -> Frame:
        return Frame(operation, token, ranges)


def _neighbours(index: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The same positions, as a slice if there is no gap between them."""
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == index.shape[0] else index
