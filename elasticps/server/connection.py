"""One connection as the server sees it: bytes to frames, answers to bytes, bounded both ways."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from elasticps.server.linger import Linger
from elasticps.wire.assembler import Assembler
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    MAX_LINK_BODY_BYTES,
    Buffer,
    FrameError,
    Header,
    Kind,
    VersionError,
    json_frame,
)
from elasticps.wire.pool import Pool
from replication.chain import Member

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 10.0
STALLED_TIMEOUT_S = 60.0  # a peer that reads nothing for so long, while answers wait for it, is cut off
WRITE_HIGH_BYTES = 64 << 10  # so much may wait for a peer before the next part of an answer is made
MAX_WAITING_ANSWERS = 64
TURN_BYTES = 1 << 20  # then others have their turn: libuv reads a socket up to 32 times in a row, and timers wait
MAX_HELD_FRAMES = 4096

Chunks = Iterator[list[Buffer]]


class Handler(Protocol):
    """What a connection needs of its server."""

    def opened(self, connection: Connection) -> None:
        """A peer connected."""

    def closed(self, connection: Connection) -> None:
        """It is gone."""

    def handle(self, connection: Connection, header: Header, body: NDArray[np.uint8]) -> None:
        """One frame. `body` is valid during the call only."""

    def tell_view(self, connection: Connection) -> None:
        """Sends the view, once per connection and epoch."""


class Connection(asyncio.BufferedProtocol):
    """A framed connection. Single-threaded: everything runs in the server's event loop.

    Answers that do not fit into the transport's write buffer wait as generators, which make each chunk only when there
    is room for it. While too many wait, nothing more is read from the peer: a client that stops reading costs a
    bounded amount of memory and holds up nobody else.
    """

    def __init__(self, handler: Handler, loop: asyncio.AbstractEventLoop, linger: Linger, pool: Pool) -> None:
        self._handler = handler
        self._loop = loop
        self._linger = linger
        self._assembler = Assembler(self._on_frame, MAX_CONTROL_BYTES, pool=pool)
        self._answers: deque[Chunks] = deque()
        self._paused = False  # by the transport: its write buffer is full
        self._held: deque[tuple[Header, NDArray[np.uint8]]] = deque()
        self.holding = False  # frames wait for a view or roster
        self._timer: asyncio.TimerHandle | None = None
        self.transport: asyncio.Transport
        self.peer = "?"
        self.known = False  # the peer has said who it is
        self.worker = 0  # its id, 0 for anybody but a worker
        self.worker_name = self.app = ""
        self.base = -1  # the clock that this worker starts above, -1 until it has joined
        self.member: Member | None = None  # a replica
        self.number = 0  # of a link between replicas, counted by the one that dials
        self.leader = False
        self.told_epoch = 0  # the newest view sent to this peer
        self.heard_s = loop.time()
        self._turn_bytes = 0  # handled since the loop last had its turn
        self._resting = False
        self.tickets: set[object] = set()  # pushes from here that wait to be admitted

    # --- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's do not derive from asyncio's
        self.peer = _address(transport.get_extra_info("peername"))
        self.transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES)
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        self._handler.opened(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._assembler.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            self._assembler.received(nbytes)
        except FrameError as error:
            self.refuse(error)
        self.heard_s = self._loop.time()
        self._linger.touched()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._answers.clear()
        self._held.clear()
        self._handler.closed(self)

    def pause_writing(self) -> None:
        self._paused = True
        self._cancel_timer()
        self._timer = self._loop.call_later(STALLED_TIMEOUT_S, self._stalled)

    def resume_writing(self) -> None:
        self._paused = False
        self._cancel_timer()
        self._pump()

    # --- frames -------------------------------------------------------------------------------------------------

    def welcome(self) -> None:
        """The peer is who it says: full-size frames from now on."""
        self.known = True
        self._assembler.limit = MAX_BODY_BYTES if self.member is None else MAX_LINK_BODY_BYTES
        self._cancel_timer()

    def kept(self, body: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The body of the frame at hand, in memory that stays as it is."""
        return self._assembler.kept(body)

    def wait_for(self, ticket: object) -> None:
        """Reads nothing more until this push, and every other that waits, has been admitted."""
        self.tickets.add(ticket)
        self.transport.pause_reading()

    def admitted(self, ticket: object) -> None:
        """It has been."""
        self.tickets.discard(ticket)
        self._read_on()

    def _on_frame(self, header: Header, body: NDArray[np.uint8]) -> None:
        if self.holding:
            if len(self._held) >= MAX_HELD_FRAMES:
                raise FrameError(f"more than {MAX_HELD_FRAMES} frames arrived while one was held")
            self._held.append((header, body.copy()))
            return
        self._handler.handle(self, header, body)
        self._turn_bytes += HEADER_BYTES + header.body
        if self._turn_bytes > TURN_BYTES and not self._resting and self.known:
            self._resting = True
            self.transport.pause_reading()
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_bytes, self._resting = 0, False
        self._read_on()

    def hold(self, header: Header, body: NDArray[np.uint8]) -> None:
        """Keeps this frame, and all that follow, until `release`: the server lacks what it needs to judge it."""
        self.holding = True
        self._held.appendleft((header, body.copy()))
        self.transport.pause_reading()

    def release(self) -> None:
        """Handles the frames held, in order; stops if one of them is held again."""
        if not self.holding:
            return
        self.holding = False
        try:
            while self._held and not self.holding:
                self._handler.handle(self, *self._held.popleft())
        except FrameError as error:
            self.refuse(error)
        self._read_on()

    def _read_on(self) -> None:
        if not (self.holding or self.tickets or self._resting or self._full or self.transport.is_closing()):
            self.transport.resume_reading()

    def refuse(self, error: FrameError) -> None:
        """Tells the peer why and closes: a stream that is wrong once cannot be trusted again."""
        log.warning("refused peer=%s worker=%s reason=%r", self.peer, self.worker_name, str(error))
        code = "version" if isinstance(error, VersionError) else "malformed"
        if not self.transport.is_closing():
            self.transport.write(json_frame(Kind.ERROR, {"code": code, "message": str(error)}))
            self.transport.close()

    def tell_view(self) -> None:
        """Sends the newest view unless the peer has it from here."""
        self._handler.tell_view(self)

    # --- answers ------------------------------------------------------------------------------------------------

    def send(self, frame: bytes) -> None:
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
        """Asks the answers that had to wait whether they still have to."""
        self._pump()

    @property
    def waiting_bytes(self) -> int:
        """What has been sent and has not left yet."""
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
        if was_full:
            self._read_on()

    # --- timers -------------------------------------------------------------------------------------------------

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _no_hello(self) -> None:
        if not self.known:
            self.refuse(FrameError(f"no hello within {HELLO_TIMEOUT_S:.0f} s"))

    def _stalled(self) -> None:
        log.warning("cut off peer=%s worker=%s reason='read nothing for %.0f s'", self.peer, self.worker_name,
                    STALLED_TIMEOUT_S)  # fmt: skip
        self.transport.abort()


def _address(peername: object) -> str:
    return f"{peername[0]}:{peername[1]}" if isinstance(peername, tuple) else str(peername)
