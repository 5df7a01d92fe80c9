"""Servers without sockets, in one thread: bytes go through pipes that cut them anywhere, time stands still unless told.

What a seed does is the same whichever way its servers handle frames, so two runs can be compared byte for byte.
"""

from __future__ import annotations

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.network.connection import Connection
from elasticps.server.options import ServerOptions
from elasticps.server.server import Server
from elasticps.wire.frames import LAST, Header, Kind, json_frame
from elasticps.wire.stream import SendQueue
from tests.server.conftest import RANGES, tell_time


class Clock:
    """The part of an event loop that a server needs."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.timers: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., None], *arguments: Any) -> Handle:
        handle = Handle(callback)
        heapq.heappush(self.timers, (max(when, self.now), next(self.numbers), handle.run, arguments))
        return handle

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Handle:
        return self.call_at(self.now + delay, callback, *arguments)

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> Handle:
        return self.call_at(self.now, callback, *arguments)

    def create_future(self) -> Any:
        return Later()

    def create_task(self, work: Any, *, name: str = "") -> Any:
        work.close()  # dialling: links are made by hand; sweeps: nothing goes on by itself
        return Later()

    def run_due(self) -> bool:
        """Runs one callback that is due; whether there was one."""
        if not self.timers or self.timers[0][0] > self.now:
            return False
        _, _, callback, arguments = heapq.heappop(self.timers)
        callback(*arguments)
        return True


class Handle:
    def __init__(self, callback: Callable[..., None]) -> None:
        self.callback: Callable[..., None] | None = callback

    def run(self, *arguments: Any) -> None:
        if self.callback is not None:
            self.callback(*arguments)

    def cancel(self) -> None:
        self.callback = None


class Later:
    def set_result(self, value: object) -> None:
        pass

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        pass

    def add_done_callback(self, callback: object) -> None:
        pass


class Quiet:
    """Does not linger: that looks at the machine's clock."""

    def touched(self) -> None:
        pass


class FakeTransport(ABC):
    """What every connection asks of its transport and no test has an opinion on."""

    reading = True
    closed = False
    high = 0

    def set_write_buffer_limits(self, high: int) -> None:
        self.high = high

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else None

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.abort()

    @abstractmethod
    def abort(self) -> None:
        """Ends at once."""


class Pipe(FakeTransport):
    """One direction of a connection, and the transport of the end that writes into it. As a socket that is full: bytes
    leave from where they lie, when they are delivered. `written`: all that ever left."""

    def __init__(self, wires: Wires, to: Connection | None) -> None:
        self.wires = wires
        self.to = to
        self.back: Pipe | None = None
        self.queue = SendQueue()
        self.written = bytearray()
        self.owner: Connection | None = None
        self.paused = False
        self.window = 1 << 30  # bytes that may wait before the writer is told to pause

    def write(self, data: Any) -> None:
        self.writelines((data,))

    def fill(self) -> None:
        """Tells the writer when too much waits. Not in the middle of a buffer: compiled code writes at its end."""
        if self.queue.nbytes > self.window and not self.paused and not self.closed and self.owner is not None:
            self.paused = True
            self.owner.pause_writing()

    def writelines(self, buffers: Sequence[Any]) -> None:
        assert not self.closed
        self.queue.add(buffers)

    def take(self, most: int) -> bytes:
        """The next bytes leave."""
        taken = Taken(most)
        self.queue.send(taken)
        self.written += taken.found
        return bytes(taken.found)

    def drained(self) -> None:
        if self.paused and not self.queue and self.owner is not None:
            self.paused = False
            self.owner.resume_writing()

    def get_write_buffer_size(self) -> int:
        return self.queue.nbytes

    def abort(self) -> None:
        for pipe in (self, self.back):
            if pipe is not None and not pipe.closed:
                pipe.closed = True
                pipe.queue.clear()
                if pipe.owner is not None:
                    self.wires.clock.call_soon(pipe.owner.connection_lost, None)


