"""Chooses how a server accepts and dials connections: by compiled code where it can, else by the event loop."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from elasticps.security.channel import Channel
from elasticps.security.gate import Gate, anybody, proof, resolving
from elasticps.security.identity import Expect
from elasticps.security.transport import TlsTransport
from elasticps.server.network.pump import Pump
from elasticps.server.network.secure import SecureStreams

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials
    from elasticps.server.fast.path import FastPath
    from elasticps.server.network.busy_poll import BusyPoll
    from elasticps.server.network.connection import Connection


class Listening(Protocol):
    """Accepts connections."""

    def close(self) -> None:
        """Accepts no more."""


class Streams(Protocol):
    """Accepts and dials the connections of one server, in the event loop's thread. With TLS, a connection object gets
    its transport only when its peer has proved who it is."""

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listening:
        """Accepts connections from a socket that listens, until the listener is closed, and the socket with it."""

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; returns when it has its transport. OSError if nobody answers or, with TLS, if `expect`
        rejects the peer."""

    def close(self) -> None:
        """Closes what is left when all connections have ended."""


def streams(loop: asyncio.AbstractEventLoop, gate: Gate, path: FastPath, busy_poll: BusyPoll) -> Streams:
    """The streams of a server. The event loop itself is used where it cannot watch descriptors, on systems without
    epoll, and with TLS where compiled code finds no OpenSSL."""
    credentials, watching = gate.credentials, watches(loop)
    if credentials is None:
        return Pump(loop, path, busy_poll) if watching and hasattr(select, "epoll") else LoopStreams(loop)
    if watching and credentials.native_context() is not None:
        return SecureStreams(loop, gate, credentials)
    return TlsStreams(loop, gate, credentials)


def watches(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether a loop can watch descriptors (`add_reader`)."""
    real = getattr(type(loop), "add_reader", asyncio.AbstractEventLoop.add_reader)
    return real is not asyncio.AbstractEventLoop.add_reader


class LoopStreams:
    """Streams of an event loop, in the clear."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listening:
        """Accepts connections from a socket that listens."""
        return await self._loop.create_server(make, sock=sock)

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; OSError if nobody answers."""
        await self._loop.create_connection(lambda: connection, host, port)

    def close(self) -> None:
        """There is nothing to close."""


class TlsStreams:
    """Streams of an event loop, with TLS in Python."""

    def __init__(self, loop: asyncio.AbstractEventLoop, gate: Gate, credentials: Credentials) -> None:
        self._loop = loop
        self._gate = gate
        self._credentials = credentials

    async def create_server(self, make: Callable[[], Connection], *, sock: socket.socket) -> Listening:
        """Accepts connections from a socket that listens."""

        def accept() -> TlsTransport:
            channel = Channel(self._credentials, anybody, server=True)
            accepted = TlsTransport(make(), channel, self._gate.accepted)
            self._gate.admit(accepted)
            return accepted

        return await self._loop.create_server(accept, sock=sock)

    async def dial(self, connection: Connection, host: str, port: int, expect: Expect) -> None:
        """Connects `connection`; OSError if nobody answers, or if `expect` rejects the peer."""
        proved: asyncio.Future[None] = self._loop.create_future()
        channel = Channel(self._credentials, expect, server=False)
        dialled = TlsTransport(connection, channel, resolving(proved))
        await self._loop.create_connection(lambda: dialled, host, port)
        await proof(proved, dialled)

    def close(self) -> None:
        """There is nothing to close."""
