"""The header of each kind of frame between replicas, as `headers.py` has them for all others. Pure."""

from __future__ import annotations

from typing import NamedTuple

from elasticps.wire.frames import LAST, RECORD, REFUSED, ROUND, Header, Kind
from elasticps.wire.headers import ShardRef, shard_fields, shard_of


class ForwardHeader(NamedTuple):
    """FORWARD: an operation's part in `ranges` ranges. kind: of operation; worker: whose progress becomes `after`, 0
    for nobody's; blocks: of a push. round: it is kept for a synchronous round. refused: its head has refused what a
    push brought, and says why. record: the body ends with the step's record."""

    epoch: int
    kind: int
    worker: int
    after: int
    ranges: int
    blocks: int = 0
    round: bool = False
    shard: ShardRef | None = None
    refused: bool = False
    record: bool = False

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        bound, wait_ms = shard_fields(self.shard)
        flags = self.round * ROUND | self.refused * REFUSED | self.record * RECORD
        return Header(
            Kind.FORWARD, flags, body_bytes, 0, self.epoch, self.after,
            self.worker, part=self.kind, table=self.ranges, items=self.blocks, bound=bound, wait_ms=wait_ms,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> ForwardHeader:
        """The inverse of `header`."""
        marks = bool(h.flags & ROUND), shard_of(h), bool(h.flags & REFUSED), bool(h.flags & RECORD)
        return cls(h.epoch, h.part, h.worker, h.clock, h.table, h.items, *marks)


class RangesHeader(NamedTuple):
    """ACK and RESYNC: about so many ranges."""

    kind: Kind
    epoch: int
    ranges: int

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        return Header(self.kind, 0, body_bytes, 0, self.epoch, table=self.ranges)

    @classmethod
    def of(cls, h: Header) -> RangesHeader:
        """The inverse of `header`."""
        return cls(Kind(h.kind), h.epoch, h.table)


class SnapshotChunkHeader(NamedTuple):
    """SNAPSHOT_CHUNK: number `number` of transfer `fill` of a range, at `seq` of its log, behind cut `cut` (0: none);
    with the progress of `workers` workers (in the first one), and rows of `tables` tables. refused, records: and with
    steps of which something was refused, and records of steps (in the first one)."""

    epoch: int
    range: int
    fill: int
    number: int
    last: bool
    seq: int
    workers: int
    tables: int
    cut: int = 0
    refused: bool = False
    records: bool = False

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes."""
        flags = self.last * LAST | self.refused * REFUSED | self.records * RECORD
        return Header(
            Kind.SNAPSHOT_CHUNK, flags, body_bytes, self.fill, self.epoch,
            self.seq, self.range, table=self.workers, items=self.tables, bound=self.number, wait_ms=self.cut,
        )  # fmt: skip

    @classmethod
    def of(cls, h: Header) -> SnapshotChunkHeader:
        """The inverse of `header`."""
        last, marks = bool(h.flags & LAST), (bool(h.flags & REFUSED), bool(h.flags & RECORD))
        return cls(h.epoch, h.worker, h.request, h.bound, last, h.clock, h.table, h.items, h.wait_ms, *marks)


class ChunkAckHeader(NamedTuple):
    """CHUNK_ACK: chunk `number` of transfer `fill` of a range is in place, and every operation up to `seq`."""

    epoch: int
    range: int
    fill: int
    number: int
    last: bool
    seq: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(
            Kind.CHUNK_ACK, self.last * LAST, 0, self.fill, self.epoch, self.seq, self.range, bound=self.number
        )

    @classmethod
    def of(cls, h: Header) -> ChunkAckHeader:
        """The inverse of `header`."""
        return cls(h.epoch, h.worker, h.request, h.bound, bool(h.flags & LAST), h.clock)
