"""Pulls on their way: what was asked of which server, and who is asked when views change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from elasticps.client.core.fan_out import Send
from elasticps.client.core.routing import Readers, Routes
from elasticps.client.pull import PullPart, ServerPull
from elasticps.client.pull_batch import OWNERS, P_FIELDS, PULL, SMALL_BYTES, Landing
from elasticps.client.short_keys import ShortKeys
from elasticps.errors import Error, UnknownTable
from elasticps.wire.frames import HEADER_BYTES, LAST, Buffer, Header
from elasticps.wire.pool import Pool
from replication.chain import Member

_ALL = np.empty(0, np.int64)
PULL_FRAME_KEYS = 1 << 20
POOL_BYTES = 4 << 20  # of frames, for the next ones


class PullsInFlight:
    """Parts of pulls by request. Runs under the dispatcher's lock, except for `sink`, which the thread that reads the
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

    def start(self, pulls: Sequence[ServerPull], bound: int | None, wait_ms: int) -> None:
        """Asks for some pulls. Small frames to one server leave together: each system call costs more than several of
        them."""
        frames: dict[Member, list[Buffer]] = {}
        for pull in pulls:
            pull.bound, pull.wait_ms = bound, wait_ms
            keys = pull.keys
            if len(keys) <= PULL_FRAME_KEYS:
                self._cut(pull, keys, 0, frames)
                continue
            for first in range(0, len(keys), PULL_FRAME_KEYS):
                self._cut(pull, keys[first : first + PULL_FRAME_KEYS], first, frames)
        for member, buffers in frames.items():
            self._send(member, buffers)

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
            error = UnknownTable(f"table {part.pull.name!r}: {error}; open it again with ps.table(…) or ps.tensor(…)")
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
        for part in parts:
            part.epoch = self._routes.epoch
            if part.member is not None:
                frames.setdefault(part.member, []).extend(part.pull.layout.frame(part, part.epoch, self._worker))
        for member, buffers in frames.items():
            self._send(member, buffers)

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
