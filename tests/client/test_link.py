"""Decrypted bytes that a poller does not see are read in the same turn."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest

from coordinator.core.view import ServerInfo
from elasticps.client import transport
from elasticps.client.runtime import Runtime
from elasticps.client.transport import RECEIVE_CALLS_PER_TURN, Link, LinkReceiver
from elasticps.wire.frames import Kind, bytes_frame


class Decrypted:
    """A connection whose bytes have all left its socket and were not asked for yet: some at each call, as other threads
    want to send meanwhile."""

    has_backlog = stale = False

    def __init__(self, data: bytes, most: int) -> None:
        self.data, self.most = memoryview(data), most

    def fileno(self) -> int:
        return 7

    def close(self) -> None:
        pass

    def flush(self) -> bool:
        return True

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int:
        return sum(map(len, buffers))

    @property
    def buffered(self) -> bool:
        return len(self.data) > 0

    def recv_into(self, buffer: memoryview, /) -> int:
        n = min(len(buffer), self.most, len(self.data))
        if not n:
            raise BlockingIOError
        buffer[:n] = self.data[:n]
        self.data = self.data[n:]
        return n


class Machine(Runtime):
    def connect(self, host: str, port: int, attempt: int) -> Any:
        return None


@pytest.mark.parametrize("most", [1000, 65_536, 100_000, 1 << 20])
def test_a_turn_of_reading_ends_when_nothing_that_was_decrypted_is_left(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """A pull stood still until its time was over: the rest of its rows was within TLS, and the socket had nothing."""
    bodies = [os.urandom(300_000), os.urandom(8), os.urandom(70_000)]
    stream = Decrypted(b"".join(bytes_frame(Kind.VIEW, body, request=1) for body in bodies), most)
    assert len(stream.data) > RECEIVE_CALLS_PER_TURN * 1000
    monkeypatch.setattr(transport, "secured", lambda *_: stream)
    got: list[bytes] = []

    def frame(_: Link, header: Any, body: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        got.append(body.tobytes())

    server = ServerInfo("s0", 1, "127.0.0.1:1")
    link = Link(
        Machine(),
        server,
        LinkReceiver(frame, lambda header: None, lambda link, data, start, end: start),
        cast(Any, object()),
    )
    link.connect(b"hello")
    link.receive()
    assert [body[: len(was)] for body, was in zip(got, bodies, strict=True)] == bodies
    assert not stream.buffered
