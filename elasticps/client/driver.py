"""Who reads the sockets: the thread that waits for an answer, or else one in the background.

A hand-over between threads costs more than a small pull itself (35-50 µs against 20, measured over loopback), so a
thread that waits reads for everybody until it has what it waits for. The background thread reads only while nobody
else does: acknowledgements of pushes that nobody waits for, new views, broken connections.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable

from elasticps.client.link import Link

CALLER_RECENT_S = 0.005  # a caller that has just read will be back; keep out of its way for so long
BACKGROUND_NAP_S = 0.002
POLL_S = 0.05
TURN_S = 0.02
IDLE_S = 0.25
SPIN_S = 60e-6


class Driver:
    """Polls the links. `on_broken(link, error)` hears of each connection that ended; `on_turn()` runs about every
    TURN_S in the background thread, while it does not read, and returns whether anything is outstanding."""

    def __init__(self, on_broken: Callable[[Link, Exception], None], on_turn: Callable[[], bool]) -> None:
        self._on_broken = on_broken
        self._on_turn = on_turn
        self._epoll = select.epoll()
        self._links: dict[int, Link] = {}
        self._role = threading.Lock()  # held by the thread that reads
        self._changed = threading.Condition()  # something finished, or the role is free
        self._waiters = 0
        self._last_caller_s = 0.0
        self._short = False  # the last wait was
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._background, name="elasticps-io", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops the background thread. Links stay open."""
        self._closing.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)
        self._epoll.close()

    def add(self, link: Link) -> None:
        """Starts reading a link that connects, or is connected."""
        assert link.socket is not None
        fd = link.socket.fileno()
        self._links[fd] = link
        self._epoll.register(fd, select.EPOLLIN | select.EPOLLOUT)
        self._wake.set()

    def remove(self, link: Link) -> None:
        """Stops reading a link; call before closing it."""
        for fd, other in list(self._links.items()):
            if other is link:
                del self._links[fd]
                with contextlib.suppress(OSError, ValueError):  # closed under us
                    self._epoll.unregister(fd)

    def want_write(self, link: Link) -> None:
        """The link has more to send than its socket takes."""
        sock = link.socket
        if sock is not None and sock.fileno() in self._links:
            with contextlib.suppress(OSError, ValueError):  # it broke just now; whoever reads it will see that
                self._epoll.modify(sock.fileno(), select.EPOLLIN | select.EPOLLOUT)
        self._wake.set()

    def nudge(self) -> None:
        """Tells the background thread that there is something to wait for."""
        if not self._wake.is_set():
            self._wake.set()

    def wait(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Reads, or waits for the thread that does, until `done()` or the monotonic deadline; returns `done()`."""
        while not done():
            left = deadline_s - time.monotonic()
            if left <= 0 or self._closing.is_set():
                return done()
            if self._role.acquire(blocking=False):
                try:
                    while not done() and (left := deadline_s - time.monotonic()) > 0 and not self._closing.is_set():
                        self._poll(min(left, POLL_S))
                finally:
                    self._last_caller_s = time.monotonic()
                    self._role.release()
                    self._announce()
            else:
                with self._changed:
                    self._waiters += 1
                    if not done() and self._role.locked():
                        self._changed.wait(min(left, POLL_S))
                    self._waiters -= 1
        return True

    def _announce(self) -> None:
        if self._waiters:
            with self._changed:
                self._changed.notify_all()

    def _poll(self, timeout_s: float) -> None:
        """One turn of reading; only with the role."""
        for fd, event in self._events(timeout_s):
            link = self._links.get(fd)
            if link is None:
                continue
            try:
                if event & select.EPOLLOUT and link.flush():
                    self._epoll.modify(fd, select.EPOLLIN)
                if event & ~select.EPOLLOUT:
                    link.receive()
            except (OSError, ValueError) as error:  # ValueError: bytes that are no frame
                self.remove(link)
                self._on_broken(link, error)
        self._announce()

    def _events(self, timeout_s: float) -> list[tuple[int, int]]:
        """What epoll has. A sleep and its wake-up cost about 30 µs, as much as a small request takes at the server;
        so when the last wait was about that short, this one begins by asking again and again."""
        started_s = time.monotonic()
        if self._short:
            while time.monotonic() - started_s < SPIN_S:
                if events := self._epoll.poll(0, 64):
                    return events
        events = self._epoll.poll(timeout_s, 64)
        self._short = time.monotonic() - started_s < 2 * SPIN_S
        return events

    def _glance(self) -> None:
        """Reads what has come unasked: a fencing, a connection that ended."""
        if self._role.acquire(blocking=False):
            try:
                self._poll(0)
            finally:
                self._role.release()
                self._announce()

    def _background(self) -> None:
        turned_s = 0.0
        while not self._closing.is_set():
            now = time.monotonic()
            called = now - self._last_caller_s < CALLER_RECENT_S
            if called and now - turned_s < TURN_S:
                time.sleep(BACKGROUND_NAP_S)  # not on the event, or each push of a busy caller would wake us
                continue
            turned_s = now
            self._wake.clear()
            if not self._on_turn():
                if not called:
                    self._glance()
                    self._wake.wait(timeout=IDLE_S)
                continue
            if called or not self._role.acquire(blocking=False):
                time.sleep(BACKGROUND_NAP_S)
                continue
            try:
                while not (self._closing.is_set() or self._waiters):
                    left = turned_s + TURN_S - time.monotonic()
                    if left <= 0:
                        break
                    self._poll(left)
            finally:
                self._role.release()
                self._announce()
                if self._waiters:  # let a caller take over; it will be back
                    self._last_caller_s = time.monotonic()
