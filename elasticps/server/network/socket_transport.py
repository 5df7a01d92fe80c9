"""The base of a server's transports for sockets that no event loop reads and writes: the queue of what is to be sent,
pauses, and the end. Subclasses receive and send: in the clear, with TLS, and in the simulator."""

from __future__ import annotations

import asyncio
import socket
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Generic, TypeVar

from elasticps.wire.frames import Buffer
from elasticps.wire.stream import SendQueue

P = TypeVar("P", bound=asyncio.BaseProtocol)

HIGH_BYTES = 64 << 10


class SocketTransport(asyncio.Transport, Generic[P]):
    """Connects a socket with a protocol, `connection`. Buffers are sent without a copy.

    extra: what `get_extra_info` returns.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: P, extra: Mapping[str, Any]) -> None:
        super().__init__(extra)
        self._loop = loop
        self._connection = connection
        self._queue = SendQueue()
        self._high, self._low = HIGH_BYTES, HIGH_BYTES // 4
        self._reading = True
        self._writing_paused = False
        self._closing = self._ended = False

    @abstractmethod
    def _look_for(self) -> None:
        """Waits for the socket to be readable or writable, as this connection needs it."""

    def _left(self) -> bool:
        """Whether something is queued."""
        return bool(self._queue)

    def _waits(self) -> bool:
        """Whether what is written now has to wait behind what was written before."""
        return self._left()

    def _leave(self, queued: bool) -> None:
        """Sends what was written: at once, or when the socket is writable if something is queued before it."""
        if queued:
            self._look_for()
        else:
            self.send_queued()

    @abstractmethod
    def _send(self) -> None:
        """Gives the socket what it takes."""

    @abstractmethod
    def _close(self) -> None:
        """Stops waiting for the socket, and closes it."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False
        self._look_for()

    def resume_reading(self) -> None:
        self._reading = True
        self._look_for()

    # --- writing ----------------------------------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._queue.nbytes

    def write(self, data: Buffer) -> None:
        self.writelines((data,))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._closing:
            return
        queued = self._waits()
        self._queue.add(list_of_data)
        self._leave(queued)
        self._pause_if_full()

    def send_queued(self) -> None:
        """Gives the socket what it takes."""
        try:
            self._send()
        except OSError as error:
            self.end(error)
            return
        if self._ended:
            return
        self._look_for()
        if self._writing_paused and self._queue.nbytes <= self._low:
            self._writing_paused = False
            self._connection.resume_writing()
        if self._closing and not self._left():
            self.end(None)

    def _pause_if_full(self) -> None:
        if self._queue.nbytes > self._high and not self._writing_paused and not self._ended:
            self._writing_paused = True
            self._connection.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    # --- the end ----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Ends when the queue is empty."""
        if not self._closing:
            self._closing = True
            if self._left():
                self._look_for()
            else:
                self.end(None)

    def abort(self) -> None:
        self.end(None)

    def end(self, error: Exception | None) -> None:
        """Ends at once; the queue is dropped."""
        self._closing = True
        if self._ended:
            return
        self._ended = True
        self._queue.clear()
        self._close()
        self._tell_lost(error)

    def _tell_lost(self, error: Exception | None) -> None:
        self._loop.call_soon(self._connection.connection_lost, error)


def described(sock: socket.socket) -> dict[str, Any]:
    """What a transport over this socket returns from `get_extra_info`."""
    try:
        peer = sock.getpeername()
    except OSError:  # it has gone already
        peer = None
    return {"peername": peer, "socket": sock}
