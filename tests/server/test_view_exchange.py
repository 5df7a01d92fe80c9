"""Views are encoded once and sent once per connection, some connections in each turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from coordinator.core.view import ServerInfo, View
from elasticps.server.core.view_exchange import (
    MAX_WAITING_BYTES,
    NOTIFIED_PER_TURN,
    UNASKED_BYTES,
    HeldFrames,
    ViewNotifier,
)
from elasticps.wire.frames import HEADER_BYTES, Header, Kind, bytes_frame, json_frame, read_view, unpack_header
from tests.server.conftest import Group, Run, until

SERVERS = (ServerInfo("a", 1, "h:1"),)
VIEW = View("c", 1, 2, 1, SERVERS, np.zeros((2, 1)).astype(int), np.array([-1, -1]), np.ones(2, int), "first")
MANY = tuple(ServerInfo(f"s{i:02}", 1, f"h:{i + 1}") for i in range(40))
LARGE = replace(VIEW, servers=MANY)


class Listener:
    def __init__(self, waiting_bytes: int = 0) -> None:
        self.notified_epoch = 0
        self.waiting_bytes = waiting_bytes
        self.frames: list[bytes] = []

    def send(self, frame: bytes) -> None:
        self.frames.append(frame)


class Loop:
    def __init__(self) -> None:
        self.next: list[Callable[[], None]] = []

    def soon(self, call: Callable[[], None]) -> None:
        self.next.append(call)

    def turn(self) -> None:
        now, self.next = self.next, []
        for call in now:
            call()


def listener(waiting_bytes: int = 0) -> Any:
    return Listener(waiting_bytes)


def frames_received(listeners: list[Any]) -> int:
    return sum(len(one.frames) for one in listeners)


def test_all_connections_get_the_same_frame_some_in_each_turn() -> None:
    loop, listeners = Loop(), [listener() for _ in range(3 * NOTIFIED_PER_TURN)]
    notifier = ViewNotifier(loop.soon)
    notifier.adopt(LARGE)
    notifier.tell_all(listeners)
    notifier.tell(listeners[-1])  # it asks before its turn has come
    for turn in (1, 2, 3):
        assert frames_received(listeners[:-1]) == turn * NOTIFIED_PER_TURN - (turn == 3)
        loop.turn()
    assert not loop.next
    assert {id(frame) for one in listeners[:-1] for frame in one.frames} == {id(listeners[0].frames[0])}
    assert {unpack_header(one.frames[0]).kind for one in listeners[:-1]} == {Kind.NEWER_VIEW}
    assert unpack_header(listeners[-1].frames[0]).kind == Kind.VIEW
    assert all(len(one.frames) == 1 for one in listeners)


def test_few_servers_send_a_short_view_at_once() -> None:
    loop, new, old = Loop(), listener(), listener()
    notifier = ViewNotifier(loop.soon)
    notifier.adopt(VIEW)
    notifier.adopt(newer := replace(VIEW, epoch=2))
    old.notified_epoch = 1
    notifier.tell_all([new, old])
    for one, base in ((new, None), (old, VIEW)):
        (frame,) = one.frames
        view = read_view(unpack_header(frame), np.frombuffer(frame, np.uint8)[HEADER_BYTES:], base)
        assert view is not None
        assert view.digest == newer.digest
        assert one.notified_epoch == 2
    assert {unpack_header(one.frames[0]).kind for one in (new, old)} <= {Kind.VIEW, Kind.VIEW_DIFFERENCE}
    notifier.tell_all([new, old])
    assert frames_received([new, old]) == 2, "each hears of a view once"


def test_all_servers_together_send_a_worker_little_unasked() -> None:
    loop, kinds = Loop(), list[int]()
    for servers in range(1, 64):
        one = listener()
        notifier = ViewNotifier(loop.soon)
        notifier.adopt(replace(VIEW, servers=tuple(ServerInfo(f"s{i:02}", 1, f"h:{i + 1}") for i in range(servers))))
        notifier.tell_all([one])
        (frame,) = one.frames
        assert len(frame) == HEADER_BYTES or servers * len(frame) <= UNASKED_BYTES
        kinds.append(unpack_header(frame).kind)
    assert (kinds[0], kinds[-1]) == (Kind.VIEW, Kind.NEWER_VIEW)


def test_a_newer_view_replaces_the_older_one_for_connections_still_waiting() -> None:
    loop, listeners = Loop(), [listener() for _ in range(2 * NOTIFIED_PER_TURN)]
    notifier = ViewNotifier(loop.soon)
    notifier.adopt(VIEW)
    notifier.tell_all(listeners)
    notifier.adopt(replace(VIEW, epoch=2))
    notifier.tell_all(listeners[:1])
    loop.turn()
    loop.turn()
    assert not loop.next
    epochs = [[unpack_header(frame).epoch for frame in one.frames] for one in listeners]
    assert epochs == [[1, 2]] + [[1]] * (NOTIFIED_PER_TURN - 1) + [[2]] * NOTIFIED_PER_TURN


def test_a_connection_that_reads_nothing_gets_a_view_on_request() -> None:
    notifier, idle = ViewNotifier(Loop().soon), listener(MAX_WAITING_BYTES)
    notifier.adopt(VIEW)
    notifier.tell_all([idle])
    assert not idle.frames
    notifier.tell(idle)
    assert len(idle.frames) == 1


async def a_peer(group: Group, of: str, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A link that says it is another server's."""
    host, _, port = group.infos[of].address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    document = {"cluster": "c", "peer": [name, 1], "to": [of, 1], "number": 1 << 20}
    writer.write(json_frame(Kind.HELLO, document))
    header = unpack_header(await reader.readexactly(HEADER_BYTES))
    assert header.kind == Kind.WELCOME
    await reader.readexactly(header.body)
    return reader, writer


