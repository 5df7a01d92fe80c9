"""Writes rows of one table to a safetensors file, and reads them back.

A file has the tensors `keys` int64 [n], `weight` [n, dim] in the table's dtype, a float32 [n, floats] for each slot by
its name, `stamps` int32 [n], `deleted` int64 [m]. Its rows are cut into segments, one for each range, in ascending
order; the header's metadata says which rows are whose, and has a sum of each segment. So a sum of the header
covers the whole file, and a part that is read alone can be checked.

A table that keeps the usage of its rows has columns for it behind the slots, and tensors for keys that wait for a row;
its files have a format number of their own, which versions that know no usage refuse. Files of other tables are what
they were.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_128

from elasticps.checkpoint.range_usage import NO_KEYS, RangeUsage, SegmentUsage, together
from elasticps.checkpoint.storage import Take, new_memory
from elasticps.errors import CheckpointError
from elasticps.model.spec import TableSpec
from elasticps.store.admission import NO_BLOCKS
from elasticps.store.layout import RowLayout, split

FILE_BYTES = 64 << 20
MOST_HEADER = 64 << 20
VERSION = "1"
USAGE_VERSION = "2"  # of tables that keep the usage of their rows
COUNT = "step"  # Adam's number of a row's updates, which files of a manifest of version 1 lack
Bytes = NDArray[np.uint8]
Keys = NDArray[np.int64]
Stamps = NDArray[np.int32]
USAGE_COLUMNS = (("last_use", "U32"), ("count", "F32"), ("score", "F32"))  # as many as the table keeps
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FIRST_BYTES = 1 << 16


class Segment(NamedTuple):
    """One range's part of a file: `rows` rows from row `first` on, `deleted` keys from `first_deleted` on. full: the
    range is written whole here, so nothing of it that an earlier checkpoint has counts any more."""

    range: int
    first: int
    rows: int
    first_deleted: int
    deleted: int
    full: bool
    sum: str
    usage: SegmentUsage | None = None  # of a table that keeps it

    @property
    def waits(self) -> bool:
        """Whether it has keys that wait for a row, or blocks of a sketch."""
        return self.usage is not None and self.usage.nbytes > 0


class Piece(NamedTuple):
    """What a segment holds: keys int64 [n], whole rows uint8 [n, stride], their stamps int32 [n], keys int64 [m] that
    were deleted before that; and the usage of a table that keeps it."""

    segment: Segment
    keys: Keys
    rows: Bytes
    stamps: Stamps
    deleted: Keys
    usage: RangeUsage | None = None


class _Tensor(NamedTuple):
    """A tensor of a file, as its header describes it."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int


class _Column(NamedTuple):
    """A tensor that holds a part of each row: the part's first byte in a row of the store, and its bytes."""

    name: str
    dtype: str
    width: int
    at: int
    nbytes: int


def columns(spec: TableSpec) -> list[_Column]:
    """The columns of a table's files, in order."""
    layout = RowLayout.of(spec)
    found = [_Column("weight", _DTYPES[spec.dtype], spec.dim, 0, layout.weight_bytes)]
    at = layout.slots_at
    for name, floats in spec.optimizer.slot_shapes(spec.dim).items():
        found.append(_Column(name, "F32", floats, at, 4 * floats))
        at += 4 * floats
    for name, dtype in USAGE_COLUMNS[: spec.usage_floats]:
        found.append(_Column(name, dtype, 1, at, 4))
        at += 4
    return found


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """BLAKE2b of 32 bytes, in hexadecimal."""
    sum_ = hashlib.blake2b(digest_size=32)
    for part in parts:
        sum_.update(part)
    return sum_.hexdigest()


def segment_sum(parts: Iterable[memoryview]) -> str:
    """XXH3 of 128 bits, in hexadecimal: against damage, not against people. At 25 times BLAKE2b's speed it costs those
    nothing who train on the same cores."""
    sum_ = xxh3_128()
    for part in parts:
        sum_.update(part)
    return sum_.hexdigest()


# --- writing --------------------------------------------------------------------------------------------------------


