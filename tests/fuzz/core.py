"""One server without sockets on a clock of its own, whoever talks to it, and a worker who must never notice.

Ranges 0..3 have the server alone, and the honest worker has its rows there. In the others a server `p0` comes before
it, behind it, fills it or is filled by it; that one says what a story wants.
"""

from __future__ import annotations

import gc
import logging
import os
import struct
import weakref
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any, cast
from unittest.mock import patch

import numpy as np

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.client.short_keys import Short, ShortKeys
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core.registered_tables import RegisteredTable
from elasticps.server.fast import layout as at
from elasticps.server.network.connection import Connection
from elasticps.server.options import ServerOptions
from elasticps.server.roles import replica_links, snapshots
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, LAST, Header, Kind, block_head, json_frame, unpack_header
from elasticps.wire.headers import PushHeader
from elasticps.wire.reducing import ReduceHeader, function_body
from replication.chain import Role
from replication.progress import before_part
from tests.fuzz.corpus import RANGES
from tests.server.wires import Clock, FakeTransport, Quiet

CLUSTER, ME, PEER = "c", "s0", "p0"
HONEST, HOSTILE, NOBODY = 5, (9, 11), 77  # ids of workers; the last one is in no roster
APPS = {HONEST: "default", 9: "default", 11: "app0", NOBODY: "default"}
OWN = 4  # ranges that the server has alone
TABLE, DIM, KEYS = 0x2A11CE, 4, 96
TABLE_OF_OWN = TableSpec("honest", DIM, Accumulate())
HIGH_BYTES = READ_BYTES = 64 << 10
MOST_WAITING_BYTES = 1 << 20  # for somebody who reads nothing
MOST_HELD_BYTES = 1 << 20  # by messages of another server that speak of a view to come
MOST_TURNS = 20_000


class Ended(BaseException):
    """The process would have ended."""


class Broken(AssertionError):
    """A promise was not kept."""


class Wire(FakeTransport):
    """The server's transport of one connection. reads: the other end takes what is written to it; `written` is kept if
    it is the honest one's. digest: of all that was written."""

    def __init__(self, core: Core, reads: bool, keeps: bool = False) -> None:
        self.core = core
        self.connection = core.server.connection()
        self.reads = reads
        self.keeps = keeps
        self.written = bytearray()
        self.digest = 0
        self.waiting_bytes = 0
        self._paused = False
        self.connection.connection_made(cast(Any, self))

    # --- as asyncio's -----------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        if self.closed:
            return
        self.digest = zlib.crc32(data, self.digest)
        if self.keeps:
            self.written += data
        if not self.reads:
            self.waiting_bytes += len(data)

    def _pause_if_full(self) -> None:
        """Not in the middle of a buffer: compiled code writes at its end."""
        if self.waiting_bytes > HIGH_BYTES and not (self._paused or self.closed):
            self._paused = True
            self.connection.pause_writing()

    def writelines(self, buffers: Any) -> None:
        for data in buffers:
            self.write(data)

    def get_write_buffer_size(self) -> int:
        return self.waiting_bytes

    def abort(self) -> None:
        if not self.closed:
            self.closed = True
            self.core.clock.call_soon(self.connection.connection_lost, None)

    @property
    def waits(self) -> bool:
        """Returns whether nothing can be sent."""
        return self.closed or not self.reading

    # --- the other end ----------------------------------------------------------------------------------------------

    def feed(self, data: bytes | bytearray, most: int) -> int:
        """Sends bytes, so many at once at most; how many were taken before the server closed or stopped to read."""
        done = 0
        while done < len(data) and not self.closed:
            if not self.reading:
                self.core.settle()
                if self.waits:
                    break
            buffer = self.connection.get_buffer(-1)
            n = min(len(buffer), len(data) - done, most, READ_BYTES)
            buffer[:n] = data[done : done + n]
            buffer = memoryview(b"")
            self.connection.buffer_updated(n)
            self._pause_if_full()
            done += n
        return done


