"""What a worker's connections with TLS stand on, and what they are to it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from elasticps.security.identity import Role

if TYPE_CHECKING:
    from elasticps.security.channel import Expect, Proof
    from elasticps.security.credentials import Credentials


class Socket(Protocol):
    """A non-blocking one."""

    def fileno(self) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class Secured(ABC):
    """A socket with TLS, to a server: some of what was sent, or has come, is neither in the socket nor with the caller.

    Any thread may send, one at a time receive; both at once too. What is sent before the handshake is done leaves when
    it is: an introduction, no more."""

    def __init__(self, sock: Socket, proof: Proof) -> None:
        self._socket = sock
        self._proof = proof
        self._lock = threading.Lock()  # OpenSSL's state is not for two threads at once

    def fileno(self) -> int:
        """The socket's."""
        return self._socket.fileno()

    @property
    def stale(self) -> bool:
        """Whether it is time to connect anew, because certificates were renewed or are about to end."""
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


def server_called(name: str, credentials: Credentials) -> Expect:
    """Who has to answer there."""
    cluster = credentials.cluster
    return lambda peer: peer.require(cluster, Role.SERVER, name)
