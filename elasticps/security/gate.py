"""Bounds the TLS handshakes that a server waits for: how long each may take, and how many run at once.

Until a peer has, its connection costs a socket, OpenSSL's state and at most MAX_HANDSHAKE_BYTES, for at most
HANDSHAKE_S. There are MAX_HANDSHAKES at once, then the oldest makes room.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
MAX_HANDSHAKES = 256  # at once, of connections that were accepted


class Shaking(Protocol):
    """A connection's transport, until its handshake is over."""

    def give_up(self, why: str, *, gently: bool = False) -> None:
        """Ends it. gently: bytes that wait for the socket leave first."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As `asyncio.Transport.get_extra_info`."""


Over: TypeAlias = Callable[[Shaking, Exception | None], None]
"""Is called when a handshake is over, with None if it succeeded."""


class TlsHandshake:
    """A handshake that has begun. Its end is reported once, and in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Shaking, over: Over) -> None:
        self._transport = transport
        self._over: Over | None = over
        self._timer = loop.call_later(HANDSHAKE_S, transport.give_up, f"no handshake within {HANDSHAKE_S:.0f} s")

    def end(self, error: Exception | None) -> bool:
        """Ends it and reports the result. False if it had ended already."""
        over, self._over = self._over, None
        if over is None:
            return False
        self._timer.cancel()
        over(self._transport, error)
        return True


def resolving(future: asyncio.Future[None]) -> Over:
    """A callback that resolves a future with a handshake's result, unless the future is done already."""

    def over(_: Shaking, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return over


async def proof(proved: asyncio.Future[None], dialled: asyncio.Transport) -> None:
    """Waits for the handshake of a dialled connection; cancelling the wait ends the connection."""
    try:
        await proved
    except asyncio.CancelledError:
        dialled.abort()
        raise


class Gate:
    """Who came to a process and has not proved yet who he is. Without credentials nobody has to. most: handshakes at
    once, if fewer are to be allowed than usual."""

    def __init__(self, credentials: Credentials | None = None, most: int = MAX_HANDSHAKES) -> None:
        self.credentials = credentials
        self._most = min(most, MAX_HANDSHAKES)
        self._shaking: dict[Shaking, None] = {}  # oldest first
        self._warned_s = 0.0
        self._unreported = 0

    @property
    def shaking(self) -> int:
        """The number of accepted connections whose handshake is under way."""
        return len(self._shaking)

    def admit(self, transport: Shaking) -> None:
        """Notes that a handshake began, whose end `accepted` gets; if there are too many, the oldest makes room."""
        self._shaking[transport] = None
        if len(self._shaking) > self._most:
            next(iter(self._shaking)).give_up("too many handshakes at once")

    def accepted(self, transport: Shaking, error: Exception | None) -> None:
        """Notes that a handshake is over, however it ended."""
        self._shaking.pop(transport, None)
        if error is None:
            return
        self._unreported += 1
        if time.monotonic() - self._warned_s > 1.0:  # whoever knocks in vain is not to fill the disk
            self._warned_s, count, self._unreported = time.monotonic(), self._unreported, 0
            peer = transport.get_extra_info("peername")
            log.warning("refused peer=%s reason=%r refusals=%d", peer, str(error), count)


def anybody(peer: object) -> None:
    """Accepts any holder of a certificate; its introduction decides what it may do."""
