"""Dials another server: connects, says hello, and waits until it has welcomed this one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from coordinator.core import fields
from coordinator.core.view import ServerInfo
from elasticps.security.identity import Expect, Identity, Role
from elasticps.server.network.connection import Connection
from elasticps.wire.frames import Kind, json_frame

log = fields.logger(__name__)

CONNECT_TIMEOUT_S = 1.0

Dial: TypeAlias = Callable[[Connection, str, int, Expect], Awaitable[None]]
"""Connects to a host and port, and proves with `Expect` who is there; OSError if that fails."""


async def dial_peer(
    dial: Dial, connection: Connection, server: ServerInfo, cluster: str, hello: dict[str, Any], epoch: int
) -> None:  # fmt: skip
    """One attempt: gives `connection` a transport to a server, says hello, and returns when it is welcome or over.
    hello: who speaks, and what for; epoch: of the view that this server follows."""
    host, _, port = server.address.rpartition(":")

    def expect(peer: Identity) -> None:
        peer.require(cluster, Role.SERVER, server.name)

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await dial(connection, host.strip("[]"), int(port), expect)
    except (OSError, ValueError) as error:  # nobody there in time, or an address that is none
        log.debug("no link", peer=server.member, reason=error)
        return
    connection.member = server.member
    document = {"cluster": cluster, "to": list(server.member), **hello}
    connection.send(json_frame(Kind.HELLO, document, epoch=epoch))
    loop = asyncio.get_running_loop()
    deadline = loop.time() + CONNECT_TIMEOUT_S
    try:
        while loop.time() <= deadline and not connection.known:
            if connection.transport.is_closing():
                return
            await asyncio.sleep(0.002)
    finally:  # also where the caller gives up
        if not connection.known:
            connection.transport.abort()
