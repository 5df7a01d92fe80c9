"""Refused rows of pushes, as bytes: with a FORWARD, in the first chunk of a snapshot, and with CLOCKS and ERROR. Pure.

Each section is JSON behind its length, and then the keys that the JSON counts: int64, one table behind the other. Why
rows were refused is a document with a code and a message, as text: whoever reads one here has seen that it is one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.kernels.hashing import key_ranges, range_shift, table_salt
from elasticps.wire.frames import (
    LAST,
    MAX_CONTROL_BYTES,
    MAX_LINK_BODY_BYTES,
    REFUSED,
    Block,
    FrameError,
    Header,
    Kind,
    text,
    whole,
)
from replication.chain import Ranges
from replication.progress import MAX_CLOCK, MAX_WORKER
from replication.refusals import Refusal, Refused, RefusedStep, Rows

MAX_WHY = 4096
_SHORT = 512  # letters, that need six each at most
_MAX_TABLE = (1 << 32) - 1

Bytes = NDArray[np.uint8]
Keys = NDArray[np.int64]


class RefusedRows:
    """The keys of refused rows by table, int64 [n] each; `ranges` is the cluster's number of ranges."""

    __slots__ = ("keys", "ranges")

    def __init__(self, keys: Mapping[int, Keys], ranges: int) -> None:
        self.keys = {table: some for table, some in keys.items() if len(some)}
        self.ranges = ranges

    @property
    def nbytes(self) -> int:
        """Bytes of the keys."""
        return sum(some.nbytes for some in self.keys.values())

    def __len__(self) -> int:
        return sum(len(some) for some in self.keys.values())

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, RefusedRows)
            and self.keys.keys() == other.keys.keys()
            and all(np.array_equal(some, other.keys[table]) for table, some in self.keys.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def part(self, ranges: Ranges) -> RefusedRows:
        """The refused rows in some ranges."""
        if len(ranges) == self.ranges:
            return self
        chosen = np.zeros(self.ranges, np.bool_)
        chosen[ranges] = True
        found, shift = {}, range_shift(self.ranges)
        for table, some in self.keys.items():
            home = np.empty(len(some), np.int32)
            key_ranges(some, table_salt(table), shift, home)
            found[table] = some[chosen[home]]
        return RefusedRows(found, self.ranges)

    def joined(self, other: Rows) -> RefusedRows:
        """The union of these rows and others."""
        assert isinstance(other, RefusedRows)
        both = dict(self.keys)
        for table, some in other.keys.items():
            both[table] = np.concatenate([both[table], some]) if table in both else some
        return RefusedRows(both, self.ranges)


def refused_rows(blocks: Iterable[Block], ranges: int) -> RefusedRows:
    """All rows of some blocks of a push. Their keys are copied: the frame that they came in is used again."""
    by_table: dict[int, list[Keys]] = {}
    for block in blocks:
        by_table.setdefault(block.table, []).append(block.keys)
    return RefusedRows({table: np.concatenate(some) for table, some in by_table.items()}, ranges)


def why(document: dict[str, Any]) -> str:
    """An ERROR's document as text; less of it where it would be too long. In ASCII: `error_of` reads all that it gives,
    whatever a peer's words in it are."""
    written = json.dumps(document)
    if len(written) > MAX_WHY:
        written = json.dumps({"code": document["code"], "message": document["message"][:_SHORT]})
    return written


def error_of(written: str) -> dict[str, Any]:
    """Parses an ERROR's document. Raises `FrameError` if it is none."""
    try:
        document = json.loads(text(written, MAX_WHY))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what was refused cannot be read: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in ("code", "message")):
        raise FrameError("what was refused has no code and no message")
    return document


def encode_refusal(refusal: Refusal, ranges: Ranges) -> bytes:
    """Encodes a refusal for a FORWARD of these ranges; it comes before the rest of the operation."""
    rows = None if refusal.rows is None else refusal.rows.part(ranges)
    return _section([(refusal.why, refusal.acknowledged)], [rows])


