"""Carries out the effects of the replica: changes the store, sends messages and answers.

The effects of one event are carried out in order and without a gap, as `replication.effects` demands. Whatever fails
here leaves a copy that may differ from the others, so it ends the process.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.admin.interface import MarkedRange
from elasticps.kernels.hashing import HASH_END
from elasticps.model.spec import TableSpec
from elasticps.server.core.audit import Marks, digest
from elasticps.server.core.barrier_state import Rounds, RoundStep
from elasticps.server.core.cut import CutNotes
from elasticps.server.core.data_shards import Claim, ShardLedger, ShardMark, group_of
from elasticps.server.core.operations import (
    AuditMark,
    ChangedPolicies,
    ChunkContent,
    Cleared,
    Contribution,
    CreatedTable,
    CreatedTables,
    CutMark,
    Dropped,
    RestoredKeys,
    RestoredRows,
    RestoredState,
    RowBlocks,
    TimeMark,
)
from elasticps.server.core.sweeps import SweptInterval
from elasticps.server.core.validation import wrong
from elasticps.server.fast import layout as at
from elasticps.server.fast.path import FastPath
from elasticps.store import Store, Table
from elasticps.store.admission import NO_BLOCKS
from elasticps.system import fatal
from replication.chain import Member, Ranges, Role
from replication.effects import (
    Apply,
    ClocksReply,
    Effects,
    Erase,
    Hold,
    Install,
    Push,
    Release,
    Reply,
)
from replication.messages import Operation, OperationKind, Seqs
from replication.progress import PART_BITS
from replication.replica import Replica

COUNTED = {
    "pushes": at.H_PUSHES, "pulls": at.H_PULLS, "rows_pushed": at.H_ROWS_PUSHED, "rows_pulled": at.H_ROWS_PULLED,
}  # fmt: skip


class RequestCounts(Counter[str]):
    """Pushes, pulls, rows_pushed and rows_pulled that Python handled; `count` has those of the compiled path too."""

    def __init__(self, path: FastPath) -> None:
        super().__init__()
        self._path = path

    def count(self, what: str) -> int:
        """How many requests or rows there were."""
        return self[what] + self._path.counter(COUNTED[what])


class FutureTicket:
    """Waits for an operation that this server logs by itself."""

    def __init__(self) -> None:
        self._reply: Reply | None = None
        self._future: asyncio.Future[Reply] | None = None

    @property
    def future(self) -> asyncio.Future[Reply]:
        """The outcome. Made when it is asked for, within the event loop: nobody waits for time and most sweeps."""
        if self._future is None:
            self._future = asyncio.get_running_loop().create_future()
            if self._reply is not None:
                self._future.set_result(self._reply)
        return self._future

    def reply(self, reply: Reply) -> None:
        """The operation is committed, or was refused."""
        self._reply = reply
        if self._future is not None and not self._future.done():
            self._future.set_result(reply)

    def clocks(self, reply: ClocksReply) -> None:
        raise AssertionError("an operation was answered with clocks")

    def hold(self) -> None:
        """The operation waits for room in the log: there is no connection to stop reading."""

    def release(self) -> None:
        """The operation is admitted."""


class Executor:
    """A replica with its store. `perform` is the only way in which either changes.

    handlers: what carries out each type of effect. Those that concern neither the store nor who asked are set by
    whoever does them. tell_tables: has all neighbours know of tables that are new here, before anything of theirs is
    forwarded: a neighbour in other chains may not have been told by a log. cut_passed: hears of each CUT as it is
    applied, of the ranges that it is the first of its number in; and which of these are being filled, as in `Apply`."""

    def __init__(self, me: Member, ranges: int, budget_bytes: int, path: FastPath) -> None:
        self.replica = Replica(me, ranges, budget_bytes, path.log)
        self.store = Store(ranges)
        self._path = path
        self.replica.core.wrong = partial(wrong, self.store, me.name)
        path.follow_replica(self.replica, self.store)
        self._performing = False
        self.tell_tables: Callable[[Iterable[tuple[int, Table]]], None] = lambda new: None
        self.counts = RequestCounts(path)
        self.marks = Marks()
        self.cuts = CutNotes()
        self.cut_passed: Callable[[Ranges, Seqs, CutMark, Mapping[int, int] | None], None] = lambda *_: None
        self.rounds = Rounds(ranges)
        self.shards = ShardLedger(ranges)
        self._applied = self._rows_applied = 0  # by Python
        self._ranges = ranges
        self.handlers: dict[type, Callable[[Any], None]] = {
            Apply: self._apply,
            Reply: lambda e: e.token.reply(e),
            ClocksReply: lambda e: e.token.clocks(e),
            Hold: lambda e: e.token.hold(),
            Release: lambda e: e.token.release(),
            Install: self._install,
            Erase: self._erase,
        }

    @property
    def applied(self) -> int:
        """Operations applied, as head or follower."""
        return self._applied + self._path.counter(at.H_APPLIED)

    @property
    def rows_applied(self) -> int:
        """Rows updated by them."""
        return self._rows_applied + self._path.counter(at.H_ROWS_APPLIED)

    def perform(self, event: Callable[..., Effects], *arguments: Any) -> None:
        """Gives the replica an event and carries out its effects. Ends the process if any of it fails."""
        inner, self._performing = self._performing, True
        try:
            self._carry_out(event(*arguments))
            while self.replica.unsettled and not inner:  # within another event, its effects come first
                self._carry_out(self.replica.go_on())
            if len(self.store.live) < len(self.store.tables) and not inner:
                self._bury()
            self._path.sync()
            if self.store.new:
                new, self.store.new = self.store.new, []
                self.tell_tables(new)
        except Exception as error:
            fatal.end(self.replica.me, error)
        finally:
            self._performing = inner

    def _carry_out(self, effects: Effects) -> None:
        for effect in effects:
            self.handlers[type(effect)](effect)

    def _bury(self) -> None:
        acked = np.where(self.replica.role == Role.OUT, -1, self.replica.acked)
        for table in self.store.bury(acked):
            self.rounds.drop(table, None, self.store.tables)

    def log(self, epoch: int, kind: OperationKind, ranges: Ranges, payload: Any, nbytes: int) -> FutureTicket:
        """Logs an operation of this server's own in ranges that it heads; epoch: of the view that it serves under.

        That is the replica's own, until a view leaves this server out: the replica never follows that one. So what is
        logged afterwards, by a task that was under way, waits and is never committed by a copy that is void."""
        ticket = FutureTicket()
        push = Push(ticket, -1, epoch, 0, 0, True, ranges, payload, nbytes, kind=kind)
        self.perform(self.replica.push, push)
        return ticket

    def limit_log(self, budget_bytes: int) -> None:
        """Lets the log take so many bytes before pushes wait; with 0 all wait."""
        self._path.budget = budget_bytes
        self.perform(self.replica.limit_log, budget_bytes)

    def note_change(self) -> None:
        """Python has applied or acknowledged an operation outside of the compiled path: pulls may go on."""
        self._path.note_change()

    def note_committed(self, worker: int, clock: int) -> None:
        """Notes that a worker knows its steps up to `clock` to be committed."""
        self._path.note_acknowledged(worker, clock)

    def note_shard(self, number: int, shard: int, worker: int, clock: int) -> None:
        """Notes a push for a data shard that the compiled path has applied."""
        self.shards.note(ShardMark(number, shard), worker, clock)

    # --- operations -------------------------------------------------------------------------------------------------

    def _apply(self, effect: Apply) -> None:
        payload = effect.operation.payload
        if isinstance(payload, RowBlocks):
            self._apply_rows(effect, payload)
        elif isinstance(payload, CreatedTables):
            for new in payload.tables:
                self._create(effect, new)
        elif isinstance(payload, TimeMark):
            self.store.advance(effect.ranges, payload.seconds)
        elif isinstance(payload, SweptInterval):
            self._evict(effect, payload, effect.ranges.tolist())
        elif isinstance(payload, ChangedPolicies):
            self.store.change_policies(payload.table, effect.ranges, TableSpec.from_json(payload.spec))
        elif isinstance(payload, Cleared):
            self._clear(effect, payload.table)
        elif isinstance(payload, Dropped):
            self.rounds.drop(payload.table, effect.ranges, self.store.tables)
            self.store.drop(payload.table, effect.ranges, effect.seqs)
            self.note_change()
        elif isinstance(payload, RestoredRows):
            self._restore(effect, payload)
        elif isinstance(payload, RestoredKeys):
            self._restore_keys(effect, payload)
        elif isinstance(payload, RestoredState):
            self._restored(int(effect.ranges[0]), payload)
        elif isinstance(payload, AuditMark):
            self._mark(effect, payload)
        elif isinstance(payload, CutMark):
            self._cut(effect, payload)
        elif isinstance(payload, RoundStep):
            self._round(effect, payload)
        elif isinstance(payload, Claim):
            self.shards.take(payload)
        self._applied += 1

    def _apply_rows(self, effect: Apply, content: RowBlocks) -> None:
        tables, operation = self.store.tables, effect.operation
        if content.mark is not None and np.count_nonzero(effect.ranges == group_of(content.mark)):
            self.shards.note(content.mark, operation.worker, operation.after >> PART_BITS)
        if effect.inside is None:
            blocks = content.part(effect.ranges, tables)
        else:
            bounds = np.zeros(self._ranges, np.int64)
            bounds[effect.ranges] = HASH_END
            for r, bound in effect.inside.items():
                bounds[r] = bound
            blocks = content.below(bounds, tables)
        if isinstance(content, Contribution):
            self.rounds.keep(content.app, content.clock, operation.worker, effect.ranges, blocks)
        elif operation.kind == OperationKind.INIT:
            for table, keys, values, _ in blocks:
                tables[table].put_if_absent(keys, values)
                self.store.note_changed(table, keys)
        elif operation.kind == OperationKind.LOAD:
            for table, keys, values, _ in blocks:
                tables[table].put(keys, values)
                self.store.note_changed(table, keys)
                if tables[table].lifecycle is not None:
                    self._bound_notes(effect, tables[table])
        elif operation.kind == OperationKind.DELETE:
            for table, keys, _, _ in blocks:
                tables[table].delete(keys)
                self._bound_notes(effect, tables[table])
        else:
            for table, keys, grads, step_values in blocks:
                self._update(tables[table], keys, grads, step_values, operation)
                self.store.note_changed(table, keys)
                self._rows_applied += len(keys)

    @staticmethod
    def _update(
        table: Table, keys: NDArray[np.int64], grads: NDArray[np.float32], step_values: NDArray[np.float32],
        operation: Operation,
    ) -> None:  # fmt: skip
        if table.spec.push_width == table.spec.dim:  # else it has no filters
            grads = table.push.decode(grads)
        table.apply(keys, grads, step_values, operation.worker, operation.after)

    def _evict(self, effect: Apply, swept: SweptInterval, ranges: Iterable[int]) -> None:
        table, unfinished = self.store.tables.get(swept.table), effect.inside or {}
        if table is not None and table.lifecycle is not None:
            for r in filter(partial(table.lifecycle.under, word=swept.policies), ranges):
                bound = unfinished.get(r, HASH_END)
                table.evict(r, swept.low, swept.high, swept.predicate, bound, self.applied)
            self._bound_notes(effect, table)

    @staticmethod
    def _bound_notes(effect: Apply, table: Table) -> None:
        """Bounds the notes on rows that went; not in ranges that are being filled: their tail knows how many there
        are."""
        for r in effect.ranges.tolist():
            if r not in (effect.inside or {}):
                table.deletions.bound(r, table.count_range(r))

    def _create(self, effect: Apply, new: CreatedTable) -> None:
        spec = TableSpec.from_json(new.spec)
        table = self.store.create(spec, new.table, new.app)
        if table.lifecycle is not None:
            table.lifecycle.begin(effect.ranges, spec)

    def _clear(self, effect: Apply, table: int) -> None:
        unfinished = effect.inside or {}
        for r in effect.ranges.tolist():
            self.store.clear(table, r, unfinished.get(r))
        if self.store.journal is not None:
            self.store.journal.note_cleared(table, effect.ranges)

    def _restore(self, effect: Apply, restored: RestoredRows) -> None:
        r, table = int(effect.ranges[0]), self.store.tables[restored.table]
        keys, rows = restored.keys, restored.rows
        if effect.inside is not None:
            bounds = np.zeros(self._ranges, np.int64)
            bounds[r] = effect.inside[r]
            chosen = table.select(keys, bounds)
            keys, rows = keys[chosen], rows[chosen]
        table.load_range(r, keys, rows)
        self.store.note_changed(restored.table, keys)

    def _restore_keys(self, effect: Apply, restored: RestoredKeys) -> None:
        r, table = int(effect.ranges[0]), self.store.tables[restored.table]
        bound = HASH_END if effect.inside is None else effect.inside[r]
        chosen = table.hashes_of(restored.keys) < bound
        if table.lifecycle is not None:
            table.lifecycle.load(r, restored.keys[chosen], restored.words[chosen], 0, NO_BLOCKS)
            table.lifecycle.waiting.restore_sketch(r, restored.sketch, bound)

    def _restored(self, r: int, state: RestoredState) -> None:
        self.replica.clocks.set_column(r, *state.clocks())
        self.replica.core.records.set_column(r, state.step_records(self._ranges))
        if state.time:
            self.store.advance(np.array([r], np.int64), state.time)
        if state.cut > self.store.cuts.newest[r]:
            self.store.begin_at(np.array([r], np.int64), state.cut)
        self.rounds.load(r, state.rounds())
        self.shards.load(state.sets(self._ranges))

    def _round(self, effect: Apply, step: RoundStep) -> None:
        if effect.operation.kind == OperationKind.BARRIER_JOIN:
            self.rounds.enter(step.app, step.clock, step.workers, bounded=step.total > 0)
        elif effect.operation.kind == OperationKind.BARRIER_LEAVE:
            self.rounds.leave(step.app, step.workers[0])
        elif effect.operation.kind == OperationKind.BARRIER_DECISION:
            self.rounds.decide(step.app, step.clock, step.workers)
        else:
            tables = self.store.tables
            closing = set(effect.ranges[self.rounds.closed(step.app)[effect.ranges] < step.clock].tolist())
            for table, keys, grads, values in self.rounds.close(
                step.app, step.clock, step.workers, step.total, effect.ranges, tables
            ):
                tables[table].apply(keys, grads, values, 0, step.clock)
                self.store.note_changed(table, keys)
                self._rows_applied += len(keys)
            for sweep in step.sweeps:  # between two rounds: all workers of one see the same rows
                self._evict(effect, sweep, [r for r in sweep.ranges if r in closing])

    def _mark(self, effect: Apply, mark: AuditMark) -> None:
        unfinished = effect.inside or {}
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            if r not in unfinished:
                workers, progress = self.replica.clocks.column(r)
                words = chain(self.words(r), self.store.dropped_in(r))
                found = digest(self.store.tables, r, mark, words if mark.part == 0 else ())
                self.marks.note(mark, r, MarkedRange(seq, found, tuple(workers.tolist()), tuple(progress.tolist())))

    def words(self, r: int) -> list[int]:
        """Numbers beside the rows on which replicas of a range must agree, for digests."""
        return [*self.store.words(r), *self.rounds.words(r), *self.shards.words(r)]

    def _cut(self, effect: Apply, mark: CutMark) -> None:
        # A late cut, or one that two heads have logged one after the other, changes nothing.
        chosen = self.store.cuts.newest[effect.ranges] < mark.number
        ranges, seqs = effect.ranges[chosen], effect.seqs[chosen]
        clocks, tables = self.replica.clocks, self.store.tables
        for r, seq in zip(ranges.tolist(), seqs.tolist(), strict=True):
            if r not in (effect.inside or {}):
                records = self.replica.core.records.column(r)
                self.cuts.note(mark, r, seq, clocks.column(r), self.rounds, self.shards, tables, records)
        if len(ranges):
            self.store.pass_cut(ranges, mark.number)
            self.cut_passed(ranges, seqs, mark, effect.inside)

    # --- ranges -----------------------------------------------------------------------------------------------------

    def _install(self, effect: Install) -> None:
        content: ChunkContent = effect.payload  # type: ignore[assignment]
        self.store.load_cut(effect.range, content.cut, content.base)
        self.store.advance(np.array([effect.range], np.int64), content.time)
        for number, spec, keys, values, stamped, notes, floor, waiting in content.tables:
            if not spec:
                self.store.drop(number, np.array([effect.range], np.int64), np.zeros(1, np.int64))
                continue
            policies = TableSpec.from_json(spec)
            table = self.store.create(policies, number)
            table.deletions.add(effect.range, notes)
            table.deletions.forget(effect.range, floor)
            if len(keys):
                table.load_range(effect.range, keys, values, stamped)
            if waiting is not None and table.lifecycle is not None:
                table.lifecycle.set_policies(np.array([effect.range]), policies.admission, policies.eviction)
                table.lifecycle.load(effect.range, waiting.keys, waiting.words, waiting.low, waiting.blocks)
                table.deletions.load_sweeps(effect.range, waiting.sweeps)
        self.rounds.load(effect.range, content.rounds)
        self.shards.load(content.shards, content.rounds.more)

    def _erase(self, effect: Erase) -> None:
        self.store.erase(effect.ranges)
        self.rounds.erase(effect.ranges)
        self.shards.erase(effect.ranges.tolist())
        self.cuts.erase(effect.ranges)
