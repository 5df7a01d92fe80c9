"""A pull: what is asked, how its frames are laid out, and where the rows that come belong.

One class, `ServerPull`, with a `PullLayout` that says what differs: rows of a table (`ROWS`), blocks of a dense tensor
(`BLOCKS`), rows in the words of a filter (`Coded`), rows of several tables (`pull_tables.SeveralTables`). A table with
a cache has `row_cache.CachedPull`, which asks for the rows that it lacks by pulls like these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.routing import Readers, Routes, place_rows, plan_pull
from elasticps.client.pull_batch import cut_pull
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.store.codec import Codec
from elasticps.wire.frames import ANY, CODED, DIGESTS, HEADER_BYTES, SLOTS, Buffer, FrameError, Header
from elasticps.wire.headers import PullHeader, RowsHeader
from replication.chain import Member

Positions = NDArray[np.int64] | None  # where keys stand among the pull's own; None: they are all of them
Floats = NDArray[np.float32]
Finish: TypeAlias = "Callable[[ServerPull, float | None], None]"  # waits until all of a pull has arrived
_PADDING = np.empty(8, np.uint8)


class PendingRows(Protocol):
    """Rows that were asked for: a `ServerPull`, or one by way of a cache."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for the rows: float32 [n, dim]; `Timeout` after `timeout` seconds (default: the client's)."""


@dataclass(slots=True)
class Query:
    """What a pull asks of one table. dim: floats of a row as it travels; any_replica: committed or not, from whichever
    copy; slots: the optimizer's state instead of weights; coded: as the table's pull filters make them; digests: of
    rows instead of rows."""

    table_id: int
    salt: np.uint64
    dim: int
    name: str
    any_replica: bool = False
    slots: bool = False
    coded: bool = False
    digests: bool = False
    flags: int = field(init=False)  # of the PULL header

    def __post_init__(self) -> None:
        self.flags = self.any_replica * ANY | self.slots * SLOTS | self.coded * CODED | self.digests * DIGESTS


class AnswerTarget(Protocol):
    """Where the rows of one answer go."""

    def views(self, offset: int, count: int) -> list[memoryview]:
        """Writable bytes for `count` rows from row `offset` on."""


class RowsTarget:
    """Rows one after another: float32 [n, dim]."""

    def __init__(self, rows: Floats) -> None:
        self.rows = rows

    def views(self, offset: int, count: int) -> list[memoryview]:
        part = self.rows[offset : offset + count]
        return [part.data.cast("B")] if count else []


class BlocksTarget:
    """Rows that are blocks of a dense tensor: `keys` says which; the last block's padding is thrown away."""

    def __init__(self, flat: Floats, keys: NDArray[np.int64], dim: int) -> None:
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


class PullPart:
    """One PULL frame and what has come back of it: rows of the keys at `positions`, of `count`. member None: no server
    can answer it under this view. target: where a large answer's rows go; small ones go where they belong at once."""

    __slots__ = ("count", "epoch", "member", "positions", "pull", "request", "target")

    def __init__(
        self, pull: ServerPull, member: Member | None, positions: Positions, count: int, target: AnswerTarget | None,
        request: int = 0, epoch: int = 0,
    ) -> None:  # fmt: skip
        self.pull = pull
        self.member = member
        self.positions = positions
        self.count = count
        self.target = target
        self.request = request
        self.epoch = epoch  # of the view under which it was asked

    @property
    def keys(self) -> NDArray[np.int64]:
        """Those that this part asks for, int64 [count]."""
        return self.pull.keys if self.positions is None else self.pull.keys[self.positions]

    def views(self, header: Header) -> Sequence[memoryview] | None:
        """Where the body of a large answer goes; None for a small one."""
        answer, data = self._checked(header)
        if self.target is None:
            return None
        views = self.target.views(answer.offset, answer.rows)
        if data & 7:
            views.append(_PADDING.data[:4])
        return views

    def place(self, header: Header, body: NDArray[np.uint8]) -> None:
        """Puts the rows of a small answer where they belong."""
        answer, data = self._checked(header)
        rows, end = body[:data].view(np.float32), answer.offset + answer.rows
        where = np.arange(answer.offset, end) if self.positions is None else self.positions[answer.offset : end]
        self.pull.layout.place(self.pull, rows, where)

    def _checked(self, header: Header) -> tuple[RowsHeader, int]:
        answer = RowsHeader.of(header)
        fits = answer.offset + answer.rows <= self.count
        floats = self.pull.layout.floats
        data = 4 * floats(self.pull, self.positions, answer.offset, answer.rows) if fits else 0
        if not fits or header.body != data + (data & 7):
            raise FrameError(f"an answer of {answer.rows} rows in {header.body} bytes does not fit the pull of "
                             f"{self.count} rows")  # fmt: skip
        return answer, data


