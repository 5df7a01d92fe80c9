"""Encodes and decodes the messages between replicas. `docs/internals/protocol.md` has the tables.

Most messages between two replicas name the same ranges again and again. So their bytes are remembered by the array, and
the array by its bytes: what it costs to write, read and check them is then paid once.
"""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import WORKERS_MAX
from elasticps.admin.interface import MAX_URL
from elasticps.errors import SpecError
from elasticps.kernels.hashing import HASH_END
from elasticps.model.policies import MAX_TIME
from elasticps.model.sharding import MAX_SHARDS, ShardSpec
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import RoundStep
from elasticps.server.core.data_shards import Claim, ShardMark
from elasticps.server.core.operations import (
    AuditMark,
    ChangedPolicies,
    ChunkContent,
    Cleared,
    Contribution,
    CreatedTable,
    CreatedTables,
    CutMark,
    Dropped,
    RestoredKeys,
    RestoredRows,
    RestoredState,
    RowBlocks,
    SlicedTable,
    TimeMark,
    positions_of,
)
from elasticps.server.core.snapshot import block_buffers, decode_content, encode_content
from elasticps.server.core.sweeps import MOST_IN_A_ROUND, SweptInterval
from elasticps.wire.clocks import decode_records, encode_record, encode_records, split_record
from elasticps.wire.frames import (
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    MAX_CREATED,
    MAX_RANGES,
    Block,
    Buffer,
    FrameError,
    Header,
    Kind,
    json_body,
    padded,
    read_blocks,
    text,
    whole,
    wholes,
)
from elasticps.wire.headers import MAX_CUT, PushHeader, ShardRef
from elasticps.wire.refusals import decode_refusal, decode_steps, encode_refusal, encode_steps
from elasticps.wire.replica_headers import ChunkAckHeader, ForwardHeader, RangesHeader, SnapshotChunkHeader
from replication.chain import Ranges
from replication.messages import Ack, ChunkAck, Forward, Message, Operation, OperationKind, Resync, SnapshotChunk
from replication.progress import MAX_CLOCK, MAX_WORKER, PART_BITS, PART_MASK
from replication.step_records import home_range

_MAX_POSITION = 1 << 62  # of progress, of logs, of epochs: int64 with room for sums
MAX_NAME = 255
MAX_TABLE = (1 << 32) - 1
_ROWS = (OperationKind.PUSH, OperationKind.INIT, OperationKind.LOAD, OperationKind.DELETE)
_ROUND_STEPS = (
    OperationKind.BARRIER_JOIN,
    OperationKind.BARRIER_LEAVE,
    OperationKind.BARRIER_DECISION,
    OperationKind.BARRIER_CLOSE,
)
_REMEMBERED = 16  # arrays of ranges that are remembered, each way

Bytes = NDArray[np.uint8]


