"""TLS as bytes in and bytes out, and as a stream over a socket pair."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from elasticps.security.authority import Authority
from elasticps.security.channel import MAX_HANDSHAKE_BYTES, RENEW_MIN_S, Channel
from elasticps.security.credentials import LOOK_S, Credentials
from elasticps.security.identity import Identity, Role
from elasticps.security.stream import Secured, TlsStream, secured
from tests.security.conftest import Holder, issued


def anybody(peer: Identity) -> None:
    """Fine."""


def pair(
    client: Credentials, server: Credentials, expect: Callable[[Identity], None] = anybody
) -> tuple[Channel, Channel]:
    return Channel(client, expect, server=False), Channel(server, anybody, server=True)


def carry(a: Channel, b: Channel) -> None:
    """Lets two channels talk until both have shaken hands."""
    done = False
    while not done:
        done = a.shake()
        b.received(a.outgoing())
        done &= b.shake()
        a.received(b.outgoing())


def read(channel: Channel) -> bytes:
    buffer = bytearray(1 << 20)
    n = filled = 0
    while n := channel.read_into(memoryview(buffer)[filled:]):
        filled += n
    return bytes(buffer[:filled])


def test_two_authenticated_peers_exchange_data(holder: Holder) -> None:
    a, b = pair(holder("worker/ads/w0"), holder("server/s0"))
    carry(a, b)
    assert (str(a.peer), str(b.peer)) == (
        "spiffe://elasticps/train/server/s0",
        "spiffe://elasticps/train/worker/ads/w0",
    )
    text = os.urandom(300_000)
    a.write([text[:100], b"", text[100:]])
    sent = a.outgoing()
    assert text[:50] not in sent
    b.received(sent)
    assert read(b) == text
    b.close()
    a.received(b.outgoing())
    with pytest.raises(ConnectionResetError):
        a.read_into(memoryview(bytearray(10)))


def test_another_authority_an_ended_certificate_or_none_is_refused(
    holder: Holder, authority: Authority, tmp_path_factory: pytest.TempPathFactory
) -> None:
    server = holder("server/s0")
    stranger = Credentials(issued(Authority.create(tmp_path_factory.mktemp("other") / "ca"), "worker/a/w"), "train")
    a, b = pair(stranger, server)
    with pytest.raises(ConnectionResetError, match="certificate verify failed"):
        carry(a, b)
    old = holder("worker/ads/w0")  # good when it was read, ended when it is shown
    ended = issued(authority, "worker/ads/w0", days=-1)
    for context in (old.client_context(), old.server_context()):
        context.load_cert_chain(ended.cert, ended.key)
    a, b = pair(old, server)
    with pytest.raises(ConnectionResetError, match="certificate has expired"):
        carry(a, b)


def test_a_certificate_without_identity_and_an_unexpected_one_are_refused(holder: Holder) -> None:
    def only_s1(peer: Identity) -> None:
        peer.require("train", Role.SERVER, "s1")

    a, b = pair(holder("worker/ads/w0"), holder("server/s0"), only_s1)
    with pytest.raises(ConnectionResetError, match="not spiffe://elasticps/train/server/s1"):
        carry(a, b)


def test_altered_bytes_end_the_connection(holder: Holder) -> None:
    a, b = pair(holder("worker/ads/w0"), holder("server/s0"))
    carry(a, b)
    a.write([b"push this"])
    sent = bytearray(a.outgoing())
    sent[-1] ^= 1
    b.received(sent)
    with pytest.raises(ConnectionResetError, match=r"bad record mac|record layer failure"):
        read(b)


@pytest.mark.parametrize(
    "noise", [b"EPS1" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x40\x00" + b"\x01" * 70_000]
)
def test_bytes_that_are_no_handshake_take_little_memory(holder: Holder, noise: bytes) -> None:
    channel = Channel(holder("server/s0"), anybody, server=True)

    def hear(text: bytes) -> None:
        for start in range(0, len(text), 1000):
            channel.received(text[start : start + 1000])
            channel.shake()

    with pytest.raises(ConnectionResetError):
        hear(noise)
    assert channel.waiting_bytes < MAX_HANDSHAKE_BYTES
    assert channel.peer is None


def test_a_connection_is_stale_when_certificates_are_renewed_or_about_to_end(
    authority: Authority, holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    mine = Credentials(issued(authority, "worker/ads/w0"), "train", clock=lambda: now)
    a, b = pair(mine, holder("server/s0"))
    carry(a, b)
    stale = [a.stale]
    issued(authority, "worker/ads/w0", days=5)
    now += 2 * LOOK_S
    stale.append(a.stale)
    assert stale == [False, True]
    a, b = pair(mine, holder("server/s0"))
    carry(a, b)
    assert not a.stale
    monkeypatch.setattr("elasticps.security.channel.time.time", lambda: a.until_s - RENEW_MIN_S)
    assert a.stale


@pytest.fixture(params=["compiled", "python"])
def stream_of(request: pytest.FixtureRequest) -> Callable[..., Secured]:
    """Each way to make a TLS stream of a worker's socket: compiled, and with `ssl`."""
    return secured if request.param == "compiled" else TlsStream


def test_a_stream_sends_and_receives_more_than_sockets_hold_at_once(
    holder: Holder, stream_of: Callable[..., Secured]
) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(True)
    server = holder("server/s0").server_context()
    stream = stream_of(ours, holder("worker/ads/w0"), "s0")
    there, back = os.urandom(3_000_000), os.urandom(3_000_000)
    got = bytearray()

    def serve() -> None:
        with server.wrap_socket(theirs, server_side=True) as far:
            got.extend(far.recv(5))
            sender = threading.Thread(target=far.sendall, args=(back,))  # beside the reading, or both would wait
            while len(got) < len(there) + 5:
                got.extend(far.recv(65536))
            sender.start()
            sender.join()

    thread = threading.Thread(target=serve)
    thread.start()
    queue = [memoryview(b"hello"), *(memoryview(there[i : i + 100_000]) for i in range(0, len(there), 100_000))]
    received, buffer = bytearray(), memoryview(bytearray(70_000))
    while len(received) < len(back):
        if queue:
            try:
                sent = stream.sendmsg(queue[:3])
                while queue and sent >= len(queue[0]):
                    sent -= len(queue.pop(0))
                if queue:
                    queue[0] = queue[0][sent:]
            except BlockingIOError:
                pass
        stream.flush()
        with suppress(BlockingIOError):
            received += buffer[: stream.recv_into(buffer)]
    thread.join()
    stream.close()
    assert got == b"hello" + there
    assert received == back
    assert not stream.buffered


def test_a_stream_to_another_server_is_refused(holder: Holder, stream_of: Callable[..., Secured]) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.setblocking(False)
        stream = stream_of(ours, holder("worker/ads/w0"), "s1")
        far = Channel(holder("server/s0"), anybody, server=True)
        assert stream.flush()
        far.received(theirs.recv(65536))
        far.shake()
        theirs.sendall(far.outgoing())
        with pytest.raises(ConnectionResetError, match="not spiffe://elasticps/train/server/s1"):
            stream.recv_into(memoryview(bytearray(100)))
        stream.close()
