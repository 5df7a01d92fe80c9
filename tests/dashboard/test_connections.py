"""The dashboard's port with strangers, slow viewers and many viewers."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from urllib.parse import urlsplit

import pytest

from elasticps.dashboard import serve
from elasticps.dashboard.fanout import WAITING_MAX
from elasticps.dashboard.serve import Dashboard
from elasticps.local.etcd import free_ports
from elasticps.system import background

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def page() -> Iterator[Dashboard]:
    page = Dashboard(f"etcd://127.0.0.1:{free_ports(1)[0]}/nobody", port=0)
    page.start()
    yield page
    page.stop()


def connect(page: Dashboard) -> socket.socket:
    return socket.create_connection(("127.0.0.1", urlsplit(page.address).port or 0), timeout=20)


def head(path: str = "/", host: str = "localhost", more: str = "") -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode("latin-1", "replace")


def answer(page: Dashboard, request: bytes) -> bytes:
    """All bytes of an answer until the connection is closed."""
    with connect(page) as sock:
        sock.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        found = b""
        while part := sock.recv(1 << 16):
            found += part
        return found


def snapshot(sock: socket.socket) -> dict[str, object]:
    """The first event of a stream."""
    sock.sendall(head("/api/stream"))
    found = b""
    while b"\n\n" not in found.partition(b"event: snapshot\n")[2]:
        found += sock.recv(1 << 16)
    text = found.partition(b"event: snapshot\ndata: ")[2].partition(b"\n\n")[0]
    document: dict[str, object] = json.loads(b"".join(part for part in text.split(b"\r\n") if part[:1] in b'{"'))
    return document


def test_the_dashboard_reports_that_the_cluster_is_down_and_why(page: Dashboard, eventually: Eventually) -> None:
    def reported() -> bool:
        body = answer(page, head("/api/snapshot")).partition(b"\r\n\r\n")[2]
        return "etcd" in json.loads(body)["state"]["store_error"]

    eventually(reported)


def test_the_dashboard_survives_random_requests(page: Dashboard) -> None:
    chance = random.Random(1)
    letters = bytes(range(256))
    for i in range(300):
        noise = bytes(chance.choices(letters, k=chance.randrange(1, 400)))
        request = [
            noise,
            head("/" + noise.decode("latin-1").replace(" ", "")),
            head(more=f"X-{i}: {noise.decode('latin-1')}\r\n"),
            head("/api/preview?servers=" + noise.hex()),
            b"POST /api/act HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n" + noise,
            head(more="Transfer-Encoding: chunked\r\n") + noise,
            head(more="Upgrade: websocket\r\nConnection: Upgrade\r\n"),
        ][i % 7]
        with connect(page) as sock:
            sock.sendall(request[: chance.randrange(1, len(request) + 1)])
    assert answer(page, head("/healthz")).startswith(b"HTTP/1.1 200 ")
    with connect(page) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * serve.HEAD_MAX)  # and no end of it
        assert sock.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_connection_without_a_whole_request_is_closed(page: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "HEAD_TIMEOUT_S", 0.1)
    for part in (b"", b"GET / HTTP/1.1\r\nHost: local"):
        with connect(page) as sock:
            sock.sendall(part)
            with suppress(ConnectionResetError):
                assert sock.recv(1) == b""


def test_a_viewer_that_reads_nothing_is_dropped_and_others_are_served(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(serve, "WRITE_TIMEOUT_S", 3.0)
    fanout, heard = page._fanout, bytearray()
    with connect(page) as slow, connect(page) as fast:
        slow.sendall(head("/api/stream"))
        fast.sendall(head("/api/stream"))

        def listen() -> None:
            with suppress(OSError):
                while part := fast.recv(1 << 20):
                    heard[:] = heard[-100:] + part

        listener = threading.Thread(target=listen)
        listener.start()
        eventually(lambda: len(fanout.viewers) == 2)
        for _ in range(16):  # more than lies between two sockets
            background.run(_publish(page, "x" * (1 << 20)))
        eventually(lambda: len(fanout.viewers) == 1)
        background.run(_publish(page, "the last"))
        eventually(lambda: b"the last" in heard)
        fast.shutdown(socket.SHUT_RDWR)
        listener.join()


def test_a_hundred_viewers_that_read_nothing_take_little_memory(
    page: Dashboard, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    monkeypatch.setattr(serve, "WRITE_TIMEOUT_S", 1.0)
    fanout = page._fanout
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(connect(page)).sendall(head("/api/stream"))
        eventually(lambda: len(fanout.viewers) == 100)
        for i in range(3 * WAITING_MAX):
            background.run(_publish(page, f"{i} " + 100_000 * "x"))
        waiting = [len(viewer._waiting) for viewer in list(fanout.viewers)]
        assert max(waiting, default=0) <= WAITING_MAX
        assert answer(page, head("/healthz")).startswith(b"HTTP/1.1 200 ")
        eventually(lambda: not fanout.viewers)  # all are dropped


async def _publish(page: Dashboard, text: str) -> None:
    page._fanout.publish([("noise", text)])


def test_too_many_viewers_displace_the_oldest_one(page: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticps.dashboard.app.VIEWERS_MAX", 3)
    with ExitStack() as held:
        first, *_ = viewers = [held.enter_context(connect(page)) for _ in range(4)]
        assert all(snapshot(viewer) for viewer in viewers)
        first.settimeout(60)
        while first.recv(1 << 16):
            pass


def test_idle_connections_do_not_lock_others_out(page: Dashboard) -> None:
    """256 idle connections of one machine, or 200 streams, locked all others out."""
    with ExitStack() as held:
        for _ in range(serve.CONNECTIONS_MAX + 20):
            held.enter_context(connect(page))
        assert answer(page, head()).startswith(b"HTTP/1.1 200")
