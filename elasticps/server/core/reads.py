"""Answers pulls: when values may be shown, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.requests import Asker
from elasticps.server.core.serving import Serving
from elasticps.store import Table
from elasticps.store.codec import WORDS, digests
from elasticps.store.usage import USAGE
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import Buffer, Kind
from elasticps.wire.headers import PullHeader, RowsHeader
from replication.replica import Replica

CHUNK_BYTES = 512 << 10
MAX_PARKED = 4096
DEFAULT_WAIT_S = 30.0
_NOWHERE = np.empty(0, np.int64)


class TableKeys(NamedTuple):
    """Keys int64 [n] of a table."""

    table: Table
    keys: NDArray[np.int64]

    def floats(self, header: PullHeader) -> int:
        """Floats of one row of the answer, or words that take as much."""
        if header.slots:
            return self.table.slot_floats
        if header.digests:
            return WORDS
        if header.usage:
            return USAGE
        return self.table.pull.words if header.coded else self.table.spec.dim


class PullRequest(NamedTuple):
    """A pull of rows of one table, or of several, on a connection."""

    connection: Asker
    header: PullHeader
    parts: Sequence[TableKeys]
    deadline_s: float = 0.0  # on the server's monotonic clock; meaningful once parked
    after: ReadAfter | None = None  # steps of its worker that it has to see

    @property
    def rows(self) -> int:
        """Rows of the whole answer."""
        return sum([len(each.keys) for each in self.parts])

    @property
    def table_names(self) -> str:
        """The names of its tables, for error texts."""
        return ", ".join([repr(each.table.spec.name) for each in self.parts])

    def dropped(self) -> TableKeys | None:
        """A table of it that has been dropped, if there is one."""
        return next((each for each in self.parts if each.table.dropped), None)

    def detached(self) -> PullRequest:
        """A copy that does not refer to the frame's memory."""
        return self._replace(parts=[each._replace(keys=each.keys.copy()) for each in self.parts])


def _at_once() -> bool:
    return True


class AnswerGate:
    """Says whether the rows of one answer may be sent, while it is being made. A tail whose joiner is level does not
    show what the joiner may lack, as that may be the next tail. unshown: connections whose answers wait for that, to
    be tried again."""

    def __init__(self, read: PullRequest, serving: Serving, replica: Replica, unshown: dict[Asker, None]) -> None:
        self._read = read
        self._serving = serving
        self._replica = replica
        self._unshown = unshown

    def served(self) -> bool:
        """Whether its ranges are still served here, and its tables still exist."""
        header = self._read.header
        return self._read.dropped() is None and self._serving.serves(header.epoch, header.anywhere)

    def guarded(self) -> bool:
        """Whether values may have to wait before they are shown."""
        return self._replica.guarded and not self._read.header.anywhere

    def shown_when(self, part: Sequence[TableKeys]) -> Callable[[], bool]:
        """A function that returns whether values of these rows gathered now may be shown."""
        if not self.guarded():
            return _at_once
        ranges = np.unique(np.concatenate([_NOWHERE, *(each.table.ranges_of(each.keys) for each in part)]))
        return shown_when(self._replica, ranges, self._read.connection, self._unshown)


def shown_when(
    replica: Replica, ranges: NDArray[np.int64], asker: Asker, unshown: dict[Asker, None]
) -> Callable[[], bool]:
    """A function that returns whether values read now in these ranges, at their tail, may be shown."""
    if not replica.guarded:
        return _at_once
    ranges = ranges[replica.waiting[ranges] & (replica.acked[ranges] < replica.seq[ranges])]
    seen = replica.seq[ranges]

    def shown() -> bool:
        if not np.count_nonzero(replica.acked[ranges] < seen):
            return True
        unshown[asker] = None
        return False

    return shown


