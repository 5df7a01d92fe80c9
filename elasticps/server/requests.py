"""What workers ask for: steps, rows, tables. Each request is checked here, at the edge, before anything is changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from coordinator.view import ServerInfo
from elasticps.errors import SpecError
from elasticps.server.connection import Connection
from elasticps.server.executor import Executor
from elasticps.server.fast.layout import UNLIMITED
from elasticps.server.fast.path import FastPath
from elasticps.server.protocol.bounded_delay import BoundedDelay
from elasticps.server.protocol.operations import Content, Contribution, NewTable, positions_of
from elasticps.server.protocol.reads import Read, answer
from elasticps.server.protocol.replica_codec import shard_mark
from elasticps.server.protocol.replies import RequestTicket
from elasticps.server.protocol.request_error import RequestError
from elasticps.spec import TableSpec
from elasticps.store import Table
from elasticps.wire.frames import ANY, LAST, PAUSE, REPEAT, ROUND, Block, FrameError, Header, Kind, json_body, read_push
from replication.chain import Ranges
from replication.core import NO_RANGES
from replication.effects import Ask, Push
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK, MAX_PARTS
from replication.replica import Replica

Body = NDArray[np.uint8]
Handler = Callable[[Connection, Header, Body], None]


class Host(Protocol):
    """The server that these requests came to."""

    me: ServerInfo
    ranges: int
    epoch: int
    counts: Counter[str]
    fast: FastPath

    def wait_for_view(self, connection: Connection, header: Header, body: Body) -> bool:
        """Holds a frame that speaks of a view to come. Raises `RequestError` when that does not come."""

    def tell_view(self, connection: Connection) -> None:
        """Sends the view, once per connection and epoch."""

    def refuse(self, connection: Connection, request: int, refusal: RequestError) -> None:
        """Tells why a request was not done."""

    def serves(self, header: Header) -> bool:
        """Whether the ranges that may be read here are the same as in the pull's epoch."""

    def judged(self) -> list[tuple[Read, RequestError | None]]:
        """The waiting pulls that need not wait any more."""

    def no_room(self, table: Table, rows: int, nbytes: int) -> RequestError:
        """Why a push may not add that many rows, of so many bytes, to a table."""


