"""One server between its connections, its replica and its store. Opens no socket but those to other replicas.

Single-threaded: every method runs in the server's event loop, so a frame is judged, applied and answered without a
lock, and no other frame can come in between.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator import fields
from coordinator.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.admin.subject import MarkedRange
from elasticps.memory import fill_mark
from elasticps.server.awaited import FutureTicket
from elasticps.server.connection import Connection
from elasticps.server.executor import Executor
from elasticps.server.fast import layout as at
from elasticps.server.fast.path import FastPath
from elasticps.server.herald import Herald
from elasticps.server.linger import Linger
from elasticps.server.protocol.barrier import BarrierCoordinator
from elasticps.server.protocol.bounded_delay import BoundedDelay
from elasticps.server.protocol.data_shards import ShardDispenser
from elasticps.server.protocol.data_shards_state import Mark as ShardMark
from elasticps.server.protocol.headroom import NO_LIMIT, Headroom, Memory, full
from elasticps.server.protocol.operations import ChunkContent, Mark
from elasticps.server.protocol.reads import Read
from elasticps.server.protocol.replica_codec import ReplicaCodec
from elasticps.server.protocol.request_error import RequestError
from elasticps.server.replica_links import ReplicaLinks
from elasticps.server.requests import Requests
from elasticps.server.snapshots import SnapshotSender
from elasticps.store import Table
from elasticps.wire.frames import (
    ANY,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
)
from elasticps.wire.views import read_view
from replication.chain import Member, Ranges, Role
from replication.core import NO_RANGES
from replication.effects import CaughtUp, Push, Status
from replication.messages import Message, OperationKind

log = fields.logger(__name__)

MAX_CONNECTIONS = 4096
HOLD_TIMEOUT_S = 10.0
LOG_BUDGET_BYTES = 256 << 20
LOG_SHARE = 16  # of its memory limit a server gives at most such a part to the log
BUSY_S = 0.5  # a server that served a worker so recently gives fillings the smaller share
MARKED_AT_ONCE = 16  # ranges whose digests are taken in one go

_COUNTERS = {
    "pushes": at.H_PUSHES, "pulls": at.H_PULLS, "rows_pushed": at.H_ROWS_PUSHED, "rows_pulled": at.H_ROWS_PULLED,
}  # fmt: skip

_STARTED_AGAIN = "worker {!r} was started again; this is the older incarnation"

Body = NDArray[np.uint8]
Handler = Callable[[Connection, Header, Body], None]


class Server:
    """State and behaviour of one server; `process.serve` connects it to sockets and to the coordination store.

    behind: set when somebody speaks of a view or roster newer than ours; whoever runs this server then gets them.
    removed: done when a view has left this server out: its copy is void, and it may come back as a new incarnation.
    """

    def __init__(
        self,
        me: ServerInfo,
        cluster: str,
        ranges: int,
        loop: asyncio.AbstractEventLoop,
        *,
        log_budget_bytes: int = LOG_BUDGET_BYTES,
        clock: Callable[[], float] = time.monotonic,
        linger: Linger | None = None,
        memory: Memory = NO_LIMIT,
    ) -> None:
        self.me = me
        self.member = Member(me.name, me.incarnation)
        self.cluster = cluster
        self.ranges = ranges
        self.view: View | None = None
        self.epoch = 0
        self.counts: Counter[str] = Counter()
        self._loop = loop
        self._clock = clock
        self._started = clock()
        self.behind = asyncio.Event()
        self.removed: asyncio.Future[None] = loop.create_future()
        self._linger = linger or Linger(loop)
        self.headroom = Headroom(me.name, memory)
        if memory.limit:
            log_budget_bytes = min(log_budget_bytes, memory.limit // LOG_SHARE)
        self.fast = FastPath(ranges, log_budget_bytes, self)
        self.executor = Executor(self.member, ranges, self, log_budget_bytes, self.fast)
        self.store, self.replica = self.executor.store, self.executor.replica
        self._codec = ReplicaCodec(self.store.tables, ranges)
        self.peers = ReplicaLinks(self.member, cluster, self, loop, self.connection)
        self._snapshots = SnapshotSender(
            loop,
            self.store.tables,
            self.executor.rounds,
            self.executor.shards,
            ranges,
            self._cut,
            self._busy,
            self._backlog,
            self._filling,
        )
        self.workers: dict[int, WorkerInfo] = {}  # the roster
        self._newest: dict[tuple[Any, Any], int] = {}  # by application and name, the id that the roster has
        self._roster_version = 0
        self.delay = BoundedDelay(ranges, self.replica.clocks, clock)
        self._herald = Herald(loop.call_soon)
        self._connections: dict[Connection, None] = {}  # in the order in which they came
        self._held: dict[Connection, float] = {}  # connections that wait for a view or roster, since when
        self._tail_since = self._full_since = 1 << 62  # epochs in which the ranges that we tail, or hold, last changed
        self.listed = False  # in the view that we have
        self._requests = Requests(self, self.executor, self.delay, clock)
        self._decider = BarrierCoordinator(self, self.executor, clock)
        self._handlers: dict[int, Handler] = {
            **self._requests.handlers,
            **self._decider.handlers,
            **ShardDispenser(self, self.executor).handlers,
            Kind.GET_VIEW: self._want,
        }
        self._peer_handlers: dict[int, Handler] = {
            **dict.fromkeys((Kind.FORWARD, Kind.ACK, Kind.RESYNC, Kind.SNAPSHOT_CHUNK, Kind.CHUNK_ACK), self._message),
            Kind.GET_VIEW: self._want,
            Kind.VIEW: self._view,
            Kind.ROOM: self._room,
        }

    # --- connections ------------------------------------------------------------------------------------------------

    def connection(self) -> Connection:
        """A protocol object for a new connection, accepted or dialled."""
        return Connection(self, self._loop, self._linger, self.fast)

    def opened(self, connection: Connection) -> None:
        self._connections[connection] = None
        if len(self._connections) > MAX_CONNECTIONS:
            connection.refuse(FrameError(f"server {self.me.name} already has {MAX_CONNECTIONS} connections"))

    def closed(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self._held.pop(connection, None)
        self.delay.forget(connection)
        for ticket in list(connection.tickets):
            self.executor.perform(self.replica.forget, ticket)
        self.peers.lost(connection)

    def handle(self, connection: Connection, header: Header, body: Body) -> None:
        """Does one request; whatever is wrong with it is told to its sender and changes nothing here."""
        if not connection.known:
            self._introduction(connection, header, body)
            return
        handlers = self._handlers if connection.worker else self._peer_handlers
        handler = handlers.get(header.kind)
        if handler is None:
            raise FrameError(f"{Kind(header.kind).name} is not for this side of this connection")
        try:
            handler(connection, header, body)
        except RequestError as refusal:
            self.refuse(connection, header.request, refusal)

    def refuse(self, connection: Connection, request: int, refusal: RequestError) -> None:
        """Tells why a request was not done."""
        self.counts["refused"] += 1
        connection.send(json_frame(Kind.ERROR, refusal.document, request=request, epoch=self.epoch))

    def close(self) -> None:
        """Drops every connection."""
        self.peers.close()
        for connection in list(self._connections):
            connection.transport.abort()

    # --- who is there -----------------------------------------------------------------------------------------------

    def _introduction(self, connection: Connection, header: Header, body: Body) -> None:
        if header.kind == Kind.WELCOME and connection.member is not None:
            connection.welcome()
            self.peers.arrived(connection)
            return
        if header.kind == Kind.ERROR and connection.member is not None:
            log.warning("our link is refused", peer=connection.member, message=json_body(body.data).get("message"))
            connection.transport.abort()
            return
        if header.kind != Kind.HELLO:
            raise FrameError(f"{Kind(header.kind).name} came before HELLO")
        document = json_body(body.data)
        try:
            if document.get("cluster") != self.cluster:
                text = f"server {self.me.name} belongs to cluster {self.cluster!r}, not {document.get('cluster')!r}"
                raise RequestError("cluster", text)
            if "worker" in document:
                self._hello_worker(connection, header, body, document)
            elif document.get("to") != list(self.member):
                raise RequestError("incarnation", f"this is {self.member}, not {document.get('to')}")
            elif "peer" in document:
                self._hello_peer(connection, header, document)
            elif "leader" in document:
                connection.leader = True
                self._welcome(connection, header)
                connection.send(self.report())
            else:
                raise FrameError("a hello says who speaks: a worker, a peer or a leader")
        except RequestError as refusal:
            self.refuse(connection, header.request, refusal)

    def _welcome(self, connection: Connection, header: Header) -> None:
        connection.welcome()
        document = {"server": self.me.name, "incarnation": self.me.incarnation, "cluster": self.cluster}
        connection.send(json_frame(Kind.WELCOME, document, request=header.request, epoch=self.epoch))

    def _hello_worker(self, connection: Connection, header: Header, body: Body, document: dict[str, Any]) -> None:
        worker, name, app = document["worker"], document.get("name"), document.get("app")
        names = isinstance(name, str) and isinstance(app, str)
        if not (isinstance(worker, int) and 0 < worker < 1 << 32 and names):
            raise FrameError("a worker's hello gives its id (above 0), its name and its app")
        if worker not in self.workers:
            if self._newest.get((app, name), 0) > worker:
                raise RequestError("fenced", _STARTED_AGAIN.format(name))
            self.behind.set()
            if self._wait(connection, header, body):
                return
            text = f"worker {name!r} (id {worker}) is not in the roster: it left, or its registration ran out"
            raise RequestError("unlisted", text)
        connection.is_worker(worker, str(name), str(app))
        self._welcome(connection, header)

    def _hello_peer(self, connection: Connection, header: Header, document: dict[str, Any]) -> None:
        match document:
            case {"peer": [str(name), int(incarnation)], "number": int(number)} if number > 0:
                connection.member, connection.number = Member(name, incarnation), number
            case _:
                raise FrameError("a peer's hello gives its name and incarnation, and the number of its link")
        self._welcome(connection, header)
        if not self.peers.arrived(connection):
            connection.transport.abort()

    def _wait(self, connection: Connection, header: Header, body: Body) -> bool:
        """Holds a frame until the next view or roster; False once it has waited too long."""
        since = self._held.setdefault(connection, self._clock())
        if self._clock() - since > HOLD_TIMEOUT_S:
            del self._held[connection]
            return False
        connection.hold(header, body)
        return True

    def wait_for_view(self, connection: Connection, header: Header, body: Body) -> bool:
        """Holds a frame that speaks of a view to come. Raises `RequestError` when that does not come."""
        if header.epoch <= self.epoch:
            return False
        self.need_view(header.epoch)
        if self._wait(connection, header, body):
            return True
        text = f"server {self.me.name} is at epoch {self.epoch} and cannot get the view of epoch {header.epoch}"
        raise RequestError("stale-view", text, epoch=self.epoch)

    def _release(self) -> None:
        for connection in list(self._held):
            connection.release()
            if not connection.holding:
                self._held.pop(connection, None)

    # --- views and rosters ------------------------------------------------------------------------------------------

    def adopt(self, view: View) -> None:
        """Takes a newer view; frames that waited for it go on."""
        if view.epoch <= self.epoch:
            return
        me = view.as_chains.index(self.member)
        before, self.view, self.epoch = self.view, view, view.epoch
        self._herald.adopt(view)
        if me < 0 and self.listed:
            log.warning("left out", epoch=view.epoch, reason=view.reason)
            self.listed = False
            self.removed.set_result(None)
            return
        self.listed = self.listed or me >= 0
        headed, tailed = self.headed, self.delay.tailed
        self._follow_reads(before, view, me)
        self.peers.adopt(view)
        self.headroom.adopt(view, self.member)
        self.executor.perform(self.replica.adopt, view.as_chains)
        log.info("adopted", epoch=view.epoch, headed=len(self.headed), reason=view.reason)
        if len(np.setdiff1d(self.headed, headed)) or len(np.setdiff1d(self.delay.tailed, tailed)):
            # nobody else can tell them as early as who has ranges now
            self._herald.tell_all(connection for connection in self._connections if connection.worker)
        self._release()
        self._decider.judge()
        self._requests.judge_parked()

    def _follow_reads(self, before: View | None, view: View, me: int) -> None:
        """Notes whether the ranges that may be read here are other ones than before, or were under a view left out."""
        old_tail, old_full = self.delay.tailed, self.delay.held
        tailed = np.flatnonzero((view.tails == me) & (me >= 0))
        held = np.flatnonzero((view.chains == me).any(axis=1) & (me >= 0))
        unknown = before is None or view.epoch > before.epoch + 1
        if unknown or not np.array_equal(tailed, old_tail):
            self._tail_since = view.epoch
        if unknown or not np.array_equal(held, old_full):
            self._full_since = view.epoch
        self.delay.serve(tailed, held)
        self.fast.serve(tailed, held, self._tail_since, self._full_since)

    def serves(self, header: Header) -> bool:
        """Whether the ranges that may be read here are the same as in the pull's epoch."""
        return header.epoch >= (self._full_since if header.flags & ANY else self._tail_since)

    def judged(self) -> list[tuple[Read, RequestError | None]]:
        """The waiting pulls that need not wait any more."""
        return self.delay.judge(self._tail_since, self._full_since)

    @property
    def headed(self) -> Ranges:
        """The ranges headed here, in the order of a push's keys."""
        ranges = self.replica.headed(self.replica.epoch)
        return NO_RANGES if ranges is None else ranges

    def follow(self, roster: Roster) -> None:
        """Takes a newer roster: fences older incarnations, forgets who left, lets waiting reads be judged again."""
        if roster.version <= self._roster_version:
            return
        self._roster_version = roster.version
        self.workers = {w.id: w for w in roster.workers}
        self.delay.follow(self.workers)
        self._newest = {(w.app, w.name): w.id for w in roster.workers}
        for connection in list(self._connections):
            connection.set_rostered(connection.worker in self.workers)
            if self._newest.get((connection.app, connection.worker_name), 0) > connection.worker > 0:
                text = _STARTED_AGAIN.format(connection.worker_name)
                connection.send(json_frame(Kind.ERROR, {"code": "fenced", "message": text}))
                connection.transport.close()
        self.executor.perform(self.replica.adopt_roster, roster.version, frozenset(self.workers))
        self._release()
        self._decider.judge()
        self._requests.judge_parked()

    def tick(self) -> None:
        """Called a few times a second: ends waits that took too long, beats."""
        self._release()
        self._decider.judge()
        self._requests.judge_parked()
        self.peers.tick()
        for connection in list(self._connections):
            connection.notice_end()

    # --- memory -----------------------------------------------------------------------------------------------------

    def look_at_memory(self) -> None:
        """Called several times a second: sets how much room pushes may take, and tells neighbours."""
        self.headroom.look(self.store.reusable_bytes)
        self.fast.room = self.headroom.least.nbytes
        if self.headroom.limited:
            self.peers.broadcast(json_frame(Kind.ROOM, self.headroom.told()))

    def _room(self, connection: Connection, header: Header, body: Body) -> None:
        if connection.member is not None and self.peers.link(connection.member) is connection:
            self.headroom.heard(connection.member, json_body(body.data))
            self.fast.room = min(self.fast.room, self.headroom.behind.nbytes)

    def no_room(self, table: Table, rows: int, nbytes: int) -> RequestError:
        """Why a push may not add that many rows, of so many bytes, to a table."""
        least = self.headroom.least
        return full(
            least._replace(nbytes=min(least.nbytes, self.fast.room)), self.me.name, table.spec.name, rows, nbytes
        )

    # --- who asks for views -----------------------------------------------------------------------------------------

    def tell_view(self, connection: Connection) -> None:
        """Sends the view, once per connection and epoch."""
        self._herald.tell(connection)

    def _want(self, connection: Connection, header: Header, body: Body) -> None:
        if header.epoch < self.epoch:
            connection.told_epoch = min(connection.told_epoch, header.epoch)
            self.tell_view(connection)
        elif header.epoch > self.epoch:
            self.need_view(header.epoch)

    def _view(self, connection: Connection, header: Header, body: Body) -> None:
        view = read_view(header, body, self.epoch)
        if view is not None and view.cluster == self.cluster and view.ranges == self.ranges:
            self.adopt(view)

    # --- leaders ----------------------------------------------------------------------------------------------------

    def report(self) -> bytes:
        """The REPORT frame: what a leader wants to know, as it is now."""
        document = {
            "levels": [[level.range, level.fill, *level.joiner] for level in self.replica.levels()],
            "suspects": [[*member, round(seconds, 3)] for member, seconds in self.peers.suspects().items()],
            "stalled": [list(member) for member in self._snapshots.stalled()],
            "bytes": self.store.nbytes,
            "memory": [self.headroom.used, self.headroom.mark, fill_mark(self.headroom.limit)],
            "requests": self.count("pushes") + self.count("pulls"),
        }
        return json_frame(Kind.REPORT, document, epoch=self.epoch)

    def tell_leaders(self) -> None:
        """Sends a report to every leader that is connected; their failure detectors live on these."""
        leaders = [connection for connection in self._connections if connection.leader]
        if leaders:
            frame = self.report()
            for connection in leaders:
                connection.send(frame)

    # --- what the replica asks for ----------------------------------------------------------------------------------

    def send(self, peer: Member, message: Message) -> None:
        link = self.peers.link(peer)
        if link is not None:
            link.send_all(self._codec.encode(message))

    def need_view(self, epoch: int) -> None:
        self.behind.set()
        self.peers.broadcast(Header(Kind.GET_VIEW, epoch=self.epoch).pack())

    @property
    def roster_version(self) -> int:
        """Of the roster that is followed."""
        return self._roster_version

    def need_roster(self, version: int) -> None:
        self.behind.set()

    def start_fill(self, peer: Member, r: int, serial: int) -> None:
        self._snapshots.start(peer, r, serial)

    def next_piece(self, r: int, serial: int) -> None:
        self._snapshots.next(r, serial)

    def report_level(self, level: CaughtUp) -> None:
        log.debug("level", range=level.range, fill=level.fill, joiner=level.joiner)
        self._loop.call_soon(self.tell_leaders)

    def _cut(self, r: int, serial: int, upto: int, last: bool, content: ChunkContent) -> None:
        self.executor.perform(self.replica.piece, r, serial, upto, last, content)

    def _backlog(self, peer: Member) -> int:
        link = self.peers.link(peer)
        return 0 if link is None else link.waiting_bytes

    def _filling(self, r: int) -> tuple[Member, int] | None:
        """Who is to be filled with range r from here, as long as it is not, and since which epoch."""
        view = self.view
        if view is None or view.joining[r] < 0 or self.replica.waiting[r] or not (self.delay.tailed == r).any():
            return None
        return view.servers[view.joining[r]].member, int(view.since[r])

    def _busy(self) -> bool:
        return self._clock() - self._requests.last_s < BUSY_S

    def link_of(self, member: Member) -> Connection | None:
        """The current link to a peer."""
        return self.peers.link(member)

    def changed(self) -> None:
        """Something was applied or acknowledged: waiting pulls may go on."""
        if self._requests.waiting:
            self._requests.judge_parked()

    def served(self) -> None:
        """A worker's push or pull was handled: fillings take the smaller share for a moment."""
        self._requests.last_s = self._clock()

    def note_shard(self, number: int, shard: int, worker: int, clock: int) -> None:
        """A push that trains a shard was applied."""
        self.executor.shards.note(ShardMark(number, shard), worker, clock)

    def answer_rest(self, connection: Connection, header: Header, body: Body, done: int) -> None:
        """A pull of which `done` rows have been sent before something unusual happened."""
        self._requests.answer_rest(connection, header, body, done)

    def count(self, what: str) -> int:
        """How many pushes, pulls, rows pushed or rows pulled there were."""
        return self.counts[what] + self.fast.counter(_COUNTERS[what])

    @property
    def told(self) -> dict[int, int]:
        """Worker -> the clock up to which it has been told that all is committed."""
        return self.fast.told()

    def peer_up(self, member: Member) -> None:
        log.info("peer up", peer=member)
        connection = self.peers.link(member)
        if connection is not None:
            connection.is_peer()
        self.executor.perform(self.replica.peer_up, member)

    def peer_down(self, member: Member) -> None:
        log.info("peer down", peer=member)
        self.executor.perform(self.replica.peer_down, member)

    def _message(self, connection: Connection, header: Header, body: Body) -> None:
        member = connection.member
        if member is None:
            raise FrameError(f"{Kind(header.kind).name} came from somebody who is no replica")
        if self.peers.link(member) is connection:
            message = self._codec.decode(header, body)
            self.executor.perform(self.replica.receive, member, message)
            self.fast.note_change()

    # --- audit ------------------------------------------------------------------------------------------------------

    async def mark(self, mark: int) -> bool:
        """Has every replica of the ranges headed here note their digests; False if the view changed meanwhile."""
        ranges = self.headed
        for start in range(0, len(ranges), MARKED_AT_ONCE):
            ticket = FutureTicket(self._loop)
            some = ranges[start : start + MARKED_AT_ONCE]
            push = Push(ticket, -1, self.epoch, 0, 0, True, some, Mark(mark), 64, kind=OperationKind.AUDIT)
            self.executor.perform(self.replica.push, push)
            reply = await ticket.future
            if reply.status is not Status.COMMITTED or len(reply.moved):
                return False
        return True

    def marked(self, mark: int) -> dict[int, MarkedRange]:
        """What this replica found at a mark, by range."""
        return self.executor.marks.of(mark)

    # --- for people -------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """What `elasticps status` shows of this server."""
        role = self.replica.role
        held = int((role == Role.FULL).sum())
        return {
            "id": self.me.name,
            "pid": os.getpid(),
            "address": self.me.address,
            "admin": self.me.admin,
            "incarnation": self.me.incarnation,
            "state": "serving" if held else "spare",
            "epoch": self.epoch,
            "ranges_headed": len(self.headed),
            "ranges_held": held,
            "ranges_joining": int((role == Role.JOINING).sum()),
            "rows": self.store.rows,
            "bytes": self.store.nbytes,
            "memory_used": self.headroom.used,
            "memory_mark": self.headroom.mark,
            "memory_limit": self.headroom.limit,
            "connections": len(self._connections),
            "pushes": self.count("pushes"),
            "pulls": self.count("pulls"),
            "rows_pushed": self.count("rows_pushed"),
            "rows_pulled": self.count("rows_pulled"),
            "refused": self.counts["refused"],
            "parked": len(self.delay),
            "log_bytes": self.replica.log.nbytes,
            "sent_bytes": self._snapshots.sent_bytes,
            "tables": len(self.store.tables),
            "uptime_s": self._clock() - self._started,
        }

    def tables(self) -> list[dict[str, Any]]:
        """What `elasticps tables` shows of this server."""
        return [
            {
                "id": table.table_id,
                "rows_headed": sum(table.count_range(r) for r in self.headed.tolist()),
                "rows": table.rows,
                "bytes": table.nbytes,
            }
            for table in self.store.tables.values()
        ]
