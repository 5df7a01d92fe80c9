"""Connections of strangers make a server log a few lines, however many they are."""

from __future__ import annotations

import asyncio
import io
import logging
import socket
from collections.abc import Iterator

import grpc
import pytest

from coordinator.core.view import ServerInfo
from coordinator.sparing import Sparing
from elasticps.admin.service import start_admin
from elasticps.server.network import connection
from elasticps.server.server import Server
from elasticps.system import logs

KNOCKS = 100


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Captures the log as a server process writes it."""
    root, written = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(connection, "_SPARING", Sparing(10, 3600.0))
    monkeypatch.setattr(logs, "OTHERS_EVERY_S", 3600.0)
    logs.configure("info", written)
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_rubbish_on_the_data_port_is_logged_few_times(log: io.StringIO) -> None:
    async def story() -> None:
        loop = asyncio.get_running_loop()
        server = Server(ServerInfo("s", 1, "h:1"), "c", 8, loop)
        sock = socket.create_server(("127.0.0.1", 0))
        port = sock.getsockname()[1]
        listener = await server.streams.create_server(server.connection, sock=sock)
        for _ in range(KNOCKS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"x" * 64)
            await reader.read(4096)
            writer.close()
        listener.close()
        server.close()

    asyncio.run(story())
    assert log.getvalue().count("event=refused") == 10


def test_calls_that_cannot_be_read_are_logged_few_times(log: io.StringIO) -> None:
    async def story() -> None:
        admin = await start_admin("127.0.0.1", 0, lambda: None)
        async with grpc.aio.insecure_channel(admin.address) as channel:
            call = channel.unary_unary("/elasticps.v1.Admin/Status", None, None)
            for _ in range(KNOCKS):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(b"\xff\xff\xff", timeout=60)
        await admin.stop()

    asyncio.run(story())
    assert 0 < log.getvalue().count("Traceback") <= logs.OTHERS_MOST


def test_suppressed_lines_are_counted_and_our_own_are_never_suppressed() -> None:
    now, left_out = 0.0, []
    others = logs._Others()
    others._sparing = Sparing(2, 10.0, lambda: now)
    for second in range(11):
        now = float(second)
        record = logging.LogRecord("grpc", logging.ERROR, "", 0, "text", None, None)
        if others.filter(record):
            left_out.append(getattr(record, "left_out", 0))
        assert others.filter(logging.LogRecord("elasticps.x", logging.ERROR, "", 0, "text", None, None))
    assert left_out == [0, 0, 8]
