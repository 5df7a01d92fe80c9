"""Logs cluster time, and sweeps: forgets rows of tables with eviction policies, a slice at a time, at a bounded pace.

What is logged as time is the median of all servers' clocks and the leader's, which the leader tells: one wrong clock
changes nothing. A sweep uses the earliest of this server's clock, the leader's and the median, and none happens
without a leader. Counts and scores that fall are compared at the time of their range, to which uses made them fall: at
an earlier one, rows in use would have lost what others keep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from coordinator.core import fields
from coordinator.core.capacities import RowCount, allowances
from coordinator.core.clocks import MOST_SKEW_S
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import MAX_TIME
from elasticps.server.core.choosing import DryRun, choose, measure
from elasticps.server.core.headroom import Headroom
from elasticps.server.core.operations import TimeMark
from elasticps.server.core.sweeps import MOST_IN_A_ROUND, ROUND_BYTES, Policies, Slice, SweepPlan, SweptInterval
from elasticps.server.roles.context import Context
from elasticps.server.roles.executor import FutureTicket
from elasticps.server.roles.leaders import Leaders
from elasticps.store import Table, count_bounded
from elasticps.store.eviction import Predicate, Reason
from elasticps.store.lifecycle import NOTHING_MEASURED, MeasuredSweep
from replication.messages import OperationKind

log = fields.logger(__name__)

TIME_EVERY_S = 1.0  # cluster time goes on in such steps
PLAN_EVERY_S = 1.0  # between two looks at what is due, unless memory is short or a table too large
SHARE, HURRIED_SHARE = 0.05, 0.5  # of this thread's time that sweeps take; and where memory is short, or a table too
# large
ROOM_EVERY_S = 0.01  # between two looks whether an EVICT has found room in the log
OPERATION_BYTES = 96
ROUND_S = 30.0  # an application that has closed no round for so long is not in rounds


class _Swept:
    """A table, as `SweepPlan` needs it. allowed: gives what is kept here of each bound now; dry_run: whose rows do not
    count."""

    def __init__(
        self, table: Table, allowed: Callable[[], Mapping[tuple[bool, int], int]], dry_run: DryRun | None = None
    ) -> None:
        assert table.lifecycle is not None
        self._table, self._lifecycle = table, table.lifecycle
        self._allowed, self._dry_run = allowed, dry_run

    @property
    def version(self) -> int:
        """Another number when policies have changed."""
        return self._lifecycle.version

    def by_policies(self, ranges: NDArray[np.int64]) -> dict[Policies, list[int]]:
        """Ranges [n], by the policies that they are under."""
        return self._lifecycle.by_policies(ranges)

    def counts(self, of_candidates: bool) -> NDArray[np.int64]:
        """Rows, or candidates, of each range now, int64 [ranges]."""
        counts = self._lifecycle.waiting.counts if of_candidates else self._table.counts
        return counts if self._dry_run is None else counts - self._dry_run.gone_of(of_candidates, len(counts))

    def allowed(self, of_candidates: bool, capacity: int) -> int | None:
        """How many of them ranges headed here keep of a capacity; None: all."""
        return self._allowed().get((of_candidates, capacity))


@dataclass
class _RoundSweeps:
    """Sweeps of an application that wait for a round to close, by what they look at and compare: the last one that was
    planned counts. closed_s: loop time when one closed last."""

    closed_s: float
    sweeps: dict[SweptInterval, SweptInterval] = field(default_factory=dict)


class Sweeper:
    """Time and sweeps of the ranges that this server heads.

    swept_rows: rows that were looked at; slowest_s: the longest that a slice has taken.
    """

    def __init__(self, context: Context, leaders: Leaders, headroom: Headroom) -> None:
        self._loop = context.loop  # for time and timers
        self._executor = context.executor  # logs time and sweeps
        self._serving = context.serving  # knows what is headed here
        self._store = context.executor.store  # the tables
        self._leaders = leaders  # what time it is, and what may be kept of capacities
        self._headroom = headroom  # whether memory is short
        self._plan = SweepPlan(HASH_END // self._serving.ranges)  # what is due
        self._slices: Iterator[tuple[Slice, Predicate, float]] | None = None  # of the pass that is under way
        self._cuts: Iterator[tuple[Slice, Predicate, float]] | None = None  # of tables too large, which go first
        self._cutting = False  # the pass that is under way cuts a table to its capacity: no other cut at a time
        self._plan_due_s = 0.0  # loop time at which the next pass is planned
        self._running = False  # a look is under way, or will be
        self._requested = asyncio.Lock()  # held by a sweep that a worker has asked for
        self._logged: list[FutureTicket] = []  # EVICTs that may wait for room in the log
        self._overfull = False  # a table has outrun the usual pace
        self._for_rounds: dict[str, _RoundSweeps] = {}  # by application
        self._skewed = False  # this clock differs from the median
        self._leads = False  # cluster time is ahead of the median
        self._time_due_s = 0.0  # loop time at which time is logged again
        self.swept_rows = 0
        self.slowest_s = 0.0

    def _tables(self) -> dict[int, Table]:
        return {number: table for number, table in self._store.live.items() if table.lifecycle is not None}

    def stamp(self) -> None:
        """Logs the present time in all ranges headed here in which it has gone on. Before a table that keeps usage is
        made, and once a second while there is one."""
        clocks, headed = self._leaders.clocks(), self._serving.headed
        now = int(min(max(clocks.logged, 1.0), MAX_TIME))  # more has no place in a row
        # Until a leader has said what time it is, this clock counts only where there is none yet.
        ranges = headed[self._store.times[headed] < (now if clocks.known else 1)]
        if len(ranges):
            self._executor.log(self._serving.epoch, OperationKind.TIME, ranges, TimeMark(now), OPERATION_BYTES)

    def awaits_time(self) -> bool:
        """Whether ranges headed here have no time yet, and no leader has said what time it is: it does so soon after
        the first view, and a clock that is ahead would set them to a time at which they stay until it has come."""
        return not self._leaders.clocks().known and not self._store.times[self._serving.headed].all()

    def tick(self) -> None:
        """Called a few times a second."""
        tables, now_s = self._tables(), self._loop.time()
        if not tables:
            return
        if now_s >= self._time_due_s:
            self._time_due_s = now_s + TIME_EVERY_S
            self._compare_clocks()
            self.stamp()
        if not self._requested.locked() and not self._waiting_for_room():
            self._plan_sweeps(tables, now_s)
        if not self._running and (self._cuts is not None or self._slices is not None):
            self._running = True
            self._loop.call_soon(self._step)

    def _plan_sweeps(self, tables: Mapping[int, Table], now_s: float) -> None:
        clocks, headed = self._leaders.clocks(), self._serving.headed
        if not clocks.leader or not len(headed):
            return
        now, allowed = int(clocks.swept), _by_table(self._allowances())
        large = {n: _Swept(tables[n], partial(allowed.__getitem__, n)) for n in allowed if n in tables}
        overfull = self._plan.overfull(large, headed)
        self._overfull = bool(overfull)
        if overfull and self._cuts is None and not self._cutting:
            self._cuts = self._plan.cuts({number: self._swept(tables[number]) for number in overfull}, headed, now)
        if self._slices is None and (now_s >= self._plan_due_s or self._headroom.short):
            self._plan_due_s = now_s + PLAN_EVERY_S
            self._plan.forget(tables)
            swept = {number: self._swept(table) for number, table in tables.items()}
            self._slices = self._plan.slices(swept, headed, now, now_s, self._headroom.short)

    def _waiting_for_room(self) -> bool:
        """Whether EVICTs wait for room in the log: what they take would be planned again."""
        self._logged = [ticket for ticket in self._logged if self._executor.replica.admission.waits(ticket)]
        return bool(self._logged)

    def _compare_clocks(self) -> None:
        clocks = self._leaders.clocks()
        if (abs(clocks.skew) > MOST_SKEW_S) != self._skewed:
            self._skewed = abs(clocks.skew) > MOST_SKEW_S
            text = "this server's clock differs from the others'" if self._skewed else "clocks agree again"
            log.warning(text, seconds=round(clocks.skew, 1))
        if (self.lead_s > MOST_SKEW_S) != self._leads:
            self._leads = self.lead_s > MOST_SKEW_S
            text = "clocks were ahead: for so long, what is pushed now counts as used at that time, and is kept longer"
            log.warning(text if self._leads else "cluster time goes on", seconds=round(self.lead_s, 1))

    @property
    def skew_s(self) -> float:
        """Seconds by which this server's clock is ahead of the median of all; 0 while no leader is known."""
        return self._leaders.clocks().skew

    @property
    def lead_s(self) -> float:
        """Seconds by which the time of a range headed here is ahead of the median, at most; 0 if it is not, and while
        no leader is known."""
        clocks, headed = self._leaders.clocks(), self._serving.headed
        return max(0.0, int(self._store.times[headed].max(initial=0)) - clocks.logged) if clocks.known else 0.0

    def _swept(self, table: Table) -> _Swept:
        """A table for a pass, which may come to it a minute later: what it keeps is asked for then."""
        return _Swept(table, lambda: _by_table(self._allowances()).get(table.table_id, {}))

    def _allowances(self) -> Sequence[RowCount]:
        """What the ranges headed here may keep of tables that are above their capacity. Who heads all ranges needs no
        leader to know it."""
        headed = self._serving.headed
        if len(headed) < self._serving.ranges:
            return self._leaders.allowances()
        return allowances({None: (len(headed), count_bounded(self._tables(), headed))})[None]

    def _next(self) -> tuple[Slice, Predicate, float] | None:
        """The next slice to look at; None when nothing is due any more."""
        if self._cuts is not None:
            if (found := next(self._cuts, None)) is not None:
                return found
            self._cuts = None
        found = None if self._slices is None else next(self._slices, None)
        self._cutting = found is not None and found[2] > 0
        if found is None:
            self._slices = None
        return found

    def _step(self) -> None:
        if self._waiting_for_room():
            self._loop.call_later(ROOM_EVERY_S, self._step)
            return
        began = time.thread_time()
        found = self._next()
        if found is None:
            self._running = False
            return
        _, _, ticket = self._sweep(*found)
        self._logged += [] if ticket is None else [ticket]
        spent = time.thread_time() - began
        self.slowest_s = max(self.slowest_s, spent)
        share = HURRIED_SHARE if self._headroom.short or self._overfull else SHARE
        self._loop.call_later(spent * (1 - share) / share, self._step)

    def take(self, app: str) -> tuple[SweptInterval, ...]:
        """Sweeps that have waited for a round of an application to close: they become part of that operation, so that
        all workers of a round see the same rows. As many as an operation has room for: others wait for the next."""
        waiting = self._for_rounds.setdefault(app, _RoundSweeps(0.0))
        waiting.closed_s = self._loop.time()
        taken, left = list[SweptInterval](), ROUND_BYTES
        for about, sweep in list(waiting.sweeps.items()):
            left -= sweep.nbytes
            if left < 0 and taken:
                break
            taken.append(waiting.sweeps.pop(about))
        return tuple(taken)

    def _waits_for_a_round(self, table: Table, payload: SweptInterval) -> bool:
        """Leaves a sweep to the next round of the table's application, if it closes rounds, and did so lately."""
        if not self._executor.rounds.active(table.app):
            return False
        waiting = self._for_rounds.setdefault(table.app, _RoundSweeps(self._loop.time()))
        if self._loop.time() - waiting.closed_s > ROUND_S:
            waiting.sweeps.clear()
            return False
        about = payload._replace(predicate=payload.predicate._replace(below=0, tie=0, now=0), policies=0)
        if len(waiting.sweeps) < MOST_IN_A_ROUND or about in waiting.sweeps:  # else it is planned again
            waiting.sweeps[about] = payload
        return True

    def _sweep(self, at: Slice, by: Predicate, share: float) -> tuple[Predicate, int, FutureTicket | None]:
        """Looks at a slice, and logs an EVICT if anything goes, or has the next round take it: how many rows, and a
        ticket."""
        table = self._store.live.get(at.table)
        if table is None or table.lifecycle is None:
            return by, 0, None
        headed = set(self._serving.headed.tolist())
        ranges = [r for r in at.ranges if r in headed and table.lifecycle.under(r, at.policies)]
        by = self._at_their_time(by, ranges)
        found = measure(table, ranges, at, by)
        by, going = choose(table, found, at, by, share)
        self.swept_rows += sum(len(each.keys) for each in found.values())
        if not going:
            return by, 0, None
        payload = SweptInterval(at.table, at.low, at.high, by, tuple(ranges), at.policies)
        ordered = np.array(ranges, np.int64)
        if self._waits_for_a_round(table, payload):
            return by, going, None
        table.lifecycle.measured = MeasuredSweep(self._executor.applied, at.low, at.high, by, found)
        ticket = self._executor.log(self._serving.epoch, OperationKind.EVICT, ordered, payload, OPERATION_BYTES)
        table.lifecycle.measured = NOTHING_MEASURED
        return by, going, ticket

    def _at_their_time(self, by: Predicate, ranges: Sequence[int]) -> Predicate:
        """The predicate, comparing counts and scores that fall at no time before a use of a row of these ranges."""
        if not by.decay or not len(ranges):
            return by
        return by._replace(now=max(by.now, int(self._store.times[np.array(ranges)].max())))

    async def sweep(
        self, table: Table, dry_run: bool, allowed: Sequence[RowCount] | None
    ) -> tuple[dict[Reason, int], list[RowCount]]:
        """How many rows, and keys that wait for one, of a table go now, by reason, in the ranges headed here, and how
        many are left; unless it is a dry run, they are gone at all replicas when this returns; those of an application
        with synchronous rounds go when its next round closes. Half of this thread's time goes into it.

        allowed: what may be kept of bounds on the whole table, and these alone are enforced; None: all other policies.
        """
        if not dry_run:
            async with self._requested:  # two at a time would both cut what they found at their beginnings
                self._slices = self._cuts = None
                self._plan = SweepPlan(HASH_END // self._serving.ranges)
                return await self._pass(table, None, allowed)
        return await self._pass(table, DryRun(), allowed)

    async def _pass(
        self, table: Table, dry_run: DryRun | None, allowed: Sequence[RowCount] | None
    ) -> tuple[dict[Reason, int], list[RowCount]]:
        found, tickets, clocks = dict.fromkeys(Reason, 0), [], self._leaders.clocks()
        headed, number = self._serving.headed, table.table_id
        bounds = _by_table(allowed or ()).get(number, {})
        swept = {number: _Swept(table, lambda: bounds, dry_run)}
        plan = SweepPlan(HASH_END // self._serving.ranges)
        slices = plan.slices(swept, headed, int(clocks.swept), self._loop.time(), True)
        for at, by, share in slices if clocks.leader or dry_run is not None else ():
            began, counted = time.thread_time(), (share > 0) == (allowed is not None)
            if table.dropped:
                break
            if dry_run is not None:  # it needs the rows that others take first
                by = self._at_their_time(by, at.ranges)
                by, going = choose(table, measure(table, at.ranges, at, by), at, by, share, dry_run)
            elif counted:
                by, going, ticket = self._sweep(at, by, share)
                tickets += [] if ticket is None else [ticket.future]
            if counted:
                found[by.reason] += going
            await asyncio.sleep(time.thread_time() - began)
        await asyncio.gather(*tickets)
        left = [
            count._replace(rows=int(swept[number].counts(count.waiting)[headed].sum()))
            for count in count_bounded({number: table}, headed)
        ]
        return found, left


def _by_table(allowed: Sequence[RowCount]) -> dict[int, dict[tuple[bool, int], int]]:
    """What may be kept of each table, by its bounds."""
    found: dict[int, dict[tuple[bool, int], int]] = {}
    for one in allowed:
        found.setdefault(one.table, {})[one.waiting, one.capacity] = one.rows
    return found
