"""A server's connections with TLS: sockets that one compiled call receives from and decrypts, or encrypts for and sends
to (`security/session.py`). The event loop only says when.

Same interface as `server/pump.py`. Until a peer has proved who it is, its connection costs a socket, OpenSSL's state
and at most MAX_HANDSHAKE_BYTES, for at most HANDSHAKE_S; how many there are at once is the gate's to limit.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from elasticps.security import records, transport
from elasticps.security.channel import Expect
from elasticps.security.session import Session
from elasticps.security.transport import Gate, anybody
from elasticps.server import pump
from elasticps.server.pump import Listener, Pump, connected
from elasticps.server.socket_transport import SocketTransport, described

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials
    from elasticps.server.connection import Connection
    from elasticps.server.fast.path import FastPath
    from elasticps.server.linger import Linger

log = logging.getLogger(__name__)


def streams(loop: asyncio.AbstractEventLoop, gate: Gate, path: FastPath, linger: Linger) -> Streams:
    """What makes a server's connections: compiled code where it can, else the loop itself."""
    if gate.credentials is None:
        return pump.streams(loop, path, linger)
    if gate.credentials.native_context() is None or not pump.watches(loop):
        return loop
    return SecureStreams(loop, gate, gate.credentials)


class SecureStreams:
    """Makes the connections of one server. Everything runs in the thread of the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gate: Gate, credentials: Credentials) -> None:
        self.loop = loop
        self._gate = gate
        self._credentials = credentials
        records.warm()

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listener:
        """Accepts connections from a socket that listens, until the listener is closed, and the socket with it."""
        return Listener(self, make, sock)

    def adopt(self, connection: Connection, sock: socket.socket) -> None:
        """A connection that was accepted; its protocol hears of it when the peer has proved who it is."""
        accepted = SecureTransport(self.loop, connection, sock, self._session(sock, anybody, server=True))
        self._gate.admit(accepted)
        accepted.shake(lambda error: self._gate.accepted(accepted, error))

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; returns when it has its transport. OSError if nobody, or another one, answers."""
        sock = await connected(self.loop, host, port)
        try:
            dialled = SecureTransport(self.loop, connection, sock, self._session(sock, expect, server=False))
        except BaseException:
            sock.close()
            raise
        done: asyncio.Future[None] = self.loop.create_future()

        def over(error: Exception | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        dialled.shake(over)
        try:
            await done
        except asyncio.CancelledError:
            dialled.abort()
            raise

    def _session(self, sock: socket.socket, expect: Expect, *, server: bool) -> Session:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return Session(self._credentials, expect, sock.fileno(), server=server)


class SecureTransport(SocketTransport["Connection"]):
    """`connection` gets this as its transport once the handshake is done, and hears nothing of it where it fails."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: Connection, sock: socket.socket, session: Session
    ) -> None:
        super().__init__(loop, connection, described(sock))
        self._socket = sock
        self._session = session
        self._descriptor = sock.fileno()
        self._open = False  # the handshake is done
        self._timer: asyncio.TimerHandle | None = None
        self._done: Callable[[Exception | None], None] | None = None  # until it is, or has failed
        self._watched = (False, False)  # for reading, for writing
        self._busy = False  # what has come is being handed on

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._session if name == "channel" else super().get_extra_info(name, default)

    # --- the handshake ----------------------------------------------------------------------------------------------

    def shake(self, done: Callable[[Exception | None], None]) -> None:
        """Begins. done(error) is called when it is over, with None if it succeeded."""
        self._done = done
        limit_s = transport.HANDSHAKE_S
        self._timer = self._loop.call_later(limit_s, self.give_up, f"no handshake within {limit_s:.0f} s")
        self._go_on_shaking()

    def _go_on_shaking(self) -> None:
        try:
            if self._session.shake():
                self._open = True
                self._end_handshake(None)
                self._connection.connection_made(self)
                self._look_for()
                self._read()
            else:
                self._look_for()
        except ConnectionResetError as error:
            self.give_up(str(error))

    def give_up(self, why: str, *, gently: bool = False) -> None:
        """Ends a connection whose peer has not proved who it is."""
        if self._done is not None:
            self._end_handshake(ConnectionResetError(why))
            self.end(None)

    def _end_handshake(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if done is not None:
            done(error)

    # --- reading ----------------------------------------------------------------------------------------------------

    def _look_for(self) -> None:
        reading, writing = (False, False) if self._ended else (self.is_reading() or not self._open, self._left())
        if (reading, writing) == self._watched:
            return
        loop, descriptor = self._loop, self._descriptor
        if reading != self._watched[0]:
            if reading:
                loop.add_reader(descriptor, self._readable)
            else:
                loop.remove_reader(descriptor)
        if writing != self._watched[1]:
            if writing:
                loop.add_writer(descriptor, self.send_queued)
            else:
                loop.remove_writer(descriptor)
        self._watched = reading, writing

    def _readable(self) -> None:
        if self._open:
            self._read()
        else:
            self._go_on_shaking()

    def resume_reading(self) -> None:
        super().resume_reading()
        if self._session.buffered and not self._busy:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Hands on what there is, as long as it is wanted."""
        if self._busy:
            return
        connection, session = self._connection, self._session
        self._busy = True
        try:
            while self.is_reading():
                n = session.read_into(connection.get_buffer(-1))
                if n:
                    connection.buffer_updated(n)
                if not session.buffered:
                    break
        except ConnectionResetError as error:
            log.debug("connection with %s: %s", session.peer, error)
            self.end(None)
        except Exception as error:  # as a loop does it
            connection.fail(error)
        finally:
            self._busy = False
        if session.unsent:  # TLS itself has answered something
            self._look_for()

    # --- writing ----------------------------------------------------------------------------------------------------

    def _left(self) -> bool:
        return bool(self._unsent) or self._session.unsent

    def get_write_buffer_size(self) -> int:
        return self._unsent.nbytes + self._session.unsent_bytes

    def _send(self) -> None:
        if self._unsent.send(self._session):
            self._session.flush()

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, error: Exception | None) -> None:
        if self._closing and self._open and not (self._ended or self._left()):
            with suppress(ConnectionResetError):
                self._session.say_goodbye()
        super().end(error)

    def _close(self) -> None:
        self._look_for()
        self._end_handshake(ConnectionResetError("the connection was given up"))
        self._session.close()
        self._socket.close()

    def _tell_lost(self, error: Exception | None) -> None:
        if self._open:
            super()._tell_lost(error)


Streams: TypeAlias = SecureStreams | Pump | asyncio.AbstractEventLoop
