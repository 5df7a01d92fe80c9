"""A worker's connections with TLS: each behaves like a non-blocking socket.

`CompiledStream` calls OpenSSL from kernels, and is used where its library can be called; else `TlsStream`, over `ssl`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from elasticps.security.channel import Channel

if TYPE_CHECKING:
    from elasticps.security.channel import Proof
    from elasticps.security.credentials import Credentials

_READ_BYTES = 256 << 10
_WRITE_BYTES = 256 << 10  # encrypted in one go; a socket takes about as much
_SMALL_BYTES = 16 << 10  # a record
CLOSE_S = 0.5  # for another thread's call; in a forked child that thread, and its call, is only the parent's


class Socket(Protocol):
    """The non-blocking socket under a connection."""

    def fileno(self) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class Secured(ABC):
    """A socket with TLS, to a server. It buffers: bytes may be neither in the socket nor with the caller.

    Any thread may send, one at a time may receive, both at once too. What is sent before the handshake is done leaves
    afterwards: an introduction, no more."""

    def __init__(self, sock: Socket, proof: Proof) -> None:
        self._socket = sock
        self._proof = proof
        self._lock = threading.Lock()  # OpenSSL's state is not for two threads at once

    def fileno(self) -> int:
        """The socket's."""
        return self._socket.fileno()

    @property
    def stale(self) -> bool:
        """Whether to connect again, because certificates were renewed or are about to expire."""
        return self._proof.stale

    @property
    @abstractmethod
    def has_backlog(self) -> bool:
        """Whether `flush` has something to send."""

    @property
    @abstractmethod
    def buffered(self) -> bool:
        """Whether `recv_into` may have more although the socket has not."""

    @abstractmethod
    def flush(self) -> bool:
        """Sends what was encrypted and did not fit into the socket; True if nothing of that is left."""

    @abstractmethod
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """How many bytes were taken; they may still wait for `flush`. BlockingIOError: none."""

    @abstractmethod
    def recv_into(self, buffer: memoryview, /) -> int:
        """As much as there is, up to the buffer's length. BlockingIOError: nothing."""

    @abstractmethod
    def close(self) -> None:
        """At once; the other end hears of it from its socket."""


def secured(sock: Socket, credentials: Credentials, server: str) -> Secured:
    """A connection to the server called `server`, over a socket that is connected or connects."""
    if credentials.native_context() is None:
        return TlsStream(sock, credentials, server)
    return CompiledStream(sock, credentials, server)


class TlsStream(Secured):
    """A connection to the server called `server`, encrypted by Python's `ssl`."""

    def __init__(self, sock: Socket, credentials: Credentials, server: str) -> None:
        self._channel = Channel(credentials, credentials.expect(server), server=False)
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


class CompiledStream(Secured):
    """A connection to the server called `server`, encrypted by OpenSSL, which kernels call."""

    def __init__(self, sock: Socket, credentials: Credentials, server: str) -> None:
        from elasticps.security import records, session  # kernels, which are not loaded without TLS

        records.warm()
        self._most_early_bytes = records.RECORD_BYTES
        self._session = session.TlsSession(credentials, credentials.expect(server), sock.fileno(), server=False)
        super().__init__(sock, self._session)
        self._early: list[memoryview] | None = []  # until the handshake is done

    def close(self) -> None:
        mine = self._lock.acquire(timeout=CLOSE_S)
        try:
            if mine:
                self._session.close()
        finally:
            if mine:
                self._lock.release()
            self._socket.close()

    @property
    def has_backlog(self) -> bool:
        return self._session.has_backlog or self._late

    @property
    def buffered(self) -> bool:
        return self._session.buffered

    def flush(self) -> bool:
        with self._lock:
            if self._early is not None:
                self._greeted()
            return self._session.flush() and not self._late

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        with self._lock:
            if self._early is None:
                return self._session.sendmsg(buffers)
            if sum(map(len, self._early)) > self._most_early_bytes:
                raise BlockingIOError
            self._early += [memoryview(bytes(buffer)) for buffer in buffers]
            self._greeted()
            return sum(map(len, buffers))

    def recv_into(self, buffer: memoryview, /) -> int:
        with self._lock:
            if self._early is not None and not self._greeted():
                raise BlockingIOError
            n = self._session.read_into(buffer)
        if not n:
            raise BlockingIOError
        return n

    def _greeted(self) -> bool:
        """Goes on with the handshake, then sends what waited for its end; True when it is done."""
        if not self._session.shake():
            return False
        early = self._early or []
        while early:
            try:
                n = self._session.sendmsg(early)
            except BlockingIOError:  # `flush` tries again
                return False
            while early and n >= len(early[0]):
                n -= len(early.pop(0))
            if early:
                early[0] = early[0][n:]
        self._early = None
        return True

    @property
    def _late(self) -> bool:
        """The handshake is done, but the socket did not take what waited for that."""
        return bool(self._early) and self._session.peer is not None
