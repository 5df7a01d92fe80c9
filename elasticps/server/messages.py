"""What replicas say to each other, as frames. `docs/wire.md` has the tables."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.server.content import Content, Mark, NewTable, PieceRows, TableRows, positions_of
from elasticps.store import Table
from elasticps.store.intervals import PLACES
from elasticps.wire.frames import (
    LAST,
    MAX_RANGES,
    Block,
    Buffer,
    FrameError,
    Header,
    Kind,
    block_head,
    grads_padding,
    padded,
    read_blocks,
)
from replication.chain import Ranges
from replication.messages import Ack, Forward, Installed, Message, Operation, Piece, Resync
from replication.messages import Kind as OperationKind

_TABLE = struct.Struct("<IIQQ")  # id, bytes of the spec, rows, stride
_MAX_STRIDE = 1 << 26

Bytes = NDArray[np.uint8]


# --- writing ----------------------------------------------------------------------------------------------------------


def encode(message: Message, tables: Mapping[int, Table]) -> list[Buffer]:
    """The frame of a message; rows are not copied."""
    return _ENCODERS[type(message)](message, tables)


def _encode_forward(message: Forward, tables: Mapping[int, Table]) -> list[Buffer]:
    operation, payload = message.operation, message.operation.payload
    parts: list[Buffer] = [padded(message.ranges.astype("<i4").tobytes()) + message.seqs.tobytes()]
    blocks: list[Block] = []
    if isinstance(payload, Content):
        blocks = payload.part(message.ranges, tables)
        for block in blocks:
            parts += block_buffers(block)
    elif isinstance(payload, NewTable):
        parts.append(_json({"id": payload.table, "spec": payload.spec}))
    elif isinstance(payload, Mark):
        parts.append(_json({"id": payload.id}))
    header = Header(
        Kind.FORWARD, 0, _length(parts), 0, message.epoch, operation.after, max(operation.worker, 0),
        part=operation.kind, table=len(message.ranges), items=len(blocks),
    )  # fmt: skip
    return [header.pack(), *parts]


def block_buffers(block: Block) -> list[Buffer]:
    """A block as it stands in a body."""
    rows, dim = block.grads.shape
    parts: list[Buffer] = [block_head(block.table, rows, dim, block.step_values)]
    if rows:
        parts += [block.keys.data.cast("B"), block.grads.data.cast("B")]
        if padding := grads_padding(rows, dim):
            parts.append(b"\0" * padding)
    return parts


def _encode_ack(message: Ack, _: Mapping[int, Table]) -> list[Buffer]:
    body = padded(message.ranges.astype("<i4").tobytes()) + message.seqs.tobytes()
    return [Header(Kind.ACK, 0, len(body), 0, message.epoch, table=len(message.ranges)).pack() + body]


def _encode_resync(message: Resync, _: Mapping[int, Table]) -> list[Buffer]:
    body = padded(message.ranges.astype("<i4").tobytes()) + message.seqs.tobytes() + message.acked.tobytes()
    return [Header(Kind.RESYNC, 0, len(body), 0, message.epoch, table=len(message.ranges)).pack() + body]


def _encode_piece(message: Piece, _: Mapping[int, Table]) -> list[Buffer]:
    parts: list[Buffer] = [message.upto.to_bytes(8, "little") + message.workers.tobytes() + message.progress.tobytes()]
    rows: PieceRows = message.payload  # type: ignore[assignment]
    for table, spec, keys, values in rows:
        text = spec.encode()
        parts.append(padded(_TABLE.pack(table, len(text), *values.shape) + text))
        if len(keys):
            parts += [keys.data.cast("B"), values.data.cast("B")]
    header = Header(
        Kind.PIECE, LAST if message.last else 0, _length(parts), message.fill, message.epoch, message.seq,
        message.range, table=len(message.workers), items=len(rows), bound=message.number,
    )  # fmt: skip
    return [header.pack(), *parts]


def _encode_installed(message: Installed, _: Mapping[int, Table]) -> list[Buffer]:
    flags = LAST if message.last else 0
    header = Header(
        Kind.INSTALLED, flags, 0, message.fill, message.epoch, message.seq, message.range, bound=message.number
    )
    return [header.pack()]


def _length(parts: list[Buffer]) -> int:
    return sum(len(part) for part in parts)


def _json(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


_ENCODERS: dict[type, Callable[[Any, Mapping[int, Table]], list[Buffer]]] = {
    Forward: _encode_forward,
    Ack: _encode_ack,
    Resync: _encode_resync,
    Piece: _encode_piece,
    Installed: _encode_installed,
}


# --- reading ----------------------------------------------------------------------------------------------------------


def decode(header: Header, body: Bytes, ranges: int) -> Message:
    """The message in a frame, for a cluster of `ranges` ranges. It refers to `body`, which must stay as it is.

    Raises `FrameError` for anything malformed.
    """
    return _DECODERS[header.kind](header, body, ranges)


def _ranges_and(count: int, header: Header, body: Bytes, limit: int) -> tuple[Ranges, list[NDArray[np.int64]], int]:
    """(ranges, `count` arrays of int64 beside them, where the rest of the body begins)."""
    m = header.table
    at = (4 * m + 7) & ~7
    end = at + 8 * m * count
    if m > MAX_RANGES or end > len(body):
        raise FrameError(f"a {Kind(header.kind).name} of {m} ranges has a body of {len(body)} bytes")
    ranges = body[: 4 * m].view(np.int32).astype(np.int64)
    if m and (ranges.min() < 0 or ranges.max() >= limit):
        raise FrameError(f"a {Kind(header.kind).name} names ranges outside 0..{limit - 1}")
    numbers = body[at:end].view(np.int64)
    return ranges, [numbers[m * i : m * (i + 1)] for i in range(count)], end


def _decode_forward(header: Header, body: Bytes, limit: int) -> Forward:
    ranges, (seqs,), at = _ranges_and(1, header, body, limit)
    payload: Any
    if header.part in (OperationKind.PUSH, OperationKind.INIT):
        payload = Content(read_blocks(header.items, body, at), ranges, positions_of(ranges, limit))
    elif header.part == OperationKind.CREATE:
        document = _document(body, at)
        payload = NewTable(document["id"], str(document.get("spec")))
    elif header.part == OperationKind.AUDIT:
        payload = Mark(_document(body, at)["id"])
    else:
        raise FrameError(f"a FORWARD carries an operation of unknown kind {header.part}")
    operation = Operation(header.part, header.worker or -1, header.clock, payload, len(body))
    return Forward(header.epoch, ranges, seqs, operation)


def _document(body: Bytes, at: int) -> dict[str, Any]:
    try:
        document = json.loads(body[at:].tobytes())
    except ValueError as error:
        raise FrameError(f"a FORWARD's content is not JSON: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("id"), int):
        raise FrameError("a FORWARD's content has no id")
    return document


def _decode_ack(header: Header, body: Bytes, limit: int) -> Ack:
    ranges, (seqs,), _ = _ranges_and(1, header, body, limit)
    return Ack(header.epoch, ranges, seqs)


def _decode_resync(header: Header, body: Bytes, limit: int) -> Resync:
    ranges, (seqs, acked), _ = _ranges_and(2, header, body, limit)
    return Resync(header.epoch, ranges, seqs, acked)


def _decode_piece(header: Header, body: Bytes, limit: int) -> Piece:
    n = header.table
    at = 8 + 16 * n
    if header.worker >= limit or at > len(body):
        raise FrameError(f"a PIECE of range {header.worker} with {n} workers has a body of {len(body)} bytes")
    upto = int.from_bytes(body[:8].tobytes(), "little")
    if upto > PLACES:
        raise FrameError(f"a PIECE ends at place {upto}, the last is {PLACES}")
    numbers = body[8:at].view(np.int64)
    rows: PieceRows = []
    for _ in range(header.items):
        one, at = _read_rows(body, at)
        rows.append(one)
    if at != len(body):
        raise FrameError(f"a PIECE of {len(body)} bytes has {len(body) - at} bytes left over")
    return Piece(
        header.epoch, header.worker, header.request, header.bound, upto, bool(header.flags & LAST), header.clock,
        numbers[:n], numbers[n:], rows,
    )  # fmt: skip


def _read_rows(body: Bytes, at: int) -> tuple[TableRows, int]:
    if at + _TABLE.size > len(body):
        raise FrameError("a PIECE ends inside a table's header")
    table, text, rows, stride = _TABLE.unpack_from(body.data, at)
    keys_at = (at + _TABLE.size + text + 7) & ~7
    rows_at = keys_at + 8 * rows
    end = rows_at + rows * stride
    if rows > 1 << 40 or stride > _MAX_STRIDE or end > len(body):
        raise FrameError(f"a PIECE of {rows} rows of {stride} bytes does not fit in a body of {len(body)} bytes")
    spec = body[at + _TABLE.size : at + _TABLE.size + text].tobytes().decode(errors="replace")
    keys = body[keys_at:rows_at].view(np.int64)
    return TableRows(table, spec, keys, body[rows_at:end].reshape(rows, stride)), end


def _decode_installed(header: Header, body: Bytes, limit: int) -> Installed:
    if header.worker >= limit:
        raise FrameError(f"an INSTALLED names range {header.worker}, outside 0..{limit - 1}")
    last = bool(header.flags & LAST)
    return Installed(header.epoch, header.worker, header.request, header.bound, last, header.clock)


_DECODERS: dict[int, Callable[[Header, Bytes, int], Message]] = {
    Kind.FORWARD: _decode_forward,
    Kind.ACK: _decode_ack,
    Kind.RESYNC: _decode_resync,
    Kind.PIECE: _decode_piece,
    Kind.INSTALLED: _decode_installed,
}
