"""Logs cluster time, and sweeps: forgets rows of tables with eviction policies, a slice at a time, at a bounded pace.

A sweep uses the smaller of this server's clock and the leader's, and none without a leader: a clock that is hours ahead
keeps rows too long, and evicts none. What is logged as time is the larger one, so a clock that is behind makes no row
look older than it is. Counts and scores that fall are compared at the time of their range, to which uses made them
fall: at an earlier one, rows in use would have lost what others keep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.core import fields
from coordinator.core.capacities import RowCount, allowances
from elasticps.model.policies import MAX_TIME
from elasticps.server.core.choosing import DryRun, choose, measure
from elasticps.server.core.headroom import Headroom
from elasticps.server.core.operations import TimeMark
from elasticps.server.core.sweeps import Policies, Slice, SweepPlan, SweptInterval
from elasticps.server.roles.context import Context
from elasticps.server.roles.executor import FutureTicket
from elasticps.server.roles.leaders import Leaders
from elasticps.store import Table, count_bounded
from elasticps.store.eviction import Predicate, Reason
from elasticps.store.intervals import HASH_END
from elasticps.store.lifecycle import NOTHING_MEASURED, MeasuredSweep
from replication.messages import OperationKind

log = fields.logger(__name__)

TIME_EVERY_S = 1.0  # cluster time goes on in such steps
SHARE, HURRIED_SHARE = 0.05, 0.5  # of this thread's time that sweeps take; and where memory is short, or a table too
# large
MOST_SKEW_S = 60.0  # between this server's clock and the leader's, before that is logged
OPERATION_BYTES = 96
ROUND_S = 30.0  # an application that has closed no round for so long is not in rounds
MOST_IN_A_ROUND = 256  # sweeps that one round takes


class _Swept:
    """A table, as `SweepPlan` needs it. allowed: what is kept here of a bound; dry_run: whose rows do not count."""

    def __init__(self, table: Table, allowed: Mapping[tuple[bool, int], int], dry_run: DryRun | None = None) -> None:
        self.table, self._allowed, self._dry_run = table, allowed, dry_run

    def policies(self, r: int) -> Policies:
        """The policies that range r is under."""
        assert self.table.lifecycle is not None
        spec = self.table.lifecycle.spec_of(r)
        return spec.admission, tuple(spec.eviction)

    def count(self, r: int, of_candidates: bool) -> int:
        """Rows or candidates of range r."""
        assert self.table.lifecycle is not None
        gone = 0 if self._dry_run is None else self._dry_run.gone[r, of_candidates]
        return (self.table.lifecycle.waiting if of_candidates else self.table).count_range(r) - gone

    def allowed(self, of_candidates: bool, capacity: int) -> int | None:
        """How many of them ranges headed here keep of a capacity; None: all."""
        return self._allowed.get((of_candidates, capacity))


@dataclass
class _RoundSweeps:
    """Sweeps of an application that wait for a round to close. closed_s: loop time when one closed last."""

    closed_s: float
    sweeps: list[SweptInterval] = field(default_factory=list)


class Sweeper:
    """Time and sweeps of the ranges that this server heads. wall: seconds since 1970.

    swept_rows: rows that were looked at; slowest_s: the longest that a slice has taken.
    """

    def __init__(self, context: Context, leaders: Leaders, headroom: Headroom, wall: Callable[[], float]) -> None:
        self._loop = context.loop  # for time and timers
        self._executor = context.executor  # logs time and sweeps
        self._serving = context.serving  # knows what is headed here
        self._store = context.executor.store  # the tables
        self._leaders = leaders  # the leader's time
        self._headroom = headroom  # whether memory is short
        self._wall = wall  # seconds since 1970
        self._plan = SweepPlan(HASH_END // self._serving.ranges)  # what is due
        self._slices: Iterator[tuple[Slice, Predicate, float]] = iter(())  # of the pass that is under way
        self._running = False  # a pass is under way
        self._requested = asyncio.Lock()  # held by a sweep that a worker has asked for
        self._overfull = False  # a table has outrun the usual pace
        self._for_rounds: dict[str, _RoundSweeps] = {}  # by application
        self._skewed = False  # this clock differs from the leader's
        self._ahead = False  # cluster time is ahead of both
        self._time_due_s = 0.0  # loop time at which time is logged again
        self.swept_rows = 0
        self.slowest_s = 0.0

    def _tables(self) -> dict[int, Table]:
        return {number: table for number, table in self._store.live.items() if table.lifecycle is not None}

    def stamp(self) -> None:
        """Logs the present time in all ranges headed here in which it has gone on. Before a table that keeps usage is
        made, and once a second while there is one."""
        now = int(min(max(self._wall(), self._leaders.wall_s(), 1.0), MAX_TIME))  # more has no place in a row
        headed = self._serving.headed
        ranges = headed[self._store.times[headed] < now]
        if len(ranges):
            self._executor.log(self._serving.epoch, OperationKind.TIME, ranges, TimeMark(now), OPERATION_BYTES)

    def tick(self) -> None:
        """Called a few times a second."""
        if not self._tables():
            return
        if self._loop.time() >= self._time_due_s:
            self._time_due_s = self._loop.time() + TIME_EVERY_S
            self._compare_clocks()
            self.stamp()
        if not self._running and not self._requested.locked():
            self._running = True
            self._begin()

    def _compare_clocks(self) -> None:
        leader_s = self._leaders.wall_s()
        skew = self._wall() - leader_s if leader_s else 0.0
        if (abs(skew) > MOST_SKEW_S) != self._skewed:
            self._skewed = abs(skew) > MOST_SKEW_S
            text = "this server's clock differs from the leader's" if self._skewed else "clocks agree again"
            log.warning(text, seconds=round(skew, 1))
        headed = self._serving.headed
        ahead = int(self._store.times[headed].max(initial=0)) - max(self._wall(), leader_s)
        if leader_s and (ahead > MOST_SKEW_S) != self._ahead:
            self._ahead = ahead > MOST_SKEW_S
            behind = (
                "a clock was ahead: for so long, what is pushed now counts as used at that time, and is kept longer"
            )
            log.warning(behind if self._ahead else "cluster time goes on", seconds=round(max(ahead, 0.0), 1))

    @property
    def skew_s(self) -> float:
        """Seconds by which this server's clock is ahead of the leader's; 0 while no leader is known."""
        leader_s = self._leaders.wall_s()
        return self._wall() - leader_s if leader_s else 0.0

    def _begin(self) -> None:
        tables, leader_s = self._tables(), self._leaders.wall_s()
        if not tables or not leader_s or not len(self._serving.headed):
            self._running = False
            return
        now, headed, allowed = int(min(self._wall(), leader_s)), self._serving.headed.tolist(), self._allowances()
        swept = {number: _Swept(table, _of(number, allowed)) for number, table in tables.items()}
        self._plan.forget(tables)
        self._overfull = self._plan.overfull(swept, headed)
        self._slices = self._plan.slices(swept, headed, now, self._loop.time(), self._headroom.short)
        self._loop.call_soon(self._step)

    def _allowances(self) -> Sequence[RowCount]:
        """What the ranges headed here may keep of tables that are above their capacity. Who heads all ranges needs no
        leader to know it."""
        headed = self._serving.headed
        if len(headed) < self._serving.ranges:
            return self._leaders.allowances()
        return allowances({None: (len(headed), count_bounded(self._tables(), headed))})[None]

    def _step(self) -> None:
        began = time.thread_time()
        found = next(self._slices, None)
        if found is None:
            self._running = False
            return
        self._sweep(*found)
        spent = time.thread_time() - began
        self.slowest_s = max(self.slowest_s, spent)
        share = HURRIED_SHARE if self._headroom.short or self._overfull else SHARE
        self._loop.call_later(spent * (1 - share) / share, self._step)

    def take(self, app: str) -> tuple[SweptInterval, ...]:
        """Sweeps that have waited for a round of an application to close: they become part of that operation, so that
        all workers of a round see the same rows."""
        waiting = self._for_rounds.pop(app, None)
        self._for_rounds[app] = _RoundSweeps(self._loop.time())
        return () if waiting is None else tuple(waiting.sweeps)

    def _waits_for_a_round(self, table: Table, payload: SweptInterval) -> bool:
        """Leaves a sweep to the next round of the table's application, if it closes rounds, and did so lately."""
        if not self._executor.rounds.active(table.app):
            return False
        waiting = self._for_rounds.setdefault(table.app, _RoundSweeps(self._loop.time()))
        if self._loop.time() - waiting.closed_s > ROUND_S:
            waiting.sweeps.clear()
            return False
        if len(waiting.sweeps) < MOST_IN_A_ROUND:  # else it is planned again
            waiting.sweeps.append(payload)
        return True

    def _sweep(self, at: Slice, by: Predicate, share: float) -> tuple[Predicate, int, FutureTicket | None]:
        """Looks at a slice, and logs an EVICT if anything goes, or has the next round take it: how many rows, and a
        ticket."""
        table = self._store.live.get(at.table)
        if table is None or table.lifecycle is None:
            return by, 0, None
        headed = set(self._serving.headed.tolist())
        ranges = [r for r in at.ranges if r in headed]
        by = self._at_their_time(by, ranges)
        found = measure(table, ranges, at, by)
        by, going = choose(table, found, at, by, share)
        self.swept_rows += sum(len(each.keys) for each in found.values())
        if not going:
            return by, 0, None
        payload, ordered = SweptInterval(at.table, at.low, at.high, by, tuple(ranges)), np.array(ranges, np.int64)
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
                self._slices, self._plan = iter(()), SweepPlan(HASH_END // self._serving.ranges)
                return await self._pass(table, None, allowed)
        return await self._pass(table, DryRun(), allowed)

    async def _pass(
        self, table: Table, dry_run: DryRun | None, allowed: Sequence[RowCount] | None
    ) -> tuple[dict[Reason, int], list[RowCount]]:
        found, tickets, leader_s = dict.fromkeys(Reason, 0), [], self._leaders.wall_s()
        headed, number = self._serving.headed, table.table_id
        swept = {number: _Swept(table, _of(number, allowed or ()), dry_run)}
        now, plan = int(min(self._wall(), leader_s or self._wall())), SweepPlan(HASH_END // self._serving.ranges)
        slices = plan.slices(swept, headed.tolist(), now, self._loop.time(), True)
        for at, by, share in slices if leader_s or dry_run is not None else ():
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
            count._replace(rows=sum(swept[number].count(r, count.waiting) for r in headed.tolist()))
            for count in count_bounded({number: table}, headed)
        ]
        return found, left


def _of(table: int, allowed: Sequence[RowCount]) -> dict[tuple[bool, int], int]:
    """What may be kept of one table, by its bounds."""
    return {(one.waiting, one.capacity): one.rows for one in allowed if one.table == table}