class ReplicaCodec:
    """The codec of one server. tables: by id; ranges: of the cluster."""

    def __init__(self, tables: Mapping[int, SlicedTable], ranges: int) -> None:
        self._tables = tables
        self._ranges = ranges
        self._written: deque[tuple[Ranges, bytes]] = deque(maxlen=_REMEMBERED)
        self._read: OrderedDict[bytes, tuple[Ranges, NDArray[np.int64]]] = OrderedDict()
        self._encoders: dict[type, Callable[[Any], list[Buffer]]] = {
            Forward: self._encode_forward,
            Ack: self._encode_ack,
            Resync: self._encode_resync,
            SnapshotChunk: self._encode_piece,
            ChunkAck: self._encode_installed,
        }
        self._decoders: dict[int, Callable[[Header, Bytes], Message]] = {
            Kind.FORWARD: self._decode_forward,
            Kind.ACK: self._decode_ack,
            Kind.RESYNC: self._decode_resync,
            Kind.SNAPSHOT_CHUNK: self._decode_piece,
            Kind.CHUNK_ACK: self._decode_installed,
        }

    def encode(self, message: Message) -> list[Buffer]:
        """The frame of a message; rows are not copied."""
        return self._encoders[type(message)](message)

    def decode(self, header: Header, body: Bytes) -> Message:
        """The message in a frame. It refers to `body`, which must stay as it is. `FrameError` for what is malformed."""
        if header.clock > _MAX_POSITION or header.epoch > _MAX_POSITION:
            raise FrameError(f"a {Kind(header.kind).name} speaks of {header.clock} at epoch {header.epoch}")
        return self._decoders[header.kind](header, body)

    # --- writing ----------------------------------------------------------------------------------------------------

    def _range_bytes(self, ranges: Ranges) -> bytes:
        for known, written in self._written:
            if known is ranges:
                return written
        written = padded(ranges.astype("<i4").tobytes())
        self._written.append((ranges, written))
        return written

    def _encode_forward(self, message: Forward) -> list[Buffer]:
        operation, payload = message.operation, message.operation.payload
        parts: list[Buffer] = [self._range_bytes(message.ranges), message.seqs.tobytes()]
        blocks: list[Block] = []
        mark = None
        home = home_range(operation.worker, self._ranges) if operation.record is not None else -1
        record = operation.record if home >= 0 and (message.ranges == home).any() else None
        if operation.refusal is not None:
            parts.append(encode_refusal(operation.refusal, message.ranges))
        if isinstance(payload, RowBlocks):
            mark = payload.mark
            if isinstance(payload, Contribution):
                parts.append(_section({"app": payload.app, "clock": payload.clock}))
            blocks = payload.part(message.ranges, self._tables)
            for block in blocks:
                parts += block_buffers(block)
        elif isinstance(payload, CreatedTables):
            documents = [_document_of(table) for table in payload.tables]
            parts.append(_json(documents[0] if len(documents) == 1 else {"tables": documents}))
        elif isinstance(payload, Cleared | Dropped):
            parts.append(_json({"id": payload.table}))
        elif isinstance(payload, TimeMark):
            parts.append(_json({"seconds": payload.seconds}))
        elif isinstance(payload, SweptInterval):
            parts.append(_json(payload.document()))
        elif isinstance(payload, ChangedPolicies):
            parts.append(_json({"id": payload.table, "spec": payload.spec}))
        elif isinstance(payload, RestoredRows):
            rows, stride = payload.rows.shape
            parts.append(_section({"id": payload.table, "rows": rows, "stride": stride}))
            parts += [payload.keys.data.cast("B"), payload.rows.data.cast("B")] if rows else []
        elif isinstance(payload, RestoredKeys):
            of_sketch, width = payload.sketch.shape
            waiting = len(payload.keys)
            parts.append(_section({"id": payload.table, "waiting": waiting, "blocks": of_sketch, "width": width}))
            parts += [payload.keys.tobytes(), payload.words.tobytes(), padded(payload.sketch.tobytes())]
        elif isinstance(payload, RestoredState):
            parts.append(_json(payload.document()))
        elif isinstance(payload, AuditMark | CutMark):
            parts.append(_json(payload._asdict()))
        elif isinstance(payload, RoundStep):
            document = {"id": payload.clock, "app": payload.app, "workers": payload.workers}
            if payload.total:
                document["total"] = payload.total
            if payload.sweeps:
                document["sweeps"] = [sweep.document() for sweep in payload.sweeps]
            parts.append(_json(document))
        elif isinstance(payload, Claim):
            parts.append(_json({"id": payload.worker, "take": payload}))
        if record is not None:
            parts.append(encode_record(record))
        header = ForwardHeader(
            message.epoch, operation.kind, max(operation.worker, 0), operation.after, len(message.ranges), len(blocks),
            isinstance(payload, Contribution), None if mark is None else ShardRef(*mark), operation.refusal is not None,
            record is not None,
        )  # fmt: skip
        return [header.header(_length(parts)).pack(), *parts]

    def _encode_ack(self, message: Ack) -> list[Buffer]:
        ranges, seqs = self._range_bytes(message.ranges), message.seqs.tobytes()
        header = RangesHeader(Kind.ACK, message.epoch, len(message.ranges)).header(len(ranges) + len(seqs))
        return [header.pack() + ranges + seqs]

    def _encode_resync(self, message: Resync) -> list[Buffer]:
        body = self._range_bytes(message.ranges) + message.seqs.tobytes() + message.acked.tobytes()
        return [RangesHeader(Kind.RESYNC, message.epoch, len(message.ranges)).header(len(body)).pack() + body]

    def _encode_piece(self, message: SnapshotChunk) -> list[Buffer]:
        numbers = message.upto.to_bytes(8, "little") + message.workers.tobytes() + message.progress.tobytes()
        content: ChunkContent = message.payload  # type: ignore[assignment]
        refused = [encode_steps(message.refused)] if message.refused else []
        records = [encode_records(message.records)] if message.records else []
        parts: list[Buffer] = [numbers, *refused, *records, *encode_content(content)]
        header = SnapshotChunkHeader(
            message.epoch, message.range, message.fill, message.number, message.last, message.seq,
            len(message.workers), len(content.tables), content.cut, bool(refused), bool(records),
        )  # fmt: skip
        return [header.header(_length(parts)).pack(), *parts]

    def _encode_installed(self, message: ChunkAck) -> list[Buffer]:
        return [ChunkAckHeader(*message).header().pack()]

    # --- reading ----------------------------------------------------------------------------------------------------

    def _ranges_and(
        self, count: int, header: Header, body: Bytes
    ) -> tuple[Ranges, NDArray[np.int64], list[NDArray[np.int64]], int]:
        """(ranges, their positions, `count` arrays of int64 beside them, where the rest of the body begins)."""
        m = RangesHeader.of(header).ranges
        at = (4 * m + 7) & ~7
        end = at + 8 * m * count
        if m > MAX_RANGES or end > len(body):
            raise FrameError(f"a {Kind(header.kind).name} of {m} ranges has a body of {len(body)} bytes")
        written = body[: 4 * m].tobytes()
        known = self._read.get(written)
        if known is None:
            known = self._read[written] = self._checked(written, header.kind)
            if len(self._read) > _REMEMBERED:
                self._read.popitem(last=False)
        numbers = body[at:end].view(np.int64)
        return *known, [numbers[m * i : m * (i + 1)] for i in range(count)], end

    def _checked(self, written: bytes, kind: int) -> tuple[Ranges, NDArray[np.int64]]:
        ranges = np.frombuffer(written, "<i4").astype(np.int64)
        if len(ranges) and (ranges.min() < 0 or ranges.max() >= self._ranges):
            raise FrameError(f"a {Kind(kind).name} names ranges outside 0..{self._ranges - 1}")
        positions = positions_of(ranges, self._ranges)
        if np.count_nonzero(positions >= 0) != len(ranges):
            raise FrameError(f"a {Kind(kind).name} names a range twice")
        return ranges, positions

    def _decode_forward(self, header: Header, body: Bytes) -> Forward:
        ranges, positions, (seqs,), at = self._ranges_and(1, header, body)
        payload: Any
        fields = ForwardHeader.of(header)
        mark = None if fields.shard is None else ShardMark(*fields.shard)
        size, refusal, record = len(body), None, None
        if fields.record:
            if fields.kind != OperationKind.PUSH or not fields.worker or fields.after & PART_MASK:
                raise FrameError("a FORWARD has the record of a step that it does not end")
            body, record = split_record(body, fields.after >> PART_BITS, self._ranges)
            if at > len(body):
                raise FrameError(f"a FORWARD of {len(ranges)} ranges and a record has {size} bytes")
        if fields.refused:
            if fields.kind != OperationKind.PUSH or not fields.worker or not fields.after:
                raise FrameError("a FORWARD has something refused of what is no push")
            refusal, at = decode_refusal(body, at, self._ranges)
        if fields.kind == OperationKind.PUSH and fields.round:
            document, at = _read_section(body, at)
            blocks = read_blocks(fields.blocks, body, at)
            clock = whole(document.get("clock"), MAX_CLOCK - 1, 1)
            payload = Contribution(text(document.get("app"), MAX_NAME), clock, blocks, ranges, positions, mark)
        elif fields.kind in _ROWS:
            payload = RowBlocks(read_blocks(fields.blocks, body, at), ranges, positions, mark)
        elif fields.kind == OperationKind.CREATE:
            try:
                payload = new_tables(_document(body, at))
            except SpecError as error:
                raise FrameError(f"a FORWARD's CREATE has a spec that this server cannot use: {error}") from None
        elif fields.kind in (OperationKind.CLEAR, OperationKind.DROP):
            number = whole(_document(body, at).get("id"), MAX_TABLE, 1)
            payload = Cleared(number) if fields.kind == OperationKind.CLEAR else Dropped(number)
        elif fields.kind == OperationKind.RESTORE:
            payload = _restored(ranges, body, at)
        elif fields.kind == OperationKind.RESTORED:
            if len(ranges) != 1:
                raise FrameError(f"a RESTORED is of one range, not of {len(ranges)}")
            payload = RestoredState.of(json_body(body[at:].data, MAX_BODY_BYTES))  # it has all workers there ever were
        elif fields.kind == OperationKind.AUDIT:
            document = _document(body, at)
            parts = whole(document.get("parts"), 1 << 32, 1)
            payload = AuditMark(whole(document.get("id"), (1 << 64) - 1), whole(document.get("part"), parts - 1), parts)
        elif fields.kind == OperationKind.CUT:
            payload = cut_mark(_document(body, at))
        elif fields.kind == OperationKind.TIME:
            payload = TimeMark(whole(_document(body, at).get("seconds"), MAX_TIME))
        elif fields.kind == OperationKind.EVICT:
            payload = SweptInterval.of(_document(body, at))
        elif fields.kind == OperationKind.POLICY:
            payload = changed_policies(_document(body, at))
        elif fields.kind in _ROUND_STEPS:
            document = _document(body, at)
            clock, workers = whole(document.get("id"), _MAX_POSITION), wholes(document.get("workers"), MAX_WORKER, 1)
            if fields.kind == OperationKind.BARRIER_LEAVE and len(workers) != 1:
                raise FrameError("a FORWARD's BARRIER_LEAVE names one worker")
            sweeps = tuple(SweptInterval.of(one) for one in _list(document.get("sweeps", [])))
            total = whole(document.get("total", 0), WORKERS_MAX)
            if fields.kind == OperationKind.BARRIER_CLOSE and total < max(len(workers), 1):
                raise FrameError(f"a FORWARD's BARRIER_CLOSE is of {total} workers, and names {len(workers)}")
            payload = RoundStep(text(document.get("app"), MAX_NAME), clock, workers, sweeps, total)
        elif fields.kind == OperationKind.CLAIM_SHARDS:
            payload = _take(_document(body, at).get("take"))
        else:
            raise FrameError(f"a FORWARD carries an operation of unknown kind {fields.kind}")
        operation = Operation(fields.kind, fields.worker or -1, fields.after, payload, size, refusal, record)
        return Forward(header.epoch, ranges, seqs, operation)

    def _decode_ack(self, header: Header, body: Bytes) -> Ack:
        ranges, _, (seqs,), _ = self._ranges_and(1, header, body)
        return Ack(header.epoch, ranges, seqs)

    def _decode_resync(self, header: Header, body: Bytes) -> Resync:
        ranges, _, (seqs, acked), _ = self._ranges_and(2, header, body)
        return Resync(header.epoch, ranges, seqs, acked)

    def _decode_piece(self, header: Header, body: Bytes) -> SnapshotChunk:
        fields = SnapshotChunkHeader.of(header)
        at = 8 + 16 * fields.workers
        if fields.range >= self._ranges or at > len(body):
            raise FrameError(
                f"a SNAPSHOT_CHUNK of range {fields.range} and {fields.workers} workers has {len(body)} bytes"
            )
        upto = int.from_bytes(body[:8].tobytes(), "little")
        if upto > HASH_END:
            raise FrameError(f"a SNAPSHOT_CHUNK ends at place {upto}, the last is {HASH_END}")
        numbers = body[8:at].view(np.int64)
        workers, progress = numbers[: fields.workers], numbers[fields.workers :]
        if fields.workers and (workers.min() < 1 or workers.max() > MAX_WORKER or progress.min() < 0):
            raise FrameError("a SNAPSHOT_CHUNK has clocks of nobody, or below 0")
        refused, at = decode_steps(body, at, self._ranges) if fields.refused else ([], at)
        records, at = decode_records(body, at, self._ranges) if fields.records else ([], at)
        content = decode_content(fields.tables, body, at)._replace(cut=fields.cut)
        return SnapshotChunk(
            fields.epoch, fields.range, fields.fill, fields.number, upto, fields.last, fields.seq, workers, progress,
            content, refused, records,
        )  # fmt: skip

    def _decode_installed(self, header: Header, body: Bytes) -> ChunkAck:
        fields = ChunkAckHeader.of(header)
        if fields.range >= self._ranges:
            raise FrameError(f"a CHUNK_ACK names range {fields.range}, outside 0..{self._ranges - 1}")
        return ChunkAck(*fields)