@dataclass
class _RangePart:
    """One range's rows until they are written."""

    range: int
    full: bool
    rows: int = 0
    deleted: list[Keys] = field(default_factory=list)
    usages: list[RangeUsage] = field(default_factory=list)


class RowFile:
    """A file that is being filled: rows are split into columns as they come."""

    def __init__(self, spec: TableSpec, memory: Bytes | None = None) -> None:
        """memory: where rows go; more is taken if they do not fit."""
        self.spec = spec
        self.rows = 0
        self.nbytes = 0  # about what the file will have
        self.usage_bytes = 0  # of them beside the rows, not in its memory
        self._layout = RowLayout.of(spec)
        self._columns = columns(spec)
        self._widths = (8, *(column.nbytes for column in self._columns), 4)
        self._parts: list[_RangePart] = []
        self._buffers: list[Bytes] = []
        self.memory = np.empty(_FIRST_BYTES, np.uint8) if memory is None else memory
        self._settle(self.memory)

    @property
    def room(self) -> int:
        """The number of rows that still fit into its memory."""
        return self._capacity - self.rows

    def add(
        self, r: int, keys: Keys, rows: Bytes, stamps: Stamps, deleted: Keys = NO_KEYS, *, full: bool,
        usage: RangeUsage | None = None,
    ) -> None:  # fmt: skip
        """Keys [n], whole rows [n, stride] and stamps [n] of range r, and keys [m] deleted from it before; any number
        of times, ranges in ascending order. A range that has nothing is added too: then it is known to have nothing.
        full: see `Segment`; usage: of a table that keeps it."""
        assert rows.shape == (len(keys), self._layout.stride)
        to = self._begin(r, keys, deleted, full, usage)
        to[-1].view(np.int32)[:] = stamps
        for column, there in zip(self._columns, to[1:-1], strict=True):
            there.reshape(-1, column.nbytes)[:] = rows[:, column.at : column.at + column.nbytes]

    def add_words(
        self, r: int, keys: Keys, words: Keys, base: int, deleted: Keys = NO_KEYS, *, full: bool,
        usage: RangeUsage | None = None,
    ) -> None:  # fmt: skip
        """Like `add`, for rows in a store: their addresses with stamps above `base`, int64 [n]."""
        to = self._begin(r, keys, deleted, full, usage)
        targets = [(there.ctypes.data, c.at, c.nbytes) for c, there in zip(self._columns, to[1:-1], strict=True)]
        split(words, np.array(targets, np.int64).ravel(), base, to[-1].view(np.int32))

    def _begin(self, r: int, keys: Keys, deleted: Keys, full: bool, usage: RangeUsage | None) -> list[Bytes]:
        """Writes keys; returns where their rows' columns and stamps go."""
        if not self._parts or self._parts[-1].range != r:
            assert not self._parts or self._parts[-1].range < r, "ranges come in ascending order"
            self._parts.append(_RangePart(r, full))
        part, first, n = self._parts[-1], self.rows, len(keys)
        assert part.full == full
        if n > self.room:
            self._settle(np.empty(sum(self._widths) * 2 * (first + n), np.uint8))
        if usage is not None:
            assert self.spec.usage, "the table keeps it"
            part.usages.append(usage)
            self.usage_bytes += usage.nbytes
            self.nbytes += usage.nbytes
        part.rows += n
        part.deleted.append(deleted)
        self.rows += n
        self.nbytes += n * sum(self._widths) + 8 * len(deleted)
        to = [p[first * width : self.rows * width] for p, width in zip(self._buffers, self._widths, strict=True)]
        to[0].view(np.int64)[:] = keys
        return to

    def _settle(self, memory: Bytes) -> None:
        """Moves the columns into this memory."""
        self._capacity = max(0, len(memory) - 8 * len(self._widths)) // sum(self._widths)
        buffers, at = [], 0
        for i, width in enumerate(self._widths):
            buffers.append(memory[at : at + self._capacity * width])
            if self.rows:
                buffers[i][: self.rows * width] = self._buffers[i][: self.rows * width]
            at += self._capacity * width + -self._capacity * width % 8
        self._buffers = buffers

    def encode(self, pause: Callable[[], None] = lambda: None) -> Encoded:
        """Encodes the file; valid until its memory is used again. pause: called after each range."""
        usages = [together(part.usages) for part in self._parts] if self.spec.usage else []
        segments, deleted = self._segments(usages)
        of_rows = [place[: self.rows * width] for place, width in zip(self._buffers, self._widths, strict=True)]
        views = [*of_rows, deleted.view(np.uint8)]
        sizes = None
        if self.spec.usage:
            keys, words = (np.concatenate([NO_KEYS, *(usage[i] for usage in usages)]) for i in (0, 1))
            sketch = np.concatenate([NO_BLOCKS.ravel(), *(usage.sketch.ravel() for usage in usages)])
            views += [keys.view(np.uint8), words.view(np.uint8), sketch]
            sizes = len(keys), len(sketch)
        tensors = _tensors(self._columns, self.rows, len(deleted), sizes)
        summed = []
        for segment in segments:
            spans = zip(views, _spans(self._columns, segment), strict=True)
            sum_ = segment_sum(view[first : first + size].data for view, (first, size) in spans)
            summed.append(segment._replace(sum=sum_))
            pause()
        header = _header(tensors, summed, usage=sizes is not None)
        return Encoded((memoryview(header), *(view.data for view in views)), header, self.rows, tuple(summed))

    def _segments(self, usages: Sequence[RangeUsage]) -> tuple[list[Segment], Keys]:
        segments, first, first_deleted, waiting, at = [], 0, 0, 0, 0
        for number, part in enumerate(self._parts):
            deleted, of = sum(map(len, part.deleted)), None
            if usages:
                usage = usages[number]
                blocks, width = usage.sketch.shape
                of = SegmentUsage(waiting, len(usage.keys), at, blocks, width, usage.time, tuple(usage.sweeps))
                waiting, at = waiting + of.waiting, at + usage.sketch.size
            segments.append(Segment(part.range, first, part.rows, first_deleted, deleted, part.full, "", of))
            first, first_deleted = first + part.rows, first_deleted + deleted
        return segments, np.concatenate([NO_KEYS, *(keys for part in self._parts for keys in part.deleted)])


