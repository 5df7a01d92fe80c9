"""A connection to another server that does not come to a welcome is closed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from coordinator.core.view import ServerInfo
from elasticps.server.network import dialling
from elasticps.server.network.dialling import dial_peer

SERVER = ServerInfo("s1", 1, "127.0.0.1:1", "127.0.0.1:2")


class Transport:
    """Notes whether it was closed."""

    closed = False

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


class Connection:
    """Has a transport once it is dialled. known: the peer has welcomed it."""

    known = False
    member: object = None

    def __init__(self) -> None:
        self.transport = Transport()
        self.greeted = asyncio.Event()

    def send(self, frame: bytes) -> None:
        self.greeted.set()


async def _connect(*_: object) -> None:
    """There is somebody at every address."""


async def dial(connection: Connection) -> None:
    await dial_peer(cast(Any, _connect), cast(Any, connection), SERVER, "c", {}, 1)


def test_a_peer_that_welcomes_stays_connected() -> None:
    async def test() -> None:
        connection = Connection()
        dialled = asyncio.create_task(dial(connection))
        await connection.greeted.wait()
        connection.known = True
        await dialled
        assert not connection.transport.closed

    asyncio.run(test())


def test_a_peer_that_does_not_welcome_in_time_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "CONNECT_TIMEOUT_S", 0.01)

    async def test() -> None:
        connection = Connection()
        await dial(connection)
        assert connection.transport.closed

    asyncio.run(test())


def test_a_connection_that_is_given_up_before_its_welcome_is_closed() -> None:
    async def test() -> None:
        connection = Connection()
        dialled = asyncio.create_task(dial(connection))
        await connection.greeted.wait()
        dialled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dialled
        assert connection.transport.closed

    asyncio.run(test())
