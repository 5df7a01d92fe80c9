"""Who reads the sockets: the thread that waits for an answer, or else one in the background.

A hand-over between threads costs more than a small pull itself (35-50 µs against 20, measured over loopback), so a
thread that waits reads for everybody until it has what it waits for. The background thread reads only while nobody
else does: acknowledgements of pushes that nobody waits for, new views, broken connections.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from elasticps.client.link import Link
from elasticps.client.runtime import READABLE, WRITABLE, Runtime
from elasticps.wire.frames import FrameError

CALLER_RECENT_S = 0.005  # a caller that has just read will be back; keep out of its way for so long
BACKGROUND_NAP_S = 0.002
POLL_S = 0.05
TURN_S = 0.02
IDLE_S = 0.25


class Driver:
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
        for fd, other in list(self._links.items()):
            if other is link:
                del self._links[fd]
                with contextlib.suppress(OSError, ValueError):  # closed under us
                    self._poller.unregister(fd)

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

    def wait(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Reads, or waits for the thread that does, until `done()` or the monotonic deadline; returns `done()`."""
        while not done():
            left = deadline_s - self._runtime.monotonic()
            if left <= 0 or self._closing.is_set():
                return done()
            given = self._given
            try:
                mine = self._role.acquire(blocking=False)
                if mine:
                    while (
                        not done()
                        and (left := deadline_s - self._runtime.monotonic()) > 0
                        and not self._closing.is_set()
                    ):
                        self._poll(min(left, POLL_S))
                    self._last_caller_s = self._runtime.monotonic()
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
                self._announce()

    def _announce(self) -> None:
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    def _poll(self, timeout_s: float) -> None:
        """One turn of reading; only with the role."""
        for fd, event in self._poller.poll(timeout_s):
            link = self._links.get(fd)
            if link is None:
                continue
            try:
                if event & WRITABLE and link.flush():
                    self._poller.modify(fd, READABLE)
                    if link.unsent:  # another thread has sent in between, and had its wish to write undone just now
                        self._poller.modify(fd, READABLE | WRITABLE)
                if event & ~WRITABLE:
                    link.receive()
            except (OSError, FrameError) as error:
                self.remove(link)
                self._on_broken(link, error)
            except BaseException as error:
                self._on_failed(error)
                raise
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
                    self._wake.wait(timeout=IDLE_S)
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
