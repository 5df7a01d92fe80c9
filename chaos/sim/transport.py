"""asyncio's transport over a virtual socket. As uvloop's: what is written leaves at the end of the loop's turn, by
reference, so whoever writes a buffer must leave it alone until it is out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from chaos.sim.network import Socket
from elasticps.wire.unsent import Unsent

if TYPE_CHECKING:
    from chaos.sim.loop import Loop

HIGH_WATER_BYTES = 64 << 10
READS_PER_TURN = 8
READ_BYTES = 64 << 10


class Transport(asyncio.Transport):
    """Between one socket and one protocol."""

    def __init__(self, loop: Loop, sock: Socket, protocol: asyncio.BaseProtocol) -> None:
        super().__init__({"peername": (sock.peer.process.host, sock.number) if sock.peer is not None else None})
        self._loop = loop
        self._socket = sock
        self._protocol = protocol
        self._unsent = Unsent()
        self._high, self._low = HIGH_WATER_BYTES, HIGH_WATER_BYTES // 4
        self._paused_reading = False
        self._paused_writing = False
        self._closing = False
        self._lost = False
        self._asked = False  # a callback for `_ready` is on its way
        self._wakes = asyncio.Handle(self._ready, (), loop)  # one for all times: it is never cancelled
        sock.notify = self._notified
        protocol.connection_made(self)
        self._notified()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _notified(self) -> None:
        if not self._asked and not self._lost:
            self._asked = True
            self._loop.run_soon(self._wakes)

    def _ready(self) -> None:
        self._asked = False
        if self._unsent and self._socket.writable:
            self.flush()
        for _ in range(READS_PER_TURN):
            if self._paused_reading or self._closing or not self._socket.readable:
                return
            try:
                n = self._read()
            except BlockingIOError:
                return
            except OSError as error:
                self._end(error)
                return
            except Exception as error:  # the protocol's own
                self._loop.call_exception_handler({"message": "a protocol failed", "exception": error})
                self._end(error)
                return
            if not n:
                if not cast(asyncio.Protocol, self._protocol).eof_received():
                    self.close()
                else:
                    self._paused_reading = True
                return
        self._notified()

    def _read(self) -> int:
        protocol = self._protocol
        if isinstance(protocol, asyncio.BufferedProtocol):
            n = self._socket.recv_into(memoryview(protocol.get_buffer(READ_BYTES)).cast("B"))
            if n:
                protocol.buffer_updated(n)
            return n
        buffer = bytearray(READ_BYTES)
        n = self._socket.recv_into(memoryview(buffer))
        if n:
            cast(asyncio.Protocol, protocol).data_received(bytes(buffer[:n]))
        return n

    def is_reading(self) -> bool:
        return not (self._paused_reading or self._closing)

    def pause_reading(self) -> None:
        self._paused_reading = True

    def resume_reading(self) -> None:
        if self._paused_reading:
            self._paused_reading = False
            self._notified()

    # --- writing ----------------------------------------------------------------------------------------------------

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH_WATER_BYTES if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return self._unsent.nbytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        if self._closing:
            return
        self._unsent.add(list_of_data)
        if self._unsent.nbytes > self._high and not self._paused_writing:
            self.flush()  # so much must not wait for the end of the turn
            self._pause_if_full()
        else:
            self._loop.flush_later(self)

    def flush(self) -> None:
        """Gives the socket what it takes."""
        if self._lost:
            return
        try:
            self._unsent.send(self._socket)
        except OSError as error:
            self._end(error)
            return
        self._pause_if_full()
        if self._paused_writing and self._unsent.nbytes <= self._low:
            self._paused_writing = False
            self._protocol.resume_writing()
        if self._closing and not self._unsent:
            self._end(None)

    def _pause_if_full(self) -> None:
        if self._unsent.nbytes > self._high and not self._paused_writing and not self._lost:
            self._paused_writing = True
            self._protocol.pause_writing()

    def can_write_eof(self) -> bool:
        return False

    # --- the end ----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            if not self._unsent:
                self._end(None)

    def abort(self) -> None:
        self._end(None)

    def _end(self, error: Exception | None) -> None:
        self._closing = True
        if self._lost:
            return
        self._lost = True
        self._unsent.clear()
        self._loop.call_soon(self._protocol.connection_lost, error)
        self._socket.close()
