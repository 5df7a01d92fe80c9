"""Verifies whole checkpoints, and merges increments into full ones."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import numpy as np

from elasticps.checkpoint import catalog
from elasticps.checkpoint.contents import Contents, RangeRows, Unit, reader_of
from elasticps.checkpoint.manifest import FileEntry, Manifest, folder_of_table, path_of
from elasticps.checkpoint.range_usage import RangeUsage
from elasticps.checkpoint.rows import FILE_BYTES, RowFile, Segment
from elasticps.checkpoint.storage import Storage
from elasticps.errors import CheckpointError
from elasticps.kernels import hashing
from elasticps.model.spec import TableSpec
from elasticps.store.layout import RowLayout

READERS = 4  # files that are checked at once
_PART_BYTES = 8 << 20
Tell = Callable[[int], None]


def verify(storage: Storage, manifest: Manifest, tell: Tell = lambda nbytes: None) -> list[str]:
    """Reads all of a checkpoint's own files; what is wrong with them, in words. tell(n) hears of each n bytes.

    All that the manifest names is there, as long and with the sums that were written; each table has all ranges; each
    key lies in its range, once.
    """
    sizes = dict(storage.files(manifest.folder))
    problems: list[str] = []

    def look(entry: FileEntry) -> list[str]:
        path = f"{manifest.folder}/{entry.path}"
        if sizes.get(path) != entry.bytes:
            return [f"{path} has {sizes[path]} bytes, not {entry.bytes}" if path in sizes else f"{path} is missing"]
        try:
            _check_file(storage, manifest, entry)
        except CheckpointError as error:
            return [str(error)]
        tell(entry.bytes)
        return []

    with ThreadPoolExecutor(READERS) as pool:
        for found in pool.map(look, manifest.files):
            problems += found
    if not problems:
        contents = Contents(storage, [manifest])
        for id_, _ in manifest.tables.values():
            try:
                contents.layers(id_)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def _check_file(storage: Storage, manifest: Manifest, entry: FileEntry) -> None:
    spec = manifest.spec(entry.table)
    reader = reader_of(storage, manifest, entry, spec)
    salt, shift = hashing.table_salt(entry.table), hashing.range_shift(manifest.ranges)
    for segments in _parts(reader.segments, entry):
        for piece in reader.read(segments):
            for what, keys in (("keys", piece.keys), ("deleted keys", piece.deleted)):
                ranges = np.empty(len(keys), np.int32)
                hashing.key_ranges(keys, salt, shift, ranges)
                if (ranges != piece.segment.range).any() or len(np.unique(keys)) < len(keys):
                    r = piece.segment.range
                    raise CheckpointError(
                        f"{manifest.folder}/{entry.path}: {what} of range {r} repeat or lie elsewhere"
                    )


def _parts(segments: Sequence[Segment], entry: FileEntry) -> Iterator[list[Segment]]:
    """Groups segments into parts of about _PART_BYTES."""
    width = max(1, entry.bytes // max(1, sum(s.rows + s.deleted for s in segments)))
    some: list[Segment] = []
    nbytes = 0
    for segment in segments:
        some.append(segment)
        nbytes += (segment.rows + segment.deleted) * width
        if nbytes > _PART_BYTES:
            yield some
            some, nbytes = [], 0
    if some:
        yield some


def merge(storage: Storage, chain: Sequence[Manifest], tell: Tell = lambda rows: None) -> Manifest:
    """Makes the last checkpoint of a chain a full one, with its own number: what adds to it still does. Nothing that it
    was made of is needed any more. tell(n) hears of each n rows.

    Whoever reads it meanwhile goes on with what it was, which is deleted afterwards. A file at a time is in memory, and
    the keys of one unit. What fails leaves all as it was; what is killed leaves files that nobody names, which
    `catalog.clean` finds. CheckpointError, also if somebody else has merged or deleted it meanwhile.
    """
    last = chain[-1]
    if not last.since:
        return last
    contents = Contents(storage, chain)
    files: list[FileEntry] = []
    token = uuid.uuid4().hex[:12]
    try:
        for id_, spec in last.tables.values():
            for number, file in enumerate(_merged(contents, id_, spec, tell)):
                encoded = file.encode()
                path = f"{folder_of_table(spec, id_)}/merged-{token}.{number:03d}.safetensors"
                files.append(FileEntry.of(path, id_, encoded))
                storage.put(f"{last.folder}/{path}", encoded.parts)
        merged = replace(last, since=0, files=tuple(files))
        if catalog.read(storage, last.cut) != last:
            raise CheckpointError(f"{storage.url}: somebody else has merged checkpoint {last.cut} meanwhile")
        if lacks := catalog.lacking(storage, merged):
            raise CheckpointError(f"checkpoint {last.cut} cannot be merged: {lacks}")
    except BaseException:
        with suppress(CheckpointError):
            storage.delete([f"{last.folder}/{file.path}" for file in files])
        raise
    storage.put(path_of(last.cut), merged.encode())
    storage.delete([f"{last.folder}/{file.path}" for file in last.files])
    return merged


def _merged(contents: Contents, table: int, spec: TableSpec, tell: Tell) -> Iterator[RowFile]:
    file = RowFile(spec)
    nothing = np.empty(0, np.int64), np.empty((0, RowLayout.of(spec).stride), np.uint8), np.empty(0, np.int32)
    times = contents.times([table])
    for unit in contents.units(table):
        for r, pieces in _by_range(contents, unit):
            file.add(r, *nothing, full=True, usage=RangeUsage(time=int(times[r])) if spec.usage else None)
            for piece in pieces:
                file.add(r, piece.keys, piece.rows, piece.stamps, full=True, usage=_waiting(piece))
                tell(len(piece.keys))
                if file.nbytes >= FILE_BYTES:
                    yield file
                    file = RowFile(spec)
    yield file


def _waiting(piece: RangeRows) -> RangeUsage | None:
    """The waiting keys of a piece, without sweeps: what they chose is not in a full checkpoint."""
    return piece.usage._replace(sweeps=()) if piece.usage is not None else None


def _by_range(contents: Contents, unit: Unit) -> Iterator[tuple[int, Iterable[RangeRows]]]:
    if len(unit.ranges) == 1:  # it may be large
        yield unit.ranges[0], contents.read(unit)
        return
    found: dict[int, list[RangeRows]] = {r: [] for r in unit.ranges}
    for piece in contents.read(unit):
        found[piece.range].append(piece)
    yield from found.items()
