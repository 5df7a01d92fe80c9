"""Arrays that compiled code and Python share, each found by the field of the header that holds its address.

`SharedArrays` owns them. `CompiledTables` mirrors the store's tables there, `ReplicaMirror` the replica's view, clocks
and refusals, `AcknowledgedClocks` has the clocks that workers have acknowledged, `ReadAfters` what READ_AFTER said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.operations import positions_of
from elasticps.server.fast import layout as at
from elasticps.store import Store, Table
from elasticps.store.updates import KINDS
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import Header, Kind
from elasticps.wire.pool import Bytes
from replication.chain import Member, Ranges
from replication.replica import Replica


class Linked(Protocol):
    """A connection that has a slot."""

    slot: int


class SharedArrays:
    """h: the header, int64 [H_FIELDS]. fields: the same memory; one field is read and written faster so."""

    def __init__(self) -> None:
        self.h = np.zeros(at.H_FIELDS, np.int64)
        self.fields = memoryview(cast(Any, self.h))
        self._arrays: dict[int, NDArray[Any]] = {}  # only their addresses in the header refer to some of them

    def __getitem__(self, field: int) -> NDArray[Any]:
        return self._arrays[field]

    def make(self, field: int, shape: int | tuple[int, ...], dtype: type = np.int64) -> NDArray[Any]:
        """Zeros whose address the header gets."""
        return self.share(field, np.zeros(shape, dtype))

    def share(self, field: int, array: NDArray[Any]) -> NDArray[Any]:
        """Has the header point to an array."""
        self._arrays[field] = array
        self.fields[field] = array.ctypes.data
        return array


class ReadAfters:
    """What the workers of a server's connections have said last, as long as no pull has seen it. ranges: P."""

    def __init__(self, shared: SharedArrays, ranges: int) -> None:
        self._shared = shared
        self._ranges = ranges
        self._memory: dict[int, Bytes] = {}  # by slot

    def keep(self, slot: int, after: ReadAfter) -> None:
        """Replaces what a connection's worker said before."""
        row, body = self._shared[at.H_CONNECTIONS][slot], np.frombuffer(after.body, np.uint8)
        if len(body) > row[at.C_AFTER_ROOM]:
            memory = self._memory[slot] = np.zeros(1 << (len(body) - 1).bit_length(), np.uint8)
            row[at.C_AFTER_AT], row[at.C_AFTER_ROOM] = memory.ctypes.data, len(memory)
        if len(body):
            self._memory[slot][: len(body)] = body
        row[at.C_AFTER], row[at.C_AFTER_EPOCH] = len(after.ranges), after.epoch

    def of(self, slot: int) -> ReadAfter | None:
        """What a pull of a connection has to see, None if nothing is left."""
        row = self._shared[at.H_CONNECTIONS][slot]
        n = int(row[at.C_AFTER])
        if not n:
            return None
        size = ((4 * n + 7) & ~7) + 8 * n
        header = Header(Kind.READ_AFTER, 0, size, epoch=int(row[at.C_AFTER_EPOCH]), items=n)
        return ReadAfter.of(header, self._memory[slot][:size], self._ranges)

    def clear(self, slot: int) -> None:
        """Ends the waiting of a connection's pulls."""
        self._shared[at.H_CONNECTIONS][slot, at.C_AFTER] = 0

    def forget(self, slot: int) -> None:
        """Frees the memory of a connection that has ended."""
        row = self._shared[at.H_CONNECTIONS][slot]
        row[at.C_AFTER] = row[at.C_AFTER_AT] = row[at.C_AFTER_ROOM] = 0
        self._memory.pop(slot, None)


FIRST_TABLES = 64
FIRST_PEERS = 64
HINTS_PER_ROW = 4


