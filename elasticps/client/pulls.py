"""Pulls on their way: what was asked of which server, where its rows land, and who is asked when views change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.client.protocol.fan_out import Send
from elasticps.client.protocol.routing import Readers, Routes, place_rows, plan_pull
from elasticps.errors import Error
from elasticps.wire.frames import Buffer, FrameError, Header
from elasticps.wire.headers import PullHeader, RowsHeader
from replication.chain import Member

Positions = NDArray[np.int64] | None  # where keys stand among the read's own; None: they are all of them
_PADDING = np.empty(8, np.uint8)
PULL_FRAME_KEYS = 1 << 20
Finish: TypeAlias = "Callable[[Read, float | None], None]"  # waits until all of a read has arrived


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
    """One PULL frame and what has come back of it. member None: no server can answer it under this view."""

    def __init__(self, read: Read, member: Member | None, positions: Positions, keys: NDArray[np.int64],
                 target: Target) -> None:  # fmt: skip
        self.read = read
        self.member = member
        self.positions = positions
        self.keys = keys
        self.request = 0
        self.epoch = 0  # of the view under which it was asked
        self._target = target

    def views(self, header: Header) -> Sequence[memoryview]:
        """Where the body of one answer goes."""
        said = RowsHeader.of(header)
        data = said.rows * self.read.dim * 4
        if said.offset + said.rows > len(self.keys) or header.body != data + (data & 7):
            raise FrameError(f"an answer of {said.rows} rows in {header.body} bytes does not fit the pull of "
                             f"{len(self.keys)} rows")  # fmt: skip
        views = self._target.views(said.offset, said.rows)
        if data & 7:
            views.append(_PADDING.data[:4])
        return views

    def frame(self, epoch: int, worker: int) -> list[bytes | memoryview]:
        """The PULL frame."""
        read, keys = self.read, self.keys
        header = PullHeader(
            self.request, epoch, read.clock, worker, read.table_id, len(keys), read.bound, read.wait_ms,
            read.any_replica,
        )  # fmt: skip
        return [header.header().pack(), keys.data.cast("B")]


class Read(ABC):
    """A pull in flight. `result` gives the array asked for: float32, rows in the order of the keys.

    What is asked again, because the server that was to answer is no longer the one, lands in arrays of its own and is
    copied at the end: whatever the first one still sends cannot overwrite it.
    """

    def __init__(
        self, finish: Finish, table_id: int, salt: np.uint64, dim: int, name: str, keys: NDArray[np.int64],
        any_replica: bool,
    ) -> None:  # fmt: skip
        self._finish = finish
        self.table_id = table_id
        self.salt = salt
        self.dim = dim
        self.name = name
        self.any_replica = any_replica
        self.parts: dict[int, ReadPart] = {}  # by request, those still unanswered
        self.error: Exception | None = None
        self.clock = self.wait_ms = 0  # as in the PULL header
        self.bound: int | None = None
        self.value: NDArray[np.float32]
        self.keys = keys
        self._pieces: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []  # rows and where they belong, in order

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return not self.parts or self.error is not None

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for the rows; `Timeout` after `timeout` seconds (default: the client's)."""
        self._finish(self, timeout)
        for rows, positions in self._pieces:
            self._place(rows, positions)
        self._pieces = []
        return self.value

    @abstractmethod
    def plan(self, routes: Routes, readers: Readers) -> list[ReadPart]:
        """The parts to ask for under a view."""

    def moved(self, part: ReadPart, routes: Routes, readers: Readers) -> bool:
        """Whether another server than the one asked is to answer a part under this view."""
        if readers.only >= 0:
            return routes.members[readers.only] != part.member
        groups = plan_pull(part.keys, self.salt, routes, readers)
        return len(groups) > 1 or _member(routes, groups[0][0]) != part.member

    def plan_again(self, part: ReadPart, routes: Routes, readers: Readers) -> list[ReadPart]:
        """What takes the place of a part, asked of those who answer under this view."""
        parts = []
        for server, mine in plan_pull(part.keys, self.salt, routes, readers):
            positions = mine if part.positions is None else part.positions[mine]
            parts += self._private(_member(routes, server), positions)
        return parts

    def _private(self, member: Member | None, positions: NDArray[np.int64]) -> list[ReadPart]:
        """Parts whose rows land in an array of their own."""
        rows = np.empty((len(positions), self.dim), np.float32)
        self._pieces.append((rows, positions))
        return self._cut(member, positions, self.keys[positions], rows)

    def _cut(
        self, member: Member | None, positions: Positions, keys: NDArray[np.int64], rows: NDArray[np.float32]
    ) -> list[ReadPart]:
        if positions is None and len(keys) > PULL_FRAME_KEYS:
            positions = np.arange(len(keys))
        parts = []
        for at in range(0, len(keys), PULL_FRAME_KEYS):
            end = at + PULL_FRAME_KEYS
            where = None if positions is None else positions[at:end]
            parts.append(ReadPart(self, member, where, keys[at:end], RowsTarget(rows[at:end])))
        return parts

    @abstractmethod
    def _place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Copies rows float32 [n, dim] to their positions, int64 [n], in the order of the keys."""


class SparseRead(Read):
    """Rows of a sparse table: keys int64 [n] -> out float32 [n, dim]."""

    def __init__(self, finish: Finish, table_id: int, salt: np.uint64, name: str, keys: NDArray[np.int64],
                 out: NDArray[np.float32], any_replica: bool) -> None:  # fmt: skip
        super().__init__(finish, table_id, salt, out.shape[1], name, keys, any_replica)
        self.value = out

    def plan(self, routes: Routes, readers: Readers) -> list[ReadPart]:
        if readers.only >= 0:
            return self._cut(routes.members[readers.only], None, self.keys, self.value)
        parts = []
        for server, positions in plan_pull(self.keys, self.salt, routes, readers):
            parts += self._private(_member(routes, server), positions)
        return parts

    def _place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        place_rows(rows, positions, self.value)


class DenseRead(Read):
    """A whole dense tensor, received straight into `out`."""

    def __init__(self, finish: Finish, table_id: int, salt: np.uint64, dim: int, name: str,
                 out: NDArray[np.float32], blocks: int, any_replica: bool) -> None:  # fmt: skip
        super().__init__(finish, table_id, salt, dim, name, np.arange(blocks, dtype=np.int64), any_replica)
        self.value = out

    def plan(self, routes: Routes, readers: Readers) -> list[ReadPart]:
        flat = self.value.reshape(-1)
        parts = []
        for server, blocks in plan_pull(self.keys, self.salt, routes, readers):
            target = BlocksTarget(flat, blocks, self.dim)
            parts.append(ReadPart(self, _member(routes, server), blocks, self.keys[blocks], target))
        return parts

    def _place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        flat = self.value.reshape(-1)
        for row, block in zip(rows, positions.tolist(), strict=True):
            here = flat[block * self.dim : (block + 1) * self.dim]
            here[:] = row[: len(here)]


def _member(routes: Routes, server: int) -> Member | None:
    return routes.members[server] if server >= 0 else None


class Pulls:
    """Parts of reads by request. Runs under the dispatcher's lock, except for `sink`, which the thread that reads the
    sockets calls. `send` takes frames for a server; `abandon(member, request)` hears that an answer is
    no longer wanted, before its memory is."""

    def __init__(
        self,
        routes: Routes,
        worker: int,
        requests: Iterator[int],
        send: Send,
        abandon: Callable[[Member, int], None],
    ) -> None:
        self._routes = routes
        self._worker = worker
        self._requests = requests
        self._send = send
        self._abandon = abandon
        self._parts: dict[int, ReadPart] = {}

    @property
    def oldest(self) -> int:
        """The oldest request that has not been answered, 0 for none."""
        return next(iter(self._parts), 0)

    @property
    def asked(self) -> set[Member]:
        """The servers that owe answers."""
        return {part.member for part in self._parts.values() if part.member is not None}

    def start(self, reads: Sequence[Read], bound: int | None, wait_ms: int) -> None:
        """Asks for all parts of some reads, each server once."""
        parts: list[ReadPart] = []
        for read in reads:
            read.bound, read.wait_ms = bound, wait_ms
            parts += read.plan(self._routes, self._readers(read))
        self._ask(parts)

    def forget(self, read: Read, error: Error) -> None:
        """Gives up what is still unanswered of a read."""
        read.error = read.error or error
        for part in list(read.parts.values()):
            self._drop(part)

    def fail(self, error: Error) -> None:
        """Ends every read: nobody will answer any more."""
        for part in self._parts.values():
            part.read.error = error
        self._parts.clear()

    def sink(self, header: Header) -> Sequence[memoryview] | None:
        """Where the rows of an answer go; None for what is not wanted."""
        part = self._parts.get(header.request)
        return None if part is None else part.views(header)

    def finish(self, request: int, error: Exception | None) -> bool:
        """A part has been answered. False if it is none of ours."""
        part = self._parts.get(request)
        if part is None:
            return False
        part.read.error = part.read.error or error
        part.read.parts.pop(request, None)  # first: `recover` drops the rest, should an exception come in between
        del self._parts[request]
        return True

    def recover(self) -> None:
        """Forgets what an exception has left of reads that are done: it must not be received a second time."""
        self._parts = {n: part for n, part in self._parts.items() if n in part.read.parts}

    # -- views and connections ----------------------------------------------------------------------------------------

    def adopt(self, routes: Routes) -> None:
        """Follows a view: what others are to answer now is asked of them."""
        self._routes = routes
        parts = list(self._parts.values())
        self._ask_again([p for p in parts if p.member is None or p.read.moved(p, routes, self._readers(p.read))])

    def connected(self, member: Member) -> None:
        """A new connection to a server: what it may not have heard is asked again."""
        self._send_parts(part for part in self._parts.values() if part.member == member)

    def stall(self, request: int) -> None:
        """A server has another view than the one a part was asked under: it is planned again under a newer one, or, if
        there is none yet, with the next `resume`."""
        part = self._parts.get(request)
        if part is not None:
            part.member = None
            if part.epoch < self._routes.epoch:
                self._ask_again([part])

    def resume(self) -> None:
        """Plans again what nobody is asked for."""
        self._ask_again([part for part in self._parts.values() if part.member is None])

    # -- asking -------------------------------------------------------------------------------------------------------

    def _readers(self, read: Read) -> Readers:
        return self._routes.replicas(self._worker) if read.any_replica else self._routes.tails

    def _ask(self, parts: list[ReadPart]) -> None:
        for part in parts:
            part.request = next(self._requests)
            part.read.parts[part.request] = self._parts[part.request] = part
        self._send_parts(parts)

    def _send_parts(self, parts: Iterable[ReadPart]) -> None:
        """Small frames to one server leave together: each system call costs more than several of them."""
        frames: dict[Member, list[Buffer]] = {}
        for part in parts:
            part.epoch = self._routes.epoch
            if part.member is not None:
                frames.setdefault(part.member, []).extend(part.frame(self._routes.epoch, self._worker))
        for member, buffers in frames.items():
            self._send(member, buffers)

    def _ask_again(self, parts: list[ReadPart]) -> None:
        for part in parts:
            self._ask(part.read.plan_again(part, self._routes, self._readers(part.read)))
            self._drop(part)  # not before: a read without parts looks done to whoever waits for it

    def _drop(self, part: ReadPart) -> None:
        self._parts.pop(part.request, None)
        part.read.parts.pop(part.request, None)
        if part.member is not None:
            self._abandon(part.member, part.request)
