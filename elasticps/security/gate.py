"""Whom a server waits for to prove who they are: for how long, and for how many at once.

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
        """Ends it. gently: what the peer was told leaves first."""

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As of a transport."""


Over: TypeAlias = Callable[[Shaking, Exception | None], None]
"""Is told that a handshake is over, with None if it succeeded."""


class TlsHandshake:
    """One that has begun: who waits for its end is told once, and in time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: Shaking, over: Over) -> None:
        self._transport = transport
        self._over: Over | None = over
        self._timer = loop.call_later(HANDSHAKE_S, transport.give_up, f"no handshake within {HANDSHAKE_S:.0f} s")

    def end(self, error: Exception | None) -> bool:
        """It is over. False if it was already."""
        over, self._over = self._over, None
        if over is None:
            return False
        self._timer.cancel()
        over(self._transport, error)
        return True


def resolving(future: asyncio.Future[None]) -> Over:
    """Has a future, unless nobody waits for it any more, hear how a handshake ended."""

    def over(_: Shaking, error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    return over


async def proof(proved: asyncio.Future[None], dialled: asyncio.Transport) -> None:
    """Waits for the handshake of a connection that was dialled; who waits no longer gives it up."""
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
        """How many were accepted and have not proved it yet."""
        return len(self._shaking)

    def admit(self, transport: Shaking) -> None:
        """A handshake begins, which `accepted` is told the end of; if there are too many, the oldest makes room."""
        self._shaking[transport] = None
        if len(self._shaking) > self._most:
            next(iter(self._shaking)).give_up("too many handshakes at once")

    def accepted(self, transport: Shaking, error: Exception | None) -> None:
        """It is over, well or not."""
        self._shaking.pop(transport, None)
        if error is None:
            return
        self._unreported += 1
        if time.monotonic() - self._warned_s > 1.0:  # whoever knocks in vain is not to fill the disk
            self._warned_s, count, self._unreported = time.monotonic(), self._unreported, 0
            peer = transport.get_extra_info("peername")
            log.warning("refused peer=%s reason=%r refusals=%d", peer, str(error), count)


def anybody(peer: object) -> None:
    """Whoever has a certificate; what it may do depends on what it says it came for."""