class Core:
    """compiled: usual frames are handled by compiled code."""

    def __init__(self, random: Random, tables: Mapping[int, TableSpec], compiled: bool) -> None:
        self.random = random
        self.clock = Clock()
        self.server = Server(
            ServerInfo(ME, 1, "127.0.0.1:1"), CLUSTER, RANGES, cast(Any, self.clock),
            ServerOptions(clock=self.clock.time, wall=lambda: 1e6 + self.clock.now, busy_poll=cast(Any, Quiet())),
        )  # fmt: skip
        self.server.fast.h[at.H_ENABLED] = compiled
        registered = {TABLE: RegisteredTable(APPS[HONEST], TABLE_OF_OWN)}
        self.server.know_tables(
            registered
            | {number: RegisteredTable(("default", "app0")[number % 2], spec) for number, spec in tables.items()}
        )
        workers = (HONEST, *HOSTILE)
        self.server.follow(Roster(1, tuple(WorkerInfo(w, f"w{w}", 1, APPS[w]) for w in workers), CLUSTER))
        self.server.adopt(self.next_view())
        self._ticked_s = self.clock.now
        self._connections: list[weakref.ref[Connection]] = []
        self.honest = Honest(self)

    def settle(self) -> None:
        """Runs what is due."""
        for _ in range(MOST_TURNS):
            if not self.clock.run_due():
                return
        raise Broken("the server never comes to rest")

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, in the steps in which a server looks at it."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now = min(until, self.clock.now + 0.25)
            self.settle()
            self.server.tick()
            self.server.memory.look()
            self.server.leaders.tell()
            self.settle()

    def open(self, reads: bool) -> Wire:
        """Opens a connection that has sent no hello."""
        wire = Wire(self, reads)
        self._connections.append(weakref.ref(wire.connection))
        return wire

    def view_number(self) -> int:
        """Above all numbers of links that were given under earlier views."""
        return self.server.serving.epoch << 20

    # --- views ------------------------------------------------------------------------------------------------------

    def next_view(self, alone: bool = False) -> View:
        """A view that a leader may write now. alone: the server has its own ranges only."""
        old = self.server.serving.view
        names = (PEER, ME)
        chains, joining = np.full((RANGES, 3), -1, np.int32), np.full(RANGES, -1, np.int32)
        chains[:OWN, 0] = 1
        for r in range(OWN, RANGES):
            chain: tuple[int, ...] = (0,) if alone else self.random.choice(((1,), (1, 0), (0, 1), (0,), (1, 0), (0, 1)))
            half = self.server.replica.role[r] == Role.JOINING and not self.server.replica.filled[r]
            if half and 1 in chain:
                chain = (0,)
            chains[r, : len(chain)] = chain
            if len(chain) == 1 and not alone and self.random.random() < 0.7:
                joining[r] = 1 - chain[0]
        epoch = 1 if old is None else old.epoch + 1
        since = np.full(RANGES, epoch, np.int64)
        if old is not None:
            same = (old.chains == chains).all(axis=1) & (old.joining == joining)
            since[same] = old.since[same]
        servers = tuple(ServerInfo(name, 1, f"127.0.0.1:{i + 1}") for i, name in enumerate(names))
        return View(CLUSTER, epoch, RANGES, 3, servers, chains, joining, since, "by hand")

    # --- what must hold ---------------------------------------------------------------------------------------------

    def check_under_way(self, wires: list[Wire]) -> None:
        """In the middle of it."""
        for wire in wires:
            if wire.waiting_bytes > MOST_WAITING_BYTES:
                raise Broken(f"{wire.waiting_bytes} bytes wait for {wire.connection.member or wire.connection.worker}")
        held = sum(map(len, self.server.replica._held.values()))
        if held * replica_links.MESSAGE_BYTES > MOST_HELD_BYTES + READ_BYTES:
            raise Broken(f"{held} messages of servers wait for a view")

    def end_burst(self, wires: list[Wire]) -> None:
        """Closes all connections; checks that nothing is left of them."""
        while wires:
            wires.pop().abort()
        self.settle()
        self.pass_time(11.0)  # longer than anything waits for a view or a roster
        self.server.adopt(self.next_view(alone=True))
        self.settle()
        self.honest.work()
        self._check_nothing_left()

    def _check_nothing_left(self) -> None:
        server, replica, fast = self.server, self.server.replica, self.server.fast
        gc.collect()
        alive = [c for ref in self._connections if (c := ref()) is not None]
        self._connections.clear()
        left: dict[str, object] = {
            "connections": list(server.handshake.connections)[1:],
            "without hello": list(server.handshake._unknown),
            "workers": list(server.handshake._as_workers)[1:],
            "leaders": list(server.leaders._connections),
            "links": list(server.links._links),
            "frames held": list(server.held._since),
            "messages held": [held for held in replica._held.values() if held],
            "pushes parked": replica.parked,
            "repeats that wait": replica.core.waiters,
            "the log": len(replica.log) or replica.log.nbytes,
            "fillings": replica.transfer.fills,
            "pieces": replica.transfer._pieces or replica.core.bounds,
            "pulls parked": len(server.own_steps),
            "clocks waited for": len(server.delay) or server.delay._of_asker,
            "pulls unshown": server.pulls._unshown,
            "ranges to be reduced": server.reductions.waiting,
            "cuts": server.snapshots._snapshots,
            "chunks in use": int(np.count_nonzero(fast.chunks.refs)),
            "lists of keys": [slot for slot in fast._lists if slot != self.honest.wire.connection.slot],
            "slots": [c for c in fast._slots if c is not None][1:],
            "connections that something still refers to": [
                f"{c.member or c.worker}: {[type(r) for r in gc.get_referrers(c)]}" for c in alive
            ],
        }
        wrong = {what: how for what, how in left.items() if how}
        if wrong:
            raise Broken(f"is left after all have gone: {wrong}")


