"""Frames: what travels between workers and servers. Bytes in, values out; no sockets here.

Every frame is a fixed 64-byte little-endian header and a body whose length the header gives. The tables are in
`docs/internals/protocol.md`, golden vectors in `tests/wire`. Lengths are multiples of 8, so that arrays inside a body
are aligned whenever the body is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.core.capacities import RowCount
from coordinator.core.differences import apply_encoded
from coordinator.core.view import PROTOCOL, View

MAGIC = 0x31535045  # "EPS1" in little-endian
VERSION = PROTOCOL
HEADER_BYTES = 64
MAX_BODY_BYTES = 64 << 20
MAX_CONTROL_BYTES = 1 << 20  # hello, errors, specs; all that a peer may send before it is welcome
MAX_BLOCKS = 4096
MAX_CREATED = 64  # tables that one CREATE makes
CREATED_BYTES = 256 << 10  # of their specs, where there are several
MAX_DIM = 1 << 20
MAX_RANGES = 1 << 16
MAX_LINK_BODY_BYTES = MAX_BODY_BYTES + 12 * MAX_RANGES + MAX_CONTROL_BYTES
"""Between replicas: a FORWARD adds to what a PUSH may hold each range with its position, and a round's application."""

Buffer = memoryview | bytes | bytearray
T = TypeVar("T")


class Kind(IntEnum):
    """Frame kinds: requests of workers below 16 and from 48 on, what replicas say to each other from 16 on, what
    workers say unasked from 32 on, answers and what servers say unasked from 64 on, what heads say to each other of
    synchronous rounds from 85 on, what readers and servers say to each other from 95 on."""

    HELLO = 1
    CREATE = 2
    INIT = 3
    PUSH = 4
    PULL = 5
    JOIN = 6
    GET_CLOCKS = 7
    GET_VIEW = 8
    BARRIER_JOIN = 9
    BARRIER_ARRIVE = 10
    CLAIM_SHARDS = 12
    BARRIER_LEAVE = 13
    LIST_KEYS = 14
    ERASE = 15
    FORWARD = 16
    ACK = 17
    RESYNC = 18
    SNAPSHOT_CHUNK = 19
    CHUNK_ACK = 20
    ROOM = 21
    HELD = 32
    USE = 33
    READ_AFTER = 34
    REDUCE = 48
    SET_POLICIES = 49
    SWEEP = 50
    REPORT_CLOCK = 51
    WELCOME = 64
    OK = 65
    ROWS = 66
    ERROR = 67
    VIEW = 68
    CLOCKS = 69
    PARTLY = 70
    REPORT = 71
    BARRIER_DECISION = 72
    SHARDS = 73
    KEYS = 74
    HOLD = 75
    RELEASE = 76
    REDUCED = 77
    WATCH = 78
    ASK_CLOCK = 79
    SWEPT = 81
    ROUND_CLOSE = 85
    ROUND_CLOSED = 86
    VIEW_DIFFERENCE = 90
    NEWER_VIEW = 91
    UNCHANGED = 92
    RELEASED = 93
    SUBSCRIBE = 95
    SUBSCRIBED = 96
    WINDOW = 97
    WINDOW_ACK = 98
    READ_RANGE = 99
    RANGE_ROWS = 100


LAST = 1  # PUSH: the step's last part, it ticks the clock. ROWS: the answer's last chunk. JOIN, HELD: see headers
ALL_RANGES = 2  # PUSH: every range that the receiver heads at the frame's epoch
REPEAT = 4  # PUSH: content left out, it is applied already and only the acknowledgement is wanted
ROUND = 16  # PUSH, FORWARD: a worker's share of a synchronous round, kept until the round is closed
PAUSE = 32  # JOIN: this worker holds nobody back, until it joins again. HELD: see headers
REPLACE = 64  # INIT: rows that there are take the values too, and their slots are reset
ANY = 8  # PULL: any full replica may answer, with values that may not be committed yet
SLOTS = 128  # PULL: the rows' slots instead of their weights
CODED = 256  # PULL: the rows as the table's filters for pulls make them
SHORT = 512  # PULL, PUSH: some keys are left out, or stand as differences, see `keys`
PACKED = 1024  # PUSH: the body is compressed, see `packed`
DIGESTS = 2048  # PULL: what the rows hash to, instead of them
USAGE = 16384  # PULL: when the rows were used last, how often, and their score, instead of their weights
TABLES = 4096  # PULL: of several tables, in blocks as a PUSH has them, of keys alone
RECORD = 32768  # PUSH, FORWARD: with the record of a sparse step. SNAPSHOT_CHUNK, CLOCKS: with such records
REFUSED = 8192  # FORWARD: a PUSH without refused rows, which it names. SNAPSHOT_CHUNK, CLOCKS, ERROR: with such rows