async def all_kinds(reader: asyncio.StreamReader) -> list[Kind]:
    """The kinds of all frames until the connection ends."""
    kinds = []
    while head := await reader.read(HEADER_BYTES):
        header = unpack_header(head)
        await reader.readexactly(header.body)
        kinds.append(Kind(header.kind))
    return kinds


def test_a_view_that_cannot_be_read_ends_its_link_and_nothing_else(run: Run) -> None:
    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        view = group.make_view(lambda r: ["a"])
        group.adopt(view)
        worker = await group.connect("a")
        group.stop("b")
        for nonsense in (b"nonsense", view.encode(), view.encode()[:-4]):
            reader, writer = await a_peer(group, "a", "b")
            writer.write(bytes_frame(Kind.VIEW, b"not looked at", epoch=view.epoch))
            writer.write(bytes_frame(Kind.VIEW, nonsense, epoch=view.epoch + 1))
            kinds = await asyncio.wait_for(all_kinds(reader), 10)
            assert kinds[-1] == Kind.ERROR
            writer.close()
        header, _ = await asyncio.wait_for(worker.push(view, "a", 1, [1, 2, 3], 1.0), 10)
        assert header.kind == Kind.OK
        assert group.servers["a"].serving.epoch == view.epoch

    run(test)


def test_a_server_that_gets_ranges_sends_its_workers_the_view_once(run: Run) -> None:
    async def test(group: Group) -> None:
        ids = group.enrol(3)
        for name in ("a", "b"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        workers = [await group.connect("b", create=False, worker=worker) for worker in ids]
        view = View.decode(group.make_view(lambda r: ["b", "a"]).encode())
        group.adopt(view)
        await until(lambda: all(worker.views and worker.views[-1] == view for worker in workers))
        assert [len(worker.views) for worker in workers] == [1, 1, 1]

    run(test)


def test_repeated_requests_without_reading_get_no_more_views() -> None:
    notifier, serving = ViewNotifier(Loop().soon), SimpleNamespace(epoch=VIEW.epoch)
    notifier.adopt(VIEW)
    held = HeldFrames(cast(Any, serving), notifier, lambda: 0.0, lambda: None, lambda: None)
    asking, full = listener(MAX_WAITING_BYTES - 1), listener(MAX_WAITING_BYTES)
    for asker in (asking, asking, full):
        held.handlers[Kind.GET_VIEW](asker, Header(Kind.GET_VIEW), np.empty(0, np.uint8))
    assert [len(asking.frames), len(full.frames)] == [2, 0]