class ServerPull:
    """A pull in flight. `result` gives the array asked for: float32, rows in the order of the keys.

    What is asked again, because the server that was to answer is no longer the one, lands in arrays of its own and is
    copied at the end: whatever the first one still sends cannot overwrite it.
    """

    def __init__(
        self, finish: Finish, query: Query, keys: NDArray[np.int64], value: Floats, layout: PullLayout | None = None
    ) -> None:
        self._finish = finish  # waits until all of it has arrived
        self.query = query  # what is asked of the table
        # How frames are laid out, and where rows belong.
        self.layout = ROWS if layout is None else layout
        self.keys = keys  # int64 [n]
        self.value = value  # where rows land
        self.flat = value.reshape(-1)  # the same memory
        self.of_tensor = False  # a whole one, not rows of a table
        self.short: Short | None = None  # how its keys are made shorter
        self.on_rows: Callable[[Floats], None] | None = None  # hears of the rows when they have come
        self.group: ServerPull | None = None  # the pull that asks for these rows together with others
        self.parts: dict[int, PullPart] = {}  # by request, those still unanswered
        self.error: Exception | None = None  # raised by `result`
        self.clock = self.wait_ms = 0  # as in the PULL header
        self.bound: int | None = None  # of the delay, as in the PULL header
        self._pieces: list[tuple[Floats, NDArray[np.int64]]] = []  # rows and where they belong, in order

    @property
    def name(self) -> str:
        """Of its table, or tables."""
        return self.query.name

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        if self.group is not None:
            return self.group.done()
        return not self.parts or self.error is not None

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the rows; `Timeout` after `timeout` seconds (default: the client's)."""
        if self.group is not None:
            self.group.wait(timeout)
            self.group = None  # which has this pull among its own: two that know each other are freed late
            return
        self._finish(self, timeout)
        for rows, positions in self._pieces:
            self.layout.place(self, rows, positions)
        self._pieces = []

    def result(self, timeout: float | None = None) -> Floats:
        """Waits for the array; `Timeout` after `timeout` seconds (default: the client's)."""
        self.wait(timeout)
        return self.arrived()

    def arrived(self) -> Floats:
        """The array, when all of it has come."""
        rows = self.layout.arrived(self)
        if self.on_rows is not None:
            self.on_rows(rows)
        return rows

    def separate(self, rows: Floats, positions: NDArray[np.int64]) -> None:
        """Rows, float32 one after another, will land in memory of their own: they are copied to their positions at the
        end."""
        self._pieces.append((rows, positions))

    def moved(self, part: PullPart, routes: Routes, readers: Readers) -> bool:
        """Whether another server than the one asked is to answer a part under this view."""
        if readers.only >= 0:
            return routes.members[readers.only] != part.member
        groups = self.layout.plan(self, part, routes, readers)
        return len(groups) > 1 or _member(routes, groups[0][0]) != part.member

    def plan_again(self, part: PullPart, routes: Routes, readers: Readers) -> list[PullPart]:
        """What takes the place of a part, asked of those who answer under this view."""
        parts = []
        for server, mine in self.layout.plan(self, part, routes, readers):
            positions = mine if part.positions is None else part.positions[mine]
            target = self.layout.private(self, positions)
            parts.append(PullPart(self, _member(routes, server), positions, len(mine), target))
        return parts


class PullLayout:
    """Rows of one table, or of the optimizer's state: keys int64 [n] -> value float32 [n, dim]. Other layouts say what
    differs. Stateless; each method is given the pull."""

    def frame_bytes(self, pull: ServerPull, keys: int, servers: int) -> int:
        """Memory for frames that ask so many servers for so many keys."""
        return 8 * keys + HEADER_BYTES * (servers + 1)

    def cut(
        self, pull: ServerPull, keys: NDArray[np.int64], routes: Routes, readers: Readers, order: NDArray[np.int64],
        cuts: NDArray[np.int64], memory: NDArray[np.uint8], slots: NDArray[np.int64], small: int, request: int,
        worker: int,
    ) -> int:  # fmt: skip
        """Writes its frames; see `cut_pull`."""
        query = pull.query
        count: int = cut_pull(
            keys, query.salt, routes.shift, readers.of, readers.only, order, cuts, memory, slots, pull.flat, query.dim,
            small, request, query.flags, routes.epoch, pull.clock, worker, query.table_id,
            0 if pull.bound is None else pull.bound + 1, pull.wait_ms,
        )  # fmt: skip
        return count

    def shortened(self, pull: ServerPull, keys_of: ShortKeys, frame: memoryview) -> Sequence[Buffer]:
        """A frame with shorter keys."""
        return (frame,) if pull.short is None else keys_of.pull(frame, pull.short)

    def frame(self, part: PullPart, epoch: int, worker: int) -> list[Buffer]:
        """The frame of a part."""
        pull, query = part.pull, part.pull.query
        header = PullHeader(
            part.request, epoch, pull.clock, worker, query.table_id, part.count, pull.bound, pull.wait_ms,
            query.any_replica, query.slots, query.coded, query.digests,
        )  # fmt: skip
        return [header.header().pack(), part.keys.data.cast("B")]

    def floats(self, pull: ServerPull, positions: Positions, offset: int, count: int) -> int:
        """Of `count` rows from the one on that has number `offset` of those at `positions`."""
        return count * pull.query.dim

    def plan(
        self, pull: ServerPull, part: PullPart, routes: Routes, readers: Readers
    ) -> list[tuple[int, NDArray[np.int64]]]:
        """Who answers for a part's keys, as `plan_pull` says it."""
        return plan_pull(part.keys, pull.query.salt, routes, readers)

    def target(self, pull: ServerPull, positions: Positions, run: bool) -> AnswerTarget:
        """Where the rows of a large part go; run: they lie one after another."""
        if positions is None:
            return RowsTarget(pull.value)
        if run:
            return RowsTarget(pull.value[positions[0] : positions[-1] + 1])
        return self.private(pull, positions)

    def private(self, pull: ServerPull, positions: NDArray[np.int64]) -> AnswerTarget:
        """An array of its own for the rows at these positions."""
        rows = np.empty((len(positions), pull.query.dim), np.float32)
        pull.separate(rows.reshape(-1), positions)
        return RowsTarget(rows)

    def place(self, pull: ServerPull, rows: Floats, positions: NDArray[np.int64]) -> None:
        """Copies n rows, float32 one after another, to their positions, int64 [n], in the order of the keys."""
        place_rows(rows.reshape(-1, pull.query.dim), positions, pull.value)

    def arrived(self, pull: ServerPull) -> Floats:
        """What the caller gets when all rows have come."""
        return pull.value


class Blocks(PullLayout):
    """A whole dense tensor, float32 of its shape; the keys are its blocks."""

    def target(self, pull: ServerPull, positions: Positions, run: bool) -> AnswerTarget:
        return BlocksTarget(pull.flat, pull.keys if positions is None else positions, pull.query.dim)

    def place(self, pull: ServerPull, rows: Floats, positions: NDArray[np.int64]) -> None:
        dim = pull.query.dim
        for row, block in zip(rows.reshape(-1, dim), positions.tolist(), strict=True):
            here = pull.flat[block * dim : (block + 1) * dim]
            here[:] = row[: len(here)]


class Coded(PullLayout):
    """Rows of a table or blocks of a tensor as its filters make them, words float32 [n, words]. The caller gets `out`,
    float32 of the shape asked for; what the last block has too much is left out. where: which of the rows each of `out`
    is; None: they are the same."""

    def __init__(self, codec: Codec, out: Floats, where: NDArray[np.int64] | None = None) -> None:
        self._codec = codec
        self._out = out
        self._where = where
        self._decoded = False

    def arrived(self, pull: ServerPull) -> Floats:
        if not self._decoded:
            rows = self._codec.decode(pull.value)
            if self._where is not None:
                rows = rows[self._where]
            self._out.reshape(-1)[:] = rows.reshape(-1)[: self._out.size]
            self._decoded = True
        return self._out


ROWS, BLOCKS = PullLayout(), Blocks()


def coded_pull(
    finish: Finish, query: Query, codec: Codec, keys: NDArray[np.int64], out: Floats,
    where: NDArray[np.int64] | None = None, short: Short | None = None,
) -> ServerPull:  # fmt: skip
    """A pull of rows or blocks through a table's filters, into `out`; where: as for `Coded`. short: how its keys are
    made shorter."""
    words = np.empty((len(keys), codec.words), np.float32)
    pull = ServerPull(finish, replace(query, dim=codec.words, coded=True), keys, words, Coded(codec, out, where))
    pull.short = short
    return pull


def _member(routes: Routes, server: int) -> Member | None:
    return routes.members[server] if server >= 0 else None
