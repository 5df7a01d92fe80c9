"""Rights of roles on a server's administration port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from elasticps.admin import admin_pb2, admin_pb2_grpc
from elasticps.admin.client import fetch_health, open_channel
from elasticps.admin.cuts import CutClient
from elasticps.admin.service import start_admin
from elasticps.errors import ServerError
from elasticps.security.authority import Authority
from elasticps.security.credentials import LOOK_S, Credentials
from elasticps.security.identity import Identity
from tests.admin.test_admin import FakeServer
from tests.security.conftest import Holder, issued


@asynccontextmanager
async def serving(target: FakeServer, credentials: Credentials) -> AsyncIterator[str]:
    server = await start_admin("127.0.0.1", 0, lambda: target, credentials)
    try:
        await server.set_serving(True)
        yield server.address
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("who", "may"),
    [("worker/ads/w0", False), ("server/s1", False), ("coordinator/c0", True), ("operator/me", True)],
)
def test_only_roles_that_take_checkpoints_may_have_files_written(holder: Holder, who: str, may: bool) -> None:
    """To ask how far it is begins it: too early, and the ranges that have not passed the cut make it fail."""

    async def test() -> None:
        server = FakeServer()
        async with serving(server, holder("server/s0")) as address, open_channel(address, holder(who)) as channel:
            answer = admin_pb2_grpc.AdminStub(channel).CutWritten(admin_pb2.CutWrittenRequest(cut=2), timeout=60)
            if may:
                assert (await answer).writes
            else:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await answer
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert server.cuts.happened == ([("written", 2, 0.0)] if may else [])

    asyncio.run(test())


def test_silent_connections_are_closed_after_a_while(holder: Holder) -> None:
    """Each costs the server a descriptor: gRPC by itself would wait for two minutes."""

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with serving(FakeServer(), holder("server/s0")) as address:
            with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as silent:
                silent.setblocking(False)
                assert await asyncio.wait_for(loop.sock_recv(silent, 1), 30) == b""

    asyncio.run(test())


def test_clients_of_another_cluster_get_no_health(
    authority: Authority, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor takes the places of those who may ask: each that watches has one for as long as it likes."""
    # gRPC looks for the server's name, and the neighbour's own cluster has another one.
    monkeypatch.setattr("elasticps.admin.client.host_name", lambda cluster, role: "server.train.elasticps")
    neighbour = Credentials(authority.issue(Identity.parse("spiffe://elasticps/prod/worker/ads/w0")), "prod")

    async def test() -> None:
        async with serving(FakeServer(), holder("server/s0")) as address:
            assert await fetch_health(address, 60, credentials=holder("worker/ads/w0")) == "SERVING"
            with pytest.raises(ServerError, match="this is cluster 'train', and you are spiffe://elasticps/prod/"):
                await fetch_health(address, 60, credentials=neighbour)
            async with open_channel(address, neighbour) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await watch.read()
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(test())


def test_requests_are_refused_once_the_certificate_has_expired(
    authority: Authority, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a key that was stolen would be good for as long as whoever has it stays connected."""

    async def test() -> None:
        server = FakeServer()
        operator = Credentials(issued(authority, "operator/me", days=1), "train")
        async with serving(server, holder("server/s0")) as address, open_channel(address, operator) as channel:
            stub = admin_pb2_grpc.AdminStub(channel)
            assert (await stub.Mark(admin_pb2.MarkRequest(mark=5), timeout=60)).complete
            monkeypatch.setattr("elasticps.admin.service.time", SimpleNamespace(time=lambda: operator.until_s))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Mark(admin_pb2.MarkRequest(mark=6), timeout=60)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
            assert "certificate has ended" in (caught.value.details() or "")
            assert sorted(server._marks) == [5]

    asyncio.run(test())


def test_an_open_connection_is_opened_again_when_the_certificate_was_replaced(
    authority: Authority, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a checkpoint that takes long, or a dashboard: the old certificate ends some time later."""
    now = 0.0
    operator = Credentials(issued(authority, "operator/me", days=1), "train", clock=lambda: now)
    ends_s = operator.until_s

    async def test() -> None:
        nonlocal now
        server = FakeServer()
        async with serving(server, holder("server/s0")) as address:
            cuts = CutClient(address, 60, operator)
            await cuts.state(2)
            issued(authority, "operator/me", days=9)
            now += 2 * LOOK_S
            monkeypatch.setattr("elasticps.admin.service.time", SimpleNamespace(time=lambda: ends_s + 1))
            await cuts.state(2)
            await cuts.close()

    asyncio.run(test())
