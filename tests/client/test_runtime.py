"""A client on a runtime that is not the machine's."""

from __future__ import annotations

import ctypes
import errno
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import pytest

import elasticps as eps
from coordinator.core.view import ClusterConfig
from coordinator.memory import MemoryStore
from elasticps.client import runtime as runtime_module
from elasticps.client.client import Client
from elasticps.client.registry import Registry
from elasticps.client.runtime import QUIET_WAITS, READABLE, Runtime, Stream, WakeFlag
from tests.client.fake_cluster import chains
from tests.client.fakes import FakeServer

T = TypeVar("T")

_ATTACH_FILTER = 26  # SO_ATTACH_FILTER


class Counted(Runtime):
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.checked: list[str] = []

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        self.checked.append("connect")
        return super().connect(host, port, attempt)

    def spawn(self, name: str, target: Callable[[], None]) -> object:
        self.checked.append(name)
        return super().spawn(name, target)

    def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        self.checked.append("run")
        return super().run(coroutine, timeout_s)


def test_an_idle_thread_wakes_on_a_message_or_a_call() -> None:
    runtime = Runtime()
    wake, poller = runtime.event(), runtime.poller()
    here, there = socket.socketpair()
    try:
        poller.register(here.fileno(), READABLE)
        assert not poller.ready()
        runtime.idle(wake, poller, 0.0)
        there.send(b"x")
        runtime.idle(wake, poller, 600.0)
        assert poller.ready()
        here.recv(1)
        wake.set()
        runtime.idle(wake, poller, 600.0)
        assert not poller.ready()
    finally:
        poller.close()
        here.close()
        there.close()


@pytest.mark.parametrize("quiet", [0, QUIET_WAITS])
def test_no_wake_up_is_lost(quiet: int) -> None:
    runtime, turns = Runtime(), 300
    wake, poller, heard = cast(WakeFlag, runtime.event()), runtime.poller(), threading.Semaphore(0)
    here, there = socket.socketpair()
    poller.register(here.fileno(), READABLE)

    def hear() -> None:
        for _ in range(turns):
            wake.clear()
            wake.quiet = quiet
            heard.release()  # from now on it may be woken
            while not wake.is_set() and not poller.ready():
                runtime.idle(wake, poller, 600.0)
            if poller.ready():
                here.recv(1)

    thread = threading.Thread(target=hear, daemon=True)
    thread.start()
    try:
        for i in range(turns):
            assert heard.acquire(timeout=60.0), "it still waits for the call or message before"
            if i % 3:
                wake.set()
            else:
                there.send(b"x")
        thread.join(60.0)
        assert not thread.is_alive()
    finally:
        poller.close()
        here.close()
        there.close()


def test_a_thread_that_has_heard_nothing_for_long_waits_without_looking() -> None:
    runtime = Runtime()
    wake, poller = cast(WakeFlag, runtime.event()), runtime.poller()
    try:
        for waits in range(QUIET_WAITS):
            assert wake.quiet == waits
            runtime.idle(wake, poller, 0.0)
        looks = 0

        class Looking(WakeFlag):
            def wait(self, timeout: float | None = None) -> bool:
                nonlocal looks
                looks += 1
                return False

        looking = Looking()
        looking.quiet = wake.quiet
        runtime.idle(looking, poller, 0.0)
        assert not looks
        looking.set()
        runtime.idle(looking, poller, 0.0)
        assert looking.quiet == 0, "it looks again, as others may read now"
    finally:
        poller.close()


def test_a_client_can_be_built_on_another_runtime_and_another_store() -> None:
    server = FakeServer("a")
    view = server.view = chains([server.info], [[0]])
    runtime = Counted()
    store = MemoryStore("fake")
    runtime.run(store.put("config", ClusterConfig(view.ranges).to_json()), 30.0)
    runtime.run(store.put("view", view.encode()), 30.0)
    try:
        control = Registry(store, runtime, "memory")
        with Client(control, "w", eps.ASP(), window=4, timeout=30.0, app="default") as ps:
            table = ps.table("t", dim=4, optimizer=eps.Accumulate())
            assert table.pull([1, 2]).shape == (2, 4)
    finally:
        server.kill()
    assert {"connect", "elasticps-io", "run"} <= set(runtime.checked)


def test_a_store_that_does_not_answer_is_a_timeout() -> None:
    class Slow(Runtime):
        def run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
            coroutine.close()
            raise TimeoutError

    with pytest.raises(eps.Timeout, match="memory did not answer within 1"):
        Registry(MemoryStore("fake"), Slow(), "memory").first_view(-4.0)


def test_a_connection_whose_other_end_has_vanished_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that lost its power, or a firewall that forgot the connection, says nothing: whoever waited for an
    answer would for a quarter of an hour, whatever it was asked meanwhile."""
    monkeypatch.setattr(runtime_module, "VANISHED_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = Runtime().connect("127.0.0.1", listening.getsockname()[1], 0)
        there, _ = listening.accept()
        with there, cast(socket.socket, stream) as here:
            here.settimeout(60.0)
            drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # of BPF: ret 0
            there.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(drop_all)))
            here.send(b"a question")
            with pytest.raises(TimeoutError) as raised:
                here.recv(1)
            assert raised.value.errno == errno.ETIMEDOUT  # the kernel says so, no time-out of ours


def test_idle_connections_are_kept_alive() -> None:
    """A firewall forgets connections on which nothing passes, some after a few minutes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        stream = Runtime().connect("127.0.0.1", listening.getsockname()[1], 0)
        with cast(socket.socket, stream) as here:
            assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert here.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 120


def test_chance_neither_follows_nor_moves_the_generator_that_a_program_seeds() -> None:
    """Workers of one program seed it alike, and would all ask the same server at the same time."""
    random.seed(7)
    expected = [random.random() for _ in range(2)]
    random.seed(7)
    drawn = Runtime().chance()
    assert 0 <= drawn < 1
    assert drawn != expected[0]
    assert [random.random() for _ in range(2)] == expected
