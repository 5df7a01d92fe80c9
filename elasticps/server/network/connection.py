"""One connection as the server sees it: bytes to frames, answers to bytes, bounded both ways."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

from coordinator.core import fields
from coordinator.sparing import Sparing
from elasticps.security.channel import Proof
from elasticps.security.identity import Identity, NotAuthorised
from elasticps.server.core.error_replies import ErrorReplies
from elasticps.server.core.requests import Body, RequestError
from elasticps.server.core.view_exchange import ViewNotifier
from elasticps.server.fast import layout as at
from elasticps.server.fast.path import FastPath
from elasticps.server.network.busy_poll import BusyPoll
from elasticps.wire.clocks import MAX_EPOCH, ReadAfter
from elasticps.wire.frames import (
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    MAX_LINK_BODY_BYTES,
    Buffer,
    FrameError,
    Header,
    Kind,
    VersionError,
)
from replication.chain import Member

log = fields.logger(__name__)

_SPARING = Sparing(10, 10.0)

HELLO_TIMEOUT_S = 10.0
STALLED_TIMEOUT_S = 60.0  # a peer that reads nothing for so long, while answers wait for it, is cut off
WRITE_HIGH_BYTES = 64 << 10  # so much may wait for a peer before the next part of an answer is made
LINK_HIGH_BYTES = 1 << 20  # with so much waiting for a replica the link to it is full, until a quarter is left
MAX_WAITING_ANSWERS = 64
MAX_HELD_FRAMES = 4096

_ENDED = (7, 8)  # TCP_CLOSE and TCP_CLOSE_WAIT, as the kernel counts states

_arrivals = itertools.count()

Chunks = Iterator[list[Buffer]]
Handler = Callable[["Connection", Header, Body], None]


class PeerKind:
    """What one kind of peer may send: a handler for each kind of frame. `opened` is called for each of its connections,
    all of `closed` when one ends. `rest` continues a pull of which some rows have been sent. `wrong` is the reason with
    which any other frame is refused."""

    def __init__(
        self,
        handlers: Mapping[int, Handler],
        *closed: Callable[[Connection], None],
        opened: Callable[[Connection], None] | None = None,
        rest: Callable[[Connection, Header, Body, int], None] | None = None,
        wrong: str = "is not for this side of this connection",
    ) -> None:
        self.handlers = dict(handlers)
        self.opened = opened
        self.closed = closed
        self.rest = rest
        self.wrong = wrong


class Connection(asyncio.BufferedProtocol):
    """A framed connection. Single-threaded: everything runs in the server's event loop.

    Answers that do not fit into the transport's write buffer wait as generators, which make each chunk only when there
    is room for it. While too many wait, nothing more is read from the peer: a client that stops reading costs a
    bounded amount of memory and holds up nobody else.
    """

    def __init__(
        self, role: PeerKind, notifier: ViewNotifier, loop: asyncio.AbstractEventLoop, busy_poll: BusyPoll,
        path: FastPath,
    ) -> None:  # fmt: skip
        self.arrival = next(_arrivals)  # connections are numbered as they come
        self._role = role  # what the peer may send
        self._notifier = notifier  # refuses requests
        self._loop = loop  # for timers
        self._busy_poll = busy_poll  # hears of each request
        self._path = path  # handles usual frames
        self.slot = -1  # number in the path while connected, else -1
        self._answers: deque[Chunks] = deque()  # that wait for room, or until they may be shown
        self._paused = False  # by the transport: its write buffer is full
        self._on_full: Callable[[bool], None] | None = None  # called when a link is full, and when it has room
        self._held: deque[tuple[Header, Body]] = deque()  # frames that wait
        self.holding = False  # whether frames wait for a view or a roster
        self._timer: asyncio.TimerHandle | None = None  # cuts off a peer that does not read
        self._hello: asyncio.TimerHandle | None = None  # cuts off a peer that sends no HELLO
        self.transport: asyncio.Transport  # set when connected
        self._channel: Proof | None = None  # TLS, and what it has proved
        self.peer = "?"  # its address, for the log
        self.known = False  # HELLO or WELCOME was accepted
        self.discarding = False  # what arrives is not handled: the stream was wrong, or there is a newer connection
        self.worker = 0  # id of a worker; 0 for any other peer
        self.worker_name = self.app = ""  # of a worker
        self.member: Member | None = None  # of a replica
        self.number = 0  # of a link between replicas, counted by the one that dials
        self._heard_s = loop.time()  # when something was received outside of compiled code
        self._turn_bytes = 0  # handled since the loop last had its turn
        self._resting = False  # not read from until the loop's next turn
        self._left = False  # received bytes are handled when reading goes on
        self.tickets: set[object] = set()  # pushes from here that wait to be admitted

    # --- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from asyncio's
        self.peer = _address(transport.get_extra_info("peername"))
        self._channel = transport.get_extra_info("channel")
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._hello = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        self.slot = self._path.open(self, MAX_CONTROL_BYTES)
        if self._role.opened is not None:
            self._role.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._path.buffer(self.slot)

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_s = self._loop.time()
        self._path.before()
        self._receive(nbytes)
        self._busy_poll.touched()
        self._turn_bytes += nbytes
        if self._turn_bytes > self._path.turn_bytes:
            self.rest()

    def _receive(self, nbytes: int) -> None:
        try:
            self._path.received(self, nbytes)
        except FrameError as error:
            self.reject(error)

    def unusual(self, reason: int) -> None:
        """Handles what compiled code has received and leaves to Python."""
        try:
            self._path.go_on(self, reason)
        except FrameError as error:
            self.reject(error)

    @property
    def heard_s(self) -> float:
        """When something was received last, by the loop's clock."""
        return self._heard_s if self.slot < 0 else max(self._heard_s, self._path.heard_s(self.slot))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_hello()
        self._answers.clear()
        self._held.clear()
        for closed in self._role.closed:
            closed(self)
        self._path.close(self.slot)
        self.slot = -1

    def pause_writing(self) -> None:
        """The peer does not read. A worker is not read from then; other replicas always are, or both could wait for
        each other."""
        self._paused = True
        self._cancel_timer()
        self._timer = self._loop.call_later(STALLED_TIMEOUT_S, self._stalled)
        if self.worker:
            self._set(at.C_PAUSED, 1)
            self.transport.pause_reading()
        elif self._on_full is not None:
            self._on_full(True)

    def resume_writing(self) -> None:
        self._paused = False
        self._cancel_timer()
        self._pump()
        if self.worker and not self._paused:
            self._set(at.C_PAUSED, 0)
            self._go_on_reading()
        elif self._on_full is not None:
            self._on_full(False)

    # --- frames -------------------------------------------------------------------------------------------------

    def welcome(self, role: PeerKind) -> None:
        """Accepts the peer's HELLO or WELCOME: it may send full-size frames from now on."""
        self.known, self._role = True, role
        self._set(at.C_LIMIT, MAX_BODY_BYTES if self.member is None else MAX_LINK_BODY_BYTES)
        self._cancel_hello()

    def _set(self, field: int, value: int) -> None:
        self._path.connections[self.slot, field] = value

    def is_worker(self, worker: int, name: str, app: str) -> None:
        """Notes that the peer is this worker."""
        self.worker, self.worker_name, self.app = worker, name, app
        self._set(at.C_ROLE, at.ROLE_WORKER)
        self._set(at.C_WORKER, worker)
        self._set(at.C_APP, self._path.number_of(app))
        self._set(at.C_ROSTERED, 1)

    def is_peer(self, on_full: Callable[[bool], None]) -> None:
        """Notes that the peer is a replica. on_full: called with True when more waits than its socket takes, with False
        when no longer."""
        self._set(at.C_ROLE, at.ROLE_PEER)
        self._on_full = on_full
        self.transport.set_write_buffer_limits(high=LINK_HIGH_BYTES)

    @property
    def full(self) -> bool:
        """Whether more waits for the peer than its socket takes."""
        return self._paused

    @property
    def base(self) -> int:
        """The clock that this worker starts above, -1 until it has joined."""
        return int(self._path.connections[self.slot, at.C_BASE])

    @base.setter
    def base(self, clock: int) -> None:
        self._set(at.C_BASE, clock)

    def set_rostered(self, rostered: bool) -> None:
        """Notes whether the roster has this worker."""
        self._set(at.C_ROSTERED, rostered)

    @property
    def notified_epoch(self) -> int:
        """The newest view that this peer has, as far as is known: compiled code notes what its frames name."""
        return int(self._path.connections[self.slot, at.C_EPOCH]) if self.slot >= 0 else 0

    @notified_epoch.setter
    def notified_epoch(self, epoch: int) -> None:
        if self.slot >= 0:
            self._set(at.C_EPOCH, epoch)

    @property
    def read_after(self) -> ReadAfter | None:
        """Steps of this worker that its pulls have to see, None once one has."""
        return self._path.read_afters.of(self.slot)

    @read_after.setter
    def read_after(self, after: ReadAfter | None) -> None:
        if after is None:
            self._path.read_afters.clear(self.slot)
        else:
            self._path.read_afters.keep(self.slot, after)

    def set_shards(self, number: int) -> None:
        """Notes a set of data shards of this worker's application: compiled code handles its pushes."""
        self._set(at.C_SET, number)

    def wait_for(self, ticket: object) -> None:
        """Stops reading until this push, and every other that waits, has been admitted."""
        self.tickets.add(ticket)
        self._choose_path()
        self.transport.pause_reading()

    def admitted(self, ticket: object) -> None:
        """A push has been admitted: reading goes on unless others wait."""
        self.tickets.discard(ticket)
        self._choose_path()
        self._read_on()

    def frame(self, header: Header, body: Body, answered: int) -> None:
        """Handles a frame that compiled code leaves to Python. answered: rows of a pull that have been sent."""
        if self.discarding:
            return  # it came together with the frame that was wrong
        if self.holding:
            if len(self._held) >= MAX_HELD_FRAMES:
                raise FrameError(f"more than {MAX_HELD_FRAMES} frames arrived while one was held")
            self._held.append((header, body.copy()))
        else:
            self._handle(header, body, answered)

    def _handle(self, header: Header, body: Body, answered: int = 0) -> None:
        """Calls the handler. A request that is refused has changed nothing."""
        role = self._role
        if (epoch := min(header.epoch, MAX_EPOCH)) > self.notified_epoch:  # of the sender's view
            self.notified_epoch = epoch
        handler = role.handlers.get(header.kind)
        if handler is None:
            raise FrameError(f"{Kind(header.kind).name} {role.wrong}")
        try:
            if answered and role.rest is not None:
                role.rest(self, header, body, answered)
            else:
                handler(self, header, body)
        except RequestError as error:
            self._notifier.refuse(self, header.kind, header.request, error)

    def leave(self) -> None:
        """Leaves received bytes until reading goes on."""
        self._left = True

    def rest(self) -> None:
        """Stops reading until the loop's next turn: libuv reads a socket up to 32 times in a row while timers wait."""
        if not self._resting and self.known and not self.transport.is_closing():
            self._resting = True
            self.transport.pause_reading()
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_bytes, self._resting = 0, False
        self._go_on_reading()

    def _go_on_reading(self) -> None:
        """Handles received bytes that were left, then reads on."""
        if self.slot < 0 or self.transport.is_closing():
            return
        self._left = False
        self._receive(0)
        self._read_on()

    def hold(self, header: Header, body: Body) -> None:
        """Holds this frame and all that follow until `release`: the server lacks a view or a roster to handle it."""
        self.holding = True
        self._choose_path()
        self._held.appendleft((header, body.copy()))
        self.transport.pause_reading()

    def release(self) -> None:
        """Handles the frames held, in order; stops if one of them is held again."""
        if not self.holding:
            return
        self.holding = False
        self._choose_path()
        try:
            while self._held and not (self.holding or self.discarding):
                self._handle(*self._held.popleft())
        except FrameError as error:
            self.reject(error)
        except Exception as error:
            self.fail(error)
        self._go_on_reading()

    def fail(self, error: Exception) -> None:
        """Reports an exception that the peer has not caused, and ends this connection, so that the peer asks again.
        Callers that handle several connections go on with the others."""
        self._loop.call_exception_handler({"message": f"a connection failed, to {self.peer}", "exception": error})
        self.transport.abort()

    def _read_on(self) -> None:
        waits = self.holding or self.tickets or self._resting or self._full or (self.worker and self._paused)
        if not waits and not self.transport.is_closing():
            self.transport.resume_reading()
            if self._left:
                self.rest()

    @property
    def identity(self) -> Identity | None:
        """The identity that the peer has proved; None without TLS."""
        return None if self._channel is None else self._channel.peer

    @property
    def stale(self) -> bool:
        """Whether it is time to connect again: certificates were renewed, or are about to end."""
        return self._channel is not None and self._channel.stale

    def notice_expiry(self) -> None:
        """Drops a connection whose certificate has ended."""
        if self._channel is not None and time.time() >= self._channel.until_s and not self.transport.is_closing():
            log.warning("cut off: a certificate has ended", peer=self.peer, identity=self.identity)
            self.transport.abort()

    def notice_end(self) -> None:
        """Drops a connection that is not read from and whose peer has gone: no read would notice. A closing connection
        is not read from until its queue is empty, which may be never."""
        if self.transport.is_reading():
            return
        if self._peer_has_gone():
            self._log_some(log.info, "worker gone")
            self.transport.abort()
        elif self.transport.is_closing() and self._timer is None:
            self._timer = self._loop.call_later(STALLED_TIMEOUT_S, self._stalled)

    def _log_some(self, tell: Callable[..., object], event: str, **details: object) -> None:
        """Logs an event that any peer can cause as often as it likes: with a limit, and a count of what is left out."""
        if (left_out := _SPARING.due(event)) is not None:
            more = {"left_out": left_out} if left_out else {}
            tell(event, peer=self.peer, worker=self.worker_name, **details, **more)

    def _peer_has_gone(self) -> bool:
        sock = self.transport.get_extra_info("socket")
        try:
            return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _ENDED
        except OSError:  # it is closed here
            return False

    def reject(self, error: FrameError | NotAuthorised) -> None:
        """Tells the peer why it is rejected, and closes: a stream that was wrong once cannot be trusted."""
        self.discarding = True
        if self.slot >= 0:
            self._set(at.C_ROLE, at.ROLE_OTHER)
        self._log_some(log.warning, "refused", reason=error)
        code = "version" if isinstance(error, VersionError) else "malformed"
        code = "identity" if isinstance(error, NotAuthorised) else code
        if not self.transport.is_closing():
            self.transport.write(self.errors.for_connection(code, str(error)))
            self.transport.close()

    def give_up(self) -> None:
        """Ends the connection without handling what has been received: its peer uses a newer one."""
        self._held.clear()
        self.transport.abort()

    def tell_view(self) -> None:
        """Sends the newest view unless it was sent on this connection before."""
        self._notifier.tell(self)

    @property
    def errors(self) -> ErrorReplies:
        """Makes and counts the server's ERROR frames."""
        return self._notifier.errors

    # --- answers ------------------------------------------------------------------------------------------------

    def send(self, frame: Buffer) -> None:
        """Sends a small frame."""
        if not self.transport.is_closing():
            self.transport.write(frame)

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Sends a frame in several buffers, which must not change any more."""
        if not self.transport.is_closing():
            self.transport.writelines(buffers)

    def stream(self, chunks: Chunks) -> None:
        """Sends an answer of several chunks, each made when there is room for it."""
        self._answers.append(chunks)
        self._pump()
        if self._full:
            self.transport.pause_reading()

    def go_on(self) -> None:
        """Sends answers that had to wait and may go now."""
        self._pump()

    @property
    def waiting_bytes(self) -> int:
        """Bytes that were sent and are still in the transport's queue."""
        return self.transport.get_write_buffer_size()

    @property
    def _full(self) -> bool:
        return len(self._answers) >= MAX_WAITING_ANSWERS

    def _pump(self) -> None:
        was_full = self._full
        while self._answers and not self._paused and not self.transport.is_closing():
            chunk = next(self._answers[0], None)
            if chunk is None:
                self._answers.popleft()
            elif not chunk:  # it must wait; `go_on` asks again
                break
            else:
                self.transport.writelines(chunk)
        self._choose_path()
        if was_full:
            self._read_on()

    def _choose_path(self) -> None:
        """Tells compiled code to leave frames to Python while one is held or an answer waits, which it would overtake.
        While reading has stopped, it unpacks no frame, so that waiting frames take no more memory than was received."""
        if self.slot >= 0:
            self._set(at.C_SLOW, self.holding or bool(self._answers))
            self._set(at.C_FULL, self.holding or bool(self.tickets) or self._full)

    # --- timers -------------------------------------------------------------------------------------------------

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_hello(self) -> None:
        if self._hello is not None:
            self._hello.cancel()
            self._hello = None

    def _no_hello(self) -> None:
        self._hello = None
        if not self.known:
            self.reject(FrameError(f"no hello within {HELLO_TIMEOUT_S:.0f} s"))

    def _stalled(self) -> None:
        self._log_some(log.warning, "cut off", read_nothing_s=STALLED_TIMEOUT_S)
        self.transport.abort()


def _address(peername: object) -> str:
    return f"{peername[0]}:{peername[1]}" if isinstance(peername, tuple) else str(peername)
