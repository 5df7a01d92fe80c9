from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

import pytest
import uvloop

from elasticps.admin import AdminServer, fetch_health, fetch_status, start_admin
from elasticps.errors import ClusterUnreachable, ConfigError

STATUS: dict[str, Any] = {
    "id": "s0",
    "pid": os.getpid(),
    "address": "127.0.0.1:4000",
    "admin": "127.0.0.1:4001",
    "incarnation": 3,
    "state": "serving",
    "epoch": 7,
    "ranges_headed": 85,
    "ranges_held": 86,
    "rows": 5_000_000_000,
    "bytes": 1 << 40,
    "connections": 2,
    "pushes": 10,
    "pulls": 20,
    "tables": 1,
    "uptime_s": 1.5,
}


async def started(**changes: Any) -> AdminServer:
    return await start_admin("127.0.0.1", 0, lambda: {**STATUS, **changes})


def test_status_arrives_as_the_server_gave_it() -> None:
    async def main() -> None:
        server = await started()
        try:
            assert await fetch_status(server.address, timeout_s=5.0) == STATUS
        finally:
            await server.stop()

    uvloop.run(main())


def test_health_follows_set_serving() -> None:
    async def main() -> None:
        server = await started()
        try:
            assert await fetch_health(server.address, 5.0) == "NOT_SERVING"
            await server.set_serving(True)
            assert await fetch_health(server.address, 5.0) == "SERVING"
            assert await fetch_health(server.address, 5.0, "elasticps.v1.Admin") == "SERVING"
            assert await fetch_health(server.address, 5.0, "elasticps.v1.Other") == "SERVICE_UNKNOWN"
        finally:
            await server.stop()

    uvloop.run(main())


def test_a_status_that_does_not_fit_the_message_fails_the_call_and_not_the_server() -> None:
    async def main() -> None:
        server = await started(rows=-1)
        try:
            with pytest.raises(ClusterUnreachable, match=server.address):
                await fetch_status(server.address, timeout_s=5.0)
            assert await fetch_health(server.address, 5.0) == "NOT_SERVING"
        finally:
            await server.stop()

    uvloop.run(main())


def test_nobody_there_is_said_with_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ClusterUnreachable, match=address):
            uvloop.run(fetch_status(address, timeout_s=5.0))


def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    async def main() -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen()
            with pytest.raises(ClusterUnreachable, match=r"did not answer within 0\.2 s"):
                await asyncio.wait_for(fetch_status(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.2), 10)

    uvloop.run(main())


def test_a_taken_port_is_a_clear_error() -> None:
    async def main() -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ConfigError, match=f"admin port 127.0.0.1:{port}"):
                await start_admin("127.0.0.1", port, lambda: STATUS)

    uvloop.run(main())


def test_a_proxy_for_the_outside_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    async def main() -> None:
        server = await started()
        try:
            assert (await fetch_status(server.address, timeout_s=5.0))["id"] == "s0"
        finally:
            await server.stop()

    uvloop.run(main())
