"""TLS between an asyncio transport and a `BufferedProtocol` that knows nothing of it: a protocol to one, a transport to
the other.

Until the peer has proved who it is, a connection costs a socket, OpenSSL's state and at most MAX_HANDSHAKE_BYTES, for
at most HANDSHAKE_S. There are MAX_HANDSHAKES at once, then the oldest makes room. Afterwards a connection has no memory
of its own but what is on its way: all of a process receive into the same buffer, one after the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, cast

from elasticps.security.channel import Buffer, Channel, Expect

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 256  # at once, of connections that were accepted
_READ_BYTES = 256 << 10
_JOINED_BYTES = 16 << 10  # a record; buffers that fit into one are not worth several
_raw = memoryview(bytearray(_READ_BYTES))


class TlsTransport(asyncio.BufferedProtocol, asyncio.Transport):
    """`upper` gets this as its transport once the handshake is done, and hears nothing of a connection where it fails.

    done(error) is called when the handshake is over, with None if it succeeded.
    """

    def __init__(
        self, upper: asyncio.BufferedProtocol, channel: Channel, done: Callable[[TlsTransport, Exception | None], None]
    ) -> None:
        super().__init__()
        self.channel = channel
        self._upper = upper
        self._done = done
        self._lower: asyncio.Transport
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False  # before it began
        self._open = False  # the handshake is done
        self._paused = False  # by the upper protocol
        self._left = False  # bytes may have been received that it has not read
        self._gathering = False  # what is written leaves together, at the end of the turn

    # --- the lower side: a protocol -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._lower = cast(asyncio.Transport, transport)
        if self._refused:
            self._lower.abort()
            return
        self._timer = self._loop.call_later(HANDSHAKE_S, self.give_up, f"no handshake within {HANDSHAKE_S:.0f} s")
        self._guarded(self._shake)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _raw

    def buffer_updated(self, nbytes: int) -> None:
        self._guarded(self._take, nbytes)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_handshake(ConnectionResetError("the peer closed the connection during the handshake"))
        if self._open:
            self._upper.connection_lost(exc)

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
        if self._timer is None:
            self._refused = True
            return
        self._end_handshake(ConnectionResetError(why))
        if gently:
            self._lower.close()
        else:
            self._lower.abort()

    def _end_handshake(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._done(self, error)

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


class Shaking(Protocol):
    """A connection that was accepted, until its handshake is over."""

    def give_up(self, why: str, *, gently: bool = False) -> None:
        """Ends it. gently: what the peer was told leaves first."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of a transport."""


class Gate:
    """How connections of a server begin: in the clear without credentials, else with TLS."""

    def __init__(self, credentials: Credentials | None = None) -> None:
        self.credentials = credentials
        self._shaking: dict[Shaking, None] = {}  # those that were accepted, oldest first
        self._told_s = 0.0
        self._untold = 0

    def accept(self, protocol: asyncio.BufferedProtocol) -> asyncio.BufferedProtocol:
        """What a listener gives a new connection, for `protocol` to serve."""
        if self.credentials is None:
            return protocol
        channel = Channel(self.credentials, anybody, server=True)
        transport = TlsTransport(protocol, channel, self.accepted)
        self.admit(transport)
        return transport

    def admit(self, transport: Shaking) -> None:
        """A handshake begins, which `accepted` is told the end of; if there are too many, the oldest makes room."""
        self._shaking[transport] = None
        if len(self._shaking) > MAX_HANDSHAKES:
            next(iter(self._shaking)).give_up("too many handshakes at once")

    def accepted(self, transport: Shaking, error: Exception | None) -> None:
        """It is over, well or not."""
        self._shaking.pop(transport, None)
        if error is None:
            return
        self._untold += 1
        if time.monotonic() - self._told_s > 1.0:  # whoever knocks in vain is not to fill the disk
            self._told_s, count, self._untold = time.monotonic(), self._untold, 0
            peer = transport.get_extra_info("peername")
            log.warning("refused peer=%s reason=%r refusals=%d", peer, str(error), count)

    async def dial(
        self, connect: Callable[..., Awaitable[object]], protocol: asyncio.BufferedProtocol, host: str, port: int,
        expect: Expect,
    ) -> None:  # fmt: skip
        """Connects `protocol`, in the clear by `connect`; returns when it has its transport. OSError if that fails, or
        another one answers."""
        if self.credentials is None:
            await connect(lambda: protocol, host, port)
            return
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def over(_: TlsTransport, error: Exception | None) -> None:
            if done.cancelled():
                return
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        channel = Channel(self.credentials, expect, server=False)
        transport, _ = await loop.create_connection(lambda: TlsTransport(protocol, channel, over), host, port)
        try:
            await done
        except asyncio.CancelledError:
            transport.abort()
            raise


def anybody(peer: object) -> None:
    """Whoever has a certificate; what it may do depends on what it says it came for."""
