"""What `stream.TlsStream` is, in compiled code."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elasticps.security import records
from elasticps.security.identity import Role
from elasticps.security.session import Session

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials
    from elasticps.security.sockets import Socket

CLOSE_S = 0.5  # for another thread's call; in a forked child that thread, and its call, is only the parent's


class CompiledStream:
    """To the server called `server`. Any thread may send, one at a time receive; both at once too. What is sent before
    the handshake is done leaves when it is: an introduction, no more."""

    def __init__(self, sock: Socket, credentials: Credentials, server: str) -> None:
        records.warm()
        cluster = credentials.cluster
        self._socket = sock
        self._session = Session(
            credentials, lambda p: p.require(cluster, Role.SERVER, server), sock.fileno(), server=False
        )
        self._lock = threading.Lock()  # OpenSSL's state is not for two threads at once
        self._early: list[memoryview] | None = []  # until the handshake is done

    def fileno(self) -> int:
        """The socket's."""
        return self._socket.fileno()

    def close(self) -> None:
        """At once; the other end hears of it from its socket."""
        mine = self._lock.acquire(timeout=CLOSE_S)
        try:
            if mine:
                self._session.close()
        finally:
            if mine:
                self._lock.release()
            self._socket.close()

    @property
    def stale(self) -> bool:
        """Whether it is time to connect anew, because certificates were renewed or are about to end."""
        return self._session.stale

    @property
    def unsent(self) -> bool:
        """Whether `flush` has something to send."""
        return self._session.unsent or self._late

    @property
    def buffered(self) -> bool:
        """Whether `recv_into` may have more although the socket has not."""
        return self._session.buffered

    def flush(self) -> bool:
        """Sends what was encrypted and did not fit into the socket; True if nothing of that is left."""
        with self._lock:
            if self._early is not None:
                self._greeted()
            return self._session.flush() and not self._late

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        """How many bytes were taken; they may still wait for `flush`. BlockingIOError: none."""
        with self._lock:
            if self._early is None:
                return self._session.sendmsg(buffers)
            if sum(map(len, self._early)) > records.RECORD_BYTES:
                raise BlockingIOError
            self._early += [memoryview(bytes(buffer)) for buffer in buffers]
            self._greeted()
            return sum(map(len, buffers))

    def recv_into(self, buffer: memoryview, /) -> int:
        """As much as there is, up to the buffer's length. BlockingIOError: nothing."""
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
