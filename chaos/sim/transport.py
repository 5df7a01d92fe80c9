"""asyncio's transport over a virtual socket. As uvloop's: what is written leaves at the end of the loop's turn, by
reference, so whoever writes a buffer must leave it alone until it is out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from chaos.sim.network import Socket
from elasticps.server.network.socket_transport import SocketTransport

if TYPE_CHECKING:
    from chaos.sim.loop import Loop

READS_PER_TURN = 8
READ_BYTES = 64 << 10


class Transport(SocketTransport[asyncio.BaseProtocol]):
    """Between one socket and one protocol."""

    _loop: Loop

    def __init__(self, loop: Loop, sock: Socket, protocol: asyncio.BaseProtocol) -> None:
        peer = (sock.peer.process.host, sock.number) if sock.peer is not None else None
        super().__init__(loop, protocol, {"peername": peer})
        self._socket = sock
        self._scheduled = False  # a callback for `_ready` is on its way
        self._wakes = asyncio.Handle(self._ready, (), loop)  # one for all times: it is never cancelled
        sock.notify = self._notified
        protocol.connection_made(self)
        self._notified()

    # --- reading ----------------------------------------------------------------------------------------------------

    def _notified(self) -> None:
        if not self._scheduled and not self._ended:
            self._scheduled = True
            self._loop.run_soon(self._wakes)

    def _ready(self) -> None:
        self._scheduled = False
        if self._queue and self._socket.writable:
            self.send_queued()
        for _ in range(READS_PER_TURN):
            if not (self.is_reading() and self._socket.readable):
                return
            try:
                n = self._read()
            except BlockingIOError:
                return
            except OSError as error:
                self.end(error)
                return
            except Exception as error:  # any: a bug of the protocol, reported as asyncio's own transports do
                self._loop.call_exception_handler({"message": "a protocol failed", "exception": error})
                self.end(error)
                return
            if not n:
                if not cast(asyncio.Protocol, self._connection).eof_received():
                    self.close()
                else:
                    self._reading = False
                return
        self._notified()

    def _read(self) -> int:
        protocol = self._connection
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

    def resume_reading(self) -> None:
        if not self._reading:
            super().resume_reading()
            self._notified()

    # --- writing, and the end ---------------------------------------------------------------------------------------

    def _look_for(self) -> None:
        pass  # the socket tells of itself

    def _leave(self, queued: bool) -> None:
        if self._queue.nbytes > self._high and not self._writing_paused:
            self.send_queued()  # so much must not wait for the end of the turn
        else:
            self._loop.flush_later(self)

    def _send(self) -> None:
        self._queue.send(self._socket)

    def _close(self) -> None:
        self._socket.close()
