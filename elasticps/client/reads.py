"""Pulls on their way: what was asked of which server, and where its rows land."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.client.routing import Routes, place_rows, plan_pull
from elasticps.wire.frames import FrameError, Header, Kind

if TYPE_CHECKING:
    from elasticps.client.cluster import Client

_PADDING = np.empty(8, np.uint8)
PULL_FRAME_KEYS = 1 << 20


class Target(Protocol):
    """Where the rows of one answer go."""

    def views(self, offset: int, count: int) -> list[memoryview]:
        """Writable bytes for `count` rows from row `offset` on."""


class RowsTarget:
    """Rows one after another: float32 [n, dim]."""

    def __init__(self, rows: NDArray[np.float32]) -> None:
        self.rows = rows

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self.rows[offset : offset + count]
        return [part.data.cast("B")] if count else []


class BlocksTarget:
    """Rows that are blocks of a dense tensor: `keys` says which; the last block's padding is thrown away."""

    def __init__(self, flat: NDArray[np.float32], keys: NDArray[np.int64], dim: int) -> None:
        self._bytes = flat.data.cast("B")
        self._keys = keys
        self._row_bytes = dim * 4

    def views(self, offset: int, count: int) -> list[memoryview]:
        row, size, views = self._row_bytes, len(self._bytes), []
        for key in self._keys[offset : offset + count].tolist():
            at = key * row
            views.append(self._bytes[at : min(at + row, size)])
            if at + row > size:
                views.append(memoryview(bytearray(at + row - size)))
        return views


class ReadPart:
    """One PULL frame and what has come back of it."""

    def __init__(self, read: Read, server: str, keys: NDArray[np.int64], target: Target) -> None:
        self.read = read
        self.server = server
        self.keys = keys
        self.request = 0
        self._target = target

    def views(self, header: Header) -> Sequence[memoryview]:
        """Where the body of one answer goes."""
        data = header.items * self.read.dim * 4
        if header.clock + header.items > len(self.keys) or header.body != data + (data & 7):
            raise FrameError(f"an answer of {header.items} rows in {header.body} bytes does not fit the pull of "
                             f"{len(self.keys)} rows")  # fmt: skip
        views = self._target.views(header.clock, header.items)
        if data & 7:
            views.append(_PADDING.data[:4])
        return views


class Read(ABC):
    """A pull in flight. `result` gives the array asked for: float32, rows in the order of the keys."""

    def __init__(self, client: Client, table_id: int, salt: np.uint64, dim: int, name: str) -> None:
        self._client = client
        self.table_id = table_id
        self.salt = salt
        self.dim = dim
        self.name = name
        self.parts: dict[int, ReadPart] = {}  # by request, those still unanswered
        self.error: Exception | None = None
        self.started_s = time.monotonic()
        self.clock = self.bound = self.wait_ms = 0  # as in the PULL header
        self.value: NDArray[np.float32]

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return not self.parts or self.error is not None

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for the rows; `Timeout` after `timeout` seconds (default: the client's)."""
        self._client.finish_read(self, timeout)
        return self._assemble()

    @abstractmethod
    def plan(self, routes: Routes) -> list[ReadPart]:
        """The parts to ask for under a view."""

    def _assemble(self) -> NDArray[np.float32]:
        return self.value


class SparseRead(Read):
    """Rows of a sparse table: keys int64 [n] -> out float32 [n, dim]."""

    def __init__(self, client: Client, table_id: int, salt: np.uint64, name: str, keys: NDArray[np.int64],
                 out: NDArray[np.float32]) -> None:  # fmt: skip
        super().__init__(client, table_id, salt, out.shape[1], name)
        self._keys = keys
        self.value = out
        self._pieces: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []

    def plan(self, routes: Routes) -> list[ReadPart]:
        self._pieces = []
        if routes.only_reader >= 0:
            name = routes.view.servers[routes.only_reader].name
            return self._cut(name, self._keys, self.value)
        order, offsets = plan_pull(self._keys, self.salt, routes)
        parts = []
        for index, server in enumerate(routes.view.servers):
            mine = order[offsets[index] : offsets[index + 1]]
            if len(mine):
                rows = np.empty((len(mine), self.dim), np.float32)
                self._pieces.append((rows, mine))
                parts += self._cut(server.name, self._keys[mine], rows)
        return parts

    def _cut(self, server: str, keys: NDArray[np.int64], rows: NDArray[np.float32]) -> list[ReadPart]:
        return [
            ReadPart(self, server, keys[at : at + PULL_FRAME_KEYS], RowsTarget(rows[at : at + PULL_FRAME_KEYS]))
            for at in range(0, len(keys), PULL_FRAME_KEYS)
        ]

    def _assemble(self) -> NDArray[np.float32]:
        for rows, order in self._pieces:
            place_rows(rows, order, self.value)
        self._pieces = []
        return self.value


class DenseRead(Read):
    """A whole dense tensor, received straight into `out`."""

    def __init__(self, client: Client, table_id: int, salt: np.uint64, dim: int, name: str,
                 out: NDArray[np.float32], blocks: int) -> None:  # fmt: skip
        super().__init__(client, table_id, salt, dim, name)
        self.value = out
        self._keys = np.arange(blocks, dtype=np.int64)

    def plan(self, routes: Routes) -> list[ReadPart]:
        order, offsets = plan_pull(self._keys, self.salt, routes)
        flat = self.value.reshape(-1)
        parts = []
        for index, server in enumerate(routes.view.servers):
            keys = self._keys[order[offsets[index] : offsets[index + 1]]]
            if len(keys):
                parts.append(ReadPart(self, server.name, keys, BlocksTarget(flat, keys, self.dim)))
        return parts


def pull_frame(part: ReadPart, epoch: int, worker: int) -> list[bytes | memoryview]:
    """The PULL frame of a part."""
    keys = part.keys
    header = Header(
        Kind.PULL, 0, keys.nbytes, part.request, epoch, part.read.clock, worker,
        table=part.read.table_id, items=len(keys), bound=part.read.bound, wait_ms=part.read.wait_ms,
    )  # fmt: skip
    return [header.pack(), keys.data.cast("B")]
