"""Pulls: when their values may be shown, and how they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elasticps.server.connection import Connection
from elasticps.store import Table
from elasticps.wire.frames import LAST, Buffer, Header, Kind

CHUNK_BYTES = 512 << 10
MAX_PARKED = 4096
DEFAULT_WAIT_S = 30.0


@dataclass(frozen=True)
class Read:
    """One pull: keys int64 [n] of a table, asked for on a connection."""

    connection: Connection
    header: Header
    table: Table
    keys: NDArray[np.int64]
    deadline_s: float  # on the server's monotonic clock; meaningful once parked


def answer(read: Read) -> None:
    """Gathers and sends the rows as they are now."""
    rows, dim = len(read.keys), read.table.spec.dim
    if rows * dim * 4 <= CHUNK_BYTES:
        read.connection.transport.writelines(_chunk(read, read.keys, 0, last=True))
    else:
        read.connection.stream(_chunks(read))


def _chunks(read: Read) -> Iterator[list[Buffer]]:
    """The answer in pieces of CHUNK_BYTES: while the peer receives one, the next is gathered."""
    rows = len(read.keys)
    step = max(1, CHUNK_BYTES // (read.table.spec.dim * 4))
    keys = read.keys.copy() if read.connection.staged else read.keys
    for at in range(0, rows, step):
        yield _chunk(read, keys[at : at + step], at, last=at + step >= rows)


def _chunk(read: Read, keys: NDArray[np.int64], offset: int, *, last: bool) -> list[Buffer]:
    rows = len(keys)
    out = np.empty((rows, read.table.spec.dim), np.float32)
    read.table.gather(keys, out)
    padding = out.nbytes & 7
    header = Header(
        Kind.ROWS,
        LAST if last else 0,
        out.nbytes + padding,
        read.header.request,
        read.header.epoch,
        clock=offset,
        count=rows,
    )
    parts: list[Buffer] = [header.pack()]
    if rows:
        parts.append(out.data.cast("B"))
    if padding:
        parts.append(b"\0" * padding)
    return parts
