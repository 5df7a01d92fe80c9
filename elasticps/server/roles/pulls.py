"""Answers what workers read: pulls, and lists of keys."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elasticps.server.core.own_steps import OwnSteps
from elasticps.server.core.reads import AnswerGate, PullRequest, TableKeys, answer, shown_when
from elasticps.server.core.requests import Asker, Body, RequestError
from elasticps.server.core.validation import unknown_table
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.store import Table
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import FrameError, Header, Kind, read_tables
from elasticps.wire.headers import KeysHeader, ListKeysHeader, PullHeader

MAX_LISTED = 1 << 18  # keys
NO_KEYS = np.empty(0, np.int64)


class PullHandler:
    """Answers pulls and lists of keys, at once or when their worker's own steps are there."""

    def __init__(self, context: Context, own: OwnSteps) -> None:
        self._serving = context.serving
        self._held = context.held
        self._notifier = context.notifier
        self._own = own
        self._store, self._replica = context.executor.store, context.executor.replica
        self._registered = context.registered
        self._counts = context.executor.counts
        self._last_served = context.last_served
        self._unshown: dict[Asker, None] = {}  # connections with answers that must not be shown yet
        self.handlers: dict[int, Handler] = {
            Kind.PULL: self._pull, Kind.LIST_KEYS: self._list_keys, Kind.READ_AFTER: self._read_after,
        }  # fmt: skip

    def _read_after(self, connection: Connection, header: Header, body: Body) -> None:
        connection.read_after = ReadAfter.of(header, body, self._serving.ranges)

    def _pull(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        request = PullHeader.of(header)
        if not self._serving.serves(request.epoch, request.anywhere):
            raise self._stale(request.epoch)
        read = self._read(connection, request, body)
        self._counts["pulls"] += 1
        self._counts["rows_pulled"] += read.rows
        self._last_served.mark()
        after = connection.read_after
        if after is not None and self._own.reached(connection.worker, after, request.anywhere):
            connection.read_after = None
        elif after is not None:
            read = read._replace(after=after)
        if (request.clock or read.after) and self._own.waits(read):
            self._own.park(read)
        else:
            self._answer(read)

    def _list_keys(self, connection: Connection, header: Header, body: Body) -> None:
        """LIST_KEYS: the keys may be newer than what a pull may show; values are pulled afterwards."""
        if self._held.wait_for_view(connection, header, body):
            return
        request = ListKeysHeader.of(header)
        if request.range >= self._serving.ranges:
            raise FrameError(f"there is no range {request.range}, there are {self._serving.ranges}")
        if not self._serving.serves(request.epoch, anywhere=False) or not (self._serving.tailed == request.range).any():
            raise self._stale(request.epoch)
        table = self._table(connection, request.table)
        keys, place = NO_KEYS, 0
        if request.keys:
            keys, place = table.list_keys(request.range, request.place, min(request.keys, MAX_LISTED))
        answer = KeysHeader(
            header.request, self._serving.epoch, request.range, place, len(keys), table.count_range(request.range)
        )
        connection.send_all([answer.header().pack(), keys.data.cast("B")] if len(keys) else [answer.header().pack()])

    def shown_when(self, asker: Asker, r: int) -> Callable[[], bool]:
        """Returns a function that tells when what is read now of range r, at its tail, may be shown. Until then `asker`
        is asked again at each change."""
        return shown_when(self._replica, np.array([r]), asker, self._unshown)

    def _stale(self, epoch: int) -> RequestError:
        ours = self._serving.epoch
        text = f"server {self._serving.me.name} is at epoch {ours}, the request at {epoch}"
        return RequestError("stale-view", text, epoch=ours)

    def rest(self, connection: Connection, header: Header, body: Body, done: int) -> None:
        """Continues an answer of which `done` rows have been sent by compiled code. Its ranges may have left meanwhile,
        or hold rows that must not be shown yet."""
        self._answer(self._read(connection, PullHeader.of(header), body), done)

    def _read(self, connection: Connection, request: PullHeader, body: Body) -> PullRequest:
        if request.blocks is None:
            return PullRequest(
                connection, request, [TableKeys(self._table(connection, request.table), body.view(np.int64))]
            )
        named = read_tables(request.blocks, body)
        return PullRequest(
            connection, request, [TableKeys(self._table(connection, table), keys) for table, keys in named]
        )

    def _table(self, connection: Connection, number: int) -> Table:
        self._registered.permit(number, connection.app)
        table = self._store.live.get(number)
        if table is None:
            raise unknown_table(self._serving.me.name, number)
        return table

    def _answer(self, read: PullRequest, done: int = 0) -> None:
        if (dropped := read.dropped()) is not None:  # while it waited
            refusal = unknown_table(self._serving.me.name, dropped.table.table_id)
            self._notifier.refuse(read.connection, Kind.PULL, read.header.request, refusal)
            return
        answer(read, AnswerGate(read, self._serving, self._replica, self._unshown), done)

    def changed(self) -> None:
        """An operation was applied or acknowledged: pulls that wait may go on."""
        if self._own or self._unshown:
            self.answer_waiting()

    def answer_waiting(self) -> None:
        """Answers pulls that need not wait any longer, and refuses those that waited too long."""
        if self._unshown:
            connections = list(self._unshown)
            self._unshown.clear()
            for connection in connections:
                try:
                    connection.go_on()
                except Exception as failure:
                    connection.fail(failure)
        for read, error in self._own.release(self._serving.tail_since, self._serving.full_since):
            try:
                if error is None:
                    self._answer(read)
                else:
                    self._notifier.refuse(read.connection, Kind.PULL, read.header.request, error)
            except Exception as failure:
                read.connection.fail(failure)

    def forget(self, connection: Connection) -> None:
        """A connection has ended: its pulls are dropped."""
        self._own.forget(connection)