_KINDS = frozenset(int(k) for k in Kind)
HEADER = struct.Struct("<IBBHQQQQIHHIIII")
assert HEADER.size == HEADER_BYTES


class FrameError(ValueError):
    """The bytes are not a frame that this version can accept; the connection cannot go on."""


class VersionError(FrameError):
    """The peer speaks another version of the protocol."""


class Header(NamedTuple):
    """The fixed part of a frame, in wire order (magic and version are implied). What the fields of a kind say, and only
    of that kind, is in `headers`."""

    kind: int
    flags: int = 0
    body: int = 0
    request: int = 0
    epoch: int = 0
    clock: int = 0
    worker: int = 0
    first: int = 0
    part: int = 0
    table: int = 0
    items: int = 0
    bound: int = 0
    wait_ms: int = 0

    def pack(self) -> bytes:
        return HEADER.pack(MAGIC, VERSION, *self)


def unpack_header(buffer: Buffer, offset: int = 0, limit: int = MAX_BODY_BYTES) -> Header:
    """Reads and checks a header; raises `FrameError` before anything of the promised length is allocated."""
    fields = HEADER.unpack_from(buffer, offset)
    magic, version = fields[:2]
    if magic != MAGIC:
        raise FrameError(f"not an elasticps frame: it starts with {magic:#010x} instead of {MAGIC:#010x}")
    if version != VERSION:
        raise VersionError(f"the peer speaks wire version {version}, this side speaks {VERSION}; upgrade the older one")
    header = Header._make(fields[2:])
    if header.kind not in _KINDS:
        raise FrameError(f"unknown frame kind {header.kind}")
    if header.body > limit:
        raise FrameError(f"a {Kind(header.kind).name} body of {header.body} bytes is over the limit of {limit}")
    if header.body & 7:
        raise FrameError(f"a body of {header.body} bytes is not a multiple of 8")
    return header


# --- JSON bodies: rare control frames ---------------------------------------------------------------------------


def json_frame(kind: Kind, document: dict[str, Any], *, request: int = 0, epoch: int = 0, flags: int = 0) -> bytes:
    """A control frame: JSON padded with spaces to a multiple of 8."""
    body = json.dumps(document, separators=(",", ":")).encode()
    body += b" " * (-len(body) % 8)
    return Header(kind, flags, len(body), request, epoch).pack() + body


def json_body(body: Buffer, most_bytes: int = MAX_CONTROL_BYTES) -> dict[str, Any]:
    """The document of a control frame; `FrameError` if it is too long or not a JSON object."""
    if len(body) > most_bytes:
        raise FrameError(f"a control frame of {len(body)} bytes is over the limit of {most_bytes}")
    try:
        document = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a control frame's body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise FrameError(f"a control frame's body is a JSON {type(document).__name__}, not an object")
    return document


def whole(value: object, most: int, least: int = 0) -> int:
    """Checks a number from JSON. Raises `FrameError` unless it is whole and within bounds, as Python's numbers have
    none."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise FrameError(f"a whole number from {least} to {most} is expected, not {value!s:.40}")
    return value


def text(value: object, most: int) -> str:
    """A text that stood in JSON, of so many letters at most. Half a surrogate pair, which JSON can hold, is none."""
    if not isinstance(value, str) or len(value) > most or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise FrameError(f"a text of at most {most} letters is expected, not {str(value)!a:.40}")
    return value


def wholes(values: object, most: int, least: int = 0) -> tuple[int, ...]:
    """Checks a list of whole numbers from JSON, as `whole` does."""
    if not isinstance(values, list):
        raise FrameError(f"a list of numbers is expected, not {type(values).__name__}")
    return tuple([whole(value, most, least) for value in values])


def row_counts(values: object) -> tuple[RowCount, ...]:
    """Checks counts of tables' rows from JSON: lists of table, whether of keys that wait, capacity and rows."""
    if not isinstance(values, list):
        raise FrameError(f"a list of counts is expected, not {type(values).__name__}")
    most, found = 1 << 62, list[RowCount]()
    for value in values:
        if not isinstance(value, list) or len(value) != len(RowCount._fields) or not isinstance(value[1], bool):
            raise FrameError("a count of rows has a table, whether of keys that wait, a capacity, and how many")
        table, waiting, capacity, rows = value
        found.append(RowCount(whole(table, most), waiting, whole(capacity, most), whole(rows, most)))
    return tuple(found)


