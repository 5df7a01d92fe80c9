"""Who is let in: pushes of workers are judged, wait, or are answered at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replication.chain import Member, Ranges
from replication.core import NO_RANGES, Waiter
from replication.effects import (
    Ask,
    ClocksReply,
    Effects,
    Hold,
    NeedRoster,
    NeedView,
    Push,
    Release,
    Reply,
    Status,
)
from replication.log import Frame, Log
from replication.messages import Operation, OperationKind, Seqs
from replication.progress import PART_BITS, Progress, after_part, before_part
from replication.refusals import Refused
from replication.snapshot_transfer import SnapshotTransfer

_LOOK = (OperationKind.AUDIT, OperationKind.CUT, OperationKind.DROP)
"""As the first two are applied, clocks are those of their place in the log; what comes behind the end of a table is
looked at again."""
_LET_IN_BYTES = 1 << 20  # of pushes that waited: what they send is out, and may fill a link, before more are let in


class Admission(SnapshotTransfer):
    """A head's side towards workers. `budget_bytes` bounds its log: beyond it pushes wait. `look_again` is called with
    each push that has waited as it is let in, and may change its payload, or refuse it."""

    def __init__(self, me: Member, ranges: int, budget_bytes: int, log: Log | None = None) -> None:
        super().__init__(me, ranges, log)
        self._budget = self.retained.budget_bytes = budget_bytes
        self._orders: dict[int, Ranges] = {}
        self._roster: frozenset[int] | None = None
        self._roster_version = 0
        self._parked: deque[Push | Ask] = deque()
        self._doubtful = False
        self.look_again: Callable[[Push], None] = lambda push: None
        self.unsettled = False  # pushes that waited could go on, with `go_on`, once what is to be sent has been

    def adopt_roster(self, version: int, workers: frozenset[int]) -> Effects:
        """Follows the roster: only these worker ids may push. A restarted worker has a new id, none is used again."""
        out: Effects = []
        if version > self._roster_version or self._roster is None:
            self._roster_version, self._roster = version, workers
            self.clocks.shelve(workers)
        return self._settle(out)

    def headed(self, epoch: int) -> Ranges | None:
        """What a push of that epoch calls all ranges headed here, in the order of its keys; None if it is stale."""
        return self._orders.get(epoch)

    @property
    def parked(self) -> int:
        """Pushes and questions that wait here for a view, a roster or room in the log."""
        return len(self._parked)

    def push(self, push: Push) -> Effects:
        """A worker's part of a step, or an operation of the ranges themselves; answered by one Reply, maybe later."""
        out: Effects = []
        if self._must_wait(push) or (self._parked and any(p.worker == push.worker for p in self._parked)):
            self._park(push, out)
            out.append(Hold(push.token))
        else:
            self._admit(push, out)
        return out

    def ask(self, ask: Ask) -> Effects:
        """How far a worker's pushes are applied and committed in the ranges headed here."""
        out: Effects = []
        if self._must_wait(ask):
            self._park(ask, out)
        else:
            self._tell_clocks(ask, out)
        return out

    def waits(self, token: object) -> bool:
        """Whether a push with that token waits for admission."""
        return any(event.token is token for event in self._parked)

    def forget(self, token: object) -> Effects:
        """Whoever waits for this answer is gone: a push that still waits for admission is dropped."""
        self._parked = deque(p for p in self._parked if p.token is not token)
        return []

    def limit_log(self, budget_bytes: int) -> Effects:
        """Lets the log take so many bytes before pushes wait; with 0 all wait."""
        self._budget = budget_bytes
        return self._settle([])

    def doubt(self, doubtful: bool) -> Effects:
        """Whether I may head no more what my view gives me, because I was stopped: then pushes wait."""
        self._doubtful = doubtful
        return self._settle([])

    def _must_wait(self, event: Push | Ask) -> bool:
        if event.epoch > self.epoch or (self._roster is not None and event.roster > self._roster_version):
            return True
        full = self.congested or self.log.nbytes >= self._budget
        return (full or self._doubtful) and isinstance(event, Push)

    def _park(self, event: Push | Ask, out: Effects) -> None:
        self._parked.append(event)
        if event.epoch > self.epoch:
            out.append(NeedView(event.epoch))
        elif self._roster is not None and event.roster > self._roster_version:
            out.append(NeedRoster(event.roster))

    def go_on(self) -> Effects:
        """What was to be sent has been sent: lets in more of what waits, as long as this is `unsettled`."""
        return self._settle([])

    def _settle(self, out: Effects) -> Effects:
        """The end of an event: whoever waited and need not any more goes on, each worker's pushes in order."""
        if not self.congested and np.count_nonzero(self._unacknowledged):
            untold = np.flatnonzero(self._unacknowledged).astype(np.int64)
            self._unacknowledged[untold] = False
            self._acknowledge(untold, self.acked[untold], out)
        if not self._parked:
            return out
        parked, self._parked = self._parked, deque()
        blocked: set[int] = set()
        let_in, looked = 0, False
        self.unsettled = False
        for event in parked:
            if self._must_wait(event) or (event.worker in blocked and isinstance(event, Push)):
                self._parked.append(event)
                blocked.add(event.worker)
            elif isinstance(event, Push) and (looked or let_in >= _LET_IN_BYTES or (let_in and event.kind in _LOOK)):
                self._parked.append(event)
                blocked.add(event.worker)
                self.unsettled = True
            elif isinstance(event, Push):
                let_in += event.nbytes
                looked = event.kind in _LOOK
                self.look_again(event)
                self._admit(event, out)
                out.append(Release(event.token))  # behind its Apply: what is told of it is what there is then
            else:
                self._tell_clocks(event, out)
        return out

    def _refuse(self, push: Push, status: Status, out: Effects) -> None:
        out.append(Reply(push.token, status, self.epoch, NO_RANGES, NO_RANGES))

    def _admit(self, push: Push, out: Effects) -> None:
        headed = self._headed if push.epoch == self.epoch else self._orders.get(push.epoch)
        if headed is None:
            self._refuse(push, Status.STALE_VIEW, out)
            return
        ranges = push.ranges
        if ranges is None:
            ranges = headed
        elif np.count_nonzero(self._head[ranges]) < ranges.shape[0]:
            self._refuse(push, Status.STALE_VIEW, out)
            return
        worker = push.worker
        if worker >= 0 and self._roster is not None and worker not in self._roster and push.kind == OperationKind.PUSH:
            self._refuse(push, Status.FENCED, out)
            return
        if ranges.shape[0] == 0:
            refused = [] if push.refusal is None else [Refused(push.clock, push.refusal.why)]
            out.append(Reply(push.token, Status.COMMITTED, self.epoch, ranges, NO_RANGES, refused))
            return
        if push.clock:
            self._admit_step(push, ranges, out)
            return
        before: int | Progress = 0
        if worker >= 0:
            row = self.clocks.row(worker)
            before = row[ranges]
            row[ranges] = push.after
        operation = Operation(push.kind, worker, push.after, push.payload, push.nbytes)
        self._log_operation(push, operation, ranges, before, [], out)

    def _admit_step(self, push: Push, ranges: Ranges, out: Effects) -> None:
        """Judges a part of a step by the worker's progress: next, duplicate, or beyond next."""
        row = self.clocks.row(push.worker)
        expected = before_part(push.clock, push.first)
        after = after_part(push.clock, push.part, push.last)
        have = row[ranges]
        if np.count_nonzero(have != expected) == 0 and not push.repeat:
            row[ranges] = after
            operation = Operation(push.kind, push.worker, after, push.payload, push.nbytes, push.refusal)
            self._log_operation(push, operation, ranges, expected, self._refused(push, ranges, NO_RANGES), out)
            return
        fresh, repeated = self._judge(push, have, expected, after)
        unapplied = np.count_nonzero(fresh)
        if unapplied + np.count_nonzero(repeated) < ranges.shape[0] or (unapplied and push.repeat):
            self._refuse(push, Status.GAP, out)
            return
        operation = Operation(push.kind, push.worker, after, push.payload, push.nbytes, push.refusal)
        frame = self._frame(operation, push.token, ranges)
        # Counted before the fresh part is performed, so that the frame is answered once, when both are committed.
        again = ranges[repeated]
        targets = self.seq[again]
        frame.refused = self._refused(push, ranges[fresh], again)
        if unapplied:
            ticked = ranges[fresh]
            row[ticked] = after
            self._give_seqs(frame, ticked, have[fresh], out)
        if np.count_nonzero(self._unsafe_repeat(again, targets)):
            self.log.wait(frame)
            self._waiters.append(Waiter(frame, again, targets))
        if frame.left == 0:
            self._finish(frame, out)

    def _refused(self, push: Push, ticked: Ranges, again: Ranges) -> list[Refused]:
        """What its answer says was refused: where it ticks now, as it is judged now; in ranges that it repeats, as it
        was judged then. The last part speaks of all parts: who was to answer those may be gone."""
        before = np.concatenate([again, ticked]) if push.last else again
        refused = self.refusals.look(push.worker, push.clock, before) if self.refusals else []
        if push.refusal is not None and ticked.shape[0]:
            rows = push.refusal.rows
            rows = rows if rows is None else rows.part(ticked)
            if rows is None or len(rows):
                refused.append(Refused(push.clock, push.refusal.why, rows))
        return refused

    def _judge(
        self, push: Push, have: Progress, expected: int, after: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """(next, duplicate) per range. A worker that starts above a base jumps over what lies below it."""
        reached = np.maximum(have, push.base << 16) if push.base else have
        return reached == expected, reached >= after

    def _unsafe_repeat(self, ranges: Ranges, seqs: Seqs) -> NDArray[np.bool_]:
        """Where the tail may still lack what is repeated."""
        unsafe: NDArray[np.bool_] = self.acked[ranges] < seqs
        return unsafe

    def _log_operation(
        self, push: Push, operation: Operation, ranges: Ranges, before: int | Progress, refused: list[Refused],
        out: Effects,
    ) -> None:  # fmt: skip
        frame = self._frame(operation, push.token, ranges)
        frame.refused = refused
        self._give_seqs(frame, ranges, before, out)
        if frame.left == 0:
            self._finish(frame, out)
        if operation.after == 0 and operation.worker >= 0:
            self.clocks.forget(operation.worker)

    def _give_seqs(self, frame: Frame, ranges: Ranges, before: int | Progress, out: Effects) -> None:
        seqs = self.seq[ranges]
        seqs += 1
        self.seq[ranges] = seqs
        self._perform(frame, ranges, seqs, before, out)

    def _tell_clocks(self, ask: Ask, out: Effects) -> None:
        ranges = self._orders.get(ask.epoch)
        status = Status.COMMITTED
        if ranges is None:
            status, ranges = Status.STALE_VIEW, NO_RANGES
        if not self.clocks.known(ask.worker):
            none = np.zeros(ranges.shape[0], dtype=np.int64)
            out.append(ClocksReply(ask.token, status, self.epoch, ranges, none, none))
            return
        applied = self.clocks.read(ask.worker)
        committed = self._committed(ask.worker, applied)
        refused = self.refusals.of(ask.worker, committed[ranges] >> PART_BITS, ranges)
        out.append(ClocksReply(ask.token, status, self.epoch, ranges, applied[ranges], committed[ranges], refused))

    def _committed(self, worker: int, applied: Progress) -> Progress:
        """The worker's progress as the tail is known to have it: before its oldest operation still in the log."""
        committed: Progress = applied.copy()
        for entry in reversed(self.log.entries()):
            if entry.frame.operation.worker == worker:
                open_ = self.acked[entry.ranges] < entry.seqs
                before = entry.before
                committed[entry.ranges[open_]] = before if isinstance(before, int) else before[open_]
        return committed