class Taken:
    """A socket that takes so many bytes."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.found = bytearray()

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        before = len(self.found)
        for buffer in buffers:
            self.found += buffer[: self.most - len(self.found)]
        if len(self.found) == before:
            raise BlockingIOError
        return len(self.found) - before


class Wires:
    """Servers, their links, and workers' connections. compiled: whether usual frames are handled in compiled code."""

    def __init__(self, seed: int, compiled: bool) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.wall_s = 1_000_000.0  # that servers see
        self.led = True  # a leader says what time it is, with each view
        self.compiled = compiled
        self.pipes: list[Pipe] = []
        self.servers: dict[str, Server] = {}
        self.infos: dict[str, ServerInfo] = {}
        self.numbers = itertools.count(1)
        self.view: View | None = None

    def start(self, name: str, workers: Sequence[int], budget_bytes: int = 256 << 20) -> Server:
        self.infos[name] = ServerInfo(name, 1, f"127.0.0.1:{len(self.infos) + 1}")
        server = Server(
            self.infos[name], "c", RANGES, cast(Any, self.clock),
            ServerOptions(log_budget_bytes=budget_bytes, clock=self.clock.time, busy_poll=cast(Any, Quiet()),
                          wall=lambda: self.wall_s),
        )  # fmt: skip
        server.fast.h[H_ENABLED] = self.compiled
        server.readers.changes.begin()  # a reader is there
        server.follow(Roster(1, tuple(WorkerInfo(w, f"w{w}", 1, "default") for w in workers), "c"))
        self.servers[name] = server
        return server

    def adopt(self, chain_of: Callable[[int], Sequence[str]], joining: Callable[[int], str] = lambda r: "") -> View:
        from tests.server.conftest import Group

        group = cast(Any, self)
        view = Group.make_view(group, chain_of, joining)
        for server in self.servers.values():
            server.adopt(view)
        if self.led:
            self.tell_time(self.wall_s)
        return view

    def link(self, a: str, b: str) -> Connection:
        """A new link between two servers, greeted and welcomed once the bytes have gone back and forth."""
        one, other = self.servers[a].connection(), self.servers[b].connection()
        there = self._pipe(one, other)
        one.member, one.number = self.servers[b].member, next(self.numbers)
        hello = {
            "cluster": "c", "peer": list(self.servers[a].member), "to": list(one.member), "number": one.number,
        }  # fmt: skip
        there.write(json_frame(Kind.HELLO, hello))
        return one

    def _pipe(self, one: Connection, other: Connection) -> Pipe:
        there, back = Pipe(self, other), Pipe(self, one)
        there.back, back.back = back, there
        there.owner, back.owner = one, other
        self.pipes += [there, back]
        one.connection_made(cast(Any, there))
        other.connection_made(cast(Any, back))
        return there

    def connect(self, name: str, worker: int, base: int = 0) -> tuple[Pipe, Pipe]:
        """A worker's connection, joined at clock `base`: what it writes, and what the server writes to it."""
        connection = self.servers[name].connection()
        there, back = Pipe(self, connection), Pipe(self, None)
        there.back, back.back = back, there
        back.owner = connection
        self.pipes += [there, back]
        connection.connection_made(cast(Any, back))
        hello = {"cluster": "c", "worker": worker, "name": f"w{worker}", "app": "default"}
        there.write(json_frame(Kind.HELLO, hello))
        there.write(Header(Kind.JOIN, LAST, request=1, clock=base).pack())
        return there, back

    def deliver(self) -> bool:
        """Some bytes of some pipe arrive, or a callback runs; whether anything could."""
        for pipe in self.pipes:
            pipe.fill()
        if self.clock.run_due():
            return True
        ready = [p for p in self.pipes if p.queue and (p.to is None or (p.back is not None and p.back.reading))]
        if not ready:
            return False
        pipe = self.random.choice(ready)
        n = self.random.choice((1, 8, 63, 64, 65, 200, 1000, 5000, 1 << 20))
        if pipe.to is None:
            pipe.take(n)
        else:
            while n and pipe.queue and pipe.back is not None and pipe.back.reading:
                buffer = pipe.to.get_buffer(-1)
                assert len(buffer)
                taken = pipe.take(min(n, len(buffer)))
                buffer[: len(taken)] = taken
                n -= len(taken)
                pipe.to.buffer_updated(len(taken))
        pipe.drained()
        return True

    def tell_time(self, median_s: float, leader_s: float | None = None) -> None:
        """A leader tells all servers the time by its own clock and by the median of all."""
        for server in self.servers.values():
            tell_time(server, median_s, leader_s)

    def settle(self) -> None:
        """Until nothing is on its way."""
        for _ in range(200_000):
            if not self.deliver():
                return
        raise AssertionError("the bytes never come to rest")

    @staticmethod
    def _changed(server: Server) -> dict[int, list[int]]:
        """The keys that a server has noted for readers, by table: in what portions depends on who notes them."""
        found: dict[int, list[int]] = {}
        journal = server.readers.changes.journal
        assert journal is not None
        for table, keys in journal.entries(0, journal.end):
            found.setdefault(table, []).extend(keys.tolist())
        return {table: sorted(keys) for table, keys in found.items()}

    def state(self) -> dict[str, Any]:
        """Everything that two runs of a seed must agree on."""
        found: dict[str, Any] = {}
        for name, server in self.servers.items():
            replica = server.replica
            clocks = {int(w): replica.clocks.read(int(w)).tolist() for w in replica.clocks.workers if w}
            tables = {
                number: [table.digest_range(r) for r in range(RANGES)] for number, table in server.store.tables.items()
            }
            entries = [
                (e.ranges.tolist(), e.seqs.tolist(), operation.after, operation.worker, operation.record)
                for e in replica.log.entries()
                for operation in (e.frame.operation,)
            ]
            found[name] = (
                replica.seq.tolist(), replica.acked.tolist(), replica.joined.tolist(), clocks, tables, entries,
                replica.log.nbytes, server.admin.acknowledged,
                {w: server.executor.counts.count(w) for w in ("pushes", "rows_pushed")},
                [server.store.words(r) for r in range(RANGES)],
                {n: t.lifecycle.admitted.tolist() for n, t in server.store.tables.items() if t.lifecycle is not None},
                server.executor.applied, server.executor.rows_applied, np.flatnonzero(replica.waiting).tolist(),
                [replica.records.column(r) for r in range(RANGES)], self._changed(server),
            )  # fmt: skip
        return found
