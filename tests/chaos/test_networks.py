"""The two networks that can be disturbed, with real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from chaos.live import netns
from chaos.live.network import Shape
from chaos.live.proxy import Proxy
from elasticps.errors import ConfigError, Error
from elasticps.local.etcd import free_ports

PATIENCE_S = 60.0
QUIET_S = 0.4

ECHO = """
import socket, sys, threading
listener = socket.create_server((sys.argv[1], int(sys.argv[2])))
def serve(connection):
    while data := connection.recv(65536):
        connection.sendall(data)
    connection.close()
print("ready", flush=True)
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


@contextmanager
def echo(command: Callable[[list[str]], list[str]], host: str, port: int) -> Iterator[subprocess.Popen[str]]:
    """A process that sends back what it gets."""
    words = command([sys.executable, "-I", "-S", "-c", ECHO, host, str(port)])
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def hears(connection: socket.socket, data: bytes) -> bool:
    """Sends, and tells whether it came back."""
    connection.sendall(data)
    return receives(connection, data)


def is_silent(connection: socket.socket, data: bytes) -> bool:
    """Sends, and tells whether nothing comes back for a while."""
    connection.sendall(data)
    return not receives(connection, data, QUIET_S)


def receives(connection: socket.socket, data: bytes, seconds: float = PATIENCE_S) -> bool:
    connection.settimeout(seconds)
    found = b""
    try:
        while len(found) < len(data):
            found += connection.recv(65536)
    except TimeoutError:
        return False
    return found == data


def dial(address: str) -> socket.socket:
    """Connects as soon as a process listens."""
    host, _, port = address.rpartition(":")
    for _ in range(1000):
        try:
            return socket.create_connection((host, int(port)), PATIENCE_S)
        except ConnectionRefusedError:
            threading.Event().wait(0.02)
    raise AssertionError(f"{address} does not listen")


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    proxy.started("me", os.getpid())
    yield proxy
    proxy.close()


def test_a_proxy_carries_cuts_and_mends_each_direction(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    with echo(lambda words: words, "127.0.0.1", port), dial(proxy.publish("s0", "127.0.0.1", port)) as connection:
        assert hears(connection, b"1" * 100_000)
        for pair in (("me", "s0"), ("s0", "me")):
            proxy.cut([pair])
            assert is_silent(connection, b"2")
            proxy.mend([pair])
            assert receives(connection, b"2")  # nothing is lost
        proxy.cut([("s1", "s0"), ("s0", "s1")])
        assert hears(connection, b"3")  # we are not s1


def test_a_proxy_delays_bytes(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    with echo(lambda words: words, "127.0.0.1", port), dial(proxy.publish("s0", "127.0.0.1", port)) as connection:
        proxy.shape("s0", Shape(ms=2000))
        assert is_silent(connection, b"1")
        assert receives(connection, b"1")
        proxy.shape("s0", Shape())
        assert hears(connection, b"2")


def test_the_port_of_a_dead_process_is_refused_until_it_is_back(proxy: Proxy) -> None:
    (port,) = free_ports(1)
    address = proxy.publish("s0", "127.0.0.1", port)
    host = address.rpartition(":")[0]
    with echo(lambda words: words, "127.0.0.1", port) as process, dial(address) as connection:
        assert hears(connection, b"1")
        process.kill()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, port), PATIENCE_S)
    with echo(lambda words: words, "127.0.0.1", port), dial(address) as connection:
        assert hears(connection, b"2")


def test_a_proxy_that_has_ended_is_an_error(proxy: Proxy) -> None:
    proxy._process.kill()
    proxy._process.wait()  # then what is written to it stays behind, until it is closed
    with pytest.raises(Error, match="the proxy has ended with exit code -9"):
        proxy.cut([("a", "b")])


needs_namespaces = pytest.mark.skipif(bool(netns.refused()), reason=f"no namespaces here: {netns.refused()}")


@needs_namespaces
def test_processes_in_namespaces_are_cut_off_one_way_and_both_and_nothing_is_left() -> None:
    before = interfaces()
    script = [sys.executable, "-c", "from tests.chaos import test_networks; test_networks.inside()"]
    done = subprocess.run(
        [*netns._unshare(), "--", *script], env={**os.environ, netns._INSIDE: "1"}, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "all is well\n"
    assert interfaces() == before


def interfaces() -> list[str]:
    return sorted(name for _, name in socket.if_nameindex())


class Client:
    """A process that says what it hears back."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, word: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()


def inside() -> None:
    """The checks made inside a namespace."""
    network = netns.Namespaces()
    hosts = {name: network.join(name) for name in ("s0", "s1")}
    dialler = (
        "import socket, sys\n"
        "connection = socket.create_connection((sys.argv[1], 7000), 30)\n"
        "connection.settimeout(float(sys.argv[2]))\n"
        "for line in sys.stdin:\n"
        "    connection.sendall(line.encode())\n"
        "    try:\n        print(connection.recv(100).decode().replace(chr(10), ' '), flush=True)\n"
        "    except TimeoutError:\n        print('silence', flush=True)\n"
    )
    command = network.command("s0", [sys.executable, "-I", "-S", "-c", dialler, hosts["s1"], str(QUIET_S)])
    with echo(lambda words: network.command("s1", words), hosts["s1"], 7000):
        for pairs in ([("s0", "s1")], [("s1", "s0")], [("s0", "s1"), ("s1", "s0")]):
            with Client(command) as client:
                while client.ask("a") == "silence":
                    pass
                network.cut(pairs)
                while (answer := client.ask("b")) != "silence":
                    assert answer[0] == "a", pairs  # an answer that was late
                network.mend(pairs)
                while (answer := client.ask("c")) == "silence":
                    pass
                assert answer[0] in "ab"  # TCP has sent it again
    sys.stdout.write("all is well\n")


def test_without_a_namespace_of_its_own_no_network_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(netns._INSIDE, raising=False)
    with pytest.raises(Error, match="call enter"):
        netns.Namespaces()


def test_where_namespaces_are_refused_the_proxy_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(netns._INSIDE, raising=False)
    monkeypatch.setattr(netns, "refused", lambda: "operation not permitted")
    with pytest.raises(ConfigError, match="cannot be made here: operation not permitted; use the user-space proxy"):
        netns.enter()


def test_a_missing_kernel_feature_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netns.Namespaces, "can_shape", staticmethod(lambda: False))
    assert netns._discipline(Shape(mbit=5)) == ["tbf", "rate", "5mbit", "burst", "256kb", "latency", "400ms"]
    with pytest.raises(Error, match="this kernel has no netem"):
        netns._discipline(Shape(ms=5))
    monkeypatch.setattr(netns.Namespaces, "can_shape", staticmethod(lambda: True))
    words = netns._discipline(Shape(ms=5, jitter=1, percent=2, mbit=10))
    assert words == ["netem", "limit", "100000", "delay", "5ms", "1ms", "loss", "2%", "rate", "10mbit"]