class CompiledTables:
    """A row for each live table of a store, in any order. written: rows written so far."""

    def __init__(self, shared: SharedArrays) -> None:
        self.written = 0
        self._shared = shared
        self._rows = shared.make(at.H_TABLES, (FIRST_TABLES, at.TABLE))
        self._row_of: dict[int, int] = {}  # of rows, by the tables' ids
        self._apps: dict[str, int] = {}

    def number_of(self, app: str) -> int:
        """The number by which compiled code knows an application, from 1 on."""
        return self._apps.setdefault(app, len(self._apps) + 1)

    def follow(self, store: Store) -> None:
        """Writes the rows of tables that have changed, and of no others: there may be thousands."""
        changed, store.changed = store.changed, set()
        for number in changed:
            table = store.live.get(number)
            if table is None:
                self._remove(number)
            else:
                self._write(number, table)
        self._shared.fields[at.H_TABLE_COUNT] = len(self._row_of)

    def _write(self, number: int, table: Table) -> None:
        row = self._row_of.setdefault(number, len(self._row_of))
        if row == len(self._rows):
            self._rows = self._shared.share(at.H_TABLES, np.concatenate([self._rows, np.zeros_like(self._rows)]))
        self._rows[row] = self._row(number, table)
        self.written += 1

    def _remove(self, number: int) -> None:
        """Fills the row of a dropped table with the last one."""
        row = self._row_of.pop(number, None)
        last = len(self._row_of)
        if row is None or row == last:
            return
        self._rows[row] = self._rows[last]
        self._row_of[int(self._rows[row, at.TABLE_ID])] = row

    def _row(self, number: int, table: Table) -> NDArray[np.int64]:
        kind = table.spec.optimizer.kind
        row = np.empty(at.TABLE, np.int64)
        row[at.TABLE_ID], row[at.TABLE_HEADER] = number, table.header_address
        row[at.TABLE_UPDATE] = KINDS.index(kind) if kind in KINDS and table.push.code >= 0 else -1
        row[at.TABLE_VALUES] = table.spec.optimizer.step_floats
        row[at.TABLE_APP] = self.number_of(table.app) if table.app else 0
        row[at.TABLE_PUSH], row[at.TABLE_PUSH_WORDS] = table.push.code, table.push.words
        row[at.TABLE_PULL], row[at.TABLE_PULL_WORDS] = table.pull.code, table.pull.words
        return row


Workers = NDArray[np.int64]


class AcknowledgedClocks:
    """By row of the clocks, the clock up to which its worker knows its steps to be committed, as the worker has said.

    workers, in all methods: whose the rows are, int64 [rows]; 0 or less is nobody's.
    """

    def __init__(self, shared: SharedArrays) -> None:
        self._shared = shared
        self._clocks = shared.make(at.H_ACKNOWLEDGED, 16)
        self._owners = np.zeros(0, np.int64)  # of the rows, when they were looked at last
        self._rowless: dict[int, int] = {}  # clocks of workers that have no row

    def follow(self, workers: Workers) -> None:
        """Moves each worker's clock along when rows have changed hands."""
        before, clocks = self._owners, self._clocks
        known = min(len(before), len(workers))
        other = np.ones(max(len(before), len(workers)), np.bool_)  # rows that have another owner now
        other[:known] = before[:known] != workers[:known]
        for i in np.flatnonzero(other[: len(before)] & (clocks[: len(before)] > 0)).tolist():
            self._rowless[int(before[i])] = int(clocks[i])
        if len(clocks) != len(workers):
            self._clocks = self._shared.share(at.H_ACKNOWLEDGED, np.zeros(len(workers), np.int64))
            self._clocks[:known] = clocks[:known]
        fresh = np.flatnonzero(other[: len(workers)])
        self._clocks[fresh] = 0
        for i in fresh[workers[fresh] > 0].tolist():
            self._clocks[i] = self._rowless.pop(int(workers[i]), 0)
        self._owners = workers.copy()

    def of_all(self, workers: Workers) -> dict[int, int]:
        """The clocks by worker, of workers with a row and of those without."""
        here = {int(workers[i]): int(self._clocks[i]) for i in np.flatnonzero(self._clocks[: len(workers)])}
        return self._rowless | here

    def note(self, workers: Workers, worker: int, clock: int) -> None:
        """Notes a clock from a frame that Python handled."""
        self._clocks[: len(workers)][workers == worker] = clock


