"""TLS in compiled code, over sockets: what one end sends the other reads, however it is cut, and a peer that does wrong
ends its own connection."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from elasticps.security import openssl, records
from elasticps.security.channel import MAX_HANDSHAKE_BYTES
from elasticps.security.identity import Identity
from elasticps.security.session import BUFFERS, TlsSession
from tests.security.conftest import Holder

RECORD, PIECE = records.RECORD_BYTES, records.PIECE_BYTES


def anybody(peer: Identity) -> None:
    """Fine."""


class Ends:
    """Two that have shaken hands; between them what `carry` takes along, or, `direct`, one socket."""

    def __init__(self, holder: Holder, *, direct: bool) -> None:
        self.sockets = list(socket.socketpair())
        if not direct:
            self.sockets += socket.socketpair()
        for sock in self.sockets:
            sock.setblocking(False)
        records.warm()
        self.a = TlsSession(holder("worker/ads/w0"), anybody, self.sockets[0].fileno(), server=False)
        self.b = TlsSession(holder("server/s0"), anybody, self.sockets[-1].fileno(), server=True)
        self.direct = direct
        while not (self.a.shake() & self.b.shake()):
            self.carry()
        self.carry()

    def sent(self) -> bytes:
        """The bytes that `a` has sent since the last call, for connections that are not direct."""
        found = bytearray()
        with suppress(BlockingIOError):
            while data := self.sockets[1].recv(1 << 20):
                found += data
        return bytes(found)

    def carry(self) -> None:
        if not self.direct:
            self.sockets[2].sendall(self.sent())
            with suppress(BlockingIOError):
                self.sockets[1].sendall(self.sockets[2].recv(1 << 20))

    def close(self) -> None:
        self.a.close()
        self.b.close()
        for sock in self.sockets:
            sock.close()


@pytest.fixture
def direct(holder: Holder) -> Iterator[Ends]:
    ends = Ends(holder, direct=True)
    yield ends
    ends.close()


@pytest.fixture
def by_hand(holder: Holder) -> Iterator[Ends]:
    ends = Ends(holder, direct=False)
    yield ends
    ends.close()


def read(session: TlsSession, room: int = 1 << 20) -> bytes:
    found, buffer = bytearray(), memoryview(bytearray(room))
    while n := session.read_into(buffer):
        found += buffer[:n]
        if not session.buffered and n < room:
            break
    return bytes(found)


def exchange(sender: TlsSession, receiver: TlsSession, buffers: Sequence[bytes], room: int) -> bytes:
    """The bytes that arrive of buffers larger than sockets hold."""
    queue, size = [memoryview(buffer) for buffer in buffers], sum(map(len, buffers))
    got = bytearray()
    while len(got) < size:
        try:
            n = sender.sendmsg(queue) if queue else 0
        except BlockingIOError:
            n = 0
            sender.flush()
        while queue and n >= len(queue[0]):
            n -= len(queue.pop(0))
        if queue:
            queue[0] = queue[0][n:]
        assert sender.backlog_bytes <= records.OUT_BYTES
        sender.flush()
        got += read(receiver, room)
    return bytes(got)


@pytest.mark.parametrize(
    "sizes",
    [
        [1],
        [RECORD - 1],
        [RECORD],
        [RECORD + 1],
        [40, RECORD],
        [40, 60, RECORD - 100, 7],
        [PIECE, 1, PIECE + 1],
        [3] * (BUFFERS + 200),
        [RECORD // 2] * 50,
        [40, 300_000, 40, 2_000_000, 40],
    ],
    ids=lambda sizes: f"{len(sizes)}-of-{sizes[0]}",
)
@pytest.mark.parametrize("room", [1000, 1 << 20])
def test_sent_bytes_arrive(direct: Ends, sizes: list[int], room: int) -> None:
    buffers = [os.urandom(size) for size in sizes]
    assert exchange(direct.a, direct.b, buffers, room) == b"".join(buffers)
    assert exchange(direct.b, direct.a, buffers, room) == b"".join(buffers)


def test_records_may_come_byte_by_byte(by_hand: Ends) -> None:
    text = os.urandom(2000)
    by_hand.a.sendmsg([memoryview(text)])
    sent = by_hand.sent()
    for byte in sent[:-1]:
        by_hand.sockets[2].send(bytes([byte]))
        assert read(by_hand.b) == b""
    by_hand.sockets[2].send(sent[-1:])
    assert read(by_hand.b) == text


def test_altered_bytes_end_the_connection_after_earlier_bytes(by_hand: Ends) -> None:
    by_hand.a.sendmsg([memoryview(b"good")])
    good = by_hand.sent()
    by_hand.a.sendmsg([memoryview(b"bad")])
    bad = bytearray(by_hand.sent())
    bad[-1] ^= 1
    by_hand.sockets[2].sendall(good + bytes(bad))
    buffer = memoryview(bytearray(100))
    assert by_hand.b.read_into(buffer) == 4
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="bad record mac"):
            by_hand.b.read_into(buffer)
    with pytest.raises(ConnectionResetError):
        by_hand.b.sendmsg([memoryview(b"too late")])


def test_a_close_arrives_after_the_bytes_before_it(direct: Ends) -> None:
    direct.a.sendmsg([memoryview(b"the last words")])
    direct.a.say_goodbye()
    buffer = memoryview(bytearray(100))
    assert direct.b.read_into(buffer) == 14
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        direct.b.read_into(buffer)


def test_a_connection_that_ends_inside_a_record_is_reset(by_hand: Ends) -> None:
    by_hand.a.sendmsg([memoryview(b"cut off")])
    by_hand.sockets[2].sendall(by_hand.sent()[:-3])
    assert read(by_hand.b) == b""
    by_hand.sockets[2].close()
    with pytest.raises(ConnectionResetError):
        read(by_hand.b)


def test_a_closed_session_does_nothing(direct: Ends) -> None:
    direct.a.close()
    direct.a.close()
    direct.a.say_goodbye()
    buffer = memoryview(bytearray(10))
    tries: list[Callable[[], object]] = [
        lambda: direct.a.read_into(buffer),
        lambda: direct.a.sendmsg([buffer]),
        direct.a.flush,
    ]
    for work in tries:
        with pytest.raises(ConnectionResetError, match="closed"):
            work()


def update_keys(session: TlsSession) -> None:
    """Has TLS change its keys, and ask the other end to do so."""
    library: Any = openssl.LIBRARY
    change: Any = library["SSL_key_update"]
    change.argtypes = [ctypes.c_void_p, ctypes.c_int]
    assert change(session._tls, 1) == 1
    assert library.SSL_do_handshake(session._tls) == 1
    session.flush()


def test_keys_change_while_both_send(direct: Ends) -> None:
    for ours, theirs in ((direct.a, direct.b), (direct.b, direct.a)) * 3:
        update_keys(ours)
        assert exchange(ours, theirs, [b"x" * 100_000], 1 << 20) == b"x" * 100_000
        assert exchange(theirs, ours, [b"y" * 100_000], 1 << 20) == b"y" * 100_000


def test_a_peer_that_floods_key_updates_without_reading_is_cut_off(by_hand: Ends) -> None:
    by_hand.sockets[3].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    buffer, rounds = memoryview(bytearray(100)), 0

    def ask() -> None:
        nonlocal rounds
        while True:
            update_keys(by_hand.a)
            by_hand.sockets[2].sendall(by_hand.sent())
            rounds += 1
            assert by_hand.b.read_into(buffer) == 0
            assert by_hand.b.backlog_bytes <= records.FLOOD_BYTES

    with pytest.raises(ConnectionResetError, match="does not read them"):
        ask()
    assert rounds > 1000


@pytest.mark.parametrize(
    "noise", [b"EPS1" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + b"\x01" * 70_000]
)
def test_bytes_that_are_no_handshake_take_little_memory(holder: Holder, noise: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        session = TlsSession(holder("server/s0"), anybody, ours.fileno(), server=True)

        def hear() -> None:
            for start in range(0, len(noise), 1000):
                theirs.sendall(noise[start : start + 1000])
                session.shake()

        with pytest.raises(ConnectionResetError):
            hear()
        assert session.peer is None
        assert session.backlog_bytes < MAX_HANDSHAKE_BYTES
        session.close()
