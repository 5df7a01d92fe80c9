"""Restores the ranges headed here from a checkpoint: reads in threads, and logs the rows as operations, a bounded part
at a time. A range may be restored again by its next head: the result is the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core import fields
from elasticps.admin.interface import RestoreProgress, RestoreSpec
from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import UNIT_BYTES, Contents, Job, Portion, RangeRows, Sizes, from_bits, portions
from elasticps.checkpoint.manifest import Manifest
from elasticps.checkpoint.range_usage import NO_KEYS, together
from elasticps.checkpoint.storage import Storage, Take, new_memory
from elasticps.errors import CheckpointError, Error
from elasticps.kernels import hashing
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import (
    ChangedPolicies,
    CreatedTable,
    CreatedTables,
    Dropped,
    RestoredKeys,
    RestoredRows,
    RestoredState,
    TimeMark,
)
from elasticps.server.core.requests import RequestError
from elasticps.server.roles.context import Context
from elasticps.server.roles.executor import Executor, FutureTicket
from elasticps.server.roles.memory_limit import MemoryLimit
from elasticps.store.admission import NO_BLOCKS
from elasticps.wire.frames import Block
from elasticps.wire.pool import Pool
from replication.chain import Ranges
from replication.effects import Status
from replication.messages import OperationKind
from replication.progress import ERASER, PART_BITS
from replication.step_records import home_range

log = fields.logger(__name__)

READERS = 4  # units that are read at once
NEAR_READERS = 2  # of a folder: more of them cost memory and hide no delay
NEAR_BYTES = UNIT_BYTES // 2  # of a unit in a folder
PORTION_BYTES = 32 << 20  # of each table; when a range moves, its portion is read again
BUFFER_BYTES = READERS * 32 << 20  # memory of all readers, used again; readers of a folder take half of it
PIECE_BYTES = 512 << 10  # of an operation: applying one must not stop a server for long
PIECES_AT_ONCE = 16  # logged in one turn of the loop, however small they are
UNASKED_S = 30.0  # without a request for so long the driver of the restore has gone
_LOOK_S = 0.05


class _Moved(Exception):
    """A range may be headed elsewhere now: the task looks again which ranges are left."""


class Restorer:
    """One server's part in restoring a checkpoint; at most one restore at a time."""

    def __init__(self, context: Context, memory: MemoryLimit, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._context = context
        self._loop = context.loop
        self._executor = context.executor
        self._serving = context.serving
        self._memory = memory
        self._buffer_bytes = buffer_bytes
        self._work: _RestoreTask | None = None
        self._serial = 0

    @property
    def serial(self) -> int:
        """The highest number of a restore that was heard. A store that adopts this cluster numbers above it."""
        return self._serial

    def look(self, tables: Iterable[int], named: Iterable[int] = ()) -> RestoreProgress:
        """Reports which of these table ids are in use or were, and how far workers are in the ranges headed here; of
        the workers that are named in each."""
        store, replica = self._executor.store, self._executor.replica
        taken = tuple(id_ for id_ in tables if id_ in store.tables or id_ in store.dropped)
        headed, acknowledged = self._serving.headed.tolist(), self._context.path.acknowledged_clocks()
        columns = [dict(zip(*(each.tolist() for each in replica.clocks.column(r)), strict=True)) for r in headed]
        workers = tuple(sorted(set().union(*columns)))
        least = tuple(min(column.get(worker, 0) for column in columns) >> PART_BITS for worker in workers)
        roster = replica.admission.roster or ()
        records = tuple(one for r in headed for one in replica.core.records.column(r) if one[0] not in roster)
        progress = tuple(column.get(worker, 0) for worker in named for column in columns)
        rounds = self._executor.rounds
        some = any(
            rounds.closed_in(r) or any(group.in_rounds for group in rounds.groups_of(r).values()) for r in headed
        )
        known_to = tuple(acknowledged.get(worker, 0) for worker in workers)
        return RestoreProgress(
            tuple(headed) if progress else (), 0, taken, "", len(headed), workers, least, known_to, some, records,
            progress,
        )  # fmt: skip

    def go_on(self, serial: int, spec: RestoreSpec, done: bytes = b"") -> RestoreProgress:
        """Starts or continues a restore, and reports how far it is. It ends by itself without a request for UNASKED_S.
        done: ranges that others have restored, as bits: they stay restored, whichever server heads them later."""
        if serial < self._serial:
            return RestoreProgress((), 0, (), "somebody else restores, or it has ended")
        self._serial = serial
        if self._work is None or self._work.spec != spec:
            self.close()  # another restore, which its driver has given up
            self._work = _RestoreTask(self._context, self._memory, spec, self._buffer_bytes)
        work = self._work
        work.requested_s, work.requested_epoch = self._loop.time(), self._serving.epoch
        work.done.update(from_bits(done, self._serving.ranges))
        if work.over:  # reported once: the next request tries again
            self._work = None
        return RestoreProgress(tuple(sorted(work.done)), work.rows, (), work.failed)

    async def end(self, serial: int, dropped: Iterable[int]) -> bool:
        """Ends a restore, so that nothing of it is logged later, and drops these tables. False: the view has changed,
        ask again."""
        if serial + 1 < self._serial:  # another driver has continued it since
            return True
        self._serial = max(self._serial, serial + 1)
        if self._work is not None:
            work, self._work = self._work, None
            await work.end()
        headed = self._serving.headed
        try:
            await _logged(
                self._executor, self._serving.epoch, [(OperationKind.DROP, Dropped(id_), headed) for id_ in dropped]
            )
        except _Moved:
            return False
        return True

    def close(self) -> None:
        """Stops the present restore."""
        if self._work is not None:
            self._work.stop()


class _RestoreTask:
    """Reads one checkpoint, and logs the rows of the ranges headed here, until all have them or nobody asks."""

    def __init__(self, context: Context, memory: MemoryLimit, spec: RestoreSpec, buffer_bytes: int) -> None:
        self._buffer_bytes = buffer_bytes
        self.spec = spec
        self.done: set[int] = set()
        self.rows = 0
        self.failed = ""
        self.requested_s = context.loop.time()
        self.requested_epoch = 0  # epoch in which it was requested last
        self._loop = loop = context.loop
        self._executor = context.executor
        self._serving = context.serving
        self._memory = memory
        self._since: dict[int, int] = {}  # by range being restored: the epoch since which it is headed here
        self.over = False  # it has failed, or its driver has gone
        self._pool = ThreadPoolExecutor(READERS, "elasticps-restore")
        self._task = loop.create_task(self._run())

    def stop(self) -> None:
        """Stops reading; nothing more is logged once the task has ended."""
        self.over = True
        self._task.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def end(self) -> None:
        """Stops, and waits until the task has ended."""
        self.stop()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        try:
            contents = await self._loop.run_in_executor(self._pool, self._open)
            while self._loop.time() - self.requested_s < UNASKED_S:
                if self.spec.recovery:
                    mine = self._executor.replica.brings_back()
                else:
                    left = np.setdiff1d(self._serving.headed, np.array(sorted(self.done), np.int64))
                    mine = left[[self._since_of(r) <= self.requested_epoch for r in left.tolist()]]
                if len(mine):
                    try:
                        await self._restore(contents, mine)
                    except _Moved:
                        log.info("restores what is left under the new view")
                await asyncio.sleep(_LOOK_S)
        except (Error, RequestError) as error:
            self.failed = str(error)
            log.warning("cannot restore", url=self.spec.url, error=error)
        except Exception as error:
            self.failed = repr(error)
            log.exception("cannot restore", url=self.spec.url)
        finally:
            self.over = True
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _open(self) -> Contents:
        storage = Storage(self.spec.url)
        contents = Contents(storage, catalog.chain(storage, self.spec.cut))
        for old, _ in self._read_from:
            contents.layers(old)
        return contents

    @property
    def _read_from(self) -> list[tuple[int, int]]:
        """Tables that the checkpoint has, by their ids there and here."""
        return [(old, new) for old, new in self.spec.tables if old]

    async def _restore(self, contents: Contents, mine: Ranges) -> None:
        """Restores the rows of these ranges, then their state."""
        manifest = contents.manifest
        specs = {new: manifest.spec(old) for old, new in self._read_from}
        for (_, new), text in zip(self.spec.tables, self.spec.specs, strict=False):
            specs[new] = TableSpec.from_json(text)
        dropped = self._executor.store.dropped
        if not self.spec.recovery and (gone := [new for new in specs if new in dropped]):
            raise CheckpointError(f"table {specs[gone[0]].name!r} was dropped meanwhile")
        self._since = {r: self._since_of(r) for r in mine.tolist()}
        for new, spec in specs.items():
            self._executor.store.create(spec, new)
        if not self.spec.recovery:
            creates = [
                (OperationKind.CREATE, CreatedTables((CreatedTable(new, spec.to_json()),)), mine)
                for new, spec in specs.items()
            ]
            await self._log(creates)
        else:
            self._set_policies(mine)
        here = np.zeros(self._serving.ranges, np.bool_)
        here[mine] = True
        several, sizes, buffer_bytes = (
            READERS,
            Sizes(UNIT_BYTES, UNIT_BYTES, PORTION_BYTES),
            self._buffer_bytes // READERS,
        )
        if contents.storage.near:
            several, sizes, buffer_bytes = (
                NEAR_READERS,
                Sizes(NEAR_BYTES, 2 * UNIT_BYTES, PORTION_BYTES),
                buffer_bytes // 2,
            )
        found = portions(contents, mine, self._serving.ranges, self._read_from, sizes)
        for portion in found:
            if not portion.left:
                await self._complete(contents, portion.ranges)
        jobs = ((portion, job) for portion in found for job in portion.jobs)
        readers = [self._loop.create_task(self._read(contents, jobs, here, buffer_bytes)) for _ in range(several)]
        try:
            await asyncio.gather(*readers)
        except BaseException:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)
            raise

    def _set_policies(self, mine: Ranges) -> None:
        """Puts recovered ranges under the policies of today: no CREATE or POLICY of theirs comes here any more."""
        for (_, new), text in zip(self.spec.tables, self.spec.specs, strict=False):
            if TableSpec.from_json(text).usage:
                change = ChangedPolicies(new, text)
                self._apply([(OperationKind.POLICY, change, np.array([r])) for r in mine.tolist()])

    async def _complete(self, contents: Contents, ranges: Ranges) -> None:
        """Restores the state of ranges whose rows are committed, and notes that they are done."""
        count = self._serving.ranges
        times = times_of(contents.times(old for old, _ in self._read_from), count, self._read_from)
        if self.spec.whole:
            floors = dict(self.spec.floors) if self.spec.recovery else None
            states = ((r, state_of(contents.manifest, r, count, floors)) for r in ranges.tolist())
            await self._log(
                [(OperationKind.RESTORED, state._replace(time=int(times[r])), np.array([r])) for r, state in states]
            )
        elif times.any():  # or rows would have been used in the future
            await self._log([(OperationKind.TIME, TimeMark(int(times[r])), np.array([r])) for r in ranges.tolist()])
        if self.spec.recovery:
            for r in ranges.tolist():
                self._executor.perform(self._executor.replica.brought_back, r)
        self.done.update(ranges.tolist())

    def _since_of(self, r: int) -> int:
        view = self._serving.view
        return 0 if view is None else int(view.since[r])

    async def _read(
        self, contents: Contents, jobs: Iterator[tuple[Portion, Job]], here: NDArray[np.bool_], buffer_bytes: int
    ) -> None:
        """Takes unit after unit while there are any: reads in a thread, and logs in the loop."""
        take = Pool(buffer_bytes, buffer_bytes // 2).take  # by one thread at a time
        same = contents.manifest.ranges == self._serving.ranges
        for portion, (table, unit, scattered) in jobs:
            parts = _joined(contents.read(unit, take)) if scattered else contents.read(unit, take)
            sketches = same and not scattered
            batches = (
                each
                for rows in parts
                for each in _batches(
                    chain(cut_up(rows, table, here, take), cut_up_waiting(rows, table, here, sketches=sketches))
                )
            )
            while (some := await self._loop.run_in_executor(self._pool, next, batches, None)) is not None:
                await self._log([(OperationKind.RESTORE, piece, np.array([r])) for r, piece in some])
                self.rows += sum(len(piece.keys) for _, piece in some if isinstance(piece, RestoredRows))
            portion.left -= 1
            if not portion.left:
                await self._complete(contents, portion.ranges)

    async def _log(self, operations: Sequence[_Operation]) -> None:
        for _, payload, _ in operations:
            if isinstance(payload, RestoredRows):
                nothing = np.empty((0, 0), np.float32), np.empty(0, np.float32)
                self._memory.take([Block(payload.table, payload.keys, *nothing)])
            elif isinstance(payload, RestoredKeys) and (table := self._executor.store.tables.get(payload.table)):
                self._memory.take_waiting(table, len(payload.keys))
        if self.spec.recovery:
            self._apply(operations)
            return
        await self._still_requested({r for _, _, ranges in operations for r in ranges.tolist()})
        await _logged(self._executor, self._serving.epoch, operations)

    async def _still_requested(self, ranges: set[int]) -> None:
        """Waits for the next request where chains have changed since the last: those ranges may have been restored
        elsewhere meanwhile, and trained."""
        while any(self._since_of(r) > self.requested_epoch for r in ranges):
            if self._loop.time() - self.requested_s >= UNASKED_S:
                raise _Moved
            await asyncio.sleep(_LOOK_S)
        if not self.done.isdisjoint(ranges):
            raise _Moved

    def _apply(self, operations: Sequence[_Operation]) -> None:
        """Applies operations of range recovery at once: no other server has these ranges, and there is no log yet."""
        replica = self._executor.replica
        for kind, payload, ranges in operations:
            r = int(ranges[0])
            if self._since_of(r) != self._since[r] or not np.count_nonzero(replica.brings_back() == r):
                raise _Moved
            self._executor.perform(replica.bring_back, r, kind, payload)


_Operation = tuple[OperationKind, Any, Ranges]


async def _logged(executor: Executor, epoch: int, operations: Sequence[_Operation]) -> None:
    """Logs operations, and waits until they are committed. Raises _Moved if a range may be headed elsewhere."""
    tickets: list[FutureTicket] = []
    for kind, payload, ranges in operations:
        nbytes = payload.nbytes if isinstance(payload, RestoredRows | RestoredKeys) else 256
        tickets.append(executor.log(epoch, kind, ranges, payload, nbytes))
    executor.note_change()
    try:
        replies = await asyncio.gather(*(ticket.future for ticket in tickets))
    except asyncio.CancelledError:
        for ticket in tickets:  # operations that wait for room in the log are not logged
            executor.perform(executor.replica.forget, ticket)
        raise
    if any(reply.status is not Status.COMMITTED or len(reply.moved) for reply in replies):
        raise _Moved


# --- pure -----------------------------------------------------------------------------------------------------------


def _joined(parts: Iterable[RangeRows]) -> Iterator[RangeRows]:
    """Joins rows of several ranges. Rows of a table that has another id now lie in all ranges, and an operation for a
    row or two costs as much as one for hundreds."""
    some = list(parts)
    if some:
        keys, rows = np.concatenate([each.keys for each in some]), np.concatenate([each.rows for each in some])
        usages = [each.usage for each in some if each.usage is not None]
        usage = together(usages) if usages else None
        yield RangeRows(-1, keys, rows, np.concatenate([each.stamps for each in some]), usage)


def cut_up(
    rows: RangeRows, table: int, here: NDArray[np.bool_], take: Take = new_memory
) -> Iterator[tuple[int, RestoredRows]]:
    """Splits rows by range into pieces of PIECE_BYTES, for ranges where `here`, bool [P], is true. Rows of one range
    are not copied; others are, into memory from `take`."""
    where = np.empty(len(rows.keys), np.int32)
    hashing.key_ranges(rows.keys, hashing.table_salt(table), hashing.range_shift(len(here)), where)
    stride = rows.rows.shape[1]
    step = max(1, PIECE_BYTES // (8 + stride))
    if len(where) and (where == where[0]).all():  # the usual case: a cluster with as many ranges
        for at in range(0, len(where) if here[where[0]] else 0, step):
            yield int(where[0]), RestoredRows(table, rows.keys[at : at + step], rows.rows[at : at + step])
        return
    chosen = np.flatnonzero(here[where])
    chosen = chosen[np.argsort(where[chosen], kind="stable")]
    ranges, starts = np.unique(where[chosen], return_index=True)
    ends = np.append(starts[1:], len(chosen))
    for r, start, end in zip(ranges.tolist(), starts.tolist(), ends.tolist(), strict=False):
        for at in range(start, end, step):
            some = chosen[at : min(at + step, end)]
            copy = take(len(some) * stride).reshape(len(some), stride)
            yield r, RestoredRows(table, rows.keys[some], np.take(rows.rows, some, 0, copy, "clip"))


def cut_up_waiting(
    rows: RangeRows, table: int, here: NDArray[np.bool_], *, sketches: bool
) -> Iterator[tuple[int, RestoredKeys]]:
    """Splits the waiting keys of a table, now with id `table`, by range into pieces of PIECE_BYTES, for ranges where
    `here`, bool [P], is true. sketches: the range's own sketch goes with them: its counters are in blocks by the hashes
    of a range, so it says nothing in ranges of another number, or of a table with another id."""
    usage = rows.usage
    if usage is None:
        return
    where = np.empty(len(usage.keys), np.int32)
    hashing.key_ranges(usage.keys, hashing.table_salt(table), hashing.range_shift(len(here)), where)
    step = max(1, PIECE_BYTES // 16)
    for r in np.unique(where).tolist():
        of_range = np.flatnonzero(where == r) if here[r] else where[:0]
        for at in range(0, len(of_range), step):
            some = of_range[at : at + step]
            yield r, RestoredKeys(table, usage.keys[some], usage.words[some], NO_BLOCKS)
    if sketches and len(usage.sketch) and here[rows.range]:
        yield rows.range, RestoredKeys(table, NO_KEYS, NO_KEYS, usage.sketch)


_Piece = tuple[int, RestoredRows | RestoredKeys]


def _batches(pieces: Iterable[_Piece]) -> Iterator[list[_Piece]]:
    """Groups pieces that are logged together: waiting for each would take a turn of the loop for each."""
    some: list[_Piece] = []
    for piece in pieces:
        some.append(piece)
        if sum(each.nbytes for _, each in some) >= 4 * PIECE_BYTES or len(some) == PIECES_AT_ONCE:
            yield some
            some = []
    if some:
        yield some


def times_of(times: NDArray[np.int64], ranges: int, tables: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """The cluster time of each of `ranges` ranges, int64 [ranges], when a checkpoint's ranges had these, int64 [P]: no
    row there was used later. tables: their ids there and here; rows of one with another id lie anywhere."""
    if any(old != new for old, new in tables):
        return np.full(ranges, times.max(initial=0))
    if ranges >= len(times):
        return np.repeat(times, ranges // len(times))
    return np.asarray(times.reshape(ranges, -1).max(axis=1))


def state_of(manifest: Manifest, r: int, ranges: int, floors: Mapping[int, int] | None = None) -> RestoredState:
    """The state of range r, in a cluster with `ranges` ranges: all but its rows. floors: where only lost ranges come
    back, by worker, the least clock. Then steps of workers whose home it is have no record any more, and need not have
    ticked all other ranges: a record of the last one, in no range, says that all up to there are whole."""
    clocks = {worker.id: worker.clock << 16 for worker in manifest.workers.values()}
    clocks |= {id_: clock << 16 for id_, clock in manifest.former.items()}
    clocks |= {id_: progress[r * manifest.ranges // ranges] for id_, progress in manifest.left_out.items()}
    for id_, clock in (floors or {}).items():
        clocks[id_] = max(clocks.get(id_, 0), clock << 16)
    known = sorted((id_, progress) for id_, progress in clocks.items() if progress)
    records = [
        (id_, clock, committed, _scaled(ticked, manifest.ranges, ranges))
        for id_, clock, committed, ticked in manifest.records
        if home_range(id_, ranges) == r
    ]
    if floors is not None:
        recorded = {id_ for id_, *_ in records}
        for id_, progress in known:
            if id_ < ERASER and home_range(id_, ranges) == r and id_ not in recorded | manifest.left_out.keys():
                records.append((id_, progress >> PART_BITS, (progress >> PART_BITS) - 1, ()))
    groups = [dict(one) for one in manifest.groups if hashing.group_range(one["app"], ranges) == r]
    shards = sorted(manifest.shards, key=lambda one: int(one["id"]))  # so that they get the ids that they had
    sets = [dict(one) for one in shards if hashing.group_range(one["app"], ranges) == r]
    return RestoredState(
        manifest.cut, tuple(id_ for id_, _ in known), tuple(progress for _, progress in known), dict(manifest.closed),
        groups, sets, records=tuple(records),
    )  # fmt: skip


def _scaled(ranges: Sequence[int], before: int, now: int) -> tuple[int, ...]:
    """The same ranges, of `before`, in a cluster of `now`."""
    width = max(1, now // before)
    return tuple(sorted({r * now // before + i for r in ranges for i in range(width)}))