def _length(parts: list[Buffer]) -> int:
    return sum([len(part) for part in parts])


def _json(document: dict[str, Any]) -> bytes:
    written = json.dumps(document, separators=(",", ":")).encode()
    return written + b" " * (-len(written) % 8)


def _section(document: dict[str, Any]) -> bytes:
    """JSON that is followed by something else: its padded length comes first."""
    written = _json(document)
    return len(written).to_bytes(8, "little") + written


def _read_section(body: Bytes, at: int) -> tuple[dict[str, Any], int]:
    size = int.from_bytes(body[at : at + 8].tobytes(), "little")
    end = at + 8 + size
    if size & 7 or size > MAX_CONTROL_BYTES or end > len(body):
        raise FrameError(f"a section of {size} bytes at {at} does not fit in a body of {len(body)} bytes")
    return json_body(body[at + 8 : end].data), end


def _restored(ranges: Ranges, body: Bytes, at: int) -> RestoredRows | RestoredKeys:
    document, at = _read_section(body, at)
    if "waiting" in document:
        return _restored_keys(document, ranges, body, at)
    rows, stride = whole(document.get("rows"), len(body) // 8), whole(document.get("stride"), len(body))
    keys_end = at + 8 * rows
    if len(ranges) != 1 or keys_end + rows * stride != len(body):
        raise FrameError(f"a RESTORE of {rows} rows of {stride} bytes, in {len(ranges)} ranges, has {len(body)} bytes")
    table = whole(document.get("id"), MAX_TABLE, 1)
    return RestoredRows(table, body[at:keys_end].view(np.int64), body[keys_end:].reshape(rows, stride))


def _restored_keys(document: dict[str, Any], ranges: Ranges, body: Bytes, at: int) -> RestoredKeys:
    n = whole(document.get("waiting"), len(body) // 16)
    blocks, width = (whole(document.get(name), len(body)) for name in ("blocks", "width"))
    words_at, sketch_at = at + 8 * n, at + 16 * n
    end = sketch_at + blocks * width
    if len(ranges) != 1 or (end + 7) & ~7 != len(body):
        raise FrameError(f"a RESTORE of {n} waiting keys, in {len(ranges)} ranges, has {len(body)} bytes")
    table, sketch = whole(document.get("id"), MAX_TABLE, 1), body[sketch_at:end].reshape(blocks, width)
    return RestoredKeys(table, body[at:words_at].view(np.int64), body[words_at:sketch_at].view(np.int64), sketch)


def _take(document: Any) -> Claim:
    try:
        app, name, spec, worker, committed, want, lost, done, back = document
        cut = ShardSpec(*spec)
        if not all(isinstance(n, int) for n in spec if n is not None) or not cut.possible:
            raise ValueError(f"there can be no shards like {cut}")
    except (TypeError, ValueError) as error:
        raise FrameError(f"a FORWARD's CLAIM_SHARDS cannot be read: {error}") from None
    return Claim(
        text(app, MAX_NAME), text(name, MAX_NAME), cut, whole(worker, MAX_WORKER, 1), whole(committed, MAX_CLOCK - 1),
        whole(want, MAX_SHARDS), wholes(lost, MAX_WORKER, 1), wholes(done, MAX_SHARDS), wholes(back, MAX_SHARDS),
    )  # fmt: skip


def new_tables(document: dict[str, Any]) -> CreatedTables:
    """Decodes a CREATE of one table or of several. `SpecError` for a spec that is invalid, or needs a plug-in that this
    server lacks."""
    several = document.get("tables", [document])
    if not isinstance(several, list) or not 0 < len(several) <= MAX_CREATED:
        raise FrameError(f"a CREATE is of 1 to {MAX_CREATED} tables")
    tables = tuple([_new_table(one) for one in several])
    if len({table.table for table in tables}) < len(tables):
        raise FrameError("a CREATE names a table twice")
    return CreatedTables(tables)


def _document_of(table: CreatedTable) -> dict[str, Any]:
    return {"id": table.table, "spec": table.spec} | ({"app": table.app} if table.app else {})


def _new_table(document: object) -> CreatedTable:
    if not isinstance(document, dict):
        raise FrameError("a CREATE's table is a JSON object")
    spec = TableSpec.from_json(text(document.get("spec"), MAX_CONTROL_BYTES))
    app = text(document.get("app", ""), MAX_NAME)
    return CreatedTable(whole(document.get("id"), MAX_TABLE, 1), spec.to_json(), app)


def changed_policies(document: dict[str, Any]) -> ChangedPolicies:
    """Decodes a POLICY. `FrameError` for policies that this version does not know."""
    try:
        spec = TableSpec.from_json(text(document.get("spec"), MAX_CONTROL_BYTES))
    except SpecError as error:
        raise FrameError(f"a POLICY has a spec that this server cannot use: {error}") from None
    return ChangedPolicies(whole(document.get("id"), MAX_TABLE, 1), spec.to_json())


def cut_mark(document: dict[str, Any]) -> CutMark:
    """Decodes a CUT."""
    number = whole(document.get("number"), MAX_CUT, 1)
    return CutMark(
        number, whole(document.get("since"), number - 1), text(document.get("writer"), MAX_NAME),
        whole(document.get("incarnation"), _MAX_POSITION), text(document.get("url"), MAX_URL),
    )  # fmt: skip


def shard_mark(header: Header) -> ShardMark | None:
    """The shard that a PUSH trains, if it names one."""
    shard = PushHeader.of(header).shard
    return None if shard is None else ShardMark(*shard)


def _list(found: object) -> list[Any]:
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise FrameError("a BARRIER_CLOSE has a list of sweeps that is none")
    if len(found) > MOST_IN_A_ROUND:
        raise FrameError(f"a BARRIER_CLOSE has {len(found)} sweeps, at most {MOST_IN_A_ROUND} are allowed")
    return found


def _document(body: Bytes, at: int) -> dict[str, Any]:
    return json_body(body[at:].data)