def bytes_frame(kind: Kind, body: bytes, *, request: int = 0, epoch: int = 0) -> bytes:
    """A frame around opaque bytes; `items` holds their unpadded length."""
    padded = body + b"\0" * (-len(body) % 8)
    return Header(kind, 0, len(padded), request, epoch, items=len(body)).pack() + padded


# --- several frames instead of one that is too long ----------------------------------------------------------------


def portions(items: Sequence[T], most: int, most_bytes: int, size: Callable[[T], int]) -> Iterator[Sequence[T]]:
    """Cuts items, in their order, into portions of at most `most` items and `most_bytes` bytes; an item that is larger
    is a portion of its own."""
    start = nbytes = 0
    for i, item in enumerate(items):
        its = size(item)
        if i > start and (i - start == most or nbytes + its > most_bytes):
            yield items[start:i]
            start, nbytes = i, 0
        nbytes += its
    if start < len(items):
        yield items[start:]


# --- ranges and progress ------------------------------------------------------------------------------------------


def padded_size(size: int) -> int:
    """The bytes of a body that holds so many: a multiple of 8."""
    return (size + 7) & ~7


def padded(body: bytes) -> bytes:
    """The bytes, with zeros up to a multiple of 8."""
    return body + b"\0" * (-len(body) % 8)


def partly_frame(request: int, epoch: int, committed: NDArray[np.int64], moved: NDArray[np.int64]) -> bytes:
    """PARTLY: of the ranges that a push named, int64 [n] are committed, int64 [m] left the server before they were."""
    body = padded(committed.astype("<i4").tobytes() + moved.astype("<i4").tobytes())
    return Header(Kind.PARTLY, 0, len(body), request, epoch, table=len(moved), items=len(committed)).pack() + body


