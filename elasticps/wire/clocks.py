"""Clocks of workers, and records of their sparse steps (`replication.step_records`), in frames. Pure.

A PUSH or FORWARD whose flag RECORD is set ends with one: int64 committed, then one bit for each range that the step
ticks, padded to 8 bytes. Where several stand together, in SNAPSHOT_CHUNK and CLOCKS, their number comes first, and
before each record int64 worker and int64 clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.frames import RECORD, REFUSED, FrameError, Header, Kind, padded
from replication.chain import Ranges
from replication.progress import MAX_CLOCK, MAX_WORKER, Progress
from replication.step_records import StepRecord, record_bytes

MOST_RECORDS = 1 << 20
MAX_EPOCH = (1 << 63) - 1
Bytes = NDArray[np.uint8]
NONE: Bytes = np.empty(0, np.uint8)


class ClocksFrame(NamedTuple):
    """CLOCKS: a worker's progress, int64 [n] each, in `ranges`, int64 [n]. records: of its sparse steps; refused: what
    `refusals` writes of its steps there."""

    ranges: Ranges
    applied: Progress
    committed: Progress
    records: Sequence[tuple[int, StepRecord]] = ()
    refused: Bytes = NONE

    def frame(self, request: int, epoch: int) -> bytes:
        """The frame that answers a request."""
        records = encode_records(self.records) if self.records else b""
        numbers = padded(self.ranges.astype("<i4").tobytes()) + self.applied.tobytes() + self.committed.tobytes()
        body = numbers + records + self.refused.tobytes()
        flags = REFUSED * bool(len(self.refused)) | RECORD * bool(records)
        return Header(Kind.CLOCKS, flags, len(body), request, epoch, items=len(self.ranges)).pack() + body

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> ClocksFrame:
        """The inverse, in a cluster of so many ranges: copies, but for `refused`. Raises `FrameError`."""
        n = header.items
        at = (4 * n + 7) & ~7
        end = at + 16 * n
        if n > ranges or end > len(body) or (end < len(body)) != bool(header.flags & (REFUSED | RECORD)):
            raise FrameError(f"a CLOCKS frame of {n} ranges has a body of {len(body)} bytes")
        numbers, records = body[at:end].copy().view(np.int64), list[tuple[int, StepRecord]]()
        if header.flags & RECORD:
            records, end = decode_records(body, end, ranges)
        return cls(_named(body, n, ranges), numbers[:n], numbers[n:], records, body[end:])


class ReadAfter(NamedTuple):
    """READ_AFTER: the pulls that follow on this connection are to see what its worker has pushed: its progress, int64
    [n], in `ranges`, int64 [n]. epoch: of the view by which it was sent, as the pulls were."""

    ranges: Ranges
    progress: Progress
    epoch: int = 0

    @property
    def body(self) -> bytes:
        """The frame's body."""
        return padded(self.ranges.astype("<i4").tobytes()) + self.progress.tobytes()

    def frame(self) -> bytes:
        """The whole frame."""
        body = self.body
        return Header(Kind.READ_AFTER, 0, len(body), epoch=self.epoch, items=len(self.ranges)).pack() + body

    @classmethod
    def of(cls, header: Header, body: Bytes, ranges: int) -> ReadAfter:
        """The inverse, in a cluster of so many ranges: copies. Raises `FrameError`."""
        n = header.items
        at = (4 * n + 7) & ~7
        if n > ranges or at + 8 * n != len(body):
            raise FrameError(f"a READ_AFTER frame of {n} ranges has a body of {len(body)} bytes")
        if header.epoch > MAX_EPOCH:
            raise FrameError(f"a READ_AFTER frame is of epoch {header.epoch}, the highest is {MAX_EPOCH}")
        return cls(_named(body, n, ranges), body[at:].copy().view(np.int64), header.epoch)


def _named(body: Bytes, n: int, ranges: int) -> Ranges:
    """The n ranges at the front of a body, of so many: a copy."""
    named: Ranges = body[: 4 * n].view(np.int32).astype(np.int64)
    if n and (named.min() < 0 or named.max() >= ranges):
        raise FrameError(f"a frame names ranges outside 0..{ranges - 1}")
    return named


def encode_record(record: StepRecord) -> bytes:
    """The end of a PUSH or FORWARD that has a record."""
    return record.committed.to_bytes(8, "little") + record.bits


def split_record(body: Bytes, clock: int, ranges: int) -> tuple[Bytes, StepRecord]:
    """A body without the record at its end, and the record, of step `clock`. Raises `FrameError` if it has none."""
    n = record_bytes(ranges)
    if len(body) < n:
        raise FrameError(f"a frame of {len(body)} bytes says that a record of {n} bytes is at its end")
    return body[:-n], _record(body[-n:], clock, ranges)


def encode_records(records: Sequence[tuple[int, StepRecord]]) -> bytes:
    """(worker, record) pairs, one after another."""
    numbers = (worker.to_bytes(8, "little") + record.clock.to_bytes(8, "little") for worker, record in records)
    pairs = zip(numbers, (encode_record(record) for _, record in records), strict=True)
    return len(records).to_bytes(8, "little") + b"".join(head + body for head, body in pairs)


def decode_records(body: Bytes, at: int, ranges: int) -> tuple[list[tuple[int, StepRecord]], int]:
    """The inverse, from byte `at` on, and where it ends. Raises `FrameError` for what cannot be."""
    each = 16 + record_bytes(ranges)
    count = int.from_bytes(body[at : at + 8].tobytes(), "little")
    at += 8
    if count > MOST_RECORDS or at + each * count > len(body):
        raise FrameError(f"{count} records of steps do not fit in a body of {len(body)} bytes")
    found = []
    for _ in range(count):
        worker, clock = body[at : at + 16].copy().view(np.int64).tolist()
        if not 0 < worker <= MAX_WORKER:
            raise FrameError(f"a record of a step is of worker {worker}")
        found.append((worker, _record(body[at + 16 : at + each], clock, ranges)))
        at += each
    return found, at


def _record(body: Bytes, clock: int, ranges: int) -> StepRecord:
    committed, bits = int.from_bytes(body[:8].tobytes(), "little"), body[8:].tobytes()
    if not 0 <= committed < clock < MAX_CLOCK:
        raise FrameError(f"a record of step {clock} says that all up to step {committed} is committed")
    record = StepRecord(clock, committed, bits)
    if len(record.ranges) and record.ranges[-1] >= ranges:
        raise FrameError(f"a record of step {clock} names range {record.ranges[-1]} of {ranges}")
    return record
