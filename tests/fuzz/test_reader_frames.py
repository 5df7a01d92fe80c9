"""Frames between readers and who feeds them, with something wrong about them: a connection ends, and nothing else.

Both ways, and at a relay. What a frame announces is not allocated before it is there.
"""

from __future__ import annotations

import socket
import tracemalloc
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, cast

import numpy as np
import pytest

from coordinator.core.view import ServerInfo, View
from elasticps.client.runtime import Runtime
from elasticps.kernels.hashing import HASH_END
from elasticps.model.optimizers import SGD
from elasticps.model.spec import TableSpec
from elasticps.readers.core.following import OutOfOrder
from elasticps.readers.pull_server import PullServer
from elasticps.readers.reader import Reader
from elasticps.readers.relay import Relay, RelayFeed
from elasticps.readers.values import ReaderSpec
from elasticps.wire.frames import HEADER_BYTES, Buffer, FrameError, Header, Kind, json_frame, unpack_header
from elasticps.wire.range_parts import (
    ALL_TABLES,
    RangePart,
    ReadCursor,
    ReadRange,
    TableCells,
    TableInterval,
)
from elasticps.wire.row_blocks import RowBlock
from elasticps.wire.windows import Progresses, Subscribe, Subscribed, WindowFrame, window_ack
from replication.step_records import record_of
from tests.fuzz.core import APPS, CLUSTER, HONEST, TABLE, Core, Wire, watched
from tests.fuzz.corpus import RANGES
from tests.fuzz.mutations import mutate

FRAMES = 3000
EVERY = np.arange(RANGES)
NONE = np.empty(0, np.int64)
SPEC = TableSpec("users", 4, SGD(lr=0.1))
WIDTH = HASH_END // RANGES
FIRST = ReadCursor(0)
SHIFT = WIDTH.bit_length() - 4  # of cells: eight of a range
MOST_ALLOCATED = 4 << 20
DECODERS: dict[int, Callable[[Header, Any], object]] = {
    Kind.SUBSCRIBE: lambda header, body: Subscribe.of(header, body, RANGES),
    Kind.SUBSCRIBED: lambda header, body: Subscribed.of(header, body, RANGES),
    Kind.WINDOW: lambda header, body: WindowFrame.of(header, body, RANGES),
    Kind.READ_RANGE: lambda header, body: ReadRange.of(header, body, RANGES),
    Kind.RANGE_ROWS: lambda header, body: RangePart.of(header, body, RANGES),
}


def joined(buffers: Sequence[Buffer]) -> bytes:
    return b"".join(bytes(memoryview(one).cast("B")) for one in buffers)


def block(table: int = 7, keys: int = 5) -> RowBlock:
    rows = np.ones((keys, SPEC.dim), np.float32)
    return RowBlock(table, np.arange(keys), rows, np.array([30, 31]), np.array([2]))


def from_servers(number: int = 1, request: int = 9, r: int = 1, start: ReadCursor = FIRST) -> list[bytes]:
    """What servers say, each as it may be."""
    runs = Progresses(np.array([[5, 0, RANGES - 1, 640], [6, 1, 2, 704]]))
    record = record_of(5, 3, np.arange(RANGES) % 2 == 0)
    listed = WindowFrame(1, number, 5_000_000, True, [block()], EVERY, EVERY + 3, runs, [(5, record)],
                         [(7, SPEC.to_json())], [3])  # fmt: skip
    half = WindowFrame(1, number, 5_000_000, False, [block(), block(7, 0)])
    part = RangePart(request, 1, r, start, ALL_TABLES, [TableInterval(0, 1, block())])
    low, high = WIDTH, WIDTH + (3 << SHIFT)
    some = TableInterval(low, high, block(), SHIFT, np.array([True, False, True]))
    frames = [listed.frame(), half.frame(), part.frame(),
              part._replace(end=ReadCursor(7, high), intervals=[some]).frame(),
              part._replace(intervals=[]).frame(),
              Subscribed(1, 1, EVERY[:3], EVERY[3:]).frame(), Subscribed(0, 1, NONE, EVERY).frame()]  # fmt: skip
    return [joined(cast(Any, one)) for one in frames]


