"""Pulls: when their values may be shown, and how they are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.server.protocol.asker import Asker
from elasticps.server.protocol.serving import Serving
from elasticps.store import Table
from elasticps.store.row_digests import WORDS, digests
from elasticps.wire.frames import Buffer, Kind, json_frame
from elasticps.wire.headers import PullHeader, RowsHeader
from replication.replica import Replica

CHUNK_BYTES = 512 << 10
MAX_PARKED = 4096
DEFAULT_WAIT_S = 30.0


class Read(NamedTuple):
    """One pull: keys int64 [n] of a table, asked for on a connection."""

    connection: Asker
    header: PullHeader
    table: Table
    keys: NDArray[np.int64]
    deadline_s: float  # on the server's monotonic clock; meaningful once parked

    @property
    def floats(self) -> int:
        """Of one row of the answer, or words that take as much."""
        if self.header.slots:
            return self.table.slot_floats
        if self.header.digests:
            return WORDS
        return self.table.pull.words if self.header.coded else self.table.spec.dim


def _at_once() -> bool:
    return True


class Judge:
    """Of one answer, while it is being made. A tail whose joiner is level does not show what the joiner may lack: it
    may be the next tail. unshown: connections with answers that wait for that, to be looked at again."""

    def __init__(self, read: Read, serving: Serving, replica: Replica, unshown: dict[Asker, None]) -> None:
        self._read = read
        self._serving = serving
        self._replica = replica
        self._unshown = unshown

    def served(self) -> bool:
        """Whether its ranges are still served here, and there is still such a table."""
        return not self._read.table.dropped and self._serving.serves(
            self._read.header.epoch, self._read.header.anywhere
        )

    def guarded(self) -> bool:
        """Whether values may have to wait before they are shown."""
        return self._replica.guarded and not self._read.header.anywhere

    def shown_when(self, keys: NDArray[np.int64]) -> Callable[[], bool]:
        """Tells when values of `keys` gathered at this instant may be shown."""
        if not self.guarded():
            return _at_once
        ranges = np.unique(self._read.table.ranges_of(keys))
        return shown_when(self._replica, ranges, self._read.connection, self._unshown)


def shown_when(
    replica: Replica, ranges: NDArray[np.int64], asker: Asker, unshown: dict[Asker, None]
) -> Callable[[], bool]:
    """Tells when values in these ranges that were read at this instant, at their tail, may be shown."""
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


def answer(read: Read, judge: Judge, done: int = 0) -> None:
    """Gathers and sends the rows as they are now, from row `done` on.

    A large answer is gathered bit by bit; it ends as stale when its ranges are no longer served here.
    """
    rows, dim = len(read.keys), read.floats
    if not done and rows * dim * 4 <= CHUNK_BYTES and not judge.guarded():
        out = np.empty((rows, dim), np.float32)
        read.connection.send_all(_chunk(read, read.keys, out, 0, last=True))
    else:  # it is made later, chunk by chunk, and the frame that the keys are a view of is gone by then
        read.connection.stream(_chunks(read._replace(keys=read.keys.copy()), judge, done))


def _chunks(read: Read, judge: Judge, done: int) -> Iterator[list[Buffer]]:
    """The answer in pieces of CHUNK_BYTES: while the peer receives one, the next is gathered. Nothing (an empty list)
    as long as a piece must not be shown.

    A chunk that has left is gathered over: memory in use already costs no page faults, and may still be in the cache.
    """
    rows, dim = len(read.keys), read.floats
    step = max(1, CHUNK_BYTES // max(4, dim * 4))
    keys = read.keys
    out = np.empty((min(step, rows), dim), np.float32)
    for at in range(done, max(rows, 1), step):
        part = keys[at : at + step]
        chunk = _chunk(read, part, out[: len(part)], at, last=at + step >= rows) if judge.served() else []
        may_show = judge.shown_when(part)
        while judge.served() and not may_show():
            yield []
        if not judge.served():
            document = {"code": "stale-view", "message": "the ranges left this server in the middle of the answer"}
            yield [json_frame(Kind.ERROR, document, request=read.header.request, epoch=read.header.epoch)]
            return
        yield chunk
        if read.connection.waiting_bytes:  # it is still being sent from
            out = np.empty((min(step, rows), dim), np.float32)


def _chunk(read: Read, keys: NDArray[np.int64], out: NDArray[np.float32], offset: int, *, last: bool) -> list[Buffer]:
    if read.header.slots:
        read.table.read_slots(keys, out)
    elif read.header.coded:
        rows = np.empty((len(keys), read.table.spec.dim), np.float32)
        read.table.gather(keys, rows)
        out[:] = read.table.pull.encode(rows)
    elif read.header.digests:
        rows = np.empty((len(keys), read.table.spec.dim), np.float32)
        read.table.gather(keys, rows)
        out.view(np.uint64)[:, 0] = digests(rows)
    else:
        read.table.gather(keys, out)
    padding = out.nbytes & 7
    header = RowsHeader(read.header.request, read.header.epoch, offset, len(keys), last)
    parts: list[Buffer] = [header.header(out.nbytes + padding).pack()]
    if out.size:  # optimizers may keep nothing of a row
        parts.append(out.data.cast("B"))
    if padding:
        parts.append(b"\0" * padding)
    return parts
