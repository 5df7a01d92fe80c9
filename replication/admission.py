"""Who is let in: pushes of workers are judged, wait, or are answered at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replication.chain import Ranges
from replication.core import NO_RANGES, Core, Waiter
from replication.effects import (
    Ask,
    ClocksReply,
    Hold,
    NeedRoster,
    NeedView,
    Push,
    Release,
    Reply,
    Status,
)
from replication.log import Frame
from replication.messages import Operation, OperationKind, Seqs
from replication.progress import PART_BITS, Progress, after_part
from replication.refusals import Refused
from replication.step_records import home_range

_LOOK = (OperationKind.AUDIT, OperationKind.CUT, OperationKind.DROP)
"""As the first two are applied, clocks are those of their place in the log; what comes behind the end of a table is
looked at again."""
_LET_IN_BYTES = 1 << 20  # of pushes that waited: what they send is out, and may fill a link, before more are let in


class Admission:
    """A head's side towards workers. `budget_bytes` bounds its log: beyond it pushes wait. `look_again` is called with
    each push that has waited as it is let in, and may change its payload, or refuse it."""

    def __init__(self, core: Core, budget_bytes: int) -> None:
        self._core = core
        self._budget = core.retained.budget_bytes = budget_bytes
        self.orders: dict[int, Ranges] = {}
        self.roster: frozenset[int] | None = None
        self._roster_version = 0
        self._parked: deque[Push | Ask] = deque()
        self.doubtful = False
        self.look_again: Callable[[Push], None] = lambda push: None
        self.unsettled = False  # pushes that waited could go on, with `go_on`, once what is to be sent has been

    def adopt_roster(self, version: int, workers: frozenset[int]) -> None:
        """Follows the roster: only these worker ids may push. A restarted worker has a new id, none is used again."""
        if version > self._roster_version or self.roster is None:
            self._roster_version, self.roster = version, workers
            self._core.clocks.retire_rows(workers)

    def headed(self, epoch: int) -> Ranges | None:
        """What a push of that epoch calls all ranges headed here, in the order of its keys; None if it is stale."""
        return self.orders.get(epoch)

    @property
    def parked(self) -> int:
        """Pushes and questions that wait here for a view, a roster or room in the log."""
        return len(self._parked)

    def push(self, push: Push) -> None:
        """A worker's part of a step, or an operation of the ranges themselves; answered by one Reply, maybe later."""
        if self._must_wait(push) or (self._parked and any(p.worker == push.worker for p in self._parked)):
            self._park(push)
            self._core.effects.append(Hold(push.token))
        else:
            self._admit(push)

    def ask(self, ask: Ask) -> None:
        """How far a worker's pushes are applied and committed in the ranges headed here."""
        if self._must_wait(ask):
            self._park(ask)
        else:
            self._tell_clocks(ask)

    def waits(self, token: object) -> bool:
        """Whether a push with that token waits for admission."""
        return any(event.token is token for event in self._parked)

    def forget(self, token: object) -> None:
        """Whoever waits for this answer is gone: a push that still waits for admission is dropped."""
        self._parked = deque(p for p in self._parked if p.token is not token)

    def limit_log(self, budget_bytes: int) -> None:
        """Lets the log take so many bytes before pushes wait; with 0 all wait."""
        self._budget = budget_bytes

    def _must_wait(self, event: Push | Ask) -> bool:
        core = self._core
        if event.epoch > core.epoch or (self.roster is not None and event.roster > self._roster_version):
            return True
        full = core.congested or core.log.nbytes >= self._budget
        return (full or self.doubtful) and isinstance(event, Push)

    def _park(self, event: Push | Ask) -> None:
        core = self._core
        self._parked.append(event)
        if event.epoch > core.epoch:
            core.effects.append(NeedView(event.epoch))
        elif self.roster is not None and event.roster > self._roster_version:
            core.effects.append(NeedRoster(event.roster))

    def settle(self) -> None:
        """The end of an event: whoever waited and need not any more goes on, each worker's pushes in order."""
        core = self._core
        if not core.congested and np.count_nonzero(core.unacknowledged):
            untold = np.flatnonzero(core.unacknowledged).astype(np.int64)
            core.unacknowledged[untold] = False
            core.acknowledge(untold, core.acked[untold])
        if not self._parked:
            return
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
                self._admit(event)
                core.effects.append(Release(event.token))  # behind its Apply: what is told of it is what there is then
            else:
                self._tell_clocks(event)

    def _refuse(self, push: Push, status: Status) -> None:
        core = self._core
        core.effects.append(Reply(push.token, status, core.epoch, NO_RANGES, NO_RANGES))

    def _admit(self, push: Push) -> None:
        core = self._core
        headed = core.headed if push.epoch == core.epoch else self.orders.get(push.epoch)
        if headed is None:
            self._refuse(push, Status.STALE_VIEW)
            return
        ranges = push.ranges
        if ranges is None:
            ranges = headed
        elif np.count_nonzero(core.neighbours.head[ranges]) < ranges.shape[0]:
            self._refuse(push, Status.STALE_VIEW)
            return
        worker = push.worker
        if worker >= 0 and self.roster is not None and worker not in self.roster and push.kind == OperationKind.PUSH:
            self._refuse(push, Status.FENCED)
            return
        if ranges.shape[0] == 0:
            refused = [] if push.refusal is None else [Refused(push.clock, push.refusal.why)]
            core.effects.append(Reply(push.token, Status.COMMITTED, core.epoch, ranges, NO_RANGES, refused))
            return
        if push.clock:
            self._admit_step(push, ranges)
            return
        before: int | Progress = 0
        if worker >= 0:
            before = core.clocks.of(worker, ranges)
            core.clocks.set(worker, ranges, push.after)
        operation = Operation(push.kind, worker, push.after, push.payload, push.nbytes)
        self._log_operation(push, operation, ranges, before, [])

    def _admit_step(self, push: Push, ranges: Ranges) -> None:
        """Judges a part of a step by the worker's progress: next, duplicate, or beyond next."""
        core = self._core
        after = after_part(push.clock, push.part, push.last)
        have = core.clocks.of(push.worker, ranges)
        operation = Operation(push.kind, push.worker, after, push.payload, push.nbytes, push.refusal, push.record)
        if np.count_nonzero(have != push.prev) == 0 and not push.repeat:
            core.clocks.set(push.worker, ranges, after)
            self._log_operation(push, operation, ranges, push.prev, self._refused(push, ranges, NO_RANGES))
            return
        fresh, repeated = self._next_or_duplicate(push, have, after)
        unapplied = np.count_nonzero(fresh)
        if unapplied + np.count_nonzero(repeated) < ranges.shape[0] or (unapplied and push.repeat):
            self._refuse(push, Status.GAP)
            return
        frame = Frame(operation, push.token, ranges)
        # Counted before the fresh part is performed, so that the frame is answered once, when both are committed.
        again = ranges[repeated]
        targets = core.seq[again]
        frame.refused = self._refused(push, ranges[fresh], again)
        if unapplied:
            ticked = ranges[fresh]
            core.clocks.set(push.worker, ticked, after)
            self._give_seqs(frame, ticked, have[fresh])
        if np.count_nonzero(self._unsafe_repeat(again, targets)):
            core.log.wait(frame)
            core.waiters.append(Waiter(frame, again, targets))
        if frame.left == 0:
            core.finish(frame)

    def _refused(self, push: Push, ticked: Ranges, again: Ranges) -> list[Refused]:
        """What its answer says was refused: where it ticks now, as it is judged now; in ranges that it repeats, as it
        was judged then. The last part speaks of all parts: who was to answer those may be gone."""
        core = self._core
        before = np.concatenate([again, ticked]) if push.last else again
        refused = core.refusals.look(push.worker, push.clock, before) if core.refusals else []
        if push.refusal is not None and ticked.shape[0]:
            rows = push.refusal.rows
            rows = rows if rows is None else rows.part(ticked)
            if rows is None or len(rows):
                refused.append(Refused(push.clock, push.refusal.why, rows))
        return refused

    def _next_or_duplicate(
        self, push: Push, have: Progress, after: int
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:  # fmt: skip
        """Whether the push is (next, a duplicate), per range.

        It is next where the worker's progress is `prev`. It is, too, where both are known to be committed: such a
        range came back from a checkpoint. What it lacks is lost, and nothing that it lacks will be sent again.
        """
        known = push.committed << PART_BITS
        fresh = (have == push.prev) | ((have <= known) & (push.prev <= known))
        return fresh, have >= after

    def _unsafe_repeat(self, ranges: Ranges, seqs: Seqs) -> NDArray[np.bool_]:
        """Where the tail may still lack what is repeated."""
        unsafe: NDArray[np.bool_] = self._core.acked[ranges] < seqs
        return unsafe

    def _log_operation(
        self, push: Push, operation: Operation, ranges: Ranges, before: int | Progress, refused: list[Refused],
    ) -> None:  # fmt: skip
        core = self._core
        frame = Frame(operation, push.token, ranges)
        frame.refused = refused
        self._give_seqs(frame, ranges, before)
        if frame.left == 0:
            core.finish(frame)
        if operation.after == 0 and operation.worker >= 0:
            core.clocks.forget(operation.worker)
            core.records.forget(operation.worker)

    def _give_seqs(self, frame: Frame, ranges: Ranges, before: int | Progress) -> None:
        core = self._core
        seqs = core.seq[ranges]
        seqs += 1
        core.seq[ranges] = seqs
        core.perform(frame, ranges, seqs, before)

    def _tell_clocks(self, ask: Ask) -> None:
        core = self._core
        ranges = self.orders.get(ask.epoch)
        status = Status.COMMITTED
        if ranges is None:
            status, ranges = Status.STALE_VIEW, NO_RANGES
        if not core.clocks.known(ask.worker):
            none = np.zeros(ranges.shape[0], dtype=np.int64)
            core.effects.append(ClocksReply(ask.token, status, core.epoch, ranges, none, none))
            return
        applied = core.clocks.read(ask.worker)
        committed = self._committed(ask.worker, applied)
        refused = core.refusals.of(ask.worker, committed[ranges] >> PART_BITS, ranges)
        # Those of steps that are not committed, too: such a record has dropped older ones, and says that they are.
        at_home = (ranges == home_range(ask.worker, core.ranges)).any()
        records = [(ask.worker, each) for each in core.records.of(ask.worker)] if at_home else []
        core.effects.append(
            ClocksReply(ask.token, status, core.epoch, ranges, applied[ranges], committed[ranges], refused, records)
        )

    def _committed(self, worker: int, applied: Progress) -> Progress:
        """The worker's progress as the tail is known to have it: before its oldest operation still in the log."""
        core = self._core
        committed: Progress = applied.copy()
        for entry in reversed(core.log.entries()):
            if entry.frame.operation.worker == worker:
                open_ = core.acked[entry.ranges] < entry.seqs
                before = entry.before
                committed[entry.ranges[open_]] = before if isinstance(before, int) else before[open_]
        return committed
