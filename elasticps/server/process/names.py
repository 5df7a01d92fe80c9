"""Asks other servers: whether one is alive under this server's name, and whether one stays in the cluster."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from coordinator.connect import insist
from coordinator.core import fields
from coordinator.core.keys import SERVERS, server_of
from coordinator.core.store import Store
from coordinator.core.view import ServerInfo
from elasticps.admin import fetch_health, fetch_status
from elasticps.errors import ClusterUnreachable, ConfigError, ServerError

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

log = fields.logger(__name__)

_LEASE_S = 6.0  # by then the lease of a dead server has run out
_LOOK_S = 0.2
_ANSWER_S = 1.0


async def wait_for_name(
    store: Store, name: str, address: str, timeout_s: float, credentials: Credentials | None = None
) -> None:
    """Returns when no living server has this name; ConfigError if one has.

    The registered server has died if nothing listens at its address, or if the address is ours now. A server that is
    frozen or cannot be reached counts as dead when its lease has run out.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + _LEASE_S
    logged = False
    while (entry := await insist(lambda: store.get(SERVERS + name), timeout_s)) is not None:
        try:
            other = server_of(entry.key, entry.value)
        except ValueError as error:
            if loop.time() > until:
                raise ConfigError(
                    f"what is registered under {SERVERS + name} cannot be read: {error}. Delete that key, or give "
                    "--take-over to put this server in its place"
                ) from None
            await asyncio.sleep(_LOOK_S)
            continue
        if other.address == address or await _refuses(other.address):
            return
        if loop.time() > until or await _answers(other, credentials):
            raise ConfigError(
                f"a server called {name!r} is alive at {other.address} (incarnation {other.incarnation}): take another "
                "--name, or end that one first, or give --take-over to put this one in its place"
            )
        if not logged:
            log.warning("waiting until the lease of whoever had this name has ended", address=other.address)
            logged = True
        await asyncio.sleep(_LOOK_S)


async def _refuses(address: str) -> bool:
    """Whether nothing listens at an address."""
    host, _, port = address.rpartition(":")
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            try:
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            except ConnectionRefusedError:
                return True
            writer.transport.abort()
    return False


async def _answers(other: ServerInfo, credentials: Credentials | None) -> bool:
    try:
        status = await fetch_status(other.admin, _ANSWER_S, credentials)
    except (ClusterUnreachable, ServerError):
        return False
    return (status["id"], status["incarnation"]) == (other.name, other.incarnation)


async def stays(other: ServerInfo, credentials: Credentials | None = None) -> bool:
    """Whether another server serves and does not leave; False if it does not answer."""
    try:
        return await fetch_health(other.admin, _ANSWER_S, credentials=credentials) == "SERVING"
    except ClusterUnreachable:
        return False
    except ServerError:  # it is alive, and refuses to answer us
        return True
