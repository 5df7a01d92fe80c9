"""What a worker's connections with TLS stand on, and what they are to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Socket(Protocol):
    """A non-blocking one."""

    def fileno(self) -> int: ...
    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...
    def recv_into(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


class Secured(Socket, Protocol):
    """With TLS: some of what was sent, or has come, is neither in the socket nor with the caller."""

    @property
    def unsent(self) -> bool:
        """Whether `flush` has something to send."""

    @property
    def buffered(self) -> bool:
        """Whether `recv_into` may have more although the socket has not."""

    @property
    def stale(self) -> bool:
        """Whether it is time to connect anew, because certificates were renewed or are about to end."""

    def flush(self) -> bool:
        """Sends what was encrypted and did not fit into the socket; True if nothing of that is left."""