def from_readers(request: int = 1, table: int = 7) -> list[bytes]:
    """What readers say."""
    cells = TableCells(table, SHIFT, np.arange(WIDTH >> SHIFT, dtype=np.uint64))
    wants = Subscribe(request, 1, EVERY, EVERY * 0 - 1, EVERY * 0, ("users",), "", 5, 100)
    frames = [wants._replace(tables=None).frame(), wants.frame(), wants._replace(ranges=NONE, positions=NONE,
              origins=NONE).frame(), ReadRange(request, 1, 1, 10, ReadCursor(table)).frame(),
              ReadRange(request, 1, 1, 10, ReadCursor(0), ReadCursor(table + 1), (cells,)).frame(),
              [window_ack(request)]]  # fmt: skip
    return [joined(cast(Any, one)) for one in frames]


@pytest.mark.parametrize("seed", range(3))
def test_a_frame_is_what_it_says_or_is_refused_before_anything_is_allocated(seed: int) -> None:
    random, refused = Random(seed), 0
    whole = [*from_servers(), *from_readers()]
    for _ in range(FRAMES):
        data = bytes(mutate(random, bytearray(random.choice(whole)), whole))
        if len(data) < HEADER_BYTES:
            continue
        tracemalloc.start()
        try:
            header = unpack_header(data)
            body = np.frombuffer(data[HEADER_BYTES : HEADER_BYTES + header.body], np.uint8)
            if header.kind in DECODERS:
                DECODERS[header.kind](header, body)
        except FrameError as error:
            refused += bool(str(error))
        finally:
            most = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
        assert most < MOST_ALLOCATED
    assert refused > FRAMES / 10


