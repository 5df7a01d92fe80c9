"""The Python side of the compiled path: owns its memory, and does what it leaves to Python.

`received` is called with every buffer; all else here keeps what the compiled code reads in step with the replica, the
store, the roster and the connections.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core import reads
from elasticps.server.core.headroom import UNLIMITED
from elasticps.server.fast import layout as at
from elasticps.server.fast import sockets
from elasticps.server.fast.buffers import Chunks, Outbox, PathConnection, int64_at, size_for
from elasticps.server.fast.notes import Notes
from elasticps.server.fast.receive import consume, warm
from elasticps.server.fast.recent_log import RecentEntries, RecentLog
from elasticps.server.fast.shared import CompiledTables, ReadAfters, ReplicaMirror, SharedArrays
from elasticps.store import Store
from elasticps.system import fatal
from elasticps.wire.frames import HEADER_BYTES, FrameError, unpack_header
from elasticps.wire.packing import LIST_KEYS, unpack_first
from elasticps.wire.pool import Bytes
from replication.chain import Member, Ranges
from replication.replica import Replica

RETAINED_SHARE = 4  # of what the log may have: received chunks that are kept for the next bytes
TURN_BYTES = 1 << 20  # of one connection, then others have their turn: about a millisecond
FIRST_CONNECTIONS = 64
SEGMENTS = 12288
ROWS = 1 << 14
BIG = np.iinfo(np.int64).max


class Observer(Protocol):
    """Measures the compiled path."""

    def watch(self, path: FastPath, handle: Callable[[], None]) -> None:
        """Calls `handle`, which handles frames that `path` counts, and looks how long that takes."""


class FastPath:
    """The arrays of one server, and the calls into the compiled code.

    `follow_replica` and `connect` set what the constructor only declares, before the first peer or worker connects.
    """

    def __init__(self, ranges: int, budget_bytes: int) -> None:
        warm()
        self._on_change: Callable[[], None]
        """Called when something was applied or acknowledged."""
        self._on_served: Callable[[], None]
        """Called when a worker was served."""
        self._on_shard: Callable[[int, int, int, int], None]
        """Called for each push that trains a shard: set, shard, worker, clock."""
        self.before: Callable[[], None]
        """Called before bytes are handled."""
        self.observer: Observer | None = None
        """Measures the time that frames take, if somebody asked for that."""
        self.replica: Replica
        """The replica whose arrays compiled code shares."""
        self.store: Store
        """The store whose tables compiled code reads and updates."""
        self.log = RecentLog()
        """The replica's log, with the recent entries that compiled code holds."""
        self.turn_bytes = TURN_BYTES
        """Bytes of one connection that are handled before others have their turn."""
        self._shared = shared = SharedArrays()
        """Every array that the header points to."""
        self.h = shared.h
        """The header, int64 [H_FIELDS]: what every kernel gets."""
        self._fields = shared.fields
        """The same memory; single fields are read and written faster so."""
        self.chunks = Chunks(budget_bytes // RETAINED_SHARE)
        """Memory that is received into and sent from."""
        self._slots: list[PathConnection | None] = []
        """The connections by slot; None for a free one."""
        self._free: list[int] = []
        """A heap of the free slots."""
        self._lists: dict[int, NDArray[np.int64]] = {}
        """By slot, the key lists that a worker has had kept."""
        self._changed = 0
        """H_CHANGED when `_on_change` was called last."""
        self._served = 0
        """Pushes and pulls when `_on_served` was called last."""
        f = self._fields
        f[at.H_RANGES], f[at.H_BUDGET], f[at.H_ENABLED], f[at.H_TURN] = ranges, budget_bytes, 1, TURN_BYTES
        f[at.H_CHUNK], f[at.H_ROOM] = reads.CHUNK_BYTES, UNLIMITED
        f[at.H_TAIL_SINCE] = f[at.H_FULL_SINCE] = BIG
        f[at.H_REFS] = self.chunks.refs.ctypes.data
        f[at.H_CHUNK_ADDRESSES] = self.chunks.addresses.ctypes.data
        self._mirror = ReplicaMirror(shared, ranges)
        """What compiled code reads of the replica: view, clocks, refusals."""
        self.tables = CompiledTables(shared)
        """What compiled code reads of the store's tables."""
        self.connections = shared.make(at.H_CONNECTIONS, (FIRST_CONNECTIONS, at.CONNECTION))
        """A row per slot: see C_… in `layout`."""
        self._slot_of: NDArray[np.int64]
        """The slot of each descriptor that the epoll watches."""
        self._segments = shared.make(at.H_SEGMENTS, (SEGMENTS, at.SEGMENT))
        """Queued bytes, in the order in which they leave."""
        f[at.H_SEGMENT_SIZE] = SEGMENTS
        self._notes = Notes(shared, ranges)
        """Shards that pushes train and records of steps, until Python has noted them."""
        self.read_afters = ReadAfters(shared, ranges)
        """What pulls have to see of their worker's own steps."""
        self._blocks = shared.make(at.H_BLOCKS, (2 * at.BLOCKS, at.BLOCK))
        """The blocks of the frame at hand: see B_… in `layout`."""
        self._rows = shared.make(at.H_ROWS, ROWS)
        """Addresses of the rows of the frame at hand."""
        f[at.H_ROWS_SIZE] = ROWS
        shared.make(at.H_MISSING, (3, ROWS))
        shared.make(at.H_COUNTED, ROWS, np.float32)
        self._waited = shared.make(at.H_WAITED, at.WAITED)
        """How long pushes waited, in nanoseconds, since `waited` was called last."""
        shared.make(at.H_STARTS, (at.BLOCKS, ranges + 1))
        shared.make(at.H_SCRATCH, ranges)
        shared.make(at.H_POSITIONS, ranges)[:] = -1
        shared.make(at.H_SLOTS, at.SLOTS)
        shared.make(at.H_DECODED, at.DECODED, np.float32)
        self.recent = RecentEntries(shared, self.chunks, self._slots, ranges)
        """The log's recent entries, which compiled code holds."""
        self._outbox = Outbox(shared, self.chunks, self._slots)
        """Sends what compiled code has queued and did not send itself."""

    def connect(
        self,
        link_of: Callable[[Member], PathConnection | None],
        changed: Callable[[], None],
        served: Callable[[], None],
        note_shard: Callable[[int, int, int, int], None],
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Sets the callbacks: see the attributes. link_of: the connection to a peer."""
        self.before = before
        self._mirror.link_of = link_of
        self._on_change, self._on_served, self._on_shard = changed, served, note_shard

    def follow_replica(self, replica: Replica, store: Store) -> None:
        """Shares the replica's state from now on."""
        self.replica, self.store = replica, store
        self.log.recent = self.recent
        for field, array in ((at.H_SEQ, replica.seq), (at.H_ACKED, replica.acked), (at.H_JOINED, replica.joined)):
            self._shared.share(field, array)
        self.sync()

    # --- what others change ---------------------------------------------------------------------------------------

    def sync(self) -> None:
        """After every event of the replica: what the compiled code reads is as the replica has it."""
        f, replica = self._fields, self.replica
        if self._mirror.follow(replica) and not self.recent.fits(held := int(np.count_nonzero(replica.role))):
            self.log.take_over()
            self.recent.fit(held)
        if self.store.changed:
            self.tables.follow(self.store)
        f[at.H_CAREFUL] = replica.careful
        f[at.H_PYTHON_BYTES] = self.log.old_bytes
        self._mirror.note_python_entries(self.log.old())
        if f[at.H_SEGMENT_COUNT]:
            self._outbox.flush()

    def number_of(self, app: str) -> int:
        """The number by which compiled code knows an application, from 1 on."""
        return self.tables.number_of(app)

    def serve(self, tailed: Ranges, held: Ranges, tail_since: int, full_since: int) -> None:
        """What may be read here, and since which epochs."""
        self._shared.share(at.H_TAILED, np.ascontiguousarray(tailed, np.int64))
        self._shared.share(at.H_HELD, np.ascontiguousarray(held, np.int64))
        f = self._fields
        f[at.H_TAILED_COUNT], f[at.H_HELD_COUNT] = len(tailed), len(held)
        f[at.H_TAIL_SINCE], f[at.H_FULL_SINCE] = tail_since, full_since

    def acknowledged_clocks(self) -> dict[int, int]:
        """By worker, the clock up to which it has said that it knows its steps to be committed."""
        return self._mirror.acknowledged.of_all(self.replica.clocks.workers)

    def note_acknowledged(self, worker: int, clock: int) -> None:
        """Notes the same for a worker whose frame Python handled."""
        self._mirror.acknowledged.note(self.replica.clocks.workers, worker, clock)

    def stamp(self, nanoseconds: int, sample: int) -> None:
        """The time from now on, for pushes of which one in `sample` is measured."""
        self._fields[at.H_NOW], self._fields[at.H_SAMPLE] = nanoseconds, sample

    def waited(self) -> list[int]:
        """How long the measured pushes answered since the last call have waited, in nanoseconds."""
        count, self._fields[at.H_WAITED_COUNT] = self._fields[at.H_WAITED_COUNT], 0
        found: list[int] = self._waited[:count].tolist()
        return found

    @property
    def room(self) -> int:
        """Bytes that new rows may take, here and down the chains, less what they have taken since it was set."""
        return self._fields[at.H_ROOM]

    @room.setter
    def room(self, nbytes: int) -> None:
        self._fields[at.H_ROOM] = nbytes

    @property
    def budget(self) -> int:
        """Bytes of the log at which pushes wait."""
        return self._fields[at.H_BUDGET]

    @budget.setter
    def budget(self, nbytes: int) -> None:
        self._fields[at.H_BUDGET] = nbytes

    def note_change(self) -> None:
        """Python applied or acknowledged something: `changed` follows at the end of the buffer at hand."""
        self._fields[at.H_CHANGED] += 1

    def counter(self, field: int) -> int:
        """A counter of the compiled code."""
        return self._fields[field]

    # --- connections ------------------------------------------------------------------------------------------------

    def open(self, connection: PathConnection, limit: int) -> int:
        """A slot for a connection, and memory that it receives into."""
        slot = heappop(self._free) if self._free else len(self._slots)
        if slot == len(self._slots):
            self._slots.append(None)
            if slot == len(self.connections):
                self.connections = self._shared.share(
                    at.H_CONNECTIONS, np.concatenate([self.connections, np.zeros_like(self.connections)])
                )
        self._slots[slot] = connection
        row = self.connections[slot]
        serial = row[at.C_SERIAL] + 1
        row[:] = 0
        row[at.C_SERIAL], row[at.C_LIMIT], row[at.C_BASE], row[at.C_PEER], row[at.C_FD] = serial, limit, -1, -1, -1
        self._attach(slot, self.chunks.take(size_for(0)))
        return slot

    def use_epoll(self, descriptor: int, message_bytes: int, event_bytes: int) -> None:
        """An epoll waits for connections: see `sockets.turn`."""
        self._fields[at.H_EPOLL] = descriptor
        self._shared.make(at.H_MESSAGE, message_bytes, np.uint8)
        self._shared.make(at.H_EVENTS, event_bytes, np.uint8)
        self._slot_of = self._shared.make(at.H_SLOT_OF, FIRST_CONNECTIONS)

    def watch(self, slot: int, descriptor: int) -> None:
        """Compiled code receives and sends for a connection."""
        if descriptor >= len(self._slot_of):
            more = np.concatenate([self._slot_of, np.zeros(descriptor + 1, np.int64)])
            self._slot_of = self._shared.share(at.H_SLOT_OF, more)
        self._slot_of[descriptor] = slot
        self.connections[slot, at.C_FD] = descriptor

    def unwatch(self, slot: int) -> None:
        """It does so no longer."""
        self.connections[slot, at.C_FD] = -1

    def set_queued(self, slot: int, queued: bool) -> None:
        """Whether bytes that Python has queued for a connection go before all others."""
        self.connections[slot, at.C_QUEUED] = queued

    def queued(self, slot: int) -> bool:
        """Whether that is so, or a socket has just not taken all that compiled code had for it."""
        return bool(self.connections[slot, at.C_QUEUED])

    def heard_s(self, slot: int) -> float:
        """When compiled code received something of a connection last, by the monotonic clock."""
        return float(self.connections[slot, at.C_HEARD]) / 1e9

    def close(self, slot: int) -> None:
        """The connection is over: what still answers it answers nobody."""
        row = self.connections[slot]
        row[at.C_SERIAL] += 1
        row[at.C_ROLE], row[at.C_PEER] = at.ROLE_OTHER, -1
        self._lists.pop(slot, None)
        self.read_afters.forget(slot)
        self.chunks.give_up(int(row[at.C_CHUNK]))
        self._slots[slot] = None
        heappush(self._free, slot)

    def _attach(self, slot: int, chunk: int) -> None:
        row, array = self.connections[slot], self.chunks.arrays[chunk]
        row[at.C_CHUNK], row[at.C_ADDRESS], row[at.C_BYTES] = chunk, array.ctypes.data, len(array)
        row[at.C_START] = row[at.C_END] = row[at.C_PINNED] = 0

    def buffer(self, slot: int) -> memoryview:
        """Where the next bytes of a connection go."""
        row = self.connections[slot]
        chunk: Bytes = self.chunks.arrays[row[at.C_CHUNK]]
        return chunk[row[at.C_END] :].data

    def _replace_chunk(self, slot: int, needed: int) -> None:
        """The chunk is full, or its front is still referred to: what is left goes to another."""
        row = self.connections[slot]
        old, start, end = int(row[at.C_CHUNK]), int(row[at.C_START]), int(row[at.C_END])
        if not self.chunks.pinned(old) and row[at.C_PINNED]:
            row[at.C_PINNED] = 0  # no longer: then it may do
            return
        self._take_chunk(slot, [self.chunks.arrays[old][start:end]], needed)

    def _take_chunk(self, slot: int, pieces: list[Bytes], needed: int = 0) -> None:
        """Another chunk for a connection, with these bytes at its front."""
        old, size = int(self.connections[slot, at.C_CHUNK]), sum(map(len, pieces))
        chunk = self.chunks.take(size_for(max(needed, size)))
        np.concatenate(pieces, out=self.chunks.arrays[chunk][:size])
        self._attach(slot, chunk)
        self.connections[slot, at.C_END] = size
        self.chunks.give_up(old)

    def _unpack(self, slot: int) -> None:
        """The frame at the front is to be as it was before it was packed."""
        row = self.connections[slot]
        received = self.chunks.arrays[row[at.C_CHUNK]][row[at.C_START] : row[at.C_END]]
        pieces = unpack_first(received, int(row[at.C_LIMIT]))
        self._fields[at.H_INFO] = sum(map(len, pieces))
        self._take_chunk(slot, pieces)

    # --- frames -----------------------------------------------------------------------------------------------------

    def received(self, connection: PathConnection, nbytes: int) -> None:
        """Handles what can be handled of a connection's bytes, of which `nbytes` are new."""
        if self.observer is None:
            self._handle(connection, nbytes)
        else:
            self.observer.watch(self, lambda: self._handle(connection, nbytes))

    def _handle(self, connection: PathConnection, nbytes: int) -> None:
        self.go_on(connection, self._consume(connection.slot, nbytes))
        self.tell_owner()

    def _consume(self, slot: int, nbytes: int) -> int:
        """Handles frames of a connection, of whose bytes `nbytes` are new; returns why compiled code stopped.

        A frame that needs memory has made some rows and counted some keys: it goes on before anything else happens, so
        that none of what was checked for it can have changed."""
        reason = int(consume(self.h, slot, nbytes))
        while reason in at.MEMORY_MISSING:
            self._take_memory(reason)
            reason = int(consume(self.h, slot, 0))
        return reason

    def turn(self) -> int:
        """Handles what the sockets have: see `sockets.turn`, and `_consume`."""
        reason = int(sockets.turn(self.h))
        if reason in at.MEMORY_MISSING:
            self._take_memory(reason)
            reason = self._consume(int(self._fields[at.H_AT]), 0)
        if self._notes:
            self._notes.tell(self.replica.records, self._on_shard)
        return reason

    @property
    def all_sent(self) -> bool:
        """Whether a turn has sent all that it had to send, without a stop of this process in between."""
        return not (self._fields[at.H_SEGMENT_COUNT] or self._fields[at.H_CAREFUL])

    def go_on(self, connection: PathConnection, reason: int) -> None:
        """Does what the compiled code stopped for, until nothing more can be done for a connection."""
        f, slot = self._fields, connection.slot
        made = 0  # bytes of frames that are larger than they came: they take time as if they had come so
        while True:
            if self._notes:
                self._notes.tell(self.replica.records, self._on_shard)
            if f[at.H_SEGMENT_COUNT]:
                self._outbox.flush()
            if reason == at.DONE:
                break
            if not self._act(reason, connection) or self._slots[slot] is not connection:
                break
            if reason in (at.PACKED_BODY, at.WIDER):
                made += f[at.H_INFO]
                if made > self.turn_bytes:
                    connection.rest()
                    break
            reason = self._consume(slot, 0)

    def left_over(self, reason: int) -> PathConnection | None:
        """After a `turn`: hands over what it did not send, and returns the connection for which Python has to
        do something, if it has."""
        f = self._fields
        if f[at.H_SEGMENT_COUNT]:
            self._outbox.flush()
        return None if reason in (at.IDLE, at.DONE) else self._slots[f[at.H_AT]]

    def tell_owner(self) -> None:
        """Tells the server what has happened, of all that was handled since the last time."""
        f = self._fields
        if f[at.H_CHANGED] != self._changed:
            self._changed = f[at.H_CHANGED]
            self._on_change()
        if f[at.H_PUSHES] + f[at.H_PULLS] != self._served:
            self._served = f[at.H_PUSHES] + f[at.H_PULLS]
            self._on_served()

    def _act(self, reason: int, connection: PathConnection) -> bool:
        """Does what the compiled code stopped for; whether it is to go on."""
        f = self._fields
        if reason == at.SLOW:
            return self._slow_frame(connection)
        if reason == at.FLUSH:
            f[at.H_ARENA_USED] = 0  # it has been
        elif reason in (at.ROOM, at.WIDER):
            self._replace_chunk(connection.slot, f[at.H_INFO])
        elif reason == at.LISTS:
            lists = self._lists[connection.slot] = np.zeros(LIST_KEYS, np.int64)  # the system gives what is used of it
            self.connections[connection.slot, at.C_LISTS] = lists.ctypes.data
        elif reason == at.PACKED_BODY:
            self._unpack(connection.slot)
        elif reason == at.UNREADABLE:
            raise FrameError("a frame has keys that cannot be read")
        elif reason == at.KEEP:
            self.store.live[int(self._blocks[f[at.H_INFO], at.B_TABLE])].make_room(f[at.H_SIZE])
        elif reason == at.GROW:
            self._grow(f[at.H_INFO], f[at.H_SIZE])
        elif reason == at.TURN:
            connection.rest()
            return False
        elif reason == at.LEFT:
            connection.leave()
            return False
        elif reason == at.PAUSED:
            return False  # `received` is called again when the peer reads on
        else:  # the bytes at the front are no frame, which raises
            row = self.connections[connection.slot]
            unpack_header(self.chunks.arrays[row[at.C_CHUNK]].data, int(row[at.C_START]), int(row[at.C_LIMIT]))
            raise AssertionError("a frame that only the compiled path took for none")
        return True

    def _slow_frame(self, connection: PathConnection) -> bool:
        """Gives the frame at the front to Python."""
        row = self.connections[connection.slot]
        chunk, start, answered = int(row[at.C_CHUNK]), int(row[at.C_START]), int(row[at.C_ANSWERED])
        array = self.chunks.arrays[chunk]
        header = unpack_header(array.data, start, int(row[at.C_LIMIT]))
        body_at = start + HEADER_BYTES
        row[at.C_START] = body_at + header.body
        row[at.C_ANSWERED] = 0
        body = array[body_at : body_at + header.body]
        array = _NOTHING
        connection.frame(header, body, answered)
        if self._slots[connection.slot] is not connection:
            return False
        body = _NOTHING
        if self.chunks.pinned(chunk):
            self.connections[connection.slot, at.C_PINNED] = 1
        return True

    def _take_memory(self, reason: int) -> None:
        """Takes the memory without which the frame at hand cannot go on."""
        block = int(self._fields[at.H_INFO])
        if reason == at.ROWS_MISSING:
            self._make_rows(block)
        else:
            self._make_candidates(block)

    def _make_rows(self, block: int) -> None:
        """Makes the rows of a block, for which there was no memory."""
        b = self._blocks[block]
        first, n = int(b[at.B_FIRST]), int(b[at.B_ROWS])
        try:
            table = self.store.live[int(b[at.B_TABLE])]
            self.room -= table.make_rows(int64_at(int(b[at.B_KEYS_AT]), n), self._rows[first : first + n])
        except Exception as error:  # some are made, and of a push that the others may have
            fatal.end(self.replica.me, error)

    def _make_candidates(self, block: int) -> None:
        """Makes room for keys of a block that wait for a row."""
        try:
            lifecycle = self.store.live[int(self._blocks[block, at.B_TABLE])].lifecycle
            assert lifecycle is not None
            lifecycle.waiting.grow()
        except Exception as error:  # some are counted
            fatal.end(self.replica.me, error)

    def _grow(self, what: int, size: int) -> None:
        if what == at.GROW_ARENA:
            self._outbox.take_arena(size + size // 2)
        elif what == at.GROW_ROWS:
            self._rows = self._shared.make(at.H_ROWS, 2 * size)
            self._shared.make(at.H_MISSING, (3, 2 * size))
            self._shared.make(at.H_COUNTED, 2 * size, np.float32)
            self._fields[at.H_ROWS_SIZE] = 2 * size
        else:
            self._segments = self._shared.make(at.H_SEGMENTS, (2 * size, at.SEGMENT))
            self._fields[at.H_SEGMENT_SIZE] = 2 * size


_NOTHING: Bytes = np.empty(0, np.uint8)
