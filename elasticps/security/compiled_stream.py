"""What `stream.TlsStream` is, in compiled code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticps.security import records
from elasticps.security.session import TlsSession
from elasticps.security.sockets import Secured, Socket, server_called

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

CLOSE_S = 0.5  # for another thread's call; in a forked child that thread, and its call, is only the parent's


class CompiledStream(Secured):
    """To the server called `server`."""

    def __init__(self, sock: Socket, credentials: Credentials, server: str) -> None:
        records.warm()
        self._session = TlsSession(credentials, server_called(server, credentials), sock.fileno(), server=False)
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
            if sum(map(len, self._early)) > records.RECORD_BYTES:
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