class ReplicaMirror:
    """Keeps what compiled code reads of a replica in step with it: its view, its clocks, and what it refused.

    link_of: the connection to a peer; set before there are any.
    """

    def __init__(self, shared: SharedArrays, ranges: int) -> None:
        self._shared = shared
        self._ranges = ranges
        self.link_of: Callable[[Member], Linked | None]
        self._version = self._generation = self._refusals = -1  # of view, clocks and refusals, as mirrored
        self._orders: dict[int, tuple[Ranges, NDArray[np.int64]]] = {}  # by epoch: ranges headed, their positions
        shared.make(at.H_ORDERS, (at.ORDERS, at.ORDER))
        shared.make(at.H_FLAGS, ranges)
        shared.make(at.H_BOUNDS, ranges)
        self._peers = shared.make(at.H_PEERS, (FIRST_PEERS, at.PEER))
        self._peers[:] = -1
        self._peers[:, at.P_PYTHON] = 0
        self.acknowledged = AcknowledgedClocks(shared)

    def follow(self, replica: Replica) -> bool:
        """Mirrors what has changed. Whether this server may have other ranges than before."""
        changed = replica.version != self._version or replica.epoch != self._shared.fields[at.H_EPOCH]
        if changed:
            self._follow_view(replica)
        if replica.clocks.generation != self._generation:
            self._follow_clocks(replica)
        if replica.refusals.version != self._refusals:
            self._follow_refusals(replica)
        return changed

    def note_python_entries(self, counts: Mapping[int, int]) -> None:
        """By peer, how many entries of the log Python holds for it."""
        self._peers[:, at.P_PYTHON] = 0
        for slot, count in counts.items():
            self._peers[slot, at.P_PYTHON] = count

    def _follow_view(self, replica: Replica) -> None:
        f, shared = self._shared.fields, replica.shared()
        self._version = replica.version
        f[at.H_EPOCH] = replica.epoch
        f[at.H_GUARDED] = replica.guarded
        for field, array in ((at.H_UP, shared.up), (at.H_DOWN, shared.down), (at.H_SINCE, shared.since)):
            self._shared.share(field, np.ascontiguousarray(array, np.int64))
        flags = self._shared[at.H_FLAGS]
        flags[:] = shared.waits * at.T_WAITS | shared.synced * at.T_SYNCED | shared.quiet * at.T_QUIET
        flags |= shared.fed * at.T_FED | shared.counted * at.T_COUNTED
        flags[shared.reported] |= at.T_REPORTED
        bounds = self._shared[at.H_BOUNDS]
        bounds[:] = 0
        if shared.bounds:
            bounds[list(shared.bounds)] = list(shared.bounds.values())
        if len(shared.members) > len(self._peers):
            more = np.full((2 * len(shared.members), at.PEER), -1, np.int64)
            more[: len(self._peers)] = self._peers
            more[len(self._peers) :, at.P_PYTHON] = 0
            self._peers = self._shared.share(at.H_PEERS, more)
        connections = self._shared[at.H_CONNECTIONS]
        connections[:, at.C_PEER] = -1
        for slot, member in enumerate(shared.members):
            link = self.link_of(member) if shared.linked[slot] else None
            self._peers[slot, at.P_CONNECTION] = -1 if link is None else link.slot
            if link is not None:
                connections[link.slot, at.C_PEER] = slot
        self._follow_orders(shared.orders)

    def _follow_orders(self, orders: Mapping[int, Ranges]) -> None:
        newest = dict(sorted(orders.items())[-at.ORDERS :])
        known, self._orders = self._orders, {}
        for i, (epoch, ranges) in enumerate(newest.items()):
            order = next((one for one in known.values() if one[0] is ranges), None)
            self._orders[epoch] = known[epoch] = order = order or (ranges, positions_of(ranges, self._ranges))
            addresses = ranges.ctypes.data, order[1].ctypes.data
            self._shared[at.H_ORDERS][i] = epoch, len(ranges), *addresses
        self._shared.fields[at.H_ORDER_COUNT] = len(newest)

    def _follow_clocks(self, replica: Replica) -> None:
        clocks = replica.clocks
        self._generation = clocks.generation
        self._shared.share(at.H_CLOCKS, clocks.matrix)
        self._shared.share(at.H_COLUMNS, clocks.columns)
        self._shared.fields[at.H_COLUMN_COUNT] = clocks.matrix.shape[1]
        self._shared.share(at.H_WORKERS, clocks.workers)
        self._shared.fields[at.H_WORKER_COUNT] = clocks.used
        hints = HINTS_PER_ROW * len(clocks.workers)  # a power of two, as the rows are
        if self._shared.fields[at.H_ROW_MASK] != hints - 1:
            self._shared.make(at.H_ROW_HINTS, hints)
            self._shared.fields[at.H_ROW_MASK] = hints - 1
        self.acknowledged.follow(clocks.workers)
        self._follow_refusals(replica)

    def _follow_refusals(self, replica: Replica) -> None:
        self._refusals, newest = replica.refusals.version, replica.refusals.newest
        workers = replica.clocks.workers
        refused = np.zeros(len(workers), np.int64)
        if newest:
            refused[:] = [newest.get(worker, 0) for worker in workers.tolist()]
        self._shared.share(at.H_REFUSED, refused)
