"""Carries out what the replica asks for: the store changes, messages leave, answers go back.

The effects of one event are carried out in order and without a gap, as `replication.effects` demands. Whatever fails
here leaves a copy that may differ from the others, so it ends the process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from elasticps.admin.subject import MarkedRange
from elasticps.server import fatal
from elasticps.server.fast import layout as at
from elasticps.server.fast.path import FastPath
from elasticps.server.protocol.audit import Marks, digest
from elasticps.server.protocol.barrier_state import Rounds
from elasticps.server.protocol.data_shards_state import Shards, Take, group_of
from elasticps.server.protocol.operations import ChunkContent, Content, Contribution, Mark, NewTable, RoundStep
from elasticps.spec import TableSpec
from elasticps.store import Store
from elasticps.store.intervals import PLACES
from replication.chain import Member
from replication.effects import (
    Apply,
    CaughtUp,
    ClocksReply,
    Effects,
    Erase,
    Hold,
    Install,
    NeedRoster,
    NeedView,
    NextChunk,
    Release,
    Reply,
    Send,
    SnapshotRange,
)
from replication.messages import Message, OperationKind
from replication.progress import PART_BITS
from replication.replica import Replica

log = logging.getLogger(__name__)


class Ticket(Protocol):
    """Who waits for an answer of the replica: the token of a Push or an Ask."""

    def reply(self, reply: Reply) -> None:
        """The push was answered."""

    def clocks(self, reply: ClocksReply) -> None:
        """The question for clocks was answered."""

    def hold(self) -> None:
        """Read no more from the connection that it came from."""

    def release(self) -> None:
        """Read on."""


class Surroundings(Protocol):
    """What the replica needs of its server besides the store."""

    def send(self, peer: Member, message: Message) -> None:
        """Queues a message on the current link to a peer."""

    def need_view(self, epoch: int) -> None:
        """Somebody speaks from a later epoch: get that view."""

    def need_roster(self, version: int) -> None:
        """The same for the roster."""

    def start_fill(self, peer: Member, r: int, serial: int) -> None:
        """Cut the range into pieces for its joining replica."""

    def next_piece(self, r: int, serial: int) -> None:
        """Cut the next piece."""

    def report_level(self, level: CaughtUp) -> None:
        """Tell the leader."""


class Executor:
    """A replica with its store. `perform` is the only way in which either changes."""

    def __init__(self, me: Member, ranges: int, around: Surroundings, budget_bytes: int, path: FastPath) -> None:
        self.replica = Replica(me, ranges, budget_bytes, path.log)
        self.store = Store(ranges)
        self._path = path
        path.follow_replica(self.replica, self.store.tables)
        self.marks = Marks()
        self.rounds = Rounds(ranges)
        self.shards = Shards(ranges)
        self._applied = self._rows_applied = 0  # by Python
        self._around = around
        self._ranges = ranges
        self._handlers: dict[type, Callable[[Any], None]] = {
            Send: lambda e: around.send(e.peer, e.message),
            Apply: self._apply,
            Reply: lambda e: e.token.reply(e),
            ClocksReply: lambda e: e.token.clocks(e),
            Hold: lambda e: e.token.hold(),
            Release: lambda e: e.token.release(),
            NeedView: lambda e: around.need_view(e.epoch),
            NeedRoster: lambda e: around.need_roster(e.version),
            SnapshotRange: lambda e: around.start_fill(e.peer, e.range, e.serial),
            NextChunk: lambda e: around.next_piece(e.range, e.serial),
            Install: self._install,
            Erase: self._erase,
            CaughtUp: around.report_level,
        }

    @property
    def applied(self) -> int:
        """Operations, as head or follower."""
        return self._applied + self._path.counter(at.H_APPLIED)

    @property
    def rows_applied(self) -> int:
        """Rows that they updated."""
        return self._rows_applied + self._path.counter(at.H_ROWS_APPLIED)

    def perform(self, event: Callable[..., Effects], *arguments: Any) -> None:
        """Gives the replica an event and carries out its effects. Does not return if any of it fails."""
        try:
            for effect in event(*arguments):
                self._handlers[type(effect)](effect)
            self._path.sync()
        except Exception as error:
            fatal.end(self.replica.me, error)

    # --- operations -------------------------------------------------------------------------------------------------

    def _apply(self, effect: Apply) -> None:
        payload = effect.operation.payload
        if isinstance(payload, Content):
            self._apply_rows(effect, payload)
        elif isinstance(payload, NewTable):
            self.store.create(TableSpec.from_json(payload.spec), payload.table)
        elif isinstance(payload, Mark):
            self._mark(effect, payload)
        elif isinstance(payload, RoundStep):
            self._round(effect, payload)
        elif isinstance(payload, Take):
            self.shards.take(payload)
        self._applied += 1

    def _apply_rows(self, effect: Apply, content: Content) -> None:
        tables, operation = self.store.tables, effect.operation
        if content.mark is not None and np.count_nonzero(effect.ranges == group_of(content.mark)):
            self.shards.note(content.mark, operation.worker, operation.after >> PART_BITS)
        if effect.inside is None:
            blocks = content.part(effect.ranges, tables)
        else:
            bounds = np.zeros(self._ranges, np.int64)
            bounds[effect.ranges] = PLACES
            for r, bound in effect.inside.items():
                bounds[r] = bound
            blocks = content.below(bounds, tables)
        if isinstance(content, Contribution):
            self.rounds.keep(content.app, content.clock, operation.worker, effect.ranges, blocks)
        elif operation.kind == OperationKind.INIT:
            for table, keys, values, _ in blocks:
                tables[table].put_if_absent(keys, values)
        else:
            for table, keys, grads, step_values in blocks:
                tables[table].apply(keys, grads, step_values)
                self._rows_applied += len(keys)

    def _round(self, effect: Apply, step: RoundStep) -> None:
        if effect.operation.kind == OperationKind.BARRIER_JOIN:
            self.rounds.enter(step.app, step.clock, step.workers)
        elif effect.operation.kind == OperationKind.BARRIER_LEAVE:
            self.rounds.leave(step.app, step.workers[0])
        elif effect.operation.kind == OperationKind.BARRIER_DECISION:
            self.rounds.decide(step.app, step.clock, step.workers)
        else:
            tables = self.store.tables
            for table, keys, grads, values in self.rounds.close(
                step.app, step.clock, step.workers, effect.ranges, tables
            ):
                tables[table].apply(keys, grads, values)
                self._rows_applied += len(keys)

    def _mark(self, effect: Apply, mark: Mark) -> None:
        unfinished = effect.inside or {}
        for r, seq in zip(effect.ranges.tolist(), effect.seqs.tolist(), strict=True):
            if r not in unfinished:
                workers, progress = self.replica.clocks.column(r)
                found = digest(self.store.tables, r, self.rounds.words(r) + self.shards.words(r))
                self.marks.note(mark.id, r, MarkedRange(seq, found, tuple(workers.tolist()), tuple(progress.tolist())))

    # --- ranges -----------------------------------------------------------------------------------------------------

    def _install(self, effect: Install) -> None:
        content: ChunkContent = effect.payload  # type: ignore[assignment]
        for number, spec, keys, values in content.tables:
            table = self.store.create(TableSpec.from_json(spec), number)
            if len(keys):
                table.load_range(effect.range, keys, values)
        self.rounds.load(effect.range, content.rounds)
        self.shards.load(content.shards, content.rounds.more)

    def _erase(self, effect: Erase) -> None:
        for table in self.store.tables.values():
            for r in effect.ranges.tolist():
                if table.count_range(r):
                    table.drop_range(r)
        self.rounds.erase(effect.ranges)
        self.shards.erase(effect.ranges.tolist())
