"""A worker has one connection to a server."""

from __future__ import annotations

import asyncio

import pytest

from elasticps.server.roles import handshake
from elasticps.wire.frames import Header, Kind, json_frame
from elasticps.wire.joining import JoinedAnswer, JoinHeader
from tests.server.conftest import RANGES, WORKER, Group, Run, Worker, until


def test_frames_held_on_an_older_connection_are_dropped(run: Run) -> None:
    """It said that the worker pauses, behind a frame that waits for a view; the worker had gone on meanwhile."""

    async def test(group: Group) -> None:
        (second,) = group.enrol(1)
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        older = await group.connect("a", base=3)
        older.ask(Header(Kind.LIST_KEYS, epoch=2))
        older.ask(JoinHeader(pause=True).header())
        await until(lambda: any(connection.holding for connection in server.handshake.connections))
        await group.connect("a", base=7)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(older.task, 10)
        group.adopt(group.make_view(lambda r: ["a"]))
        other = await group.connect("a", worker=second)
        header, body = await other.ask(JoinHeader().header())
        assert JoinedAnswer.of(header, bytes(body), RANGES).at_homes == 7

    run(test)


def test_a_reconnecting_worker_keeps_its_place_on_a_full_server(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of its older connection may not have come."""
    monkeypatch.setattr(handshake, "MAX_WORKERS", 2)

    async def test(group: Group) -> None:
        first, second, third = group.enrol(3)
        await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        for worker in (first, second, first):
            assert not (await asyncio.wait_for(group.connect("a", create=False, worker=worker), 10)).refused
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(group.connect("a", create=False, worker=third), 10)

    run(test)


def test_a_late_hello_of_an_older_connection_takes_no_place(run: Run) -> None:
    """Its hello was lost on the way and sent again; the worker had given it up and come back meanwhile."""

    async def test(group: Group) -> None:
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        host, _, port = group.infos["a"].address.rpartition(":")
        older = Worker(*await asyncio.open_connection(host, int(port)), WORKER)
        group.workers.append(older)
        await until(lambda: len(server.handshake.connections) == 1)
        newer = await group.connect("a", base=7)
        older.writer.write(json_frame(Kind.HELLO, {"cluster": "c", "worker": WORKER, "name": "w", "app": "default"}))
        older.ask(JoinHeader(pause=True).header())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await asyncio.wait_for(older.task, 10)
        header, _ = await asyncio.wait_for(newer.ask(JoinHeader().header()), 10)
        assert header.kind == Kind.OK
        assert [connection.worker for connection in server.handshake.workers] == [WORKER]

    run(test)
