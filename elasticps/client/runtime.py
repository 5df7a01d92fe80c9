"""All that a client needs of the machine: clock, chance, sockets, threads and what they wait on, the control loop.

Nothing else in the client knows `time`, `threading`, `select` or `socket`. So the simulator can run a client as it is:
it hands another `Runtime` to it, in which time is virtual and bytes travel over links that break when they are told to.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol, TypeVar
from weakref import WeakMethod

from coordinator import GRPC_HANDLES_FORKS
from elasticps.system import background
from elasticps.system.cpu_contention import CpuContention

T = TypeVar("T")

READABLE = select.EPOLLIN
WRITABLE = select.EPOLLOUT
EVENTS_PER_POLL = 64
SPIN_S = 60e-6
VANISHED_S = 30.0  # a connection whose other end confirms nothing for so long has none
KEEPALIVE_S = 60  # firewalls forget connections on which nothing passes, some after a few minutes
GLANCE_S = 0.02  # between two looks of a client that does nothing: servers may have something to say
QUIET_WAITS = 4  # waits that ended without a word: after so many it looks no longer, and is woken by sockets as well
QUIET_FACTOR = 16  # then it waits so many times as long: nothing is outstanding, and no server is missing
_CHANCE = random.SystemRandom()  # programs seed the generator of `random`, all workers alike, and count on its numbers


class Stream(Protocol):
    """A connection, or one that is being opened: a non-blocking socket, or what behaves like it."""

    def fileno(self) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class Lock(Protocol):
    """As `threading.Lock` and `RLock`."""

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool: ...
    def release(self) -> None: ...
    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...


class Flag(Protocol):
    """As `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...


class Condition(Protocol):
    """As `threading.Condition`."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def notify_all(self) -> None: ...


class WakeFlag:
    """As `threading.Event`, for one thread that may also wait for sockets. quiet: waits in a row without a word."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.is_set, self.clear = self._event.is_set, self._event.clear
        self._fd = -1  # readable when it was set meanwhile
        self._among_sockets = False
        self.quiet = 0

    def set(self) -> None:
        """Wakes the thread that waits."""
        self._event.set()
        if self._among_sockets:
            os.eventfd_write(self._fd, 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until it is set; returns whether it is."""
        return self._event.wait(timeout)

    def wait_among(self, poller: SocketPoller, timeout_s: float) -> None:
        """Waits until it is set, or something can be done with a socket."""
        if self._fd < 0:
            self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._among_sockets = True
        try:
            if not self.is_set():  # from here on `set` tells the descriptor
                poller.wait_with(self._fd, timeout_s)
        finally:
            self._among_sockets = False
            with suppress(BlockingIOError):
                os.eventfd_read(self._fd)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class SocketPoller:
    """Which streams can be read, or written. Any thread may register; one polls at a time. contention: measured by
    several pollers together."""

    def __init__(self, contention: CpuContention | None = None) -> None:
        self._epoll = select.epoll()
        self._any = select.poll()
        self._any.register(self._epoll.fileno(), select.POLLIN)
        self._short = False  # the last wait was
        self._contention = contention or CpuContention()

    def register(self, fd: int, events: int) -> None:
        """Begins to watch; `READABLE` and `WRITABLE` in `events`."""
        self._epoll.register(fd, events)

    def modify(self, fd: int, events: int) -> None:
        """Watches for something else. OSError or ValueError if the descriptor is not watched, or closed."""
        self._epoll.modify(fd, events)

    def unregister(self, fd: int) -> None:
        """Watches it no longer. Errors as for `modify`."""
        self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> list[tuple[int, int]]:
        """What can be done now, (descriptor, events) each; empty after `timeout_s`.

        A sleep and its wake-up cost about 30 µs, as much as a small request takes at the server; so when the last wait
        was about that short, this one begins by asking again and again; not where others need the core for their work.
        """
        started_s = time.monotonic()
        if self._short and timeout_s and not self._contention.contended(started_s):
            while time.monotonic() - started_s < SPIN_S:
                if events := self._epoll.poll(0, EVENTS_PER_POLL):
                    return events
        try:
            events = self._epoll.poll(timeout_s, EVENTS_PER_POLL)
        except ValueError:  # closed by another thread
            return []
        self._short = time.monotonic() - started_s < 2 * SPIN_S
        return events

    def ready(self) -> bool:
        """Whether something can be done now. Any thread may ask."""
        return bool(self._any.poll(0))

    def wait_with(self, fd: int, timeout_s: float) -> None:
        """Waits until something can be done, or another descriptor can be read."""
        both = select.poll()
        with suppress(ValueError):  # closed by another thread
            both.register(self._epoll.fileno(), select.POLLIN)
            both.register(fd, select.POLLIN)
            both.poll(1000 * timeout_s)

    def close(self) -> None:
        """Ends watching; streams stay open."""
        self._epoll.close()


class Runtime:
    """The machine that this process runs on."""

    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Seconds, never going back."""

    def wall(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Lets others go on for so long."""
        time.sleep(seconds)

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        """Begins to open a connection, to another one of the host's addresses at each attempt; it is open, or has
        failed, when the stream turns writable. OSError if it fails at once. It ends when the other machine has vanished
        without a word.

        Blocks for as long as it takes to resolve the host's name.
        """
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[attempt % len(found)]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1e3 * VANISHED_S))  # else a quarter of an hour
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, int(VANISHED_S / 3) or 1)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(code, os.strerror(code))
        return sock

    def idle(self, wake: Flag, poller: SocketPoller, timeout_s: float) -> None:
        """Waits until it is woken, or something has come. While others read the sockets it only looks from time to
        time, or each answer to them would wake it."""
        assert isinstance(wake, WakeFlag)
        if wake.quiet >= QUIET_WAITS:
            wake.wait_among(poller, QUIET_FACTOR * timeout_s)
        else:
            until_s = time.monotonic() + timeout_s
            while not wake.wait(GLANCE_S) and not poller.ready() and time.monotonic() < until_s:
                pass
        wake.quiet = 0 if wake.is_set() or poller.ready() else wake.quiet + 1

    def poller(self) -> SocketPoller:
        """A new one, which watches nothing."""
        return SocketPoller()

    def lock(self) -> Lock:
        """One that a thread must not take twice."""
        return threading.Lock()

    def rlock(self) -> Lock:
        """One that its holder may take again; RuntimeError if somebody else releases it."""
        return threading.RLock()

    def condition(self) -> Condition:
        """With a lock of its own."""
        return threading.Condition()

    def event(self) -> Flag:
        """Not set."""
        return WakeFlag()

    def chance(self) -> float:
        """A random number from 0 to below 1."""
        return _CHANCE.random()

    def spawn(self, name: str, target: Callable[[], None]) -> object:
        """Runs `target` in a thread of its own, which does not keep the process from ending."""
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def join(self, thread: object, timeout_s: float) -> None:
        """Waits until a thread that `spawn` returned has ended; not for itself."""
        assert isinstance(thread, threading.Thread)
        if thread is not threading.current_thread():
            thread.join(timeout_s)

    def interruptible(self) -> bool:
        """Whether signal handlers run in this thread: then an exception may come between any two calls."""
        return threading.current_thread() is threading.main_thread()

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Runs a coroutine in the control loop and waits for it; TimeoutError if it takes longer."""
        return background.run(coroutine, timeout_s)


log = logging.getLogger(__name__)

_disowns: set[WeakMethod[Callable[[], None]]] = set()
_warned = False


def at_fork(disown: Callable[[], None]) -> None:
    """Has this method of a living object called in each child that is forked from now on."""
    _disowns.add(WeakMethod(disown, _disowns.discard))


def _warn() -> None:
    """Once, where a child may crash before any code of ours runs in it."""
    global _warned
    if GRPC_HANDLES_FORKS and _disowns and not _warned:
        _warned = True
        log.warning(
            "grpc was imported before elasticps, with its handling of forks, so a child of this process may crash as it"
            " begins (a DataLoader's worker, say): import elasticps first, or set GRPC_ENABLE_FORK_SUPPORT=0"
        )


def _disown_all() -> None:
    gc.freeze()  # what the parent left to its collector is not finalised here: gRPC's objects do not bear it
    for method in list(_disowns):
        if (disown := method()) is not None:
            disown()


os.register_at_fork(before=_warn, after_in_child=_disown_all)