class Requests:
    """The handlers of a worker's frames. last_s: when the last push or pull came."""

    def __init__(self, host: Host, executor: Executor, parking: BoundedDelay, clock: Callable[[], float]) -> None:
        self._host = host
        self._executor = executor
        self._store, self._replica = executor.store, executor.replica
        self._delay = parking
        self._clock = clock
        self._order = NO_RANGES, positions_of(NO_RANGES, host.ranges)  # the newest answer of `_order_of`
        self._unshown: dict[Connection, None] = {}  # whose answers hold values that must not be shown yet
        self.last_s = -1e9
        self.handlers: dict[int, Handler] = {
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.JOIN: self._join,
            Kind.GET_CLOCKS: self._ask,
            Kind.CREATE: self._create,
            Kind.INIT: self._init,
        }

    # --- tables -----------------------------------------------------------------------------------------------------

    def _table(self, table_id: int) -> Table:
        table = self._store.tables.get(table_id)
        if table is None:
            raise RequestError("unknown-table", f"server {self._host.me.name} has no table with id {table_id}")
        return table

    def _create(self, connection: Connection, header: Header, body: Body) -> None:
        document = json_body(body.data)
        table_id, text = document.get("id"), document.get("spec")
        if not isinstance(table_id, int) or not 0 < table_id < 1 << 32 or not isinstance(text, str):
            raise FrameError("a create gives a table id above 0 and a spec")
        try:
            self._store.create(TableSpec.from_json(text), table_id)
        except SpecError as error:
            raise RequestError("spec", str(error)) from None
        self._control(connection, header, OperationKind.CREATE, NewTable(table_id, text), len(text))

    def _control(
        self, connection: Connection, header: Header, kind: OperationKind, payload: Any, nbytes: int,
        ranges: Ranges | None = None,
    ) -> None:  # fmt: skip
        """Logs an operation of the ranges themselves; answered when it is committed."""
        ticket = RequestTicket(connection, header.request)
        push = Push(ticket, -1, header.epoch, 0, 0, True, ranges, payload, nbytes, kind=kind)
        self._executor.perform(self._replica.push, push)

    def _init(self, connection: Connection, header: Header, body: Body) -> None:
        if self._host.wait_for_view(connection, header, body):
            return
        named, blocks = read_push(header, body)
        ranges, positions = self._order_of(header.epoch) if named is None else self._named(named)
        for block in blocks if len(ranges) else ():
            self._check(block, positions, values=0)
        self._take_room(blocks)
        self._control(connection, header, OperationKind.INIT, Content(blocks, ranges, positions), len(body), ranges)

    # --- pushes -----------------------------------------------------------------------------------------------------

    def _join(self, connection: Connection, header: Header, body: Body) -> None:
        if header.flags & PAUSE:
            self._delay.pause(connection.worker)
            self.judge_parked()
        elif header.flags & LAST:
            if header.clock >= MAX_CLOCK:
                raise FrameError(f"a base clock of {header.clock} is over the limit of {MAX_CLOCK}")
            connection.base = header.clock
            self._delay.join(connection.worker, header.clock)
        minimum = self._delay.minimum(connection.app)
        connection.send(Header(Kind.OK, request=header.request, epoch=self._host.epoch, clock=minimum).pack())

    def _ask(self, connection: Connection, header: Header, body: Body) -> None:
        ask = Ask(RequestTicket(connection, header.request), header.worker, header.epoch)
        self._executor.perform(self._replica.ask, ask)

    def _push(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.base < 0:
            raise RequestError("not-joined", f"worker {connection.worker_name!r} pushed before it joined")
        if not 0 < header.clock < MAX_CLOCK or not header.first <= header.part < MAX_PARTS:
            raise FrameError(f"a push of step {header.clock}, parts {header.first}..{header.part}, cannot be")
        if self._host.wait_for_view(connection, header, body):
            return
        named, blocks = read_push(header, body)
        if named is None:
            ranges, positions = self._order_of(header.epoch)
        else:
            ranges, positions = self._named(named)
        ticket = RequestTicket(connection, header.request)
        try:
            for block in blocks:
                self._check(block, positions, values=None)
            self._take_room(blocks)
        except RequestError as refusal:
            self._host.counts["refused"] += 1
            ticket.refusal, blocks = refusal, []
        mark = shard_mark(header)
        if mark is not None:
            if self._executor.shards.owns(connection.app, mark.set):
                connection.set_shards(mark.set)
            else:
                mark = None
        content = Content(blocks, ranges, positions, mark)
        if header.flags & ROUND:
            content = Contribution(connection.app, header.clock, blocks, ranges, positions, mark)
        push = Push(
            ticket, connection.worker, header.epoch, header.clock, header.part, bool(header.flags & LAST),
            None if named is None else ranges, content, len(body), connection.base,
            repeat=bool(header.flags & REPEAT), first=header.first,
        )  # fmt: skip
        self._host.counts["pushes"] += 1
        self._host.counts["rows_pushed"] += sum([len(block.keys) for block in blocks])
        self.last_s = self._clock()
        told = header.clock - header.table
        if header.table and told > connection.base:  # the base itself says nothing of ranges that are not pushed to yet
            self._host.fast.tell(connection.worker, told)
        self._executor.perform(self._replica.push, push)
        self._host.fast.note_change()

    def _order_of(self, epoch: int) -> tuple[Ranges, NDArray[np.int64]]:
        """What a push of that epoch calls all ranges headed here, and where each stands; nothing if it is stale."""
        ranges = self._replica.headed(epoch)
        if ranges is None:
            ranges = NO_RANGES
        if ranges is not self._order[0]:
            self._order = ranges, positions_of(ranges, self._host.ranges)
        return self._order

    def _named(self, named: NDArray[np.int32]) -> tuple[Ranges, NDArray[np.int64]]:
        ranges = named.astype(np.int64)
        if len(ranges) and (ranges.min() < 0 or ranges.max() >= self._host.ranges):
            raise RequestError("foreign", f"a push names ranges outside 0..{self._host.ranges - 1}")
        positions = positions_of(ranges, self._host.ranges)
        if np.count_nonzero(positions >= 0) != len(ranges):
            raise RequestError("foreign", "a push names a range twice")
        return ranges, positions

    def _check(self, block: Block, positions: NDArray[np.int64], *, values: int | None) -> None:
        """A block fits its table and this server. `values`: step values expected (None: the optimizer's number)."""
        table = self._table(block.table)
        dim, expected = table.spec.dim, table.spec.optimizer.step_floats if values is None else values
        if block.grads.shape[1] != dim:
            raise RequestError("shape", f"table {table.spec.name!r} has dim {dim}, the push has {block.grads.shape[1]}")
        if len(block.step_values) != expected:
            raise RequestError(
                "shape", f"table {table.spec.name!r} takes {expected} step values, not {len(block.step_values)}"
            )
        at = table.first_misplaced(block.keys, positions)
        if at >= 0:
            text = f"key {block.keys[at]} of table {table.spec.name!r} is not in a range that the push ticks at server "
            raise RequestError("foreign", f"{text}{self._host.me.name}, or not in their order")

    def _take_room(self, blocks: list[Block]) -> None:
        """Room for the rows that blocks add, in all tables or in none."""
        fast, needed = self._host.fast, 0
        if fast.room > UNLIMITED // 2:
            return
        for block in blocks:
            table = self._table(block.table)
            rows, nbytes = table.bytes_for(block.keys)
            needed += nbytes
            if nbytes and needed > fast.room:
                raise self._host.no_room(table, rows, nbytes)
        fast.room -= needed

    # --- pulls ------------------------------------------------------------------------------------------------------

    def _pull(self, connection: Connection, header: Header, body: Body) -> None:
        if self._host.wait_for_view(connection, header, body):
            return
        if not self._host.serves(header):
            self._host.tell_view(connection)
            text = f"server {self._host.me.name} is at epoch {self._host.epoch}, the request at {header.epoch}"
            raise RequestError("stale-view", text, epoch=self._host.epoch)
        table = self._table(header.table)
        if header.items * 8 != len(body):
            raise FrameError(f"a pull of {header.items} keys has a body of {len(body)} bytes")
        self._host.counts["pulls"] += 1
        self._host.counts["rows_pulled"] += header.items
        self.last_s = self._clock()
        read = Read(connection, header, table, body.view(np.int64), 0.0)
        if (header.bound or header.clock) and self._delay.behind(read):
            self._delay.park(read)
        else:
            self._answer(read)

    def answer_rest(self, connection: Connection, header: Header, body: Body, done: int) -> None:
        """Goes on with an answer of which `done` rows have left: its ranges may have, too, or must not be shown yet."""
        read = Read(connection, header, self._table(header.table), body.view(np.int64), 0.0)
        answer(read, _Judge(read, self._host, self._replica, self._unshown), done)

    def _answer(self, read: Read) -> None:
        answer(read, _Judge(read, self._host, self._replica, self._unshown))

    @property
    def waiting(self) -> bool:
        """Whether some pull waits to be judged again."""
        return bool(self._delay or self._unshown)

    def judge_parked(self) -> None:
        """Answers the pulls that need not wait any more, and those that waited too long."""
        if self._unshown:
            connections = list(self._unshown)
            self._unshown.clear()
            for connection in connections:
                connection.go_on()
        for read, refusal in self._host.judged():
            connection = cast(Connection, read.connection)
            if refusal is None:
                self._answer(read)
            else:
                if refusal.document["code"] == "stale-view":
                    self._host.tell_view(connection)
                self._host.refuse(connection, read.header.request, refusal)


def _at_once() -> bool:
    return True


class _Judge:
    """Of one pull. A tail whose joiner is level does not show what the joiner may lack: it may be the next tail."""

    def __init__(self, read: Read, host: Host, replica: Replica, unshown: dict[Connection, None]) -> None:
        self._read = read
        self._host = host
        self._replica = replica
        self._unshown = unshown

    def served(self) -> bool:
        return self._host.serves(self._read.header)

    def guarded(self) -> bool:
        return self._replica.guarded and not self._read.header.flags & ANY

    def shown_when(self, keys: NDArray[np.int64]) -> Callable[[], bool]:
        if not self.guarded():
            return _at_once
        acked, seq = self._replica.acked, self._replica.seq
        ranges = np.unique(self._read.table.ranges_of(keys))
        ranges = ranges[self._replica.waiting[ranges] & (acked[ranges] < seq[ranges])]
        seen = seq[ranges]

        def shown() -> bool:
            if not np.count_nonzero(self._replica.acked[ranges] < seen):
                return True
            self._unshown[cast(Connection, self._read.connection)] = None
            return False

        return shown