def answer(read: PullRequest, gate: AnswerGate, done: int = 0) -> None:
    """Gathers and sends the rows as they are now, from row `done` on.

    A large answer is gathered bit by bit; it ends as stale when its ranges are no longer served here.
    """
    floats = sum([len(each.keys) * each.floats(read.header) for each in read.parts])
    if not done and floats * 4 <= CHUNK_BYTES and not gate.guarded():
        out = np.empty(floats, np.float32)
        read.connection.send_all(_chunk(read, read.parts, out, 0, last=True))
    else:  # it is made later, chunk by chunk, and the frame that the keys are a view of is gone by then
        read.connection.stream(_chunks(read.detached(), gate, done))


def pieces(read: PullRequest, done: int) -> Iterator[list[TableKeys]]:
    """The keys of each chunk of an answer, from row `done` on: as many rows as fit, one at least."""
    piece, left = list[TableKeys](), CHUNK_BYTES
    for table, keys in read.parts:
        at, row_bytes = min(done, len(keys)), max(4, 4 * TableKeys(table, keys).floats(read.header))
        done -= at
        while at < len(keys):
            count = min(max(left, 0) // row_bytes, len(keys) - at)
            if not count and piece:
                yield piece
                piece, left = [], CHUNK_BYTES
                continue
            count = max(count, 1)
            piece.append(TableKeys(table, keys[at : at + count]))
            at, left = at + count, left - count * row_bytes
    yield piece  # of an answer without rows, too


def _chunks(read: PullRequest, gate: AnswerGate, done: int) -> Iterator[list[Buffer]]:
    """The answer in pieces of CHUNK_BYTES: while the peer receives one, the next is gathered. Nothing (an empty list)
    as long as a piece must not be shown.

    A chunk that has left is gathered over: memory in use already costs no page faults, and may still be in the cache.
    """
    header, at, rows = read.header, done, read.rows
    floats = [sum([len(each.keys) * each.floats(header) for each in part]) for part in pieces(read, done)]
    out = np.empty(max(floats), np.float32)
    for part, size in zip(pieces(read, done), floats, strict=True):
        count = sum([len(each.keys) for each in part])
        chunk = _chunk(read, part, out[:size], at, last=at + count >= rows) if gate.served() else []
        at += count
        may_show = gate.shown_when(part)
        while gate.served() and not may_show():
            yield []
        if not gate.served():
            document = {"code": "stale-view", "message": "the ranges left this server in the middle of the answer"}
            yield [read.connection.errors.for_request(Kind.PULL, header.request, document, header.epoch)]
            return
        yield chunk
        if read.connection.waiting_bytes:  # it is still being sent from
            out = np.empty(max(floats), np.float32)


def _chunk(
    read: PullRequest, part: Sequence[TableKeys], out: NDArray[np.float32], offset: int, *, last: bool
) -> list[Buffer]:
    at = rows = 0
    for each in part:
        floats, count = each.floats(read.header), len(each.keys)
        _gather(read.header, each, out[at : at + count * floats].reshape(count, floats))
        at, rows = at + count * floats, rows + count
    padding = out.nbytes & 7
    header = RowsHeader(read.header.request, read.header.epoch, offset, rows, last)
    parts: list[Buffer] = [header.header(out.nbytes + padding).pack()]
    if out.size:  # optimizers may keep nothing of a row
        parts.append(out.data.cast("B"))
    if padding:
        parts.append(b"\0" * padding)
    return parts


def _gather(header: PullHeader, parts: TableKeys, out: NDArray[np.float32]) -> None:
    table, keys = parts
    if header.slots:
        table.read_slots(keys, out)
    elif header.usage:
        out.view(np.uint32)[:] = table.read_usage(keys)
    elif header.coded:
        rows = np.empty((len(keys), table.spec.dim), np.float32)
        table.gather(keys, rows)
        out[:] = table.pull.encode(rows)
    elif header.digests:
        rows = np.empty((len(keys), table.spec.dim), np.float32)
        table.gather(keys, rows)
        out.view(np.uint64)[:, 0] = digests(rows)
    else:
        table.gather(keys, out)
