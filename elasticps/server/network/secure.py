"""A server's connections with TLS: one compiled call receives and decrypts, another encrypts and sends
(`security/session.py`); the event loop only says when."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from elasticps.security import records
from elasticps.security.gate import Gate, Over, TlsHandshake, anybody, proof, resolving
from elasticps.security.identity import Expect
from elasticps.security.session import TlsSession
from elasticps.server.network.pump import Listener, connected
from elasticps.server.network.socket_transport import SocketTransport, described

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials
    from elasticps.server.network.connection import Connection

log = logging.getLogger(__name__)


class SecureStreams:
    """Accepts and dials the connections of one server. Everything runs in the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gate: Gate, credentials: Credentials) -> None:
        self.loop = loop
        self._gate = gate
        self._credentials = credentials
        records.warm()

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listener:
        """Accepts connections from a socket that listens, until the listener is closed, and the socket with it."""
        return Listener(self, make, sock)

    def adopt(self, connection: Connection, sock: socket.socket) -> None:
        """Starts the handshake of an accepted connection."""
        session = self._session(sock, anybody, server=True)
        accepted = SecureTransport(self.loop, connection, sock, session, self._gate.accepted)
        self._gate.admit(accepted)
        if not accepted.is_closing():
            accepted.shake()

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; returns when it has its transport. OSError if nobody answers, or if `expect` rejects
        the peer."""
        sock = await connected(self.loop, host, port)
        proved: asyncio.Future[None] = self.loop.create_future()
        try:
            session = self._session(sock, expect, server=False)
        except BaseException:
            sock.close()
            raise
        dialled = SecureTransport(self.loop, connection, sock, session, resolving(proved))
        dialled.shake()
        await proof(proved, dialled)

    def close(self) -> None:
        """There is nothing to close but the connections."""

    def _session(self, sock: socket.socket, expect: Expect, *, server: bool) -> TlsSession:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return TlsSession(self._credentials, expect, sock.fileno(), server=server)


class SecureTransport(SocketTransport["Connection"]):
    """Becomes the transport of `connection` once the handshake is done, and never where it fails; `over` is called in
    both cases."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: Connection,
        sock: socket.socket,
        session: TlsSession,
        over: Over,
    ) -> None:
        super().__init__(loop, connection, described(sock))
        self._socket = sock
        self._session = session
        self._descriptor = sock.fileno()
        self._handshake = TlsHandshake(loop, self, over)
        self._open = False  # the handshake is done
        self._watched = (False, False)  # for reading, for writing
        self._busy = False  # what has come is being handed on

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._session if name == "channel" else super().get_extra_info(name, default)

    # --- the handshake ----------------------------------------------------------------------------------------------

    def shake(self) -> None:
        """Begins or continues the handshake."""
        try:
            if self._session.shake():
                self._open = True
                self._handshake.end(None)
                self._connection.connection_made(self)
                self._look_for()
                self._read()
            else:
                self._look_for()
        except ConnectionResetError as error:
            self.give_up(str(error))

    def give_up(self, why: str, *, gently: bool = False) -> None:
        """Ends a connection whose handshake is not done."""
        if self._handshake.end(ConnectionResetError(why)):
            self.end(None)

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
            self.shake()

    def resume_reading(self) -> None:
        super().resume_reading()
        if self._session.buffered and not self._busy:
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        """Gives decrypted bytes to the connection, as long as it reads."""
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
        if session.has_backlog:  # TLS itself has answered something
            self._look_for()

    # --- writing ----------------------------------------------------------------------------------------------------

    def _left(self) -> bool:
        return bool(self._queue) or self._session.has_backlog

    def get_write_buffer_size(self) -> int:
        return self._queue.nbytes + self._session.backlog_bytes

    def _send(self) -> None:
        if self._queue.send(self._session):
            self._session.flush()

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, error: Exception | None) -> None:
        if self._closing and self._open and not (self._ended or self._left()):
            with suppress(ConnectionResetError):
                self._session.say_goodbye()
        super().end(error)

    def _close(self) -> None:
        self._look_for()
        self._handshake.end(ConnectionResetError("the connection was given up"))
        self._session.close()
        self._socket.close()

    def _tell_lost(self, error: Exception | None) -> None:
        if self._open:
            super()._tell_lost(error)
