"""A server with TLS among strangers and compromised members of its own cluster."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
import uvloop

from coordinator.core.view import Roster, ServerInfo, View, WorkerInfo
from elasticps.security import gate, openssl
from elasticps.security.authority import Authority
from elasticps.security.channel import Channel
from elasticps.security.credentials import Credentials
from elasticps.security.gate import Gate
from elasticps.security.identity import Identity
from elasticps.server.options import ServerOptions
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, json_body, json_frame, unpack_header, view_frame
from tests.security.conftest import Holder, issued
from tests.server.conftest import until

RANGES = 16
WORKER = {"cluster": "train", "worker": 5, "name": "ads/w0", "app": "ads"}
LEADER = {"cluster": "train", "leader": "c0", "to": ["s0", 1]}
PEER = {"cluster": "train", "peer": ["s1", 1], "to": ["s0", 1], "number": 1}


@pytest.fixture(params=["compiled", "python"], autouse=True)
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers speak TLS both ways, and are not to differ."""
    if request.param == "python":
        monkeypatch.setattr(Credentials, "native_context", lambda credentials: None)
    else:
        assert openssl.LIBRARY is not None, "compiled code would not be tested with this Python"


class Target:
    """A server called s0, listening. It has a view that names s1 too, and a roster with one worker."""

    def __init__(self, credentials: Credentials) -> None:
        loop = asyncio.get_running_loop()
        self.info = ServerInfo("s0", 1, "127.0.0.1:1")
        self.gate = Gate(credentials)
        self.server = Server(self.info, "train", RANGES, loop, ServerOptions(gate=self.gate))
        self.server.follow(Roster(1, (WorkerInfo(5, "ads/w0", 1, "ads"), WorkerInfo(6, "shop/w0", 1, "shop")), "train"))
        self.server.adopt(self.view(1))
        self.port = 0

    def view(self, epoch: int) -> View:
        chains, since = np.zeros((RANGES, 1), np.int32), np.full(RANGES, 1)
        servers = (self.info, ServerInfo("s1", 1, "127.0.0.1:2"))
        return View("train", epoch, RANGES, 1, servers, chains, np.full(RANGES, -1, np.int32), since, "by hand")


@asynccontextmanager
async def target(credentials: Credentials) -> AsyncIterator[Target]:
    found = Target(credentials)
    sock = socket.create_server(("127.0.0.1", 0))
    found.port = sock.getsockname()[1]
    listener = await found.server.streams.create_server(found.server.connection, sock=sock)
    try:
        yield found
    finally:
        listener.close()
        found.server.close()
        await asyncio.sleep(0)


async def ask(port: int, credentials: Credentials, hello: dict[str, Any]) -> tuple[Header, dict[str, Any]]:
    """The answer of a server to a hello over TLS."""
    async with connected(port, credentials) as (reader, writer):
        writer.write(json_frame(Kind.HELLO, hello, epoch=1))
        return await answer(reader)


