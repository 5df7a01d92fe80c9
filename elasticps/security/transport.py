"""TLS between an asyncio transport and a `BufferedProtocol` that knows nothing of it: a protocol to one, a transport to
the other.

Once its handshake is done (`gate.py`) a connection has no memory of its own but what is on its way: all of a process
receive into the same buffer, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, cast

from elasticps.security.channel import Buffer, Channel
from elasticps.security.gate import Over, TlsHandshake

log = logging.getLogger(__name__)

_READ_BYTES = 256 << 10
_JOINED_BYTES = 16 << 10  # a record; buffers that fit into one are not worth several
_raw = memoryview(bytearray(_READ_BYTES))


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """`upper` gets this as its transport once the handshake is done, and hears nothing of a connection where it fails;
    `over` is told in any case."""

    def __init__(self, upper: asyncio.BufferedProtocol, channel: Channel, over: Over) -> None:
        super().__init__()
        self.channel = channel
        self._upper = upper
        self._over = over
        self._lower: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._handshake: TlsHandshake | None = None  # until there is a connection
        self._refused = ""  # why it is not to begin
        self._open = False  # the handshake is done
        self._paused = False  # by the upper protocol
        self._left = False  # bytes may have been received that it has not read
        self._gathering = False  # what is written leaves together, at the end of the turn

    # --- the lower side: a protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lower = cast(asyncio.Transport, transport)
        self._handshake = TlsHandshake(self._loop, self, self._over)
        if self._refused:
            self.give_up(self._refused)
        else:
            self._guarded(self._shake)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _raw

    def buffer_updated(self, nbytes: int) -> None:
        self._guarded(self._take, nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._open:
            self._upper.connection_lost(exc)
        else:
            self._end_handshake(ConnectionResetError("the peer closed the connection during the handshake"))

    def pause_writing(self) -> None:
        if self._open:
            self._upper.pause_writing()

    def resume_writing(self) -> None:
        if self._open:
            self._upper.resume_writing()

    def _take(self, nbytes: int) -> None:
        self.channel.received(_raw[:nbytes])
        if self._open:
            self._read()
        else:
            self._shake()

    def _shake(self) -> None:
        try:
            done = self.channel.shake()
        finally:
            self._send()
        if done:
            self._open = True
            self._end_handshake(None)
            self._upper.connection_made(self)
            self._read()

    def _read(self) -> None:
        """Hands on what there is, as long as it is wanted."""
        self._gathering = True
        try:
            while not (self._paused or self._lower.is_closing()):
                if not (n := self.channel.read_into(cast(memoryview, self._upper.get_buffer(-1)))):
                    self._left = False
                    return
                self._upper.buffer_updated(n)
            self._left = True
        finally:
            self._gathering = False
            self._send()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except ConnectionResetError as error:
            if self._open:
                log.debug("connection with %s: %s", self.channel.peer, error)
                self._lower.abort()
            else:
                self.give_up(str(error), gently=True)

    def give_up(self, why: str, *, gently: bool = False) -> None:
        """Ends a connection whose peer has not proved who it is. gently: what it was told leaves first."""
        if self._handshake is None:
            self._refused = why
        elif self._handshake.end(ConnectionResetError(why)):
            if gently:
                self._lower.close()
            else:
                self._lower.abort()

    def _end_handshake(self, error: Exception | None) -> None:
        if self._handshake is not None:
            self._handshake.end(error)

    def _send(self) -> None:
        if data := self.channel.outgoing():
            self._lower.write(data)

    # --- the upper side: a transport ----------------------------------------------------------------------------------

    def write(self, data: Buffer) -> None:
        self._write((data,))

    def writelines(self, list_of_data: Iterable[Buffer]) -> None:
        buffers = list(list_of_data)
        small = sum(map(len, buffers)) <= _JOINED_BYTES
        self._write((b"".join(buffers),) if small else buffers)

    def _write(self, buffers: Iterable[Buffer]) -> None:
        if self._lower.is_closing():
            return
        try:
            self.channel.write(buffers)
        except ConnectionResetError:
            self._lower.abort()
            return
        if not self._gathering or self.channel.waiting_bytes > _READ_BYTES:
            self._send()

    def pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self._lower.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._lower.resume_reading()
            if self._left:
                self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._left and not self._gathering:
            self._guarded(self._read)

    def is_reading(self) -> bool:
        return not self._paused

    def close(self) -> None:
        if not self._lower.is_closing():
            self.channel.close()
            self._send()
            self._lower.close()

    def abort(self) -> None:
        self._lower.abort()

    def is_closing(self) -> bool:
        return self._lower.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._lower.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._lower.get_write_buffer_size() + self.channel.waiting_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.channel if name == "channel" else self._lower.get_extra_info(name, default)
