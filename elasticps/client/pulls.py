"""Reads on their way: which PULL frame waits for whom, and who is asked when views change. Runs under the network's
lock, except for `sink`, which the thread that reads the sockets calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from elasticps.client.pushes import Send
from elasticps.client.reads import Read, ReadPart
from elasticps.client.routing import Readers, Routes
from elasticps.errors import Error
from elasticps.wire.frames import Buffer, Header, Kind
from replication.chain import Member


class Pulls:
    """Parts of reads by request. `send` takes frames for a server; `abandon(member, request)` hears that an answer is
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
        """Where the body of an answer goes; None for what is not wanted."""
        part = self._parts.get(header.request) if header.kind == Kind.ROWS else None
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
