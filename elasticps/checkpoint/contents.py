"""Reads the rows of a checkpoint, each once, over all its increments, a bounded part at a time.

The newest increment is read first: a row that is found there, or a key that was deleted, hides what older ones have.
So only keys are remembered, and no row is read that does not count. Its sweeps are applied to the rows of older ones,
not to its own: a row there was used or made after the sweep, or was not chosen by it.

A server that brings back its ranges reads them in portions, so that an interruption costs one portion.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.checkpoint.manifest import FileEntry, Manifest
from elasticps.checkpoint.range_usage import RangeUsage, joined
from elasticps.checkpoint.rows import Bytes, Keys, Piece, RowReader, Stamps, checksum
from elasticps.checkpoint.storage import Storage, Take, new_memory
from elasticps.errors import CheckpointError
from elasticps.model.spec import TableSpec
from elasticps.store.eviction import Sweep
from elasticps.store.layout import RowLayout
from elasticps.store.swept import RowUsage
from replication.chain import Ranges

UNIT_BYTES = 8 << 20
READERS = 8  # files whose headers are read at once


class RangeRows(NamedTuple):
    """Rows of a range: keys int64 [n], whole rows uint8 [n, stride], stamps int32 [n]. usage: waiting keys as the
    newest checkpoint has them."""

    range: int
    keys: Keys
    rows: Bytes
    stamps: Stamps
    usage: RangeUsage | None = None


class Unit(NamedTuple):
    """Some ranges of a table that are read at once: a single one, or several within a limit of bytes."""

    table: int
    ranges: tuple[int, ...]
    rows: int
    bytes: int


class _Layer:
    """One checkpoint's files of a table."""

    def __init__(self, files: Sequence[RowReader], ranges: int, where: str) -> None:
        self.files = files
        self.sizes: NDArray[np.int64] = np.zeros((2, ranges), np.int64)  # rows, deleted
        self.usage_bytes: NDArray[np.int64] = np.zeros(ranges, np.int64)  # of waiting keys
        self.times: NDArray[np.int64] = np.zeros(ranges, np.int64)  # cluster time, where the table keeps usage
        self.sweeps: dict[int, list[Sweep]] = {}
        covered = np.zeros(ranges, np.bool_)
        full = np.full(ranges, -1, np.int8)
        for file in files:
            for s in file.segments:
                self.sizes[:, s.range] += s.rows, s.deleted
                covered[s.range] = True
                if full[s.range] not in (-1, s.full):
                    raise CheckpointError(f"{where} contradicts itself: range {s.range} is written whole, and is not")
                full[s.range] = s.full
                if s.usage is not None:
                    self.usage_bytes[s.range] += s.usage.nbytes
                    self.times[s.range] = max(self.times[s.range], s.usage.time)
                    self.sweeps.setdefault(s.range, []).extend(s.usage.sweeps)
        if not covered.all():
            raise CheckpointError(f"{where} lacks range {np.flatnonzero(~covered)[0]}")
        self.full = full == 1