# ------------------------------------------------------------------------------------------------------- a server


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
def test_a_server_goes_on_whatever_readers_say(compiled: bool) -> None:
    random, ended, reasons = Random(5), 0, set[str]()
    with watched():
        core = Core(random, {}, compiled=compiled)
        wires = list[Wire]()
        for i in range(FRAMES // 3):
            if not wires or wires[0].closed or random.random() < 0.05:
                for wire in wires:
                    wire.abort()
                wires = [Wire(core, reads=random.random() < 0.8, keeps=True)]
                hello = {"cluster": CLUSTER, "reader": "r0", "app": APPS[HONEST]}
                wires[0].feed(json_frame(Kind.HELLO, hello), 1 << 20)
                wires[0].feed(from_readers(1, TABLE)[0], 1 << 20)
                core.settle()
            frame = bytearray(random.choice(from_readers(i + 2, TABLE)))
            if random.random() < 0.6:
                frame = mutate(random, frame, from_servers())
            wires[0].feed(frame, random.choice((7, 64, 1 << 20)))
            core.settle()
            if wires[0].closed:
                ended += 1
                reasons.add(last_error(wires[0].written))
            if i % 20 == 0:
                core.pass_time(0.3)
                core.honest.work()
                core.check_under_way(wires)
        for wire in wires:
            wire.abort()
        core.settle()
        core.pass_time(11.0)
        core.honest.work()
        assert core.server.readers.attached == 0
    assert ended > 20
    assert len(reasons - {""}) > 5, reasons


def last_error(written: bytearray) -> str:
    """What the server reasons of why a connection ended."""
    at, text = 0, ""
    while at + HEADER_BYTES <= len(written):
        header = unpack_header(written, at)
        if header.kind == Kind.ERROR:
            text = bytes(written[at + HEADER_BYTES : at + HEADER_BYTES + header.body]).decode()
        at += HEADER_BYTES + header.body
    return text


# ------------------------------------------------------------------------------------------------------- a reader


class FakeRegistry:
    """A cluster of one server, at which nobody listens."""

    cluster = CLUSTER
    credentials = None
    authenticated = False
    several = False
    absent = None

    def __init__(self) -> None:
        self.runtime = Runtime()

    def first_view(self, timeout_s: float) -> View:
        one, nobody = np.zeros((RANGES, 1), np.int32), np.full(RANGES, -1, np.int32)
        since = np.ones(RANGES, np.int64)
        server = ServerInfo("s0", 1, "127.0.0.1:1")
        return View(CLUSTER, 1, RANGES, 1, (server,), one, nobody, since, "", recovery_epoch=since)

    def ask_view(self, on_view: Callable[[View | None], None]) -> None:
        on_view(None)

    def close(self) -> None:
        """Nothing to do."""


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A reader whose links do nothing: frames are handed to it."""
    monkeypatch.setattr("elasticps.client.transport.LinkDriver.start", lambda self: None)
    monkeypatch.setattr("elasticps.client.connections.PeerConnections.send", lambda self, member, buffers: None)
    made = Reader(cast(Any, FakeRegistry()), ReaderSpec(None, None, 0.01), "r0", 5.0)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_reader_goes_on_whatever_servers_say(reader: Reader, seed: int) -> None:
    """Only `FrameError` and `OutOfOrder` come of it, which end the connection; a new one begins from what is here."""
    random, links, refused = Random(seed), reader._links, 0
    member = next(iter(links.following.tails))
    feed = None
    for _ in range(FRAMES):
        if feed is None:
            feed = links.following.connected(member)
            links.subscribe(feed)
            answer = joined(Subscribed(feed.subscribed, 1, NONE, EVERY).frame())
            links.handle(feed, *frame_of(answer))
            if random.random() < 0.3:
                reader._holding.begin()
        request = next(iter(feed.reading), 9)
        whole = from_servers(feed.window + 1, request, *feed.reading.get(request, ()))
        data = bytearray(random.choice(whole))
        if random.random() < 0.6:
            data = mutate(random, data, [*whole, *from_readers()])
        try:
            header, body = frame_of(bytes(data))
            if not reader.queue(feed, header, body):
                links.handle(feed, header, body)
        except (FrameError, OutOfOrder) as error:
            refused += bool(str(error))
            links.following.gone(member)
            feed = None
        if random.random() < 0.02:
            reader.release()
    assert refused > FRAMES / 10
    reader.stats()
    for name in reader.tables:
        assert reader.pull({name: np.arange(10)})


def frame_of(data: bytes) -> tuple[Header, Any]:
    """As a link would hand it on: not before all of it is there."""
    if len(data) < HEADER_BYTES:
        raise FrameError("half a header")
    header = unpack_header(data)
    if header.body > len(data) - HEADER_BYTES:
        raise FrameError("half a body")
    return header, np.frombuffer(data[HEADER_BYTES : HEADER_BYTES + header.body], np.uint8)


@pytest.mark.parametrize("seed", range(2))
def test_a_relay_goes_on_whatever_readers_say(reader: Reader, seed: int) -> None:
    random, sent, refused = Random(seed), list[int](), 0
    feed = reader._links.following.connected(next(iter(reader._links.following.tails)))
    reader._links.subscribe(feed)
    reader._links.handle(feed, *frame_of(joined(Subscribed(feed.subscribed, 1, NONE, EVERY).frame())))
    reader._links.handle(feed, *frame_of(from_servers(1)[0]))
    relay = Relay(reader)

    def send(buffers: list[Buffer]) -> None:
        sent.append(len(joined(buffers)))

    fed = RelayFeed(relay, send)
    for i in range(FRAMES // 3):
        data = bytearray(random.choice(from_readers(i + 1)))
        if random.random() < 0.7:
            data = mutate(random, data, from_servers())
        try:
            header, body = frame_of(bytes(data))
            fed.frame(header, body)
        except FrameError as error:
            refused += bool(str(error))
            fed.close()
            fed = RelayFeed(relay, send)
    fed.close()
    assert refused > 100
    assert sent
    assert reader.pull({"users": np.arange(5)})["users"].shape == (5, SPEC.dim)


def test_a_relay_says_why_it_ends_a_connection(reader: Reader) -> None:
    with PullServer(reader, "127.0.0.1", 0) as relay:
        host, _, port = relay.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as raw:
            raw.sendall(Header(Kind.READ_RANGE, worker=RANGES).pack())
            heard = b""
            while part := raw.recv(4096):
                heard += part
        header = unpack_header(heard)
        assert header.kind == Kind.ERROR
        assert b"a READ_RANGE of range" in heard