def decode_refusal(body: Bytes, at: int, ranges: int) -> tuple[Refusal, int]:
    """The inverse, and where it ends. ranges: of the cluster."""
    entries, end = _read_section(body, at, MAX_CONTROL_BYTES, 2, ranges)
    if len(entries) != 1:
        raise FrameError(f"a FORWARD has {len(entries)} refusals")
    ((written, clock), rows) = entries[0]
    error_of(written)
    return Refusal(written, whole(clock, MAX_CLOCK - 1), rows), end


def encode_steps(steps: Sequence[RefusedStep]) -> bytes:
    """Encodes refused steps for the first chunk of a snapshot."""
    return _section([step[:3] for step in steps], [step.rows for step in steps])


def decode_steps(body: Bytes, at: int, ranges: int) -> tuple[list[RefusedStep], int]:
    """The inverse, and where it ends."""
    entries, end = _read_section(body, at, MAX_LINK_BODY_BYTES, 3, ranges)
    steps = []
    for (worker, clock, written), rows in entries:
        error_of(written)
        steps.append(RefusedStep(whole(worker, MAX_WORKER, 1), whole(clock, MAX_CLOCK - 1, 1), written, rows))
    return steps, end


def encode_refused(refused: Sequence[Refused]) -> bytes:
    """Encodes one worker's refused steps for CLOCKS and ERROR; b"" if there are none."""
    return _section([each[:2] for each in refused], [each.rows for each in refused]) if refused else b""


def decode_refused(body: Bytes, ranges: int) -> list[tuple[int, dict[str, Any], RefusedRows]]:
    """The inverse: (clock, document, rows)."""
    if not len(body):
        return []
    entries, end = _read_section(body, 0, MAX_LINK_BODY_BYTES, 2, ranges)
    if end != len(body):
        raise FrameError(f"a frame with refused rows has {len(body) - end} bytes left over")
    nothing = RefusedRows({}, ranges)
    return [
        (whole(clock, MAX_CLOCK - 1, 1), error_of(written), nothing if rows is None else rows)
        for (clock, written), rows in entries
    ]


def refused_frame(request: int, epoch: int, refused: Sequence[Refused], *, last: bool) -> bytes:
    """The ERROR for a push that counts without some rows. last: it is the whole answer; else another frame follows."""
    body = encode_refused(refused)
    return Header(Kind.ERROR, REFUSED | LAST * last, len(body), request, epoch).pack() + body


def _section(values: Sequence[Sequence[object]], rows: Sequence[Rows | None]) -> bytes:
    tables: list[dict[int, Keys] | None] = []
    for each in rows:
        assert each is None or isinstance(each, RefusedRows)
        tables.append(None if each is None else each.keys)
    counts = [None if keys is None else [[table, len(some)] for table, some in keys.items()] for keys in tables]
    document = [[*value, count] for value, count in zip(values, counts, strict=True)]
    written = json.dumps(document, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    every = [some.tobytes() for keys in tables if keys is not None for some in keys.values()]
    return b"".join([len(written).to_bytes(8, "little"), written, *every])


def _read_section(
    body: Bytes, at: int, limit: int, count: int, ranges: int
) -> tuple[list[tuple[list[Any], RefusedRows | None]], int]:
    """Entries of `count` values and rows each, and where the section ends."""
    size = int.from_bytes(body[at : at + 8].tobytes(), "little")
    end = at + 8 + size
    if size & 7 or size > limit or end > len(body):
        raise FrameError(f"what was refused, {size} bytes at {at}, does not fit in a body of {len(body)} bytes")
    try:
        document = json.loads(body[at + 8 : end].tobytes())
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what was refused is not JSON: {error}") from None
    entries = []
    for one in _several(document):
        *values, tables = _several(one, count + 1)
        rows = None
        if tables is not None:
            keys = {}
            for each in _several(tables):
                table, n = _several(each, 2)
                stop = end + 8 * whole(n, (len(body) - end) // 8)
                keys[whole(table, _MAX_TABLE, 1)] = body[end:stop].copy().view(np.int64)
                end = stop
            rows = RefusedRows(keys, ranges)
        entries.append((values, rows))
    return entries, end


def _several(document: object, count: int = -1) -> list[Any]:
    if not isinstance(document, list) or (count >= 0 and len(document) != count):
        raise FrameError("what was refused is no list of what it should be")
    return document