class Contents:
    """A checkpoint that can be read: the chain that ends with it."""

    def __init__(self, storage: Storage, chain: Sequence[Manifest]) -> None:
        self.storage = storage
        self.chain = chain
        self.manifest = chain[-1]
        self._layers: dict[int, list[_Layer]] = {}

    def layers(self, table: int) -> list[_Layer]:
        """The layers of a table, newest first. Headers are read on first use, and checked against their sums."""
        if table not in self._layers:
            having = [m for m in reversed(self.chain) if table in (id_ for id_, _ in m.tables.values())]
            self._layers[table] = [self._layer(manifest, table) for manifest in having]
        return self._layers[table]

    def _layer(self, manifest: Manifest, table: int) -> _Layer:
        spec = self.manifest.spec(table)
        entries = [file for file in manifest.files if file.table == table]
        with ThreadPoolExecutor(READERS) as pool:
            files = list(pool.map(lambda entry: reader_of(self.storage, manifest, entry, spec), entries))
        where = f"{self.storage.url}: checkpoint {manifest.cut} of table {spec.name!r}"
        return _Layer(files, manifest.ranges, where)

    def rows(self, table: int) -> int:
        """The number of rows in a table's files, hidden ones included: for progress."""
        return int(sum(layer.sizes[0].sum() for layer in self.layers(table)))

    def sizes(self, table: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows, and bytes, of each range of a table, hidden ones included: int64 [ranges]."""
        layers = self.layers(table)
        rows = np.add.reduce([layer.sizes[0] for layer in layers])
        width = 12 + RowLayout.of(self.manifest.spec(table)).stride
        deleted = np.add.reduce([layer.sizes[1] for layer in layers])
        return rows, rows * width + 8 * deleted + layers[0].usage_bytes

    def times(self, tables: Iterable[int]) -> NDArray[np.int64]:
        """Cluster time of each range at the cut, as far as these tables tell, else 0: int64 [ranges]."""
        found = np.zeros(self.manifest.ranges, np.int64)
        for table in tables:
            np.maximum(found, self.layers(table)[0].times, out=found)
        return found

    def units(self, table: int, chosen: Iterable[int] | None = None, most_bytes: int = UNIT_BYTES) -> Iterator[Unit]:
        """The ranges of a table that are wanted, ascending, all if none are named; several at once if they have no more
        bytes."""
        rows, nbytes = self.sizes(table)
        some: list[int] = []
        for r in range(self.manifest.ranges) if chosen is None else chosen:
            if some and nbytes[some].sum() + nbytes[r] > most_bytes:
                yield Unit(table, tuple(some), int(rows[some].sum()), int(nbytes[some].sum()))
                some = []
            some.append(r)
        if some:
            yield Unit(table, tuple(some), int(rows[some].sum()), int(nbytes[some].sum()))

    def read(self, unit: Unit, take: Take = new_memory) -> Iterator[RangeRows]:
        """Its rows, each once; the ranges in no order. What is in memory is a file's part of the unit, and the keys of
        increments; rows and keys lie where `take` says. Raises CheckpointError."""
        layers, spec = self.layers(unit.table), self.manifest.spec(unit.table)
        measured = RowUsage(spec, unit.table) if spec.usage else None
        hidden: dict[int, list[Keys]] = {r: [] for r in unit.ranges}
        sweeps: dict[int, list[Sweep]] = {}  # of newer layers
        for layer in layers:
            newest, last = layer is layers[0], layer is layers[-1]
            seen: dict[int, list[Keys]] = {r: [] for r in hidden}
            for file in layer.files:
                segments = [
                    s for s in file.segments if s.range in hidden and (s.rows or s.deleted or (newest and s.waits))
                ]
                for piece in file.read(segments, take) if segments else ():
                    r = piece.segment.range
                    seen[r] += [piece.keys, piece.deleted]
                    gone = None
                    if measured is not None and sweeps.get(r):
                        gone = measured.swept(piece.keys, piece.rows, sweeps[r])
                    yield _visible(piece, hidden[r], gone, piece.usage if newest else None)
            hidden = {r: hidden[r] + seen[r] for r in hidden if not (last or layer.full[r])}
            sweeps |= {r: joined(found, sweeps.get(r, ())) for r, found in layer.sweeps.items() if r in hidden}


def _visible(
    piece: Piece, hidden: list[Keys], gone: NDArray[np.bool_] | None, usage: RangeUsage | None
) -> RangeRows:  # fmt: skip
    """The rows of a piece that count: without those of hidden keys, and those that are gone, bool [n]."""
    r, keys, rows, stamps = piece.segment.range, piece.keys, piece.rows, piece.stamps
    if hidden or gone is not None:
        fresh = np.isin(keys, np.concatenate(hidden), invert=True) if hidden else np.ones(len(keys), np.bool_)
        if gone is not None:
            fresh &= ~gone
        keys, rows, stamps = keys[fresh], rows[fresh], stamps[fresh]
    return RangeRows(r, keys, rows, stamps, usage)


def reader_of(storage: Storage, manifest: Manifest, entry: FileEntry, spec: TableSpec) -> RowReader:
    """A reader of one file. Raises CheckpointError if its header differs from what was written."""
    path = f"{manifest.folder}/{entry.path}"
    header = storage.get_range(path, 0, entry.header)
    where = f"{storage.url}/{path}"
    if checksum([header]) != entry.blake2b:
        raise CheckpointError(f"{where} was altered: its header has another sum than the manifest says")
    reader = RowReader(where, spec, header, partial(storage.get_ranges, path), manifest.newest_clock)
    if tuple(s.range for s in reader.segments) != entry.ranges or sum(s.rows for s in reader.segments) != entry.rows:
        raise CheckpointError(f"{where} has other ranges or rows than the manifest says")
    if reader.nbytes != entry.bytes:  # before memory is taken for what it says it has
        raise CheckpointError(
            f"{where} has {entry.bytes} bytes as the manifest says, {reader.nbytes} as its header does"
        )
    return reader


# --- portions of a server: pure ---------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """Bytes of a unit, of a unit of a table whose rows lie in all ranges, and of a portion at least, per table."""

    unit: int
    wide: int
    portion: int


class Job(NamedTuple):
    """A unit to read, for the table with id `table` here. scattered: its rows may lie in any range."""

    table: int
    unit: Unit
    scattered: bool


@dataclass
class Portion:
    """Ranges that are complete when these jobs are done. left: jobs not yet done."""

    ranges: Ranges
    jobs: Sequence[Job]
    left: int


def portions(
    contents: Contents, mine: Ranges, ranges: int, tables: Sequence[tuple[int, int]], sizes: Sizes
) -> list[Portion]:
    """All that some ranges (ascending) of a cluster with so many have in a checkpoint, each unit of it in one portion.
    tables: their ids there and here. A table with another id here has rows of each range in all of the checkpoint's:
    then it is one portion."""
    there = contents.manifest.ranges
    shared = min(there, ranges)  # intervals of hashes that are whole ranges on both sides
    scattered = any(old != new for old, new in tables)
    nbytes = sum((contents.sizes(old)[1].reshape(shared, -1).sum(axis=1) for old, _ in tables), np.zeros(shared, int))
    most = sizes.portion * max(1, len(tables))
    found = []
    at = np.asarray(mine) * shared // ranges
    intervals = np.unique(at)
    while len(intervals):
        before = np.cumsum(nbytes[intervals]) - nbytes[intervals]
        n = len(intervals) if scattered else max(1, int(np.searchsorted(before, most)))
        some, intervals = intervals[:n], intervals[n:]
        lying = (some[:, None] * (there // shared) + np.arange(there // shared)).ravel().tolist()
        jobs = []
        for old, new in tables:
            units = contents.units(old, lying, sizes.unit) if old == new else contents.units(old, None, sizes.wide)
            jobs += [Job(new, unit, old != new) for unit in units]
        found.append(Portion(np.asarray(mine)[np.isin(at, some)], jobs, len(jobs)))
    return found


def to_bits(some: Collection[int], ranges: int) -> bytes:
    """Encodes a set of ranges as bits, the lowest first."""
    flags = np.zeros(ranges, np.bool_)
    flags[list(some)] = True
    return np.packbits(flags, bitorder="little").tobytes()


def from_bits(data: bytes, ranges: int) -> list[int]:
    """The inverse, ascending; what is missing at the end counts as zeros."""
    padded = np.zeros(-(-ranges // 8), np.uint8)  # numpy's own padding gives anything for no bytes at all
    given = np.frombuffer(data, np.uint8)[: len(padded)]
    padded[: len(given)] = given
    return np.flatnonzero(np.unpackbits(padded, count=ranges, bitorder="little")).tolist()
