"""Checks and logs what workers change: steps, rows and tables.

Each request is checked here, before anything changes, also for what `replica_codec` demands of a FORWARD: a logged
operation that another replica cannot read would end the link to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.keys import table_key
from elasticps.errors import SpecError
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import MOST_OPEN
from elasticps.server.core.data_shards import ShardMark
from elasticps.server.core.operations import (
    Cleared,
    Contribution,
    CreatedTable,
    CreatedTables,
    Dropped,
    RowBlocks,
    positions_of,
)
from elasticps.server.core.replica_codec import MAX_TABLE, new_tables
from elasticps.server.core.requests import Body, RequestError, RequestTicket
from elasticps.server.core.validation import PushRows, check_block, unknown_table
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.server.roles.memory_limit import MemoryLimit
from elasticps.store.admission import check_sketch
from elasticps.wire.clocks import split_record
from elasticps.wire.frames import Block, FrameError, Header, Kind, json_body, read_push, whole
from elasticps.wire.headers import EraseHeader, GetClocksHeader, InitHeader, OkHeader, PushHeader
from replication.chain import Ranges
from replication.core import NO_RANGES
from replication.effects import Ask, Push
from replication.messages import OperationKind
from replication.progress import ERASER, MAX_CLOCK, MAX_PARTS, PART_BITS, after_part
from replication.step_records import home_range

MAX_DROPPED = 1 << 16  # tables that a server remembers: their ids must not come again
MAX_DROPPED_BYTES = 64 << 20


class PushHandler:
    """Checks pushes, initial values, deletions and new tables, and has the replica log them."""

    def __init__(self, context: Context, memory: MemoryLimit) -> None:
        self._serving = context.serving
        self._held = context.held
        self._executor = executor = context.executor
        self._store, self._replica = executor.store, executor.replica
        self._memory = memory
        self._registered = context.registered
        self._counts = executor.counts
        self.stamp_time: Callable[[], None] = lambda: None  # logs the present time where usage is about to be kept
        self.awaits_time: Callable[[], bool] = lambda: False  # whether that would be by this server's clock alone
        self._last_served = context.last_served
        self._order = NO_RANGES, positions_of(NO_RANGES, self._serving.ranges)  # the newest answer of `_order_of`
        self._replica.admission.look_again = self._look_again
        self.handlers: dict[int, Handler] = {
            Kind.PUSH: self._push,
            Kind.GET_CLOCKS: self._get_clocks,
            Kind.CREATE: self._create,
            Kind.INIT: self._init,
            Kind.ERASE: self._erase,
        }

    # --- tables -----------------------------------------------------------------------------------------------------

    def _create(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        try:
            tables = new_tables(json_body(body.data)).tables
            specs = [TableSpec.from_json(new.spec) for new in tables]
            lacking = self._lacking(connection, tables, specs)
            early = any(spec.usage for spec in specs) and self.awaits_time()
            if (lacking or early) and self._held.wait(connection, header, body):
                return
            if lacking:
                raise self._not_registered(lacking[0])
            made = []
            for new, spec in zip(tables, specs, strict=True):
                if new.table not in self._store.tables:
                    check_sketch(spec.admission, self._store.ranges)
                    self._memory.take_sketch(spec)
                    self._store.create(spec, new.table, connection.app)
                made.append(new._replace(app=self._store.create(spec, new.table).app))
        except SpecError as error:
            raise RequestError("spec", str(error)) from None
        if any(self._store.tables[new.table].lifecycle is not None for new in made):
            self.stamp_time()  # before a row of theirs is used
        size = sum([len(new.spec) for new in made])
        self._control(connection, header, OperationKind.CREATE, CreatedTables(tuple(made)), size)

    def _lacking(self, connection: Connection, tables: Sequence[CreatedTable], specs: Sequence[TableSpec]) -> list[int]:
        """Ids of tables that have to wait until the registry has them. RequestError or SpecError if a table may not be
        created; none has been created then."""
        lacking = []
        for new, spec in zip(tables, specs, strict=True):
            if new.table in self._store.dropped:
                raise unknown_table(self._serving.me.name, new.table)
            self._registered.permit(new.table, connection.app)
            table = self._store.tables.get(new.table)
            if table is not None:
                self._store.create(spec, new.table)  # or raises: it has another spec
            elif self._registered.lacks(new.table, table_key(connection.app, spec.name)):
                lacking.append(new.table)
            else:
                self._registered.check(new.table, spec, connection.app)
        return lacking

    def _control(
        self, connection: Connection, header: Header, kind: OperationKind, payload: Any, nbytes: int,
        ranges: Ranges | None = None,
    ) -> None:  # fmt: skip
        """Logs an operation that belongs to no step of a worker; the request is answered when it is committed."""
        ticket = RequestTicket(connection, header.kind, header.request)
        push = Push(ticket, -1, header.epoch, 0, 0, True, ranges, payload, nbytes, kind=kind)
        self._executor.perform(self._replica.push, push)

    def _init(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        request = InitHeader.of(header)
        kind = OperationKind.LOAD if request.replace else OperationKind.INIT
        named, blocks = read_push(request.all_ranges, request.blocks, body)
        ranges, positions = self._order_of(request.epoch) if named is None else self._named(named)
        if len(ranges):  # else its epoch is refused below
            self._check(connection, blocks, positions, kind)
            self._memory.take(blocks)
        self._control(connection, header, kind, RowBlocks(blocks, ranges, positions), len(body), ranges)

    def _erase(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        request, me = EraseHeader.of(header), self._serving.me.name
        self._registered.permit(request.table, connection.app)
        if request.kind == OperationKind.DROP:
            whole(request.table, MAX_TABLE, 1)
            self._drop(connection, header, body, request.table)
            return
        if request.kind not in (OperationKind.DELETE, OperationKind.CLEAR) or not 0 < request.number < MAX_CLOCK:
            raise FrameError(f"deletion {request.number} of kind {request.kind} cannot be")
        if connection.worker not in self._serving.workers:
            raise RequestError("unlisted", f"worker {connection.worker_name!r} is not in the roster now")
        ranges: Ranges | None = None
        payload: Cleared | RowBlocks
        if request.kind == OperationKind.CLEAR:
            if request.table not in self._store.live:
                raise unknown_table(me, request.table)
            payload = Cleared(request.table)
        else:
            named, blocks = read_push(request.all_ranges, request.blocks, body)
            ranges, positions = self._order_of(request.epoch) if named is None else self._named(named)
            if len(ranges):  # else its epoch is refused below
                self._check(connection, blocks, positions, request.kind)
            payload = RowBlocks(blocks, ranges, positions)
        # A lower number that has not arrived by now never will: its worker has given it up. So it counts as committed.
        before = request.number - 1
        push = Push(
            RequestTicket(connection, header.kind, header.request), connection.worker | ERASER, header.epoch,
            request.number, 0, True, ranges, payload, len(body) + 64, before << PART_BITS, before, kind=request.kind,
        )  # fmt: skip
        self._executor.perform(self._replica.push, push)
        self._executor.note_change()

    def _drop(self, connection: Connection, header: Header, body: Body, table: int) -> None:
        """Drops a table. A client removes it from the registry after all heads have answered. So a table that is
        neither registered nor here was dropped by another client while this server had none of its ranges: the answer
        is OK, and nothing is logged, or clients that guess ids would use them up."""
        store = self._store
        if table not in store.dropped:
            if not self._registered.owned(table):
                if self._held.wait(connection, header, body):
                    return
                if table in store.tables:
                    raise self._not_registered(table)
                connection.send(OkHeader(header.request, self._serving.epoch).header().pack())
                return
            most = min(MAX_DROPPED, MAX_DROPPED_BYTES // store.dropped_bytes)
            if table not in store.tables and len(store.dropped) >= most:
                text = f"server {self._serving.me.name} remembers {most} dropped tables, and takes no more"
                raise RequestError("spec", text)
        self._control(connection, header, OperationKind.DROP, Dropped(table), 64)

    def _not_registered(self, table: int) -> RequestError:
        text = f"no table with id {table} is registered, as far as server {self._serving.me.name} knows"
        return RequestError("unknown-table", text)

    def _check(self, connection: Connection, blocks: list[Block], positions: NDArray[np.int64], kind: int) -> None:
        for block in blocks:
            self._registered.permit(block.table, connection.app)
            check_block(self._store.live, block, positions, self._serving.me.name, kind)

    # --- pushes -----------------------------------------------------------------------------------------------------

    def _get_clocks(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        request = GetClocksHeader.of(header)
        ask = Ask(RequestTicket(connection, header.kind, request.request), request.worker, request.epoch)
        self._executor.perform(self._replica.ask, ask)

    def _push(self, connection: Connection, header: Header, body: Body) -> None:
        request = PushHeader.of(header)
        if connection.base < 0:
            raise RequestError("not-joined", f"worker {connection.worker_name!r} pushed before it joined")
        after = after_part(request.clock, request.part, request.last)
        if not 0 < request.clock < MAX_CLOCK or request.part >= MAX_PARTS or not 0 <= request.prev < after:
            raise FrameError(f"a push of part {request.part} of step {request.clock} after {request.prev} cannot be")
        if request.committed is not None and request.committed < 0:
            raise FrameError(f"a push of step {request.clock} knows what is committed as step {request.committed}")
        if self._held.wait_for_view(connection, header, body):
            return
        nbytes, record = len(body), None
        if request.record:
            body, record = split_record(body, request.clock, self._serving.ranges)
        named, blocks = read_push(request.all_ranges, request.blocks, body)
        if named is None:
            ranges, positions = self._order_of(request.epoch)
        else:
            ranges, positions = self._named(named)
        if record is not None and len(ranges):  # else its epoch is refused below
            home = home_range(connection.worker, self._serving.ranges)
            if not request.last or positions[home] < 0:
                raise FrameError(f"a push has a record, and range {home} is not in it or does not end its step")
        rows, rounds = PushRows(blocks), self._executor.rounds
        try:
            rows.refuse_unknown(self._store.live, self._serving.me.name)
            self._check(connection, rows.blocks, positions, OperationKind.PUSH)
            if request.round and rounds.has_too_many_open(connection.app, request.clock, connection.worker, ranges):
                raise _too_many_rounds(request.clock, connection.app)
        except RequestError as error:
            rows.refuse_all(error)
        else:
            rows.refuse_not_finite(self._store.live)
            step = connection.worker, after
            self._memory.limit(rows, rounds.size(rows.blocks) if request.round else 0, rounds.nbytes, step)
        refusal, blocks = rows.refusal(request.committed or 0, self._serving.ranges), rows.blocks
        mark = None
        if request.shard is not None and self._executor.shards.owns(connection.app, request.shard.set):
            connection.set_shards(request.shard.set)
            mark = ShardMark(*request.shard)
        content = RowBlocks(blocks, ranges, positions, mark)
        if request.round:
            content = Contribution(connection.app, request.clock, blocks, ranges, positions, mark)
        push = Push(
            RequestTicket(connection, header.kind, request.request), connection.worker, request.epoch, request.clock,
            request.part, request.last, None if named is None else ranges, content, nbytes,
            request.prev, request.committed or 0, repeat=request.repeat, refusal=refusal, record=record,
        )  # fmt: skip
        self._counts["pushes"] += 1
        self._counts["rows_pushed"] += sum([len(block.keys) for block in blocks])
        self._last_served.mark()
        # At its base clock a worker may know nothing of ranges that it has not pushed to.
        if request.committed is not None and request.committed > connection.base:
            self._executor.note_committed(connection.worker, request.committed)
        self._executor.perform(self._replica.push, push)
        self._executor.note_change()

    def _look_again(self, push: Push) -> None:
        """Checks an operation again that has waited for admission. A table may have been dropped meanwhile: nothing of
        it may be logged after that, for replicas forget the table as soon as all of them have the drop. And shares of
        too many rounds may have been admitted before."""
        content = push.payload
        if not isinstance(content, RowBlocks):
            return
        rows = PushRows(content.blocks)
        rows.refuse_unknown(self._store.live, self._serving.me.name)
        if isinstance(content, Contribution) and self._executor.rounds.has_too_many_open(
            content.app, content.clock, push.worker, content.ranges
        ):
            rows.refuse_all(_too_many_rounds(content.clock, content.app))
        if rows.error is None:
            return
        push.payload = content.only(rows.blocks)
        if push.kind == OperationKind.PUSH:
            push.refusal = rows.refusal(0, self._serving.ranges, push.refusal)

    def forget(self, connection: Connection) -> None:
        """A connection has ended: what it asked is not answered."""
        for ticket in list(connection.tickets):
            self._executor.perform(self._replica.forget, ticket)

    def _order_of(self, epoch: int) -> tuple[Ranges, NDArray[np.int64]]:
        """The ranges headed here, as a push of that epoch numbers them, and the position of each; none if it is
        stale."""
        ranges = self._replica.headed(epoch)
        if ranges is None:
            ranges = NO_RANGES
        if ranges is not self._order[0]:
            self._order = ranges, positions_of(ranges, self._serving.ranges)
        return self._order

    def _named(self, named: NDArray[np.int32]) -> tuple[Ranges, NDArray[np.int64]]:
        ranges = named.astype(np.int64)
        if len(ranges) and (ranges.min() < 0 or ranges.max() >= self._serving.ranges):
            raise RequestError("foreign", f"a push names ranges outside 0..{self._serving.ranges - 1}")
        positions = positions_of(ranges, self._serving.ranges)
        if np.count_nonzero(positions >= 0) != len(ranges):
            raise RequestError("foreign", "a push names a range twice")
        return ranges, positions


def _too_many_rounds(clock: int, app: str) -> RequestError:
    text = f"a share of round {clock} of {app!r}, while this worker's of {MOST_OPEN} others are kept until those close"
    return RequestError("ahead", text)
