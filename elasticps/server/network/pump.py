"""Connections in the clear whose sockets compiled code reads and writes (`fast/sockets.py`).

A third of what an event loop's own streams cost per message (`streams.py`). Python handles only what is
not usual: connections that come and go, pauses, bytes that a socket did not take at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, cast

from elasticps.server.fast import layout as at
from elasticps.server.fast import sockets
from elasticps.server.fast.path import FastPath
from elasticps.server.network.socket_transport import SocketTransport, described

if TYPE_CHECKING:
    from elasticps.security.identity import Expect
    from elasticps.server.network.busy_poll import BusyPoll
    from elasticps.server.network.connection import Connection

log = logging.getLogger(__name__)

TURNS = 32  # of the compiled code, then timers and others have theirs
ACCEPTED_AT_ONCE = 64
FULL_PAUSE_S = 1.0  # nothing is accepted for so long when there are no descriptors left
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Pump:
    """Waits for the sockets of all connections of one server by epoll. Everything runs in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, path: FastPath, busy_poll: BusyPoll) -> None:
        self.loop = loop
        self.path = path
        self._busy_poll = busy_poll
        sockets.warm()
        self.epoll = select.epoll()
        path.use_epoll(self.epoll.fileno(), sockets.MESSAGE_BYTES, sockets.EVENT_BYTES * sockets.EVENTS)
        loop.add_reader(self.epoll.fileno(), self._ready)

    def close(self) -> None:
        """Stops; its connections have ended."""
        self.loop.remove_reader(self.epoll.fileno())
        self.epoll.close()

    # --- connections come ---------------------------------------------------------------------------------------------

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listener:
        """Accepts connections from a socket that listens, until the listener is closed, and the socket with it."""
        return Listener(self, make, sock)

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; OSError if nobody answers. In the clear, `expect` cannot be checked."""
        sock = await connected(self.loop, host, port)
        try:
            self.adopt(connection, sock)
        except BaseException:
            sock.close()
            raise

    def adopt(self, connection: Connection, sock: socket.socket) -> None:
        """A connection over a socket that is connected and does not block."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Transport(self, connection, sock)

    # --- sockets are ready ----------------------------------------------------------------------------------------

    def _ready(self) -> None:
        observer = self.path.observer
        if observer is None:
            self._work()
        else:
            observer.watch(self.path, self._work)
        self._busy_poll.touched()

    def _work(self) -> None:
        path = self.path
        path.before()
        for _ in range(TURNS):
            reason = path.turn()
            if reason == at.IDLE and path.all_sent:
                break  # as usual, and in as few calls as possible: twenty servers on two cores wake for each
            path.before()  # also in the middle of a turn we may have been stopped
            connection = path.left_over(reason)
            if connection is None:
                if reason == at.IDLE:
                    break
            else:
                self._act(cast("Connection", connection), reason)
        path.tell_owner()

    def _act(self, connection: Connection, reason: int) -> None:
        transport = cast(Transport, connection.transport)
        try:
            if reason == at.WRITABLE:
                transport.send_queued()
            elif reason == at.CLOSED:
                transport.ended(self.path.counter(at.H_INFO))
            else:
                connection.unusual(reason)
        except Exception as error:  # as a loop does it
            connection.fail(error)


async def connected(loop: asyncio.AbstractEventLoop, host: str, port: int) -> socket.socket:
    """A socket that is connected and does not block; OSError if none of the host's addresses answers."""
    error: OSError | None = None
    for family, kind, protocol, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
        except OSError as failure:
            sock.close()
            error = failure
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise error or OSError(f"no address for {host}")


class Adopts(Protocol):
    """Takes accepted connections."""

    loop: asyncio.AbstractEventLoop

    def adopt(self, connection: Connection, sock: socket.socket) -> None:
        """A connection over a socket that is connected and does not block."""


class Listener:
    """Accepts connections."""

    def __init__(self, pump: Adopts, make: Callable[[], Connection], sock: socket.socket) -> None:
        self._pump = pump
        self._make = make
        self._socket = sock
        self._again: asyncio.TimerHandle | None = None
        sock.setblocking(False)
        self._listen()

    @property
    def sockets(self) -> tuple[socket.socket, ...]:
        """The one socket, as asyncio's servers tell theirs."""
        return (self._socket,)

    def close(self) -> None:
        """Accepts no more."""
        if self._again is not None:
            self._again.cancel()
        self._pump.loop.remove_reader(self._socket)
        self._socket.close()

    def _listen(self) -> None:
        self._again = None
        self._pump.loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _FULL:
                    raise
                log.error("cannot accept connections: %s; tried again in %g s", os.strerror(error.errno), FULL_PAUSE_S)
                self._pump.loop.remove_reader(self._socket)
                self._again = self._pump.loop.call_later(FULL_PAUSE_S, self._listen)
                return
            sock.setblocking(False)
            self._pump.adopt(self._make(), sock)


class Transport(SocketTransport["Connection"]):
    """The transport of one connection: Python's part in its socket."""

    def __init__(self, pump: Pump, connection: Connection, sock: socket.socket) -> None:
        super().__init__(pump.loop, connection, described(sock))
        self._pump = pump
        self._socket = sock
        self._mask = select.EPOLLIN
        pump.epoll.register(sock, self._mask)
        connection.connection_made(self)
        if not self._ended:
            pump.path.watch(connection.slot, sock.fileno())

    def _look_for(self) -> None:
        mask = select.EPOLLIN if self.is_reading() else 0
        if self._queue:
            mask |= select.EPOLLOUT
        if mask != self._mask and not self._ended:
            self._mask = mask
            self._pump.epoll.modify(self._socket, mask)

    def _waits(self) -> bool:
        return bool(self._queue) or self._pump.path.queued(self._connection.slot)

    def _send(self) -> None:
        self._queue.send(self._socket)
        self._pump.path.set_queued(self._connection.slot, bool(self._queue))

    def ended(self, number: int) -> None:
        """The peer has closed the connection (0), or it is broken (errno)."""
        if number:
            self.end(OSError(number, os.strerror(number)))
        else:
            self.close()

    def _close(self) -> None:
        self._pump.path.unwatch(self._connection.slot)
        self._pump.epoll.unregister(self._socket)
        self._socket.close()
