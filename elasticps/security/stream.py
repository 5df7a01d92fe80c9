"""A worker's connection with TLS: behaves like a non-blocking socket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticps.security.channel import Channel
from elasticps.security.sockets import Secured, Socket, server_called

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

_READ_BYTES = 256 << 10
_WRITE_BYTES = 256 << 10  # encrypted in one go; a socket takes about as much
_SMALL_BYTES = 16 << 10  # a record


def secured(sock: Socket, credentials: Credentials, server: str) -> Secured:
    """A connection to the server called `server`, over a socket that is connected or connects."""
    if credentials.native_context() is None:
        return TlsStream(sock, credentials, server)
    from elasticps.security.compiled_stream import CompiledStream  # its kernels are not to be loaded without TLS

    return CompiledStream(sock, credentials, server)


class TlsStream(Secured):
    """To the server called `server`."""

    def __init__(self, sock: Socket, credentials: Credentials, server: str) -> None:
        self._channel = Channel(credentials, server_called(server, credentials), server=False)
        super().__init__(sock, self._channel)
        self._raw = memoryview(bytearray(_READ_BYTES))
        self._backlog = memoryview(b"")  # encrypted already
        self._early: list[bytes] | None = []  # until the handshake is done
        self._more = False  # something may have been received that was not read
        self._channel.shake()
        self._backlog = memoryview(self._channel.outgoing())

    def close(self) -> None:
        self._socket.close()

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    @property
    def buffered(self) -> bool:
        return self._more

    def flush(self) -> bool:
        with self._lock:
            return self._flush()

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        with self._lock:
            if not self._flush():
                raise BlockingIOError
            if self._early is not None:
                self._early += [bytes(buffer) for buffer in buffers]
                return sum(map(len, buffers))
            taken, some = 0, []
            for buffer in buffers:
                part = buffer[: _WRITE_BYTES - taken]
                some.append(part)
                taken += len(part)
                if taken == _WRITE_BYTES:
                    break
            self._channel.write(some if taken > _SMALL_BYTES or len(some) == 1 else (b"".join(some),))
            self._backlog = memoryview(self._channel.outgoing())
            self._flush()
            return taken

    def recv_into(self, buffer: memoryview, /) -> int:
        with self._lock:
            filled = self._read(buffer)
            while not filled:
                n = self._socket.recv_into(self._raw)
                if not n:
                    raise ConnectionResetError("the peer closed the connection")
                self._channel.received(self._raw[:n])
                if self._early is not None and not self._greet():
                    continue
                filled = self._read(buffer)
            return filled

    def _greet(self) -> bool:
        """Goes on with the handshake, then sends what waited for its end; True when it is done."""
        try:
            done = self._channel.shake()
        finally:
            self._send()
        if done:
            early, self._early = self._early or [], None
            self._channel.write(early)
            self._send()
        return done

    def _send(self) -> None:
        self._backlog = memoryview(bytes(self._backlog) + self._channel.outgoing())
        self._flush()

    def _read(self, buffer: memoryview) -> int:
        filled = 0
        if self._early is None:
            while filled < len(buffer) and (n := self._channel.read_into(buffer[filled:])):
                filled += n
        self._more = filled == len(buffer)
        return filled

    def _flush(self) -> bool:
        while self._backlog:
            try:
                self._backlog = self._backlog[self._socket.sendmsg([self._backlog]) :]
            except BlockingIOError:
                return False
        return True
