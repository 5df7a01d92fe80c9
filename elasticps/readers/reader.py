"""A reader: rows of a cluster's tables in this process, kept as new as its servers send them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from elasticps.client.registry import Registry
from elasticps.client.runtime import Lock
from elasticps.errors import Error, InputError, Timeout, UnknownTable
from elasticps.model.spec import TableSpec
from elasticps.readers.connections import ReaderConnections
from elasticps.readers.core.absent_tables import NOTHING
from elasticps.readers.core.clocks import RangeClocks
from elasticps.readers.core.following import Feed, Wishes
from elasticps.readers.holding import SEARCH_S, Holding, HoldState
from elasticps.readers.listeners import Listeners
from elasticps.readers.rows import GatheredTable, ReaderTable, ReaderTables
from elasticps.readers.values import AsOf, Listener, ReaderSpec, ReaderStats, TableChange, check_names_keys
from elasticps.store.journal import Journal
from elasticps.wire.frames import FrameError, Header, Kind
from elasticps.wire.range_parts import RangePart, ReadRange
from elasticps.wire.windows import WindowFrame

if TYPE_CHECKING:
    from elasticps.readers.pinning import CheckpointName, CheckpointRows

Rows = NDArray[np.float32]
Bytes = NDArray[np.uint8]

HOLD_POLL_S = 0.02
MEASURED = 1024  # windows whose ages are remembered


class Reader:
    """Rows in local memory that follow training. Made by `reader`; threads may share it, and it is a context manager.

    Without `hold` each row is the newest committed one that has come.
    """

    def __init__(self, registry: Registry, spec: ReaderSpec, name: str, timeout_s: float) -> None:
        """Connects, and returns before it has read anything."""
        self.spec = spec  # what it follows
        self._registry = registry  # of the cluster
        runtime = registry.runtime
        self._lock = runtime.rlock()  # of rows and of what is known of them
        self._arrived = runtime.condition()  # something has been applied
        wishes = Wishes(spec.tables, spec.dtype or "", max(1, round(spec.every * 1e3)), spec.share)
        # To servers.
        self._links = ReaderConnections(registry, self._lock, name, spec.application, wishes, timeout_s, self)
        self._following = self._links.following  # which server for which range
        self._tables = ReaderTables(self._following.ranges, spec.dtype, spec.share)  # rows
        self._clocks = RangeClocks(self._following.ranges)  # of workers, by range
        # One moment of all ranges.
        self._holding = Holding(
            self._following, self._clocks, self._links.subscribe, self._links.handle, spec.buffer_bytes
        )
        self._listeners = Listeners(runtime, self._lock)  # who gets each window
        # Since it began.
        self._counts = dict.fromkeys(
            ("windows", "window_bytes", "changed", "filled", "fill_bytes", "pulls", "pulled"), 0
        )
        self._ages: deque[float] = deque(maxlen=MEASURED)  # of windows, as they were applied
        self._pinned: CheckpointRows | None = None  # what pulls show instead
        self._journal: Journal | None = None  # of changed keys, for readers that follow this one
        self._hooks: tuple[Callable[[], None], ...] = ()  # called whenever something was applied
        self._links.start()

    @property
    def cluster(self) -> str:
        """The cluster's name."""
        return self._registry.cluster

    @property
    def tables(self) -> dict[str, TableSpec]:
        """The tables that are here, by name."""
        with self._lock:
            return {name: table.spec for name, table in self._tables.by_name.items()}

    @property
    def age(self) -> float:
        """Seconds since the state that the oldest range shows was read at its server; infinite before the first."""
        oldest = int(self._following.time_us.min())
        return max(0.0, self._registry.runtime.wall() - oldest / 1e6) if oldest else float("inf")

    @property
    def as_of(self) -> AsOf:
        """How far it has come: vector clock, positions and time of what is shown."""
        with self._lock:
            return self._followed() if self._pinned is None else self._pinned.as_of

    def _followed(self) -> AsOf:
        """How far what it follows has come; under the lock."""
        following = self._following
        oldest = int(following.time_us.min()) / 1e6
        return AsOf(oldest, following.epoch, following.have.copy(), self._clocks.steps(), self._holding.held)

    def pull(self, keys: Mapping[str, object]) -> dict[str, Rows]:
        """Rows of several tables, {table: keys int64 [n]}: of each float32 [n, dim] in the order of its keys, from this
        process's memory. Keys without a row read as the servers compute them. `keys` of None: all of a tensor, in its
        shape. Raises `UnknownTable`; `Closed` when the reader is."""
        if self._links.error is not None:
            self.check()
        check_names_keys(keys)
        found = {}
        with self._lock:
            if self._pinned is not None:
                self._counts["pulls"] += 1
                return self._pinned.pull(keys)
            for name, named in keys.items():
                table = self._table(name)
                if named is None:
                    found[name] = table.pull_whole()
                    continue
                checked = table.owned_keys(named)
                found[name] = table.pull(checked)
                self._counts["pulled"] += len(checked)
            self._counts["pulls"] += 1
        return found

    def pull_numbered(
        self,
        parts: Sequence[tuple[int, NDArray[np.int64]]],
        most_bytes: int,
        gather: Callable[[Sequence[GatheredTable]], Bytes],
    ) -> Bytes:
        """What `gather` makes, under the lock, of tables by their ids: for `PullServer`. InputError for more than
        `most_bytes` of rows. While it is pinned, of that."""
        if self._links.error is not None:
            raise self._links.error
        with self._lock:
            tables, pinned = self._tables.by_id, self._pinned
            if unknown := [number for number, _ in parts if number not in tables]:
                raise UnknownTable(f"this reader has no table of id {unknown[0]}")
            size = sum(4 * tables[number].spec.dim * len(keys) for number, keys in parts)
            if size > most_bytes:
                raise InputError(f"a pull of {size:,} bytes of rows is over the limit of {most_bytes:,}")
            found = list[GatheredTable]()
            for number, keys in parts:
                table = tables[number] if pinned is None else pinned.table_like(tables[number].spec)
                found.append(GatheredTable(table, table.owned_keys(keys)))
            self._counts["pulls"] += 1
            self._counts["pulled"] += 0 if pinned is not None else sum(len(keys) for _, keys in found)
            return gather(found)

    @property
    def ranges(self) -> int:
        """How many ranges the cluster has."""
        return self._following.ranges

    @property
    def identity(self) -> str:
        """The cluster's name, and what distinguishes it from others of that name."""
        return self._links.routes.view.cluster

    @property
    def positions(self) -> NDArray[np.int64]:
        """How far each range is here, int64 [P], a copy; under `lock`."""
        return self._following.have.copy()

    @property
    def exact(self) -> bool:
        """Whether all ranges are as their servers said at the end of a window, and no row is newer; under `lock`."""
        return bool(self._following.exact.all())

    @property
    def clocks(self) -> RangeClocks:
        """How far workers are in each range; under `lock`."""
        return self._clocks

    @property
    def oldest_us(self) -> int:
        """When the oldest range's state was read, microseconds since 1970."""
        return int(self._following.time_us.min())

    def keep_journal(self, journal: Journal) -> None:
        """From now on notes the keys of what windows bring."""
        with self._lock:
            self._journal = journal

    def hook(self, call: Callable[[], None]) -> None:
        """Has something called whenever a frame was applied, from the reader's thread."""
        with self._lock:
            self._hooks = (*self._hooks, call)

    def unhook(self, call: Callable[[], None]) -> None:
        """Ends that."""
        with self._lock:
            self._hooks = tuple(one for one in self._hooks if one != call)

    @property
    def lock(self) -> Lock:
        """Of the rows: while it is held, none changes."""
        return self._lock

    @property
    def table_rows(self) -> dict[str, ReaderTable]:
        """The tables by name; under `lock`."""
        return self._tables.by_name

    def _table(self, name: str) -> ReaderTable:
        table = self._tables.by_name.get(name)
        if table is None:
            there = ", ".join(sorted(self._tables.by_name)) or "none"
            raise UnknownTable(f"this reader has no table {name!r}; it has {there}")
        return table

    def hold(self, timeout: float = 10.0) -> AsOf:
        """From now on pulls show one moment: for every worker the same steps in all ranges, until `release`. Windows
        are kept meanwhile. `Timeout` says how far ranges are apart if there is no such moment in time."""
        until_s = self._registry.runtime.monotonic() + timeout
        begun_s = 0.0
        try:
            while True:
                with self._lock:
                    now = self._registry.runtime.monotonic()
                    if self._holding.held:
                        return self.as_of
                    if self._holding.state is HoldState.FOLLOWS or now - begun_s > SEARCH_S:
                        begun_s = now
                        self._holding.begin()
                self.check()
                if now >= until_s:
                    raise Timeout(
                        f"the reader found no moment of all ranges within {timeout:.1f} s: {self._holding.apart}"
                    )
                with self._arrived:
                    self._arrived.wait(min(until_s - now, HOLD_POLL_S))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Goes on with the newest; no effect unless it holds."""
        with self._lock:
            self._holding.release()

    @property
    def pinned(self) -> str:
        """The checkpoint that pulls show, as URL/000042; "" while the reader follows training."""
        pinned = self._pinned
        return "" if pinned is None else str(pinned.name)

    def pin(self, checkpoint: str) -> AsOf:
        """From now on pulls show a checkpoint, until `follow`: the newest at a URL, or `URL/000042`. Its rows are read
        first, into memory beside those that go on following. Raises `CheckpointError`; `UnknownTable` for a table that
        the reader follows and the checkpoint lacks."""
        from elasticps.readers.pinning import parse_name

        return self._pin(parse_name(checkpoint))

    def roll_back(self, checkpoint: str) -> AsOf:
        """The same for `URL/000042`; with a URL alone, the newest checkpoint there that is older than what it shows."""
        from elasticps.readers.pinning import before, parse_name

        pinned = self._pinned
        return self._pin(before(parse_name(checkpoint), None if pinned is None else pinned.name))

    def _pin(self, name: CheckpointName) -> AsOf:
        from elasticps.readers.pinning import CheckpointRows  # reads files, which most readers do without

        rows = CheckpointRows(name, self.spec)
        self._show(rows)
        return rows.as_of

    def _show(self, rows: CheckpointRows | None) -> None:
        with self._lock:
            before, self._pinned = self._pinned, rows
            if before is not None:
                before.close()

    def follow(self) -> None:
        """Shows what training has made by now, and goes on with it; no effect unless the reader is pinned."""
        self._show(None)

    def wait(self, timeout: float = 30.0) -> None:
        """Waits until every range has been read once, and it is known as of when. `reader` has done so. Raises
        `Timeout`."""
        until_s = self._registry.runtime.monotonic() + timeout
        with self._arrived:
            while not (self._following.filled and self.oldest_us):
                self.check()
                left_s = until_s - self._registry.runtime.monotonic()
                if left_s <= 0:
                    raise Timeout(f"the reader has not read all ranges within {timeout:.1f} s: {self._links.explain()}")
                self._arrived.wait(min(left_s, 0.25))

    def subscribe(self, listener: Listener) -> None:
        """Calls `listener` with all rows that are here, in parts (`listing`), and from then on with each window as it
        is applied: in order, from the reader's thread, which waits for it. A listener that raises gets no more, and
        `check` raises what it raised."""
        self.check()
        self._listeners.add(listener)

    def unsubscribe(self, listener: Listener) -> None:
        """Calls it no more; when this returns it is not being called."""
        self._listeners.remove(listener)

    def check(self) -> None:
        """Raises what has ended the reader, or a listener, if anything has."""
        if self._links.error is not None:
            raise self._links.error
        self._listeners.check()

    def stats(self) -> ReaderStats:
        """What it has, and has done."""
        with self._lock:
            tables, ages = self._tables.by_id.values(), np.array(self._ages or [0.0])
            p50, p99 = np.percentile(ages, (50, 99)).tolist()
            return ReaderStats(
                sum(table.rows for table in tables), sum(table.nbytes for table in tables), fills=self._following.fills,
                age_s=self.age, ages_s=(p50, p99), **self._counts,
            )  # fmt: skip

    def close(self) -> None:
        """Ends it; what it had can be read no more."""
        self._links.close()
        self._registry.close()
        self._show(None)
        with self._lock:
            self._tables.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- what servers send ------------------------------------------------------------------------------------------

    def subscribed(self, feed: Feed, ranges: NDArray[np.int64]) -> None:
        """A server has begun to answer for these ranges: it says again how far workers are there."""
        self._clocks.reset(ranges)

    def queue(self, feed: Feed, header: Header, body: Bytes) -> bool:
        """Whether a frame was queued because the reader holds."""
        queued = self._holding.queue(feed, header, body)
        if queued and header.kind == Kind.WINDOW and not self._holding.full:
            self._links.acknowledge(feed, header.clock, len(body))
        return queued

    @property
    def full(self) -> bool:
        """Whether servers are to send nothing, as the reader holds, and its queue is full."""
        return self._holding.full

    def window(self, feed: Feed, frame: WindowFrame, body: Bytes) -> None:
        """A window has come."""
        self._apply(feed, frame, len(body))
        self._links.acknowledge(feed, frame.number, len(body))
        self._holding.step()

    def _apply(self, feed: Feed, frame: WindowFrame, nbytes: int) -> None:
        changes = list[TableChange | None]()
        try:
            changes += [self._tables.add(number, spec) for number, spec in frame.tables if self._follows(spec)]
        except Error as error:
            raise FrameError(f"a WINDOW names a table that cannot be: {error}") from None
        settled, absent = NOTHING, self._registry.absent
        if absent is not None:  # a relay does not say what was dropped while nobody was followed
            first, here, named = frame.number == 1, self._tables.by_id.keys(), feed.tables.keys()
            settled = absent.window(first=first, time_us=frame.time_us, here=here, named=named)
        changes += [self._tables.drop(number) for number in (*frame.dropped, *settled.gone)]
        counts, collect, blocks = self._following.counts(feed), bool(self._listeners), frame.blocks
        if counts is None and not collect:
            overwritten, blocks = self._tables.overwrite(blocks, self._journal)
            self._counts["changed"] += overwritten
        for block in blocks:
            table = self._tables.by_id.get(block.table)
            if table is not None:
                change = table.apply(block, counts)
                self._counts["changed"] += len(change.keys) + len(change.deleted)
                self._note(block.table, change)
                if collect:
                    changes.append(table.decoded(change))
        self._links.ask(feed, self._following.applied(feed, frame))
        if settled.compare:
            self._following.compare(feed)
            self._links.subscribe(feed)
        if frame.complete:
            self._clocks.note(frame.progress.runs, counts)
            self._clocks.note_records(frame.records)
            self._ages.append(self._registry.runtime.wall() - frame.time_us / 1e6)
        self._counts["windows"] += 1
        self._counts["window_bytes"] += nbytes
        self._tell([change for change in changes if change is not None])

    def _follows(self, spec: str) -> bool:
        return self.spec.tables is None or TableSpec.from_json(spec).name in self.spec.tables

    def describe(self, request: ReadRange) -> ReadRange:
        """A request for a part of a range, with digests of the rows that are here: only others are sent."""
        described = self._tables.describe(request)
        self._counts["fill_bytes"] += sum(one.digests.nbytes for one in described.cells)
        return described

    def rows(self, feed: Feed, rows: RangePart) -> None:
        """A part of a range has come."""
        changes, collect = list[TableChange](), bool(self._listeners)
        self._counts["fill_bytes"] += sum(one.block.nbytes for one in rows.intervals)
        for table, change in self._tables.replace(rows, feed.tables):
            self._counts["filled"] += len(change.keys)
            self._note(table.number, change)
            if collect:
                changes.append(table.decoded(change))
        self._tell(changes)

    def _note(self, table: int, change: TableChange) -> None:
        """Notes keys for those that this reader feeds."""
        if self._journal is not None:
            for keys in (change.keys, change.deleted):
                self._journal.note(table, change.spec.dim, keys)

    def _tell(self, changes: Sequence[TableChange]) -> None:
        """Notes what changed for listeners: those get it without the lock."""
        if self._listeners:
            self._listeners.note(changes, self._followed())

    def settle(self) -> None:
        """Tells listeners, and whoever waits."""
        self._listeners.tell(self._list)
        for call in self._hooks:
            call()
        with self._arrived:
            self._arrived.notify_all()

    def _list(self) -> tuple[list[Callable[[], TableChange]], AsOf]:
        return self._tables.listing(), self._followed()