def read_partly(header: Header, body: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The inverse of `partly_frame`: (committed, moved), copies."""
    n, m = header.items, header.table
    if n > MAX_RANGES or m > MAX_RANGES or len(body) != (4 * (n + m) + 7) & ~7:
        raise FrameError(f"a PARTLY frame of {n} and {m} ranges has a body of {len(body)} bytes")
    ranges = body[: 4 * (n + m)].view(np.int32).astype(np.int64)
    return ranges[:n], ranges[n:]


# --- PUSH bodies ------------------------------------------------------------------------------------------------

_BLOCK = struct.Struct("<IIIHHQ")
BLOCK_BYTES = _BLOCK.size
assert BLOCK_BYTES == 24


class Block(NamedTuple):
    """One table's share of a push: keys int64 [n], grads float32 [n, dim], step_values float32 [k]."""

    table: int
    keys: NDArray[np.int64]
    grads: NDArray[np.float32]
    step_values: NDArray[np.float32]


def block_head(table: int, rows: int, dim: int, step_values: NDArray[np.float32]) -> bytes:
    """What stands before a block's keys: its own header and the step values, padded to 8 bytes."""
    values = step_values.tobytes()
    return _BLOCK.pack(table, rows, dim, len(step_values), 0, 0) + values + b"\0" * (-len(values) % 8)


def grads_padding(rows: int, dim: int) -> int:
    """Bytes (0 or 4) that follow a block's gradients."""
    return (rows * dim * 4) & 7


def read_push(all_ranges: bool, blocks: int, body: NDArray[np.uint8]) -> tuple[NDArray[np.int32] | None, list[Block]]:
    """Splits the body of a PUSH or INIT into the ranges that it names (None for all) and its blocks, as views.

    Layout: unless `all_ranges`, uint64 m and int32 [m] ranges padded to 8; then so many blocks.
    Raises `FrameError` when lengths do not add up.
    """
    at = 0
    ranges: NDArray[np.int32] | None = None
    if not all_ranges:
        if len(body) < 8:
            raise FrameError("a push that names its ranges is too short to do so")
        m = int.from_bytes(body[:8].tobytes(), "little")
        if m > MAX_RANGES or 8 + 4 * m > len(body):
            raise FrameError(f"a push names {m} ranges but its body has {len(body)} bytes")
        ranges = body[8 : 8 + 4 * m].view(np.int32)
        at = (8 + 4 * m + 7) & ~7
    return ranges, read_blocks(blocks, body, at)


def read_blocks(count: int, body: NDArray[np.uint8], at: int, limit: int = MAX_BLOCKS) -> list[Block]:
    """The `count` blocks that fill a body from byte `at` to its end, as views. Raises `FrameError` if they do not."""
    if count > limit:
        raise FrameError(f"a push of {count} blocks is over the limit of {limit}")
    size = len(body)
    blocks = []
    for _ in range(count):
        if at + BLOCK_BYTES > size:
            raise FrameError(f"a push of {count} blocks ends inside a block header")
        table, rows, dim, values, _, _ = _BLOCK.unpack_from(body.data, at)
        if dim > MAX_DIM:  # 0: keys alone
            raise FrameError(f"a push block has dim {dim}; the limit is {MAX_DIM}")
        keys_at = at + BLOCK_BYTES + ((4 * values + 7) & ~7)
        grads_at = keys_at + 8 * rows
        end = grads_at + 4 * rows * dim
        if end > size:
            raise FrameError(f"a push block of {rows} rows of {dim} floats does not fit in a body of {size} bytes")
        blocks.append(
            Block(
                table,
                body[keys_at:grads_at].view(np.int64),
                body[grads_at:end].view(np.float32).reshape(rows, dim),
                body[at + BLOCK_BYTES : at + BLOCK_BYTES + 4 * values].view(np.float32),
            )
        )
        at = (end + 7) & ~7
    if at != size:
        raise FrameError(f"a push body of {size} bytes has {size - at} bytes left over")
    return blocks


def table_block(table: int, keys: int) -> bytes:
    """What stands before the keys of one table in a PULL of several."""
    return _BLOCK.pack(table, keys, 0, 0, 0, 0)


def read_tables(count: int, body: NDArray[np.uint8]) -> list[tuple[int, NDArray[np.int64]]]:
    """The tables that a PULL of several names, and keys int64 [n] of each, as views. Raises `FrameError` if these do
    not fill the body, or more than keys is there."""
    blocks = read_blocks(count, body, 0)
    if any(block.grads.shape[1] or len(block.step_values) for block in blocks):
        raise FrameError("a pull has keys, and nothing else")
    return [(block.table, block.keys) for block in blocks]


def view_frame(view: View) -> bytes:
    """The VIEW frame of a view. It is encoded once, for all receivers."""
    return bytes_frame(Kind.VIEW, view.encode(), epoch=view.epoch)


def difference_frame(epoch: int, difference: bytes) -> bytes:
    """The VIEW_DIFFERENCE frame of the encoded difference that makes the view of that epoch."""
    return bytes_frame(Kind.VIEW_DIFFERENCE, difference, epoch=epoch)


class Gap(Exception):
    """A VIEW_DIFFERENCE of a newer view has another base than the receiver's view, or makes something else of it."""


def read_view(header: Header, body: NDArray[np.uint8], known: View | None) -> View | None:
    """The view in a VIEW or VIEW_DIFFERENCE frame, whole; None, without decoding, if it is not newer than the one that
    is known. Raises `Gap`, and `FrameError` for a frame that cannot be read."""
    if known is not None and header.epoch <= known.epoch:
        return None
    data = body[: header.items].tobytes()
    name = Kind(header.kind).name
    try:
        if header.kind == Kind.VIEW:
            view = View.decode(data)
        elif known is None or (made := apply_encoded(known, data)) is None:
            raise Gap
        else:
            view = made
    except ValueError as error:
        raise FrameError(f"a {name} cannot be read: {error}") from None
    if view.epoch != header.epoch:
        raise FrameError(f"a {name} of epoch {header.epoch} holds the view of epoch {view.epoch}")
    return view