async def raw_answer(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    async with asyncio.timeout(60):
        header = unpack_header(await reader.readexactly(HEADER_BYTES))
        return header, await reader.readexactly(header.body)


async def answer(reader: asyncio.StreamReader) -> tuple[Header, dict[str, Any]]:
    header, body = await raw_answer(reader)
    return header, json_body(body)


@asynccontextmanager
async def connected(
    port: int, credentials: Credentials
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=credentials.client_context())
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    uvloop.run(main())


@pytest.mark.parametrize(
    ("who", "hello"),
    [
        ("worker/ads/w0", WORKER),
        ("worker/*/*", WORKER),
        ("worker/ads/*", WORKER),
        ("coordinator/c0", LEADER),
        ("server/s1", PEER),
    ],
)
def test_a_peer_with_a_matching_certificate_is_admitted(holder: Holder, who: str, hello: dict[str, Any]) -> None:
    async def main() -> None:
        async with target(holder("server/s0")) as s0:
            header, document = await ask(s0.port, holder(who), hello)
            assert (header.kind, document["server"]) == (Kind.WELCOME, "s0")

    run(main)


@pytest.mark.parametrize(
    ("who", "hello", "code"),
    [
        ("worker/ads/w1", WORKER, "identity"),
        ("worker/shop/w0", WORKER, "identity"),
        ("worker/shop/*", WORKER, "identity"),
        ("worker/shop/w0", WORKER | {"worker": 6}, "identity"),  # the roster says that 6 is shop's, the hello ads'
        ("worker/ads/w0", WORKER | {"worker": 6}, "identity"),
        ("worker/ads/w0", WORKER | {"worker": 6, "name": "shop/w0", "app": "shop"}, "identity"),
        ("server/s1", WORKER, "identity"),
        ("operator/me", WORKER, "identity"),
        ("worker/ads/w0", LEADER, "identity"),
        ("operator/me", LEADER, "identity"),
        ("server/s1", LEADER, "identity"),
        ("coordinator/c1", LEADER, "identity"),
        ("coordinator/c0", LEADER | {"leader": ["c0"]}, "identity"),
        ("worker/ads/w0", PEER, "identity"),
        ("coordinator/c0", PEER, "identity"),
        ("server/s2", PEER, "identity"),
        ("server/s2", PEER | {"peer": ["s2", 1]}, "incarnation"),  # the view does not name it
        ("server/s1", PEER | {"peer": ["s1", 2]}, "incarnation"),
    ],
)
def test_a_peer_with_another_identity_is_refused(holder: Holder, who: str, hello: dict[str, Any], code: str) -> None:
    async def main() -> None:
        async with target(holder("server/s0")) as s0:
            header, document = await ask(s0.port, holder(who), hello)
            assert (header.kind, document["code"]) == (Kind.ERROR, code)
            assert not any(c.known for c in s0.server.handshake.connections)

    run(main)


@pytest.mark.parametrize("who", ["train/operator/me", "train/server/s1", "train/worker/shop/w0", "prod/worker/ads/w9"])
def test_a_worker_unknown_to_the_roster_takes_no_workers_place(
    authority: Authority, holder: Holder, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """A hello of who is not in the roster yet waits for that, and has one of the places of workers meanwhile."""
    monkeypatch.setattr("elasticps.server.roles.handshake.MAX_WORKERS", 1)
    stranger = Credentials(authority.issue(Identity.parse(f"spiffe://elasticps/{who}")), who.partition("/")[0])

    async def test() -> None:
        async with target(holder("server/s0")) as s0, connected(s0.port, stranger) as (reader, writer):
            unknown = {"cluster": "train", "worker": 9, "name": "ads/w9", "app": "ads"}
            writer.write(json_frame(Kind.HELLO, unknown, epoch=1))
            header, document = await answer(reader)
            assert (header.kind, document["code"]) == (Kind.ERROR, "identity")
            assert (await ask(s0.port, holder("worker/ads/w0"), WORKER))[0].kind == Kind.WELCOME

    run(test)


def test_only_a_coordinators_view_counts(holder: Holder) -> None:
    async def main() -> None:
        async with target(holder("server/s0")) as s0:
            async with connected(s0.port, holder("server/s1")) as (reader, writer):
                writer.write(json_frame(Kind.HELLO, PEER, epoch=1))
                await answer(reader)
                writer.write(view_frame(s0.view(7)))
                writer.write(Header(Kind.GET_VIEW, epoch=0).pack())  # answered after what came before it
                header, _ = await raw_answer(reader)
                while header.kind != Kind.VIEW:
                    header, _ = await raw_answer(reader)
                assert s0.server.serving.epoch == 1
            async with connected(s0.port, holder("coordinator/c0")) as (reader, writer):
                writer.write(json_frame(Kind.HELLO, LEADER, epoch=1))
                await answer(reader)
                writer.write(view_frame(s0.view(7)))
                await until(lambda: s0.server.serving.epoch == 7)

    run(main)


def test_a_stranger_is_refused_and_disturbs_no_other(
    holder: Holder, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    other = Authority.create(tmp_path_factory.mktemp("other") / "ca")
    stranger = Credentials(issued(other, "worker/ads/w0"), "train")
    stranger.client_context().load_verify_locations(authority.ca)
    neighbour = Credentials(authority.issue(Identity.parse("spiffe://elasticps/prod/worker/ads/w0")), "prod")

    async def main() -> None:
        async with target(holder("server/s0")) as s0:
            assert (await ask(s0.port, neighbour, WORKER))[1]["code"] == "identity"
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await ask(s0.port, stranger, WORKER)
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await in_the_clear(s0.port, json_frame(Kind.HELLO, WORKER))
            nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            nobody.check_hostname, nobody.verify_mode = False, ssl.CERT_NONE
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await over(s0.port, nobody)
            old = holder("worker/ads/w0").client_context()
            old.minimum_version, old.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await over(s0.port, old)
            assert (await ask(s0.port, holder("worker/ads/w0"), WORKER))[0].kind == Kind.WELCOME

    run(main)


async def in_the_clear(port: int, frame: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(frame)
        while True:
            await asyncio.wait_for(reader.readexactly(1), 60)
    finally:
        writer.transport.abort()


async def over(port: int, context: ssl.SSLContext) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    try:
        writer.write(json_frame(Kind.HELLO, WORKER))
        await asyncio.wait_for(reader.readexactly(1), 60)
    finally:
        writer.transport.abort()


def test_stalled_handshakes_make_room_and_time_out(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_HANDSHAKES", 8)
    monkeypatch.setattr(gate, "HANDSHAKE_S", 0.5)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with target(holder("server/s0")) as s0:
            with mute(s0.port, 20) as silent:
                assert (await ask(s0.port, holder("worker/ads/w0"), WORKER))[0].kind == Kind.WELCOME
                assert s0.gate.shaking <= 8
                for each in silent:  # the oldest at once, the others when their time is over
                    assert await asyncio.wait_for(closed(loop, each), 60)
            assert not s0.gate.shaking

    run(main)


def test_a_connection_refused_before_its_handshake_leaves_nothing(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "MAX_HANDSHAKES", 0)

    async def main() -> None:
        async with target(holder("server/s0")) as s0:
            with mute(s0.port, 3) as silent:
                for each in silent:
                    assert await asyncio.wait_for(closed(asyncio.get_running_loop(), each), 60)
            assert not s0.gate.shaking

    run(main)


@contextmanager
def mute(port: int, count: int) -> Iterator[list[socket.socket]]:
    found = []
    try:
        for _ in range(count):
            found.append(socket.create_connection(("127.0.0.1", port)))
            found[-1].setblocking(False)
        yield found
    finally:
        for each in found:
            each.close()


async def closed(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bool:
    try:
        return await loop.sock_recv(sock, 1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_ends_with_its_certificate(
    holder: Holder, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with target(holder("server/s0")) as s0, connected(s0.port, holder("worker/ads/w0")) as (reader, writer):
            writer.write(json_frame(Kind.HELLO, WORKER))
            assert (await answer(reader))[0].kind == Kind.WELCOME
            s0.server.tick()
            (connection,) = s0.server.handshake.connections
            assert not connection.transport.is_closing()
            assert connection._channel is not None
            connection._channel.until_s = 0.0
            s0.server.tick()
            await asyncio.wait_for(reader.read(), 60)  # up to its end

    run(main)


def test_new_certificates_are_used_for_the_next_connection(authority: Authority, holder: Holder) -> None:
    now = 0.0
    files = issued(authority, "server/s0")
    mine = Credentials(files, "train", clock=lambda: now)

    async def serial(port: int) -> str:
        async with connected(port, holder("worker/ads/w0")) as (_, writer):
            return str(writer.get_extra_info("ssl_object").getpeercert()["serialNumber"])

    async def main() -> None:
        nonlocal now
        async with target(mine) as s0:
            before = await serial(s0.port)
            assert await serial(s0.port) == before
            issued(authority, "server/s0")
            now += 10
            assert await serial(s0.port) != before

    run(main)


def test_half_a_tls_record_delays_no_other_connection(holder: Holder) -> None:
    """What a peer has sent of a record waits with its connection; others are answered, and so is it when it goes on."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        async with target(holder("server/s0")) as s0:
            channel = Channel(holder("worker/ads/w0"), lambda peer: None, server=False)
            sock = socket.create_connection(("127.0.0.1", s0.port))
            sock.setblocking(False)
            with sock:
                while not channel.shake():
                    await loop.sock_sendall(sock, channel.outgoing())
                    channel.received(await asyncio.wait_for(loop.sock_recv(sock, 65536), 60))
                channel.write([json_frame(Kind.HELLO, WORKER)])
                flight = channel.outgoing()
                await loop.sock_sendall(sock, flight[:-40])
                assert (await ask(s0.port, holder("coordinator/c0"), LEADER))[0].kind == Kind.WELCOME
                for byte in flight[-40:]:
                    await loop.sock_sendall(sock, bytes([byte]))
                buffer, n = memoryview(bytearray(4096)), 0
                while not n:
                    channel.received(await asyncio.wait_for(loop.sock_recv(sock, 65536), 60))
                    n = channel.read_into(buffer)
                assert unpack_header(buffer[:n]).kind == Kind.WELCOME

    run(main)
