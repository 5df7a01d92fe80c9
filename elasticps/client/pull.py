"""Pulls: what callers wait for, what each server was asked, and who is asked when views change.

A `ServerPull` asks for rows of a table, or for a tensor. `joined` makes one pull of several, so that each server gets
one frame, and `TablesPull` is what the caller of several waits for. `PullsInFlight` sends them, frame by frame as their
layout says (`pull_layouts.py`), and knows what is unanswered. A table with a cache has `row_cache.CachedPull`, which
asks for the rows that it lacks by pulls like these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import SendAll
from elasticps.client.core.read_after import read_after, read_clock
from elasticps.client.core.routing import Readers, Routes
from elasticps.client.core.session import PushSession
from elasticps.client.pull_batch import OWNERS, P_FIELDS, PULL, SMALL_BYTES, Landing
from elasticps.client.pull_layouts import (
    ROWS,
    AnswerTarget,
    DecodedRows,
    Floats,
    Positions,
    PullLayout,
    Query,
    SeveralTables,
)
from elasticps.client.short_keys import MOST_BLOCKS, Short, ShortKeys
from elasticps.errors import Error, UnknownTable
from elasticps.store.codec import Codec
from elasticps.wire.frames import HEADER_BYTES, LAST, Buffer, FrameError, Header
from elasticps.wire.headers import RowsHeader
from elasticps.wire.pool import Pool
from replication.chain import Member

T = TypeVar("T")  # whatever tables are known by
Finish: TypeAlias = "Callable[[ServerPull, float | None], None]"  # waits until all of a pull has arrived
SMALL_PULL_BYTES = 64 << 10  # tensors above that are asked for by themselves
PULL_FRAME_KEYS = 1 << 20  # at most
POOL_BYTES = 4 << 20  # of frames, for the next ones
_PADDING = np.empty(8, np.uint8)
_NOTHING = np.empty(0, np.float32)
_ALL = np.empty(0, np.int64)
_NO_SALT = np.uint64(0)


class PendingRows(Protocol):
    """Rows that were asked for: a `ServerPull`, or one by way of a cache."""

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""

    def result(self, timeout: float | None = None) -> NDArray[np.float32]:
        """Waits for the rows: float32 [n, dim]; `Timeout` after `timeout` seconds (default: the client's)."""


@dataclass(slots=True, eq=False)
class PullPart:
    """One PULL frame and what has come back of it: rows of the keys at `positions`, of `count`."""

    pull: ServerPull
    member: Member | None  # whom it asks; None: no server can answer it under this view
    positions: Positions
    count: int
    target: AnswerTarget | None  # where a large answer's rows go; small ones go where they belong at once
    request: int = 0
    epoch: int = 0  # of the view under which it was asked

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


@dataclass(eq=False, repr=False)
class ServerPull:
    """A pull in flight. `result` gives the array asked for: float32, rows in the order of the keys.

    What is asked again, because the server that was to answer is no longer the one, lands in arrays of its own and is
    copied at the end: whatever the first one still sends cannot overwrite it.
    """

    _finish: Finish  # waits until all of it has arrived
    query: Query  # what is asked of the table
    keys: NDArray[np.int64]  # [n]
    value: Floats  # where rows land
    layout: PullLayout = ROWS  # of its frames, and of the rows
    of_tensor: bool = False  # whether it asks for a whole tensor, not for rows of a table
    short: Short | None = None  # how its keys are made shorter
    decoding: DecodedRows | None = None  # of what table filters have made of the rows
    on_rows: Callable[[Floats], None] | None = None  # hears of the rows when they have come
    group: ServerPull | None = None  # the pull that asks for these rows together with others
    members: Sequence[ServerPull] = ()  # of one that is `joined`: the pulls whose rows it asks for
    parts: dict[int, PullPart] = field(default_factory=dict)  # by request, those still unanswered
    error: Exception | None = None  # raised by `result`
    clock: int = 0  # of its worker as it began
    read_at: int = 0  # as in the PULL header
    wait_ms: int = 0  # the same
    waits: bool = False  # for what it needs to be released, under bounded delay
    # Rows and where they belong, in order.
    _pieces: list[tuple[Floats, NDArray[np.int64]]] = field(default_factory=list)

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        if self.group is not None:
            return self.group.done()
        return self.error is not None or not (self.waits or self.parts)

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
        rows = self.value if self.decoding is None else self.decoding.rows(self.value)
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
        return len(groups) > 1 or groups[0][0] < 0 or routes.members[groups[0][0]] != part.member

    def plan_again(self, part: PullPart, routes: Routes, readers: Readers) -> list[PullPart]:
        """What takes the place of a part, asked of those who answer under this view."""
        parts = []
        for server, mine in self.layout.plan(self, part, routes, readers):
            positions = mine if part.positions is None else part.positions[mine]
            target = self.layout.private(self, positions)
            parts.append(PullPart(self, routes.members[server] if server >= 0 else None, positions, len(mine), target))
        return parts


def coded_pull(
    finish: Finish, query: Query, codec: Codec, keys: NDArray[np.int64], out: Floats,
    where: NDArray[np.int64] | None = None, short: Short | None = None,
) -> ServerPull:  # fmt: skip
    """A pull of rows or blocks through a table's filters, into `out`; where: as for `DecodedRows`. short: how its keys
    are made shorter."""
    words = np.empty((len(keys), codec.words), np.float32)
    query = replace(query, dim=codec.words, coded=True)
    return ServerPull(finish, query, keys, words, short=short, decoding=DecodedRows(codec, out, where))


def joined(finish: Finish, members: Sequence[ServerPull]) -> ServerPull:
    """One pull that asks for the rows of several, which are not sent themselves."""
    coded, keys = any(pull.query.coded for pull in members), np.concatenate([pull.keys for pull in members])
    name = ", ".join([pull.query.name for pull in members])
    query = Query(0, _NO_SALT, 0, name, members[0].query.any_replica, coded=coded)
    short = next((pull.short for pull in members if pull.short is not None), None)
    return ServerPull(finish, query, keys, _NOTHING, SeveralTables(members), short=short, members=members)


def in_groups(finish: Finish, pulls: Sequence[ServerPull]) -> list[ServerPull]:
    """The pulls to send for all of these: tables and small tensors together."""
    large = [pull for pull in pulls if pull.of_tensor and pull.value.nbytes > SMALL_PULL_BYTES]
    return [*_together(finish, [pull for pull in pulls if pull not in large] if large else pulls), *large]


def _together(finish: Finish, pulls: Sequence[ServerPull]) -> list[ServerPull]:
    """The pulls that bring the rows of these in as few frames as it takes: of more than MOST_BLOCKS tables, or
    PULL_FRAME_KEYS keys, several."""
    groups: list[ServerPull] = []
    group: list[ServerPull] = []
    keys = 0
    for pull in [*pulls, None]:
        n = 0 if pull is None else len(pull.keys)
        if group and (pull is None or len(group) == MOST_BLOCKS or keys + n > PULL_FRAME_KEYS):
            groups.append(joined(finish, group) if len(group) > 1 else group[0])
            group, keys = [], 0
        if pull is not None:
            group.append(pull)
            keys += n
    return groups


class Starter(Protocol):
    """Starts pulls and waits for them: the client's `Reads`."""

    @property
    def in_rounds(self) -> bool: ...
    def start_all(self, pulls: Sequence[ServerPull]) -> None: ...
    def start_with_step(self, pulls: Sequence[ServerPull]) -> None: ...
    def finish(self, pull: ServerPull, timeout: float | None) -> None: ...
    def give_up(self, pulls: Sequence[ServerPull]) -> None: ...


class TablesPull(Generic[T]):
    """A pull of several tables and tensors, all of which was checked before anything is sent. pulls: for each of
    `tables` one that is not sent yet, or, of a table with a cache, a function that begins one."""

    def __init__(
        self, reads: Starter, tables: Sequence[T], pulls: Sequence[ServerPull | Callable[[], PendingRows]]
    ) -> None:
        self._reads = reads
        self._tables = tables
        self._pulls = pulls
        self._groups = in_groups(reads.finish, [pull for pull in pulls if isinstance(pull, ServerPull)])
        # What whoever sends the last part of a step calls right after it, under the same lock: the pull leaves in the
        # same messages. None in rounds, which close in between. When the step has left, `follow` is called.
        self.with_step = None if reads.in_rounds else partial(reads.start_with_step, self._groups)
        self._begun: list[PendingRows] = []  # as `pulls`, once all are sent or begun
        self._failed: Error | None = None  # why nobody could be asked
        self._rows: dict[T, NDArray[np.float32]] | None = None  # when they have come: each layer asks for its own

    def start(self) -> TablesPull[T]:
        """Asks each server once for all of it."""
        self._begin()
        self._reads.start_all(self._groups)
        return self

    def _begin(self) -> None:
        self._begun = [pull if isinstance(pull, ServerPull) else pull() for pull in self._pulls]

    def follow(self) -> TablesPull[T]:
        """Asks for the rest, now that the step has left: what is raised here `result` raises, for whoever calls again
        would push again."""
        try:
            if self.with_step is None:
                self._reads.start_all(self._groups)
            self._begin()
        except Error as error:
            self._reads.give_up(self._groups)
            self._failed = error
        return self

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        cached = [pull.done() for pull in self._begun if not isinstance(pull, ServerPull)]
        return self._failed is not None or (all(pull.done() for pull in self._groups) and all(cached))

    def result(self, timeout: float | None = None) -> dict[T, NDArray[np.float32]]:
        """Waits for the rows, float32 [n, dim] of each table, in the order of its keys, and float32 of the shape of
        each tensor; `Timeout` after `timeout` seconds (default: the client's) for each server's part."""
        if self._failed is not None:
            raise self._failed
        if self._rows is None:
            try:
                for group in self._groups:
                    group.wait(timeout)
                self._rows = {
                    table: pull.arrived() if isinstance(pull, ServerPull) else pull.result(timeout)
                    for table, pull in zip(self._tables, self._begun, strict=True)
                }
            except Error:
                self._reads.give_up(self._groups)
                raise
        return self._rows

    def rows(self) -> dict[T, NDArray[np.float32]]:
        """Asks for all of it, and waits for the rows, as `result`. If that ends with an exception, be it between two
        lines of ours, the memory is the caller's alone from now on."""
        try:
            return self.start().result()
        except BaseException:
            self._reads.give_up(self._groups)
            raise


class PullsInFlight:
    """Parts of pulls by request. Runs under the dispatcher's lock, except for `sink`, which the thread that reads the
    sockets calls. `send` takes frames for servers; `abandon(member, request)` hears that an answer is no longer wanted,
    before its memory is."""

    def __init__(
        self, routes: Routes, session: PushSession, send: SendAll, abandon: Callable[[Member, int], None],
        keys_of: Callable[[Member], ShortKeys | None] = lambda member: None,
    ) -> None:  # fmt: skip
        self.landing = Landing()
        self._routes = routes
        self._session, self._worker = session, session.worker
        self._send = send
        self._abandon = abandon
        self._keys_of = keys_of
        self._parts: dict[int, PullPart] = {}
        self._next = OWNERS + PULL  # request
        self._pool = Pool(POOL_BYTES)

    @property
    def oldest(self) -> int:
        """The oldest request that has not been answered, 0 for none."""
        return next(iter(self._parts), 0)

    @property
    def owing(self) -> set[Member]:
        """The servers that owe answers."""
        return {part.member for part in self._parts.values() if part.member is not None}

    def start(self, pulls: Sequence[ServerPull], wait_ms: int) -> None:
        """Asks for some pulls. Small frames to one server leave together: each system call costs more than several of
        them."""
        frames, unread = dict[Member, list[Buffer]](), self._session.unread()
        for pull in pulls:
            pull.wait_ms = wait_ms
            pull.read_at = read_clock(unread)
            keys = pull.keys
            if len(keys) <= PULL_FRAME_KEYS:
                self._cut(pull, keys, 0, frames)
                continue
            for first in range(0, len(keys), PULL_FRAME_KEYS):
                self._cut(pull, keys[first : first + PULL_FRAME_KEYS], first, frames)
        self._send(read_after(unread, frames, self._routes, map(self._readers, pulls)))

    def _cut(self, pull: ServerPull, keys: NDArray[np.int64], first: int, frames: dict[Member, list[Buffer]]) -> None:
        """Cuts the part of a pull that begins with key number `first` by server, and lays the frames out."""
        routes, members = self._routes, self._routes.members
        readers = self._readers(pull) if pull.query.any_replica else routes.tails
        n, only, request = len(keys), readers.only >= 0, self._next
        self._next += OWNERS * (len(members) + 1)
        order = _ALL if only else np.empty(n, np.int64)
        memory = self._pool.take(pull.layout.frame_bytes(pull, n, len(members)))
        cuts = np.empty((len(members) + 1, P_FIELDS), np.int64)
        small = SMALL_BYTES if n == len(pull.keys) else 0
        slots, worker = self.landing.slots, self._worker
        count = pull.layout.cut(pull, keys, routes, readers, order, cuts, memory, slots, small, request, worker)
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
                    target = pull.layout.target(pull, positions, only)
                at = 8 * word
                frame = data[at : at + HEADER_BYTES + body]
                shorter: Sequence[Buffer] = (frame,)
                if pull.short is not None and (keys_of := self._keys_of(member)) is not None:
                    shorter = pull.layout.shortened(pull, keys_of, frame)
                frames.setdefault(member, []).extend(shorter)
            part = PullPart(pull, member, positions, high - low, target, request, routes.epoch)
            self._parts[request] = pull.parts[request] = part
            request += OWNERS

    def forget(self, pull: ServerPull, error: Error) -> None:
        """Gives up what is still unanswered of a pull."""
        pull.error = pull.error or error
        for part in list(pull.parts.values()):
            self._drop(part)

    def fail(self, error: Error) -> None:
        """Ends every pull: nobody will answer any more."""
        self.landing.clear()
        for part in self._parts.values():
            part.pull.error = error
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
        if isinstance(error, UnknownTable):  # servers know numbers
            name = part.pull.query.name
            error = UnknownTable(f"table {name!r}: {error}; open it again with ps.table(…) or ps.tensor(…)")
        part.pull.error = part.pull.error or error
        self.arrived(request)
        return True

    def arrived(self, request: int) -> None:
        """All rows of a part are where they belong."""
        part = self._parts[request]
        part.pull.parts.pop(request, None)  # first: `recover` drops the rest, should an exception come in between
        del self._parts[request]

    def recover(self) -> None:
        """Forgets what an exception has left of pulls that are done: it must not be received a second time."""
        self.landing.clear()
        self._parts = {n: part for n, part in self._parts.items() if n in part.pull.parts}

    # -- views and connections ----------------------------------------------------------------------------------------

    def adopt(self, routes: Routes) -> None:
        """Follows a view: what others are to answer now is asked of them."""
        self._routes = routes
        parts = list(self._parts.values())
        self._ask_again([p for p in parts if p.member is None or p.pull.moved(p, routes, self._readers(p.pull))])

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

    def _readers(self, pull: ServerPull) -> Readers:
        return self._routes.replicas(self._worker) if pull.query.any_replica else self._routes.tails

    def _ask(self, parts: list[PullPart]) -> None:
        for part in parts:
            part.request, self._next = self._next, self._next + OWNERS
            part.pull.parts[part.request] = self._parts[part.request] = part
        self._send_parts(parts)

    def _send_parts(self, parts: Iterable[PullPart]) -> None:
        frames: dict[Member, list[Buffer]] = {}
        pulls, unread = [], self._session.unread()
        for part in parts:
            part.epoch = self._routes.epoch
            part.pull.read_at = read_clock(unread)
            pulls.append(part.pull)
            if part.member is not None:
                frames.setdefault(part.member, []).extend(part.pull.layout.frame(part, part.epoch, self._worker))
        self._send(read_after(unread, frames, self._routes, map(self._readers, pulls)))

    def _ask_again(self, parts: list[PullPart]) -> None:
        for part in parts:
            self._ask(part.pull.plan_again(part, self._routes, self._readers(part.pull)))
            self._drop(part)  # not before: a pull without parts looks done to whoever waits for it

    def _drop(self, part: PullPart) -> None:
        self.landing.forget(part.request)
        self._parts.pop(part.request, None)
        part.pull.parts.pop(part.request, None)
        if part.member is not None:
            self._abandon(part.member, part.request)
