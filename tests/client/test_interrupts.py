"""An exception out of place: whatever a signal handler raises, and whenever, a push happened whole or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import elasticps as eps
from elasticps.client.client import Client
from elasticps.client.runtime import Flag, Runtime, SocketPoller, Stream
from elasticps.wire.frames import HEADER_BYTES, Kind
from tests.client.fake_cluster import chains
from tests.client.fakes import FakeRegistry, FakeServer

ROWS = 60_000  # in several frames


class Interrupted:
    """A connection on which a signal comes when something has just left."""

    def __init__(self, machine: Machine, stream: Stream) -> None:
        self._machine = machine
        self._stream = stream

    def fileno(self) -> int:
        return self._stream.fileno()

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        sent = self._stream.sendmsg(buffers)
        if self._machine.signal:
            self._machine.signal = False
            assert sent == sum(map(len, buffers))  # or there would be nothing to answer
            raise KeyboardInterrupt
        return sent

    def recv_into(self, buffer: memoryview, /) -> int:
        received = self._stream.recv_into(buffer)
        self._machine.received += received
        return received

    def close(self) -> None:
        self._stream.close()


class Gate:
    """An event whose `clear`, with which the background thread begins a turn, waits while the gate is shut."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.opened.set()

    def shut(self) -> None:
        """Returns when the background thread stands before the gate."""
        self.reached.clear()
        self.opened.clear()
        self._event.set()
        assert self.reached.wait(60)

    def clear(self) -> None:
        if not self.opened.is_set():
            self.reached.set()
            self.opened.wait(60)
        self._event.clear()

    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)


class Machine(Runtime):
    """A runtime on which a test decides when the background thread runs and when a signal comes."""

    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self.signal = False
        self.received = 0  # bytes

    def connect(self, host: str, port: int, attempt: int) -> Stream:
        stream = super().connect(host, port, attempt)
        assert isinstance(stream, socket.socket)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)  # a frame leaves whole
        return Interrupted(self, stream)

    def idle(self, wake: Flag, poller: SocketPoller, timeout_s: float) -> None:
        wake.wait(timeout_s)

    def event(self) -> Flag:
        self.gates.append(Gate())
        return self.gates[-1]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer("a")
    server.view = chains([server.info], [[0]])
    yield server
    server.kill()


def test_no_answer_counts_between_an_interrupted_send_and_its_repair(server: FakeServer) -> None:
    machine = Machine()
    assert server.view is not None
    registry = FakeRegistry(server.view)
    registry.runtime = machine
    ps = Client(registry, "w", eps.ASP(), window=4, timeout=60.0, app="default")  # type: ignore[arg-type]
    try:
        table = ps.table("t", dim=4, optimizer=eps.Accumulate())
        ps.push({}).result()
        gate = machine.gates[0]  # the first event that is made wakes the background thread
        gate.shut()
        machine.signal, before = True, machine.received
        with pytest.raises(KeyboardInterrupt):
            ps.push({table: (np.arange(ROWS), np.ones((ROWS, 4), np.float32))})
        waiting = ps._dispatcher._driver.wait  # reads, and repairs nothing
        assert waiting(lambda: machine.received >= before + HEADER_BYTES, 60)
        assert ps.committed == 1
        sent = len(server.got(Kind.PUSH))
        server.applied = server.committed = 1 << 16
        gate.opened.set()
        ps.flush()
        again = server.got(Kind.PUSH)[sent:]
        assert len(again) > 1
        assert {h.clock for h in again} == {2}
        assert ps.committed == 2
    finally:
        ps.close()
