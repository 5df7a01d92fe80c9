"""Answers workers about the lives of a table's rows: changes policies, sweeps, and says how old and used rows are."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.capacities import RowCount
from elasticps.errors import SpecError
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import ChangedPolicies
from elasticps.server.core.requests import Body, RequestError, RequestTicket
from elasticps.server.core.validation import unknown_table
from elasticps.server.network.connection import Connection, Handler
from elasticps.server.roles.context import Context
from elasticps.server.roles.memory_limit import MemoryLimit
from elasticps.server.roles.sweeper import Sweeper
from elasticps.store import Table
from elasticps.store.admission import check_sketch
from elasticps.wire.frames import (
    MAX_CONTROL_BYTES,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
    row_counts,
    text,
)
from elasticps.wire.headers import PoliciesHeader
from replication.effects import Push
from replication.messages import OperationKind

BINS = 32  # of histograms: by powers of two
MOST_SWEEPS = 16  # of a connection, that wait for each other
SAMPLED_ROWS = 65_536  # of a table, of those headed here: histograms are of these


class LifecycleHandler:
    """Handles SET_POLICIES and SWEEP. sweeps: requests of a connection, of which the first is under way."""

    def __init__(self, context: Context, sweeper: Sweeper, memory: MemoryLimit) -> None:
        self._memory = memory
        self._loop, self._held, self._serving = context.loop, context.held, context.serving
        self._notifier, self._registered = context.notifier, context.registered
        self._executor, self._store, self._sweeper = context.executor, context.executor.store, sweeper
        self.sweeps: dict[Connection, list[asyncio.Task[None]]] = {}
        self.handlers: dict[int, Handler] = {Kind.SET_POLICIES: self._set_policies, Kind.SWEEP: self._sweep}

    def forget(self, connection: Connection) -> None:
        """A connection has ended: its sweeps go no further."""
        for task in self.sweeps.pop(connection, ()):
            task.cancel()

    def close(self) -> None:
        """Ends all sweeps that were asked for."""
        for connection in list(self.sweeps):
            self.forget(connection)

    def _table(self, connection: Connection, number: int) -> Table:
        self._registered.permit(number, connection.app)
        table = self._store.live.get(number)
        if table is None:
            raise unknown_table(self._serving.me.name, number)
        if table.lifecycle is None:
            raise RequestError("spec", f"table {table.spec.name!r} keeps no usage of its rows, so it has no policies")
        return table

    def _set_policies(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        table = self._table(connection, PoliciesHeader.of(header).table)
        try:
            spec = TableSpec.from_json(text(json_body(body.data).get("spec"), MAX_CONTROL_BYTES))
            if difference := spec.difference(table.spec):
                raise SpecError(f"table {table.spec.name!r} exists with another spec: {difference}")
            check_sketch(spec.admission, self._store.ranges)
        except SpecError as error:
            raise RequestError("spec", str(error)) from None
        self._memory.take_sketch(spec, table)
        payload = ChangedPolicies(table.table_id, spec.to_json())
        ticket = RequestTicket(connection, header.kind, header.request)
        push = Push(
            ticket, -1, header.epoch, 0, 0, True, None, payload, len(payload.spec), kind=OperationKind.POLICY
        )  # fmt: skip
        self._executor.perform(self._executor.replica.push, push)

    def _sweep(self, connection: Connection, header: Header, body: Body) -> None:
        if self._held.wait_for_view(connection, header, body):
            return
        ours = self._serving.epoch
        if header.epoch < ours:
            text_ = f"server {self._serving.me.name} is at epoch {ours}, the request at {header.epoch}"
            raise RequestError("stale-view", text_, epoch=ours)
        table, what = self._table(connection, PoliciesHeader.of(header).table), json_body(body.data).get("what")
        if what not in ("state", "dry-run", "sweep"):
            raise FrameError(f"a SWEEP asks for {what!r}")
        if what == "state":
            self._answer(connection, header, state(table, self._serving.headed, self._store.times))
            return
        if len(earlier := self.sweeps.setdefault(connection, [])) >= MOST_SWEEPS:
            text_ = f"{MOST_SWEEPS} sweeps of this worker's wait at server {self._serving.me.name}"
            raise RequestError("busy", f"{text_}: call evict when one has ended")
        allowed, heads = json_body(body.data).get("allowed"), None
        if allowed is not None:  # as a worker has it from answers of all servers
            if not isinstance(allowed, dict):
                raise FrameError("what a SWEEP allows is by server")
            heads, *counts = allowed.get(self._serving.me.name, [-1])
            allowed = row_counts(counts)
        run = self._run(connection, header, table, what == "dry-run", allowed, heads, earlier[-1:])
        earlier.append(self._loop.create_task(run))

    @property
    def _heads(self) -> int:
        """A number for the set of ranges headed here."""
        return zlib.crc32(np.sort(self._serving.headed).tobytes())

    async def _run(
        self, connection: Connection, header: Header, table: Table, dry_run: bool, allowed: tuple[RowCount, ...] | None,
        counted: object, earlier: Sequence[asyncio.Task[None]],
    ) -> None:  # fmt: skip
        """Sweeps when an earlier request of the connection has ended: a worker whose view has changed asks again while
        its first question is still under way. counted: the heads for whose ranges rows are `allowed`, None for any."""
        if earlier:
            await asyncio.wait(earlier)
        heads, headed = self._heads, len(self._serving.headed)
        try:
            if self._store.live.get(table.table_id) is not table:
                gone = unknown_table(self._serving.me.name, table.table_id)
                self._notifier.refuse(connection, header.kind, header.request, gone)
                return
            if counted not in (None, heads):
                self._answer(connection, header, {"moved": True})
                return
            going, left = await self._sweeper.sweep(table, dry_run, allowed)
        except Exception as error:
            connection.fail(error)
            return
        finally:
            if waiting := self.sweeps.get(connection):
                waiting.pop(0)
                if not waiting:
                    del self.sweeps[connection]
        found = {reason.name.lower(): count for reason, count in going.items()}
        moved = heads != self._heads  # what was counted is of others
        here = {"server": self._serving.me.name, "headed": headed, "heads": heads, "left": left}
        self._answer(connection, header, {"going": found, "moved": moved, **here})

    def _answer(self, connection: Connection, header: Header, document: dict[str, Any]) -> None:
        connection.send(json_frame(Kind.SWEPT, document, request=header.request, epoch=header.epoch))


def state(table: Table, headed: NDArray[np.int64], times: NDArray[np.int64]) -> dict[str, Any]:
    """What a table's rows are like in the ranges headed here: how many there are, how many keys wait for one, what this
    server has admitted and evicted, and two histograms of some of the rows: by seconds since their last use, and by
    count, in bins of powers of two (bin i: 2^i up to 2^(i+1); bin 0 has what is below)."""
    assert table.lifecycle is not None
    ages, counts, left = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64), SAMPLED_ROWS
    for r in headed.tolist():
        if left <= 0:
            break
        keys = table.range_keys(r)[:left]
        left -= len(keys)
        usage = table.read_usage(keys)
        ages += _binned(times[r] - usage[:, 0].astype(np.int64))
        counts += _binned(usage[:, 1].copy().view(np.float32))
    return {
        "rows": sum(table.count_range(r) for r in headed.tolist()),
        **table.lifecycle.counts(headed),
        "ages": ages.tolist(),
        "counts": counts.tolist(),
    }


def _binned(values: NDArray[Any]) -> NDArray[np.int64]:
    bins = np.log2(np.maximum(values, 1)).astype(np.int64)
    return np.bincount(np.minimum(bins, BINS - 1), minlength=BINS)
