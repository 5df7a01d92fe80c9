"""The owner of one server's state: admits pushes by vector clock, answers pulls, keeps tables. Opens no socket.

Single-threaded: every method runs in the server's event loop, so a frame is judged, applied and answered without a
lock, and no other frame can come in between.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.errors import SpecError
from elasticps.server.connection import Connection
from elasticps.server.reads import DEFAULT_WAIT_S, MAX_PARKED, Read, answer
from elasticps.spec import TableSpec
from elasticps.store import Store, Table
from elasticps.wire.frames import (
    LAST,
    Block,
    FrameError,
    Header,
    Kind,
    bytes_frame,
    json_body,
    json_frame,
    read_push,
)
from replication.clocks import Clocks, Verdict

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
HOLD_TIMEOUT_S = 10.0


class Refusal(Exception):
    """A request that this server will not do: a code for programs, a sentence for people."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.document: dict[str, Any] = {"code": code, "message": message} | more


class Server:
    """State and behaviour of one server; `process.serve` connects it to sockets and to the coordination store."""

    def __init__(self, me: ServerInfo, cluster: str, ranges: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.me = me
        self.cluster = cluster
        self.ranges = ranges
        self.store = Store(ranges)
        self.clocks = Clocks(ranges)
        self.view: View | None = None
        self.epoch = 0
        self._heads_since = 1 << 62  # epoch in which the set of ranges that we head last changed
        self._headed = np.zeros(ranges, np.bool_)
        self._headed_ranges: NDArray[np.intp] = np.empty(0, np.intp)
        self._roster_version = 0
        self._workers: dict[int, WorkerInfo] = {}  # the roster
        self._active: set[int] = set()  # workers that have joined and are in the roster
        self._connections: set[Connection] = set()
        self._parked: list[Read] = []
        self._held: dict[Connection, float] = {}  # connections that wait for a view or roster, since when
        self._clock = clock
        self._started = clock()
        self.counts: Counter[str] = Counter()
        self._handlers: dict[int, Callable[[Connection, Header, NDArray[np.uint8]], None]] = {
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.HELLO: self._hello,
            Kind.JOIN: self._join,
            Kind.CREATE: self._create,
            Kind.INIT: self._init,
        }

    # --- connections --------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)
        if len(self._connections) > MAX_CONNECTIONS:
            connection.refuse(FrameError(f"server {self.me.name} already has {MAX_CONNECTIONS} connections"))

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._held.pop(connection, None)
        self._parked = [r for r in self._parked if r.connection is not connection]

    def handle(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        """Does one request; whatever is wrong with it is told to its sender and changes nothing here."""
        handler = self._handlers.get(header.kind)
        if handler is None:
            raise FrameError(f"{Kind(header.kind).name} is not a request")
        if not connection.worker and header.kind != Kind.HELLO:
            raise FrameError(f"{Kind(header.kind).name} came before HELLO")
        try:
            handler(connection, header, body)
        except Refusal as refusal:
            self.counts["refused"] += 1
            connection.send(json_frame(Kind.ERROR, refusal.document, request=header.request, epoch=self.epoch))

    def _hello(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        document = json_body(body.data)
        cluster, worker = document.get("cluster"), document.get("worker")
        app, name = document.get("app"), document.get("name")
        if (
            not isinstance(worker, int)
            or not 0 < worker < 1 << 32
            or not isinstance(name, str)
            or not isinstance(app, str)
        ):
            raise FrameError("a hello gives the worker's id (above 0), its name and its app")
        if cluster != self.cluster:
            raise Refusal("cluster", f"server {self.me.name} belongs to cluster {self.cluster!r}, not {cluster!r}")
        if worker not in self._workers and self._wait(connection, header, body):
            return
        if worker not in self._workers:
            raise Refusal("fenced", f"worker {name!r} (id {worker}) is not in the roster; it left, or a newer "
                                    "incarnation took its name")  # fmt: skip
        connection.welcome(worker, name, app)
        welcome = {"server": self.me.name, "incarnation": self.me.incarnation, "cluster": self.cluster}
        connection.send(json_frame(Kind.WELCOME, welcome, request=header.request, epoch=self.epoch))

    def _wait(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> bool:
        """Holds a frame until the next view or roster; False once it has waited too long."""
        since = self._held.setdefault(connection, self._clock())
        if self._clock() - since > HOLD_TIMEOUT_S:
            del self._held[connection]
            return False
        connection.hold(header, body)
        return True

    def _release(self) -> None:
        for connection in list(self._held):
            connection.release()
            if not connection.holding:
                self._held.pop(connection, None)

    # --- views and rosters --------------------------------------------------------------------------------------

    def adopt(self, view: View) -> None:
        """Takes a newer view; frames that waited for it go on."""
        if view.epoch <= self.epoch:
            return
        me = view.index(self.me.name)
        mine = me >= 0 and view.servers[me].incarnation == self.me.incarnation
        headed = view.heads == me if mine else np.zeros(self.ranges, np.bool_)
        if not np.array_equal(headed, self._headed) or self.view is None:
            self._headed, self._headed_ranges = headed, np.flatnonzero(headed)
            self._heads_since = view.epoch
        self.view, self.epoch = view, view.epoch
        log.info("adopted epoch=%d headed=%d reason=%r", view.epoch, len(self._headed_ranges), view.reason)
        self._release()

    def follow(self, roster: Roster) -> None:
        """Takes a newer roster: fences older incarnations, forgets who left, lets waiting reads be judged again."""
        if roster.version <= self._roster_version:
            return
        self._roster_version = roster.version
        self._workers = {w.id: w for w in roster.workers}
        self._active &= self._workers.keys()
        newest = {(w.app, w.name): w.id for w in roster.workers}
        for connection in list(self._connections):
            if newest.get((connection.app, connection.worker_name), 0) > connection.worker > 0:
                text = f"worker {connection.worker_name!r} was started again; this is the older incarnation"
                connection.send(json_frame(Kind.ERROR, {"code": "fenced", "message": text}))
                connection.transport.close()
        self._release()
        self._judge_parked()

    def tick(self) -> None:
        """Called a few times a second: ends waits that took too long."""
        self._release()
        self._judge_parked()

    def _stale(self, connection: Connection, header: Header, since: int) -> bool:
        """Whether the sender's view is too old; it is then told so, and gets the view once per epoch."""
        if since <= header.epoch <= self.epoch:
            return False
        assert self.view is not None
        if connection.told_epoch < self.epoch:
            connection.told_epoch = self.epoch
            connection.send(bytes_frame(Kind.VIEW, self.view.encode(), epoch=self.epoch))
        raise Refusal("stale-view", f"server {self.me.name} is at epoch {self.epoch}, the request at {header.epoch}")

    # --- tables -------------------------------------------------------------------------------------------------

    def _table(self, table_id: int) -> Table:
        table = self.store.tables.get(table_id)
        if table is None:
            raise Refusal("unknown-table", f"server {self.me.name} has no table with id {table_id}")
        return table

    def _create(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        document = json_body(body.data)
        table_id, text = document.get("id"), document.get("spec")
        if not isinstance(table_id, int) or not 0 < table_id < 1 << 32 or not isinstance(text, str):
            raise FrameError("a create gives a table id above 0 and a spec")
        try:
            self.store.create(TableSpec.from_json(text), table_id)
        except SpecError as error:
            raise Refusal("spec", str(error)) from None
        connection.send(Header(Kind.OK, request=header.request, epoch=self.epoch).pack())

    def _init(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        if header.epoch > self.epoch and self._wait(connection, header, body):
            return
        self._stale(connection, header, self._heads_since)
        _, blocks = read_push(header, body)
        for block in blocks:
            self._check(block, values=0)
        for block in blocks:
            self._table(block.table).put_if_absent(block.keys, block.grads)
        connection.send(Header(Kind.OK, request=header.request, epoch=self.epoch).pack())

    # --- pushes -------------------------------------------------------------------------------------------------

    def _join(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        if header.flags & LAST:
            self.clocks.admit(connection.worker, header.clock)
            if connection.worker in self._workers:
                self._active.add(connection.worker)
        minimum = min(self._minimums(connection.app).values(), default=0)
        connection.send(Header(Kind.OK, request=header.request, epoch=self.epoch, clock=minimum).pack())

    def _push(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        if header.epoch > self.epoch and self._wait(connection, header, body):
            return
        self._stale(connection, header, self._heads_since)
        worker = connection.worker
        if worker not in self.clocks:
            raise Refusal("not-joined", f"worker {connection.worker_name!r} pushed before it joined")
        named, blocks = read_push(header, body)
        ranges = self._headed_ranges if named is None else self._named(named)
        verdict = self.clocks.check(worker, header.clock, header.first, ranges)
        if verdict is Verdict.NEXT:
            self.counts["pushes"] += 1
            try:
                self._apply(blocks)
            finally:  # an operation refused for good ticks as empty
                self.clocks.advance(worker, header.clock, header.part, bool(header.flags & LAST), ranges)
        elif verdict is Verdict.DUPLICATE:
            self.counts["duplicates"] += 1
        else:
            raise Refusal("gap", f"step {header.clock} of worker {connection.worker_name!r} came before the one that "
                                 f"server {self.me.name} waits for")  # fmt: skip
        connection.send(Header(Kind.OK, request=header.request, epoch=self.epoch).pack())
        if self._parked and header.flags & LAST:
            self._judge_parked()

    def _named(self, ranges: NDArray[np.int32]) -> NDArray[np.intp]:
        if len(ranges) and (ranges.min() < 0 or ranges.max() >= self.ranges or not self._headed[ranges].all()):
            raise Refusal("foreign", f"server {self.me.name} does not head all the ranges that the push names")
        return ranges.astype(np.intp)

    def _apply(self, blocks: list[Block]) -> None:
        tables = [self._check(block, values=None) for block in blocks]
        for table, block in zip(tables, blocks, strict=True):
            table.apply(block.keys, block.grads, block.step_values)
            self.counts["rows_pushed"] += len(block.keys)

    def _check(self, block: Block, *, values: int | None) -> Table:
        """A block fits its table and this server. `values`: step values expected (None: the optimizer's number)."""
        table = self._table(block.table)
        dim, expected = table.spec.dim, table.spec.optimizer.step_floats if values is None else values
        if block.grads.shape[1] != dim:
            raise Refusal("shape", f"table {table.spec.name!r} has dim {dim}, the push has {block.grads.shape[1]}")
        if len(block.step_values) != expected:
            raise Refusal(
                "shape", f"table {table.spec.name!r} takes {expected} step values, not {len(block.step_values)}"
            )
        at = table.first_foreign(block.keys, self._headed)
        if at >= 0:
            raise Refusal("foreign", f"key {block.keys[at]} of table {table.spec.name!r} is not headed by server "
                                     f"{self.me.name}")  # fmt: skip
        return table

    # --- pulls --------------------------------------------------------------------------------------------------

    def _pull(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        if header.epoch > self.epoch and self._wait(connection, header, body):
            return
        self._stale(connection, header, self._heads_since)
        table = self._table(header.table)
        if header.items * 8 != len(body):
            raise FrameError(f"a pull of {header.items} keys has a body of {len(body)} bytes")
        self.counts["pulls"] += 1
        self.counts["rows_pulled"] += header.items
        keys = body.view(np.int64)
        read = Read(connection, header, table, keys, 0.0)
        if (header.bound or header.clock) and self._behind(read):
            self._park(read)
        else:
            answer(read)

    def _park(self, read: Read) -> None:
        if len(self._parked) >= MAX_PARKED:
            raise Refusal("busy", f"server {self.me.name} already has {MAX_PARKED} pulls waiting")
        wait_s = read.header.wait_ms / 1e3 or DEFAULT_WAIT_S
        self._parked.append(Read(read.connection, read.header, read.table, read.keys.copy(), self._clock() + wait_s))

    def _minimums(self, app: str) -> dict[int, int]:
        """The lowest clock of each active worker of an application, over the ranges that we head."""
        active = [w for w in self._active if self._workers[w].app == app]
        if not active or not len(self._headed_ranges):
            return {}
        return dict(zip(active, self.clocks.minimum(active, self._headed_ranges).tolist(), strict=True))

    def _behind(self, read: Read) -> list[str]:
        """The workers that a pull has to wait for: its own pushes (read your writes), then the bounded delay's."""
        header, own = read.header, read.connection.worker
        joined = own in self.clocks and len(self._headed_ranges)
        if joined and self.clocks.minimum([own], self._headed_ranges)[0] < header.clock:
            return [read.connection.worker_name]
        if not header.bound:
            return []
        floor = header.clock - (header.bound - 1)
        minimums = self._minimums(read.connection.app)
        return [self._workers[w].name for w, clock in minimums.items() if clock < floor]

    def _judge_parked(self) -> None:
        parked, self._parked = self._parked, []
        now = self._clock()
        for read in parked:
            behind = self._behind(read)
            if not behind:
                answer(read)
            elif now >= read.deadline_s:
                text = f"a pull of table {read.table.spec.name!r} at clock {read.header.clock} waited too long for " + (
                    f"worker {', '.join(sorted(behind))}"
                )
                error = Refusal("behind", text, behind=sorted(behind)).document
                read.connection.send(json_frame(Kind.ERROR, error, request=read.header.request, epoch=self.epoch))
            else:
                self._parked.append(read)

    # --- for people ---------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `elasticps status` shows of this server."""
        return {
            "id": self.me.name,
            "pid": os.getpid(),
            "address": self.me.address,
            "admin": self.me.admin,
            "incarnation": self.me.incarnation,
            "state": "serving" if len(self._headed_ranges) else "spare",
            "epoch": self.epoch,
            "ranges_headed": len(self._headed_ranges),
            "ranges_held": len(self._headed_ranges),
            "rows": self.store.rows,
            "bytes": self.store.nbytes,
            "connections": len(self._connections),
            "pushes": self.counts["pushes"],
            "pulls": self.counts["pulls"],
            "rows_pushed": self.counts["rows_pushed"],
            "rows_pulled": self.counts["rows_pulled"],
            "duplicates": self.counts["duplicates"],
            "refused": self.counts["refused"],
            "parked": len(self._parked),
            "tables": len(self.store.tables),
            "uptime_s": self._clock() - self._started,
        }
