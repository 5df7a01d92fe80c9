"""Bytes between a worker and its servers: a non-blocking socket for each, and who reads them: the thread that waits for
an answer, or else one in the background.

A hand-over between threads costs more than a small pull itself (35-50 µs against 20, measured over loopback), so a
thread that waits reads for everybody until it has what it waits for. The background thread reads only while nobody
else does: acknowledgements of pushes that nobody waits for, new views, broken connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import ServerInfo
from elasticps.client.runtime import READABLE, WRITABLE, Runtime, Stream
from elasticps.security.stream import Secured, secured
from elasticps.wire.frames import MAX_BODY_BYTES, Buffer, FrameError, Header, Kind
from elasticps.wire.stream import Assembler, SendQueue
from replication.chain import Member

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

RECEIVE_CALLS_PER_TURN = 64
CALLER_RECENT_S = 0.005  # a caller that has just read will be back; keep out of its way for so long
BACKGROUND_NAP_S = 0.002
POLL_S = 0.05
TURN_S = 0.02
IDLE_S = 0.25


OnFrame: TypeAlias = "Callable[[Link, Header, NDArray[np.uint8]], None]"
Sink: TypeAlias = Callable[[Header], Sequence[memoryview] | None]
Usual: TypeAlias = "Callable[[Link, NDArray[np.uint8], int, int], int]"


class LinkReceiver(NamedTuple):
    """Who takes what links receive. `usual` takes frames out of a buffer, as for `Assembler`; what it leaves goes to
    `on_frame`, and rows into memory that `sink` gives, if it does."""

    on_frame: OnFrame
    sink: Sink
    usual: Usual


class Link:
    """Bytes to and from one server. `send` may be called by any thread, `receive` by one at a time.

    `ready` turns true when the server has welcomed us; before that only `hello` frames may be sent. `sinking` is the
    request whose answer is just being received into memory that the receiver gave for its rows, 0 for none.
    """

    def __init__(
        self,
        runtime: Runtime,
        server: ServerInfo,
        receiver: LinkReceiver,
        credentials: Credentials | None = None,
    ) -> None:
        self._runtime = runtime  # clock, sockets
        self._credentials = credentials  # for TLS, if there is
        self._tls: Secured | None = None  # over the socket
        self.server = server  # as the view has it
        # Its name and incarnation.
        self.member = Member(server.name, server.incarnation)
        self.ready = False
        self.sinking = 0
        self.socket: Stream | None = None  # None while the link is down
        self._receiver = receiver  # takes frames
        # The same for the usual ones.
        self._usual = partial(receiver.usual, self)
        self._assembler: Assembler | None = None  # cuts what was received into frames
        self._queue = SendQueue()  # what the socket has not taken yet
        self.received = 0  # bytes, ever
        self._lock = runtime.lock()  # of the socket, and what is to be sent
        self._attempts = 0  # to connect

    def connect(self, hello: bytes) -> None:
        """Begins to open the TCP connection; `hello` leaves, or an OSError comes, when the socket turns writable.

        Blocks for as long as it takes to resolve a host's name. OSError if that, or the connection, fails at once.
        """
        host, _, port = self.server.address.rpartition(":")
        self._attempts += 1
        sock = self._runtime.connect(host.strip("[]"), int(port), self._attempts - 1)
        with self._lock:
            self._tls = None
            if self._credentials is not None:
                sock = self._tls = secured(sock, self._credentials, self.server.name)
            self._assembler = Assembler(self._frame, MAX_BODY_BYTES, self._target, self._usual)
            self._queue.clear()
            self._queue.add((hello,))
            self.sinking = 0
            self.socket = sock

    def close(self) -> None:
        """Drops the connection; what was queued is gone, what was sent may or may not have arrived."""
        self.ready = False
        with self._lock:
            self.sinking = 0
            sock, self.socket = self.socket, None
            self._queue.clear()
        if sock is not None:
            sock.close()

    @property
    def has_backlog(self) -> bool:
        """Whether buffers wait for room in the socket."""
        return bool(self._queue) or (self._tls is not None and self._tls.has_backlog)

    @property
    def sent(self) -> int:
        """Bytes, ever."""
        return self._queue.sent

    @property
    def stale(self) -> bool:
        """Whether it is time to connect anew: certificates were renewed, or are about to end."""
        return self._tls is not None and self._tls.stale

    def send(self, buffers: Sequence[Buffer]) -> bool:
        """Sends now what the socket takes and queues the rest; True if all of it left. OSError if the link is down.

        The buffers, of bytes, must not change until they have left.
        """
        with self._lock:
            if self.socket is None:
                raise ConnectionResetError(f"not connected to server {self.server.name}")
            return self._queue.send(self.socket, buffers) and (self._tls is None or self._tls.flush())

    def flush(self) -> bool:
        """Sends more of the queue; True if nothing is left. OSError if the link is down."""
        with self._lock:
            sock = self.socket
            return sock is None or (self._queue.send(sock) and (self._tls is None or self._tls.flush()))

    def receive(self) -> None:
        """Takes what the socket has, up to a limit, and all that TLS has taken from it: of that a poller knows nothing.
        OSError if the peer closed or broke the connection."""
        assembler, sock = self._assembler, self.socket
        if assembler is None or sock is None:
            return
        calls, tls = 0, self._tls
        while True:
            calls += 1
            buffer = assembler.buffer
            try:
                n = sock.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError:
                if self.socket is not sock:  # closed on this side, by what the last frame said
                    return
                raise
            if self.socket is not sock:
                return
            if n == 0:
                raise ConnectionResetError(f"server {self.server.name} closed the connection")
            self.received += n
            assembler.received(n)
            if (n < len(buffer) or calls >= RECEIVE_CALLS_PER_TURN) and not (tls is not None and tls.buffered):
                return

    def _target(self, header: Header) -> Sequence[memoryview] | None:
        if header.kind != Kind.ROWS:
            return None
        self.sinking = header.request  # first: who gives it up now finds that here, or it is not found there
        targets = self._receiver.sink(header)
        if targets is None:
            self.sinking = 0
        elif self.sinking != header.request:  # the link was closed in between
            raise ConnectionResetError("its answer was no longer wanted")
        return targets

    def _frame(self, header: Header, body: NDArray[np.uint8]) -> None:
        self.sinking = 0
        self._receiver.on_frame(self, header, body)


class LinkDriver:
    """Polls the links. `on_broken(link, error)` hears of each connection that ended; `on_turn()` runs about every
    TURN_S in the background thread, while it does not read, and returns whether anything is outstanding.
    `on_failed(error)` hears of anything else that is raised while links are read, and of the background thread's end.

    In the main thread a signal handler may raise between any two calls, so whatever is taken there is given back even
    if the exception comes while it is being taken."""

    def __init__(
        self,
        runtime: Runtime,
        on_broken: Callable[[Link, Exception], None],
        on_turn: Callable[[], bool],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._runtime = runtime
        self._on_broken = on_broken
        self._on_turn = on_turn
        self._on_failed = on_failed
        self._poller = runtime.poller()
        self._links: dict[int, Link] = {}
        self._role = runtime.rlock()  # held by the thread that reads
        self._given = 0  # how often it was given back
        self._changed = runtime.condition()  # something finished, or the role is free
        self._waiters = 0
        self._last_caller_s = 0.0
        self._wake = runtime.event()
        self._closing = runtime.event()
        self._thread: object | None = None

    def start(self) -> None:
        self._thread = self._runtime.spawn("elasticps-io", self._background)

    def close(self) -> None:
        """Stops the background thread. Links stay open."""
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            self._runtime.join(self._thread, 5.0)
        self._poller.close()

    def disown(self) -> None:
        """In a forked child: the thread is the parent's, and so is what it watches."""
        self._closing.set()
        self._poller.close()

    def add(self, link: Link) -> None:
        """Starts reading a link that connects, or is connected."""
        assert link.socket is not None
        fd = link.socket.fileno()
        self._links[fd] = link
        self._poller.register(fd, READABLE | WRITABLE)
        self._wake.set()

    def remove(self, link: Link) -> None:
        """Stops reading a link; call before closing it."""
        own = -1 if link.socket is None else link.socket.fileno()
        for fd in [own] if self._links.get(own) is link else list(self._links):  # -1: it was closed under us
            if self._links[fd] is link:
                del self._links[fd]
                with contextlib.suppress(OSError, ValueError):  # closed under us
                    self._poller.unregister(fd)

    def send(self, frames: Iterable[tuple[Link, Sequence[Buffer]]]) -> None:
        """Sends over several links; what a socket does not take now leaves when it can be written."""
        for link, buffers in frames:
            try:
                if not link.send(buffers):
                    self.want_write(link)
            except OSError:  # whoever reads the link learns of it there, and begins again
                self.nudge()

    def want_write(self, link: Link) -> None:
        """The link has more to send than its socket takes."""
        sock = link.socket
        if sock is not None and sock.fileno() in self._links:
            with contextlib.suppress(OSError, ValueError):  # it broke just now; whoever reads it will see that
                self._poller.modify(sock.fileno(), READABLE | WRITABLE)
        self._wake.set()

    def nudge(self) -> None:
        """Tells the background thread that there is something to wait for."""
        if not self._wake.is_set():
            self._wake.set()

    def wait(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Reads, or waits for the thread that does, until `done()` or the time is over; returns `done()`."""
        met = done()
        if met:
            return True
        now = self._runtime.monotonic()
        deadline_s = now + timeout_s
        while not met:
            left = deadline_s - now
            if left <= 0 or self._closing.is_set():
                return done()
            given = self._given
            try:
                mine = self._role.acquire(blocking=False)
                if mine:
                    while left > 0 and not self._closing.is_set():
                        self._poll(min(left, POLL_S))
                        now = self._runtime.monotonic()
                        met = done()
                        if met:
                            break
                        left = deadline_s - now
                    self._last_caller_s = now
            finally:
                self._give_role()
            if not mine:
                with self._changed:
                    self._waiters += 1
                    try:
                        if not done() and self._given == given:
                            self._changed.wait(min(left, POLL_S))
                    finally:
                        self._waiters -= 1
                met, now = done(), self._runtime.monotonic()
        return True

    def _give_role(self) -> None:
        """Gives the role back, if this thread has it; also what an exception right here left of an earlier time."""
        given = False
        try:
            while True:
                self._role.release()
                given = True
        except RuntimeError:
            if given:
                self._given += 1
                if self._waiters:
                    self._announce()

    def _announce(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _poll(self, timeout_s: float) -> None:
        """One turn of reading; only with the role."""
        for fd, event in self._poller.poll(timeout_s):
            link = self._links.get(fd)
            if link is None:
                continue
            try:
                try:
                    if event & WRITABLE and link.flush():
                        self._poller.modify(fd, READABLE)
                        if link.has_backlog:  # another thread sent in between; its wish to write was undone just now
                            self._poller.modify(fd, READABLE | WRITABLE)
                    if event & ~WRITABLE:
                        link.receive()
                except (OSError, FrameError) as error:
                    self.remove(link)
                    self._on_broken(link, error)
            except BaseException as error:  # also one of a signal handler while a broken link is removed
                self._on_failed(error)
                raise
        if self._waiters:
            self._announce()

    def _glance(self) -> None:
        """Reads what has come unasked: a fencing, a connection that ended."""
        try:
            if self._role.acquire(blocking=False):
                self._poll(0)
        finally:
            self._give_role()

    def _background(self) -> None:
        try:
            self._serve()
        except Exception as error:
            self._on_failed(error)

    def _serve(self) -> None:
        turned_s = 0.0
        while not self._closing.is_set():
            now = self._runtime.monotonic()
            called = now - self._last_caller_s < CALLER_RECENT_S
            if called and now - turned_s < TURN_S:
                self._runtime.sleep(BACKGROUND_NAP_S)  # not on the event, or each push of a busy caller would wake us
                continue
            turned_s = now
            self._wake.clear()
            if not self._on_turn():
                if not called:
                    self._glance()
                    self._runtime.idle(self._wake, self._poller, IDLE_S)
                continue
            if called or not self._role.acquire(blocking=False):
                self._runtime.sleep(BACKGROUND_NAP_S)
                continue
            try:
                while not (self._closing.is_set() or self._waiters):
                    left = turned_s + TURN_S - self._runtime.monotonic()
                    if left <= 0:
                        break
                    self._poll(left)
            finally:
                self._give_role()
                if self._waiters:  # let a caller take over; it will be back
                    self._last_caller_s = self._runtime.monotonic()
