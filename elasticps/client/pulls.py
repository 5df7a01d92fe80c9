"""Pulls on their way: what was asked of which server, where its rows land, and who is asked when views change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Send
from elasticps.client.core.routing import Readers, Routes, place_rows, plan_pull
from elasticps.client.pull_batch import OWNERS, P_FIELDS, PULL, SMALL_BYTES, Landing, cut_pull
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.errors import Error
from elasticps.store.codec import Codec
from elasticps.wire.frames import ANY, CODED, DIGESTS, HEADER_BYTES, LAST, SLOTS, Buffer, FrameError, Header
from elasticps.wire.headers import PullHeader, RowsHeader
from elasticps.wire.pool import Pool
from replication.chain import Member

Positions = NDArray[np.int64] | None  # where keys stand among the read's own; None: they are all of them
_PADDING = np.empty(8, np.uint8)
_ALL = np.empty(0, np.int64)
PULL_FRAME_KEYS = 1 << 20
KEPT_BYTES = 4 << 20  # of frames, for the next ones
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
    """One PULL frame and what has come back of it: rows of the keys at `positions`, of `count`. member None: no server
    can answer it under this view. target: where a large answer's rows go; small ones go where they belong at once."""

    __slots__ = ("count", "epoch", "member", "positions", "read", "request", "target")

    def __init__(
        self, read: Read, member: Member | None, positions: Positions, count: int, target: Target | None,
        request: int = 0, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.read = read
        self.member = member
        self.positions = positions
        self.count = count
        self.target = target
        self.request = request
        self.epoch = epoch  # of the view under which it was asked

    @property
    def keys(self) -> NDArray[np.int64]:
        return self.read.keys if self.positions is None else self.read.keys[self.positions]

    def views(self, header: Header) -> Sequence[memoryview] | None:
        """Where the body of a large answer goes; None for a small one."""
        said, data = self._checked(header)
        if self.target is None:
            return None
        views = self.target.views(said.offset, said.rows)
        if data & 7:
            views.append(_PADDING.data[:4])
        return views

    def place(self, header: Header, body: NDArray[np.uint8]) -> None:
        """Puts the rows of a small answer where they belong."""
        said, data = self._checked(header)
        rows, end = body[:data].view(np.float32), said.offset + said.rows
        where = np.arange(said.offset, end) if self.positions is None else self.positions[said.offset : end]
        self.read.place(rows, where)

    def _checked(self, header: Header) -> tuple[RowsHeader, int]:
        said = RowsHeader.of(header)
        fits = said.offset + said.rows <= self.count
        data = 4 * self.read.floats(self.positions, said.offset, said.rows) if fits else 0
        if not fits or header.body != data + (data & 7):
            raise FrameError(f"an answer of {said.rows} rows in {header.body} bytes does not fit the pull of "
                             f"{self.count} rows")  # fmt: skip
        return said, data


class RowsToCome:
    """Rows of a table that were asked for, whoever has them. No abstract class, nor is `Read`: to ask whether something
    is one of those takes ten times as long, and each step asks for every table."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        raise NotImplementedError

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for the rows: float32 [n, dim]; `Timeout` after `timeout` seconds (default: the client's)."""
        raise NotImplementedError


class Read:
    """A pull in flight, of one table unless said otherwise. `result` gives the array asked for: float32, rows in the
    order of the keys.

    What is asked again, because the server that was to answer is no longer the one, lands in arrays of its own and is
    copied at the end: whatever the first one still sends cannot overwrite it.
    """

    def __init__(
        self, finish: Finish, table_id: int, salt: np.uint64, dim: int, name: str, keys: NDArray[np.int64],
        value: NDArray[np.float32], any_replica: bool, slots: bool = False, coded: bool = False,
        digests: bool = False,
    ) -> None:  # fmt: skip
        self._finish = finish
        self.table_id = table_id
        self.salt = salt
        self.dim = dim
        self.name = name
        self.any_replica = any_replica
        self.slots = slots
        self.coded = coded
        self.digests = digests
        self.short: Short | None = None
        self.parts: dict[int, ReadPart] = {}  # by request, those still unanswered
        self.error: Exception | None = None
        self.clock = self.wait_ms = 0  # as in the PULL header
        self.bound: int | None = None
        self.value = value
        self.flat = value.reshape(-1)
        self.keys = keys
        self._pieces: list[tuple[NDArray[np.float32], NDArray[np.int64]]] = []  # rows and where they belong, in order

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        return not self.parts or self.error is not None

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the rows; `Timeout` after `timeout` seconds (default: the client's)."""
        self._finish(self, timeout)
        for rows, positions in self._pieces:
            self.place(rows, positions)
        self._pieces = []

    def frame_bytes(self, keys: int, servers: int) -> int:
        """Memory for its frames, to so many servers."""
        return 8 * keys + HEADER_BYTES * (servers + 1)

    def cut(
        self, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        """Writes its frames; see `cut_pull`."""
        flags = self.any_replica * ANY | self.slots * SLOTS | self.coded * CODED | self.digests * DIGESTS
        count: int = cut_pull(
            keys, self.salt, routes.shift, readers.of, readers.only, order, cuts, memory, slots, self.flat, self.dim,
            small, request, flags, routes.epoch, self.clock, worker, self.table_id,
            0 if self.bound is None else self.bound + 1, self.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        """A frame with shorter keys."""
        return (frame,) if self.short is None else keys_of.pull(frame, self.short)

    def frame(self, part: ReadPart, epoch: int, worker: int) -> list[Buffer]:
        """The frame of a part."""
        header = PullHeader(
            part.request, epoch, self.clock, worker, self.table_id, part.count, self.bound, self.wait_ms,
            self.any_replica, self.slots, self.coded, self.digests,
        )  # fmt: skip
        return [header.header().pack(), part.keys.data.cast("B")]

    def floats(self, positions: Positions, offset: int, count: int) -> int:
        """Of `count` rows from the one on that has number `offset` of those at `positions`."""
        return count * self.dim

    def plan(self, part: ReadPart, routes: Routes, readers: Readers) -> list[tuple[int, NDArray[np.int64]]]:
        """Who answers for a part's keys, as `plan_pull` says it."""
        return plan_pull(part.keys, self.salt, routes, readers)

    def target(self, positions: Positions, run: bool) -> Target:
        """Where the rows of a large part go; run: they lie one after another."""
        raise NotImplementedError

    def moved(self, part: ReadPart, routes: Routes, readers: Readers) -> bool:
        """Whether another server than the one asked is to answer a part under this view."""
        if readers.only >= 0:
            return routes.members[readers.only] != part.member
        groups = self.plan(part, routes, readers)
        return len(groups) > 1 or _member(routes, groups[0][0]) != part.member

    def plan_again(self, part: ReadPart, routes: Routes, readers: Readers) -> list[ReadPart]:
        """What takes the place of a part, asked of those who answer under this view."""
        parts = []
        for server, mine in self.plan(part, routes, readers):
            positions = mine if part.positions is None else part.positions[mine]
            parts.append(ReadPart(self, _member(routes, server), positions, len(mine), self.private(positions)))
        return parts

    def private(self, positions: NDArray[np.int64]) -> Target:
        """An array of its own for the rows at these positions."""
        rows = np.empty((len(positions), self.dim), np.float32)
        self._pieces.append((rows.reshape(-1), positions))
        return RowsTarget(rows)

    def place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        """Copies n rows, float32 one after another, to their positions, int64 [n], in the order of the keys."""
        raise NotImplementedError


class ArrayRead(Read):
    """A pull of one array. of_tensor: a whole one, not rows of a table."""

    of_tensor = False

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for it; `Timeout` after `timeout` seconds (default: the client's)."""
        self.wait(timeout)
        return self.arrived()

    def arrived(self) -> NDArray[np.float32]:
        """It, when all of it has come."""
        return self.value


class SparseRead(ArrayRead):
    """Rows of a sparse table: keys int64 [n] -> value float32 [n, dim]."""

    def target(self, positions: Positions, run: bool) -> Target:
        if positions is None:
            return RowsTarget(self.value)
        return RowsTarget(self.value[positions[0] : positions[-1] + 1]) if run else self.private(positions)

    def place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        place_rows(rows.reshape(-1, self.dim), positions, self.value)


class CodedRead(SparseRead):
    """Rows of a table or blocks of a tensor as its filters make them, words float32 [n, words]. `result` gives `out`,
    float32 of the shape asked for; what the last block has too much is left out."""

    def __init__(
        self, finish: Finish, table_id: int, salt: np.uint64, codec: Codec, name: str, keys: NDArray[np.int64],
        out: NDArray[np.float32], any_replica: bool, where: NDArray[np.int64] | None = None, short: Short | None = None,
    ) -> None:  # fmt: skip
        coded = np.empty((len(keys), codec.words), np.float32)
        super().__init__(finish, table_id, salt, codec.words, name, keys, coded, any_replica, coded=True)
        self._codec = codec
        self._out = out
        self._where = where  # which of the rows each of `out` is; None: they are the same
        self.short = short
        self._decoded = False

    def arrived(self) -> NDArray[np.float32]:
        if not self._decoded:
            rows = self._codec.decode(self.value)
            if self._where is not None:
                rows = rows[self._where]
            self._out.reshape(-1)[:] = rows.reshape(-1)[: self._out.size]
            self._decoded = True
        return self._out


class DenseRead(ArrayRead):
    """A whole dense tensor, float32 of its shape; the keys are its blocks."""

    of_tensor = True

    def target(self, positions: Positions, run: bool) -> Target:
        return BlocksTarget(self.flat, self.keys if positions is None else positions, self.dim)

    def place(self, rows: NDArray[np.float32], positions: NDArray[np.int64]) -> None:
        for row, block in zip(rows.reshape(-1, self.dim), positions.tolist(), strict=True):
            here = self.flat[block * self.dim : (block + 1) * self.dim]
            here[:] = row[: len(here)]


def _member(routes: Routes, server: int) -> Member | None:
    return routes.members[server] if server >= 0 else None


class Pulls:
    """Parts of reads by request. Runs under the dispatcher's lock, except for `sink`, which the thread that reads the
    sockets calls. `send` takes frames for a server; `abandon(member, request)` hears that an answer is
    no longer wanted, before its memory is."""

    def __init__(
        self, routes: Routes, worker: int, send: Send, abandon: Callable[[Member, int], None],
        keys_of: Callable[[Member], ShortKeys | None] = lambda member: None,
    ) -> None:  # fmt: skip
        self.landing = Landing()
        self._routes = routes
        self._worker = worker
        self._send = send
        self._abandon = abandon
        self._keys_of = keys_of
        self._parts: dict[int, ReadPart] = {}
        self._next = OWNERS + PULL  # request
        self._pool = Pool(KEPT_BYTES)

    @property
    def oldest(self) -> int:
        """The oldest request that has not been answered, 0 for none."""
        return next(iter(self._parts), 0)

    @property
    def asked(self) -> set[Member]:
        """The servers that owe answers."""
        return {part.member for part in self._parts.values() if part.member is not None}

    def start(self, reads: Sequence[Read], bound: int | None, wait_ms: int) -> None:
        """Asks for some reads. Small frames to one server leave together: each system call costs more than several of
        them."""
        frames: dict[Member, list[Buffer]] = {}
        for read in reads:
            read.bound, read.wait_ms = bound, wait_ms
            keys = read.keys
            if len(keys) <= PULL_FRAME_KEYS:
                self._cut(read, keys, 0, frames)
                continue
            for first in range(0, len(keys), PULL_FRAME_KEYS):
                self._cut(read, keys[first : first + PULL_FRAME_KEYS], first, frames)
        for member, buffers in frames.items():
            self._send(member, buffers)

    def _cut(self, read: Read, keys: NDArray[np.int64], first: int, frames: dict[Member, list[Buffer]]) -> None:
        """Cuts the part of a read that begins with key number `first` by server, and lays the frames out."""
        routes, members = self._routes, self._routes.members
        readers = self._readers(read) if read.any_replica else routes.tails
        n, only, request = len(keys), readers.only >= 0, self._next
        self._next += OWNERS * (len(members) + 1)
        order = _ALL if only else np.empty(n, np.int64)
        memory = self._pool.take(read.frame_bytes(n, len(members)))
        cuts = np.empty((len(members) + 1, P_FIELDS), np.int64)
        small = SMALL_BYTES if n == len(read.keys) else 0
        slots, worker = self.landing.slots, self._worker
        count = read.cut(keys, routes, readers, order, cuts, memory, slots, small, request, worker)
        data = memory.data
        for server, word, low, high, body, floats in cuts[:count].tolist():
            if only:
                positions = None if small else np.arange(first, first + n)
            else:
                positions = order[low:high]  # keeps the memory in which the compiled code looks
                positions += first
            member = target = None
            if server >= 0:
                member = members[server]
                if 4 * floats > small:
                    target = read.target(positions, only)
                at = 8 * word
                frame = data[at : at + HEADER_BYTES + body]
                shorter: Sequence[Buffer] = (frame,)
                if read.short is not None and (keys_of := self._keys_of(member)) is not None:
                    shorter = read.shortened(keys_of, frame)
                frames.setdefault(member, []).extend(shorter)
            part = ReadPart(read, member, positions, high - low, target, request, routes.epoch)
            self._parts[request] = read.parts[request] = part
            request += OWNERS

    def forget(self, read: Read, error: Error) -> None:
        """Gives up what is still unanswered of a read."""
        read.error = read.error or error
        for part in list(read.parts.values()):
            self._drop(part)

    def fail(self, error: Error) -> None:
        """Ends every read: nobody will answer any more."""
        self.landing.clear()
        for part in self._parts.values():
            part.read.error = error
        self._parts.clear()

    def sink(self, header: Header) -> Sequence[memoryview] | None:
        """Where the rows of an answer go; None for what is not wanted, or small."""
        part = self._parts.get(header.request)
        return None if part is None else part.views(header)

    def rows(self, header: Header, body: NDArray[np.uint8]) -> None:
        """Rows have come: where `sink` said, or in `body`."""
        part = self._parts.get(header.request)
        if part is None:
            return
        if part.target is None:
            part.place(header, body)
        if header.flags & LAST:
            self.finish(header.request, None)

    def finish(self, request: int, error: Exception | None) -> bool:
        """A part has been answered. False if it is none of ours."""
        self.landing.forget(request)
        part = self._parts.get(request)
        if part is None:
            return False
        part.read.error = part.read.error or error
        self.arrived(request)
        return True

    def arrived(self, request: int) -> None:
        """All rows of a part are where they belong."""
        part = self._parts[request]
        part.read.parts.pop(request, None)  # first: `recover` drops the rest, should an exception come in between
        del self._parts[request]

    def recover(self) -> None:
        """Forgets what an exception has left of reads that are done: it must not be received a second time."""
        self.landing.clear()
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
            part.request, self._next = self._next, self._next + OWNERS
            part.read.parts[part.request] = self._parts[part.request] = part
        self._send_parts(parts)

    def _send_parts(self, parts: Iterable[ReadPart]) -> None:
        frames: dict[Member, list[Buffer]] = {}
        for part in parts:
            part.epoch = self._routes.epoch
            if part.member is not None:
                frames.setdefault(part.member, []).extend(part.read.frame(part, part.epoch, self._worker))
        for member, buffers in frames.items():
            self._send(member, buffers)

    def _ask_again(self, parts: list[ReadPart]) -> None:
        for part in parts:
            self._ask(part.read.plan_again(part, self._routes, self._readers(part.read)))
            self._drop(part)  # not before: a read without parts looks done to whoever waits for it

    def _drop(self, part: ReadPart) -> None:
        self.landing.forget(part.request)
        self._parts.pop(part.request, None)
        part.read.parts.pop(part.request, None)
        if part.member is not None:
            self._abandon(part.member, part.request)