class Honest:
    """Pushes and pulls, and knows what must come of it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._clock = 0
        self._request = 0
        keys = np.arange(4 * KEYS, dtype=np.int64)
        self._model = np.zeros((KEYS, DIM), np.float32)
        self._lists = ShortKeys()
        wire = self.wire = Wire(core, True, keeps=True)
        hello = {"cluster": CLUSTER, "worker": HONEST, "name": f"w{HONEST}", "app": APPS[HONEST]}
        create = json_frame(Kind.CREATE, {"id": TABLE, "spec": TABLE_OF_OWN.to_json()}, request=1, epoch=1)
        wire.feed(json_frame(Kind.HELLO, hello) + Header(Kind.JOIN, LAST).pack() + create, 1 << 20)
        core.settle()
        ranges = core.server.store.tables[TABLE].ranges_of(keys)
        inside = np.flatnonzero(ranges < OWN)[:KEYS]
        self._keys = keys[inside][np.argsort(ranges[inside], kind="stable")]
        self._ranges = core.server.store.tables[TABLE].ranges_of(self._keys)
        self._model = np.zeros((len(self._keys), DIM), np.float32)
        self.work()

    def work(self) -> None:
        """A push, and a pull of everything."""
        random, epoch = self._core.random, self._core.server.serving.epoch
        self._clock += 1
        mine = np.array(sorted(random.sample(range(len(self._keys)), random.choice((1, 8, 60)))))
        grads = np.full((len(mine), DIM), float(random.randrange(-8, 9)), np.float32)
        named = struct.pack("<Q4i", OWN, *range(OWN))
        body = named + block_head(TABLE, len(mine), DIM, np.empty(0, np.float32))
        body += self._keys[mine].tobytes() + grads.tobytes()
        self._model[mine] += grads
        header = PushHeader(0, epoch, self._clock, before_part(self._clock, 0), 1, all_ranges=False).header(len(body))
        self._ask(header, body, Kind.OK)
        body = self._keys.tobytes()
        header = Header(Kind.PULL, 0, len(body), 0, epoch, 0, HONEST, table=TABLE, items=len(self._keys))
        rows = np.frombuffer(self._ask(header, body, Kind.ROWS), np.float32).reshape(-1, DIM)
        if not np.array_equal(rows, self._model):
            raise Broken(f"the honest worker reads {rows[rows != self._model]} for {self._model[rows != self._model]}")
        r = random.randrange(OWN)
        body = function_body("sum", ())
        header = ReduceHeader(TABLE, r, epoch=epoch).header(len(body))
        found = np.frombuffer(self._ask(header, body, Kind.REDUCED), np.float64)
        total = self._model[self._ranges == r].astype(np.float64).sum()  # whole numbers, so in any order
        if found.sum() != total:
            raise Broken(f"the honest worker is told a sum of {found} for {total}")

    def _ask(self, header: Header, body: bytes, kind: Kind) -> bytes:
        wire = self.wire
        wire.written.clear()
        self._request += 1
        header = header._replace(request=self._request)
        data = self._shorter(header, header.pack() + body)
        if wire.feed(data, 1 << 20) < len(data):
            raise Broken(f"the honest worker's {Kind(header.kind).name} is not read; closed: {wire.closed}")
        self._core.settle()
        for answer, content in _frames(wire.written):
            if answer.request == self._request:
                if answer.kind != kind:
                    raise Broken(
                        f"{Kind(header.kind).name} is answered with {Kind(answer.kind).name}: {content[:500]!r}"
                    )
                return content
        raise Broken(f"the honest worker's {Kind(header.kind).name} is not answered")

    def _shorter(self, header: Header, frame: bytes) -> bytes:
        """As filters make it, more often than not."""
        random = self._core.random
        short = Short(random.random() < 0.7, random.random() < 0.3, random.random() < 0.3)
        if header.kind == Kind.PUSH:
            return b"".join(self._lists.push(memoryview(frame), {TABLE: short}))
        return b"".join(self._lists.pull(memoryview(frame), short)) if short.shortens_keys else frame


def _frames(stream: bytearray) -> Iterator[tuple[Header, bytes]]:
    at = 0
    while at < len(stream):
        header = unpack_header(stream, at)
        yield header, bytes(stream[at + HEADER_BYTES : at + HEADER_BYTES + header.body])
        at += HEADER_BYTES + header.body


class _Shouts(logging.Handler):
    """An exception that was caught and logged is one all the same."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            raise Broken(record.getMessage()) from record.exc_info[1]


@contextmanager
def watched() -> Iterator[None]:
    """No process ends, and no exception passes, without being noticed."""

    def end(code: int) -> None:
        raise Ended(f"the process ends with {code}")

    root, handler = logging.getLogger(), _Shouts()
    level, handlers = root.level, root.handlers
    with ExitStack() as stack:
        stack.enter_context(patch.object(os, "_exit", end))
        stack.enter_context(patch.object(replica_links, "MOST_BYTES", MOST_HELD_BYTES))
        stack.enter_context(patch.object(snapshots, "BUSY_S", -1.0))  # how long a piece took counts for nothing
        gc.collect()
        gc.freeze()  # to look for what is left is quick then
        stack.callback(gc.unfreeze)
        root.handlers = [handler]
        root.setLevel(logging.ERROR)
        try:
            yield
        finally:
            root.handlers = handlers
            root.setLevel(level)
