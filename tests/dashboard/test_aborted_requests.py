"""Connections of the dashboard to servers that go while they are asked."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from elasticps.admin import admin_pb2
from elasticps.dashboard.poller import ServerConnection


async def _close_during_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as frozen:  # the kernel takes connections, and nobody answers
        peer = ServerConnection("server-1", 1, "{}:{}".format(*frozen.getsockname()), None, lambda _: None)
        requests = asyncio.create_task(peer.ask("Tables", admin_pb2.TablesRequest(), 60.0))
        given_up = asyncio.create_task(peer.ask("Status", admin_pb2.StatusRequest(), 60.0))
        await asyncio.sleep(0)  # both are under way
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        await peer.close()
        with pytest.raises(grpc.aio.UsageError, match="was closed"):
            await requests


def test_a_request_under_way_ends_with_its_connection() -> None:
    """A frozen server leaves the store while it is asked: the dashboard asked nobody for tables any more after that."""
    asyncio.run(_close_during_a_request())