class Encoded(NamedTuple):
    """An encoded file: its bytes in parts, and its entry for the manifest."""

    parts: tuple[memoryview, ...]
    header: bytes
    rows: int
    segments: tuple[Segment, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def sum(self) -> str:
        """The sum of the header, which has the sums of everything else."""
        return checksum([self.header])


def _spans(columns: Sequence[_Column], segment: Segment) -> list[tuple[int, int]]:
    """(first byte in its tensor, bytes) of a segment's part of keys, each column, stamps, deleted, and usage."""
    widths = (8, *(column.nbytes for column in columns), 4)
    of_rows = [(segment.first * width, segment.rows * width) for width in widths]
    spans = [*of_rows, (8 * segment.first_deleted, 8 * segment.deleted)]
    if (usage := segment.usage) is not None:
        spans += [(8 * usage.first, 8 * usage.waiting)] * 2 + [(usage.first_byte, usage.blocks * usage.width)]
    return spans


def _tensors(
    of_rows: Sequence[_Column], rows: int, deleted: int, usage: tuple[int, int] | None = None
) -> list[_Tensor]:
    """The tensors of a file, in the order in which they follow its header. usage: waiting keys, and bytes of sketches,
    of a table that keeps usage."""
    found = [_Tensor("keys", "I64", [rows], 8 * rows)]
    found += [_Tensor(c.name, c.dtype, [rows, c.width], rows * c.nbytes) for c in of_rows]
    found += [_Tensor("stamps", "I32", [rows], 4 * rows), _Tensor("deleted", "I64", [deleted], 8 * deleted)]
    if usage is not None:
        waiting, sketch = usage
        found += [_Tensor(name, "I64", [waiting], 8 * waiting) for name in ("waiting", "waiting_words")]
        found.append(_Tensor("sketch", "U8", [sketch], sketch))
    return found


def _described(tensors: Sequence[_Tensor]) -> dict[str, Any]:
    described, at = {}, 0
    for tensor in tensors:
        end = at + tensor.nbytes
        described[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    return described


def _header(tensors: Sequence[_Tensor], segments: Sequence[Segment], *, usage: bool = False) -> bytes:
    ranges = json.dumps([[*segment[:5], int(segment.full), segment.sum] for segment in segments])
    metadata = {"elasticps": VERSION, "ranges": ranges}
    if usage:
        usages = [segment.usage.document() for segment in segments if segment.usage is not None]
        metadata = {"elasticps": USAGE_VERSION, "ranges": ranges, "usage": json.dumps(usages)}
    document = {"__metadata__": metadata} | _described(tensors)
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that numbers of 8 bytes lie at multiples of 8
    return struct.pack("<Q", len(text)) + text


# --- reading --------------------------------------------------------------------------------------------------------


class RowReader:
    """Reads single segments of one file."""

    def __init__(
        self, name: str, spec: TableSpec, header: bytes, fetch: Callable[[list[tuple[int, int]], Take], Sequence[Any]],
        updates: int = 0,
    ) -> None:  # fmt: skip
        """header: the file's first bytes, as many as its manifest says. fetch: reads several of (first byte, bytes),
        into memory that it may take. updates: of every trained row, in a file of a version that did not count them.
        Raises CheckpointError for what is no such file, or one of another table."""
        self._name, self._spec, self._fetch, self._updates = name, spec, fetch, updates
        self._layout = RowLayout.of(spec)
        self._after = 5 if spec.usage else 2  # tensors behind those of rows' columns
        try:
            self._columns, self.segments, self._at, self.nbytes = _read_header(header, spec)
        except CheckpointError as error:
            raise CheckpointError(f"{name}: {error}") from None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, RecursionError) as error:
            raise CheckpointError(f"{name} is no file of table {spec.name!r}, or was altered: {error!r}") from error

    def read(self, segments: Sequence[Segment], take: Take = new_memory) -> list[Piece]:
        """Segments of the file, in memory from `take`. Raises CheckpointError if one is another than was written."""
        spans = [
            (at + first, size)
            for segment in segments
            for at, (first, size) in zip(self._at, _spans(self._columns, segment), strict=True)
        ]
        parts = iter([np.frombuffer(part, np.uint8) for part in self._fetch(spans, take)])
        return [self._piece(segment, list(islice(parts, len(self._at))), take) for segment in segments]

    def _piece(self, segment: Segment, parts: list[Bytes], take: Take) -> Piece:
        if segment_sum(part.data for part in parts) != segment.sum:
            raise CheckpointError(f"{self._name} was altered: range {segment.range} has another sum than was written")
        stride = self._layout.stride
        rows = take(segment.rows * stride).reshape(segment.rows, stride)
        if sum(column.nbytes for column in self._columns) < stride:  # zeros between columns, or behind them
            rows[:] = 0
        for column, part in zip(self._columns, parts[1 : -self._after], strict=True):
            rows[:, column.at : column.at + column.nbytes] = part.reshape(segment.rows, column.nbytes)
        self._count(rows)
        stamps, deleted, *more = parts[-self._after :]
        usage = None if segment.usage is None else _usage(segment.usage, *more)
        return Piece(segment, parts[0].view(np.int64), rows, stamps.view(np.int32), deleted.view(np.int64), usage)

    def _count(self, rows: Bytes) -> None:
        """Gives trained rows a number of updates if the file has none: those that have a second moment."""
        there = {column.name for column in self._columns}
        lacking = {column.name: column for column in columns(self._spec) if column.name not in there}
        if COUNT in lacking:
            at = lacking[COUNT].at
            second = next(column for column in self._columns if column.name == "exp_avg_sq")
            trained = rows[:, second.at : second.at + second.nbytes].any(axis=1)
            rows[trained, at : at + 4] = np.array([self._updates], np.float32).view(np.uint8)


def _usage(segment: SegmentUsage, keys: Bytes, words: Bytes, sketch: Bytes) -> RangeUsage:
    blocks = sketch.reshape(segment.blocks, segment.width)
    return RangeUsage(keys.view(np.int64), words.view(np.int64), blocks, segment.time, segment.sweeps)


def decode(spec: TableSpec, data: bytes | memoryview, name: str = "a file") -> list[Piece]:
    """Decodes a whole file."""
    view = memoryview(data)
    size = struct.unpack_from("<Q", view)[0] + 8 if len(view) >= 8 else 0
    if not 8 < size <= len(view):
        raise CheckpointError(f"{name} is no file of table {spec.name!r}, or was cut off")

    def fetch(spans: list[tuple[int, int]], take: Take) -> list[memoryview]:
        parts = [view[first : first + nbytes] for first, nbytes in spans]
        if any(len(part) != nbytes for part, (_, nbytes) in zip(parts, spans, strict=True)):
            raise CheckpointError(f"{name} was cut off")
        return parts

    reader = RowReader(name, spec, bytes(view[:size]), fetch)
    return reader.read(reader.segments)


def _read_header(header: bytes, spec: TableSpec) -> tuple[list[_Column], list[Segment], list[int], int]:
    """The columns, the segments, where keys, each column and deleted begin in the file, and where that ends."""
    size = struct.unpack_from("<Q", header)[0]
    if size + 8 != len(header) or size > MOST_HEADER:
        raise ValueError(f"a header of {size} bytes in {len(header)}")
    document = json.loads(header[8:])
    metadata = document.pop("__metadata__")
    if metadata["elasticps"] != (expected := USAGE_VERSION if spec.usage else VERSION):
        if (metadata["elasticps"], expected) == (VERSION, USAGE_VERSION):
            raise CheckpointError(
                f"it was written without the usage of rows, which table {spec.name!r} keeps: export it with the "
                "version that wrote it, and load that"
            )
        raise ValueError(f"format {metadata['elasticps']!r}, and this version reads {expected} of such a table")
    segments = []
    usages = [SegmentUsage.of(each) for each in json.loads(metadata["usage"])] if spec.usage else ()
    for number, each in enumerate(ranges := json.loads(metadata["ranges"])):
        r, first, rows, first_deleted, deleted, full, sum_ = each
        usage = usages[number] if usages else None
        segments.append(Segment(r, first, rows, first_deleted, deleted, bool(full), sum_, usage))
    if usages and len(usages) != len(ranges):
        raise ValueError(f"usage of {len(usages)} ranges, and there are {len(ranges)}")
    (n,), (m,) = document["keys"]["shape"], document["deleted"]["shape"]
    of_rows = [column for column in columns(spec) if column.name in document or column.name != COUNT]
    sizes = _usage_sizes(usages) if spec.usage else None
    tensors = _tensors(of_rows, n, m, sizes)
    if list(document.items()) != list(_described(tensors).items()):
        raise ValueError(f"its tensors are {document}")
    *starts, end = accumulate((tensor.nbytes for tensor in tensors), initial=len(header))
    rows = deleted = 0
    before = -1
    for s in segments:
        if any(type(number) is not int for number in s[:5]):  # nor is a bool one
            raise ValueError(f"segment {s}")
        if (s.first, s.first_deleted) != (rows, deleted) or s.range <= before or min(s.rows, s.deleted) < 0:
            raise ValueError(f"segment {s}")
        rows, deleted, before = rows + s.rows, deleted + s.deleted, s.range
    if (rows, deleted) != (n, m):
        raise ValueError(f"segments of {rows} rows and {deleted} deleted keys, and there are {n} and {m}")
    return of_rows, segments, starts, end


def _usage_sizes(usages: Sequence[SegmentUsage]) -> tuple[int, int]:
    """Waiting keys, and bytes of sketches, of segments that lie one behind the other. ValueError if they do not."""
    waiting = nbytes = 0
    for usage in usages:
        if (usage.first, usage.first_byte) != (waiting, nbytes):
            raise ValueError(f"usage of a segment {usage}")
        waiting, nbytes = waiting + usage.waiting, nbytes + usage.blocks * usage.width
    return waiting, nbytes
