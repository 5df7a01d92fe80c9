"""Malformed requests of workers and servers end at most their own connection."""

from __future__ import annotations

import asyncio
import os
from contextlib import nullcontext
from unittest.mock import Mock, patch

import numpy as np
import pytest

from coordinator.core.view import ServerInfo
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.monitor import dial_server
from elasticps.server.core import view_exchange
from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.network import connection as connections
from elasticps.server.roles import handshake
from elasticps.server.server import Server
from elasticps.system import fatal
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import ALL_RANGES, HEADER_BYTES, FrameError, Header, Kind, block_head, json_body, json_frame
from replication.messages import Ack, Message
from tests.server.conftest import TABLE, WORKER, Group, Run, Worker, until

NOW, LATER = 1, 99


def body_of(kind: Kind, document: dict[str, object]) -> bytes:
    return json_frame(kind, document)[HEADER_BYTES:]


def create(
    worker: Worker, table: int, epoch: int, spec: TableSpec | None = None
) -> asyncio.Future[tuple[Header, bytes]]:
    text = (spec or TableSpec(f"t{table}", 2, Accumulate())).to_json()
    return worker.ask(Header(Kind.CREATE, epoch=epoch), body_of(Kind.CREATE, {"id": table, "spec": text}))


async def pair(group: Group) -> None:
    for name in ("a", "b"):
        await group.start(name)
    group.adopt(group.make_view(lambda r: ["a", "b"]))
    await until(lambda: all(not server.links.suspects() for server in group.servers.values()))


async def say_what_cannot_be(sender: Server, receiver: Server, *messages: Message) -> None:
    """Sends an impossible message to a peer, and waits until their link is replaced."""
    link, wrong = receiver.links.link(sender.member), sender.links.link(receiver.member)
    assert wrong is not None
    wrong.send_all([buffer for message in messages for buffer in sender.links._codec.encode(message)])
    await until(lambda: receiver.links.link(sender.member) not in (None, link))


def test_a_round_close_with_an_impossible_clock_ends_only_its_connection(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        worker, other = await group.connect("a"), await group.connect("a")
        worker.ask(
            Header(Kind.BARRIER_CLOSE, epoch=NOW), body_of(Kind.BARRIER_CLOSE, {"round": 1 << 70, "workers": [WORKER]})
        )
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(worker.task, 10)
        assert group.view is not None
        header, _ = await asyncio.wait_for(other.push(group.view, "a", 1, [1, 2, 3], 1.0), 10)
        assert header.kind == Kind.OK

    run(test)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_read_after_frame_of_an_impossible_epoch_ends_only_its_connection(run: Run, compiled: bool) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        group.servers["b"].fast.h[H_ENABLED] = compiled
        worker = await group.connect("b")
        for epoch in (NOW, 1 << 63):  # the first one makes room for the second
            worker.writer.write(ReadAfter(np.array([1]), np.array([1 << 16]), epoch).frame())
        await until(lambda: "of epoch 9223372036854775808" in worker.refused)
        other = await group.connect("b")
        assert (await other.ask(Header(Kind.PULL, epoch=NOW, worker=other.id, table=TABLE)))[0].kind == Kind.ROWS

    run(test)


def test_a_create_for_a_future_view_delays_no_other_and_times_out(run: Run) -> None:
    async def test(group: Group) -> None:
        (second,) = group.enrol(1)
        await pair(group)
        early, other = await group.connect("a"), await group.connect("a", worker=second)
        waiting = create(early, 50, LATER)
        await until(lambda: any(c.holding for c in group.servers["a"].handshake.connections))
        header, _ = await asyncio.wait_for(create(other, 51, NOW), 10)
        assert header.kind == Kind.OK
        assert 51 in group.servers["b"].store.tables
        with patch.object(view_exchange, "HOLD_TIMEOUT_S", -1.0):
            group.servers["a"].tick()
        header, document = await asyncio.wait_for(waiting, 10)
        assert json_body(document)["code"] == "stale-view"
        assert 50 not in group.servers["a"].store.tables

    run(test)


def test_requests_for_a_future_view_wait_on_their_own_connection(run: Run) -> None:
    async def test(group: Group) -> None:
        (second,) = group.enrol(1)
        await pair(group)
        early, other = await group.connect("a"), await group.connect("a", worker=second)
        for _ in range(500):
            early.ask(Header(Kind.GET_CLOCKS, epoch=LATER, worker=WORKER))
        await until(lambda: any(c.holding for c in group.servers["a"].handshake.connections))
        assert group.servers["a"].replica.parked == 0
        header, _ = await asyncio.wait_for(other.ask(Header(Kind.GET_CLOCKS, epoch=NOW, worker=WORKER)), 10)
        assert header.kind == Kind.CLOCKS

    run(test)


def test_an_acknowledgement_of_unsent_operations_ends_only_the_link(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        worker = await group.connect("a")
        ranges = np.arange(4, dtype=np.int64)
        await say_what_cannot_be(group.servers["b"], group.servers["a"], Ack(1, ranges, np.full(4, 1 << 60, np.int64)))
        assert group.view is not None
        header, _ = await asyncio.wait_for(worker.push(group.view, "a", 1, [1, 2, 3], 1.0), 10)
        assert header.kind == Kind.OK

    run(test)


def test_an_impossible_headroom_of_a_neighbour_is_ignored(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        head, tail = group.servers["a"], group.servers["b"]
        link, wrong = head.links.link(tail.member), tail.links.link(head.member)
        assert wrong is not None
        wrong.send(json_frame(Kind.ROOM, {"rooms": [[-(1 << 70), 1, "b", 0, 0, 0]]}))
        await until(lambda: head.links.link(tail.member) not in (None, link))
        head.memory.look()

    run(test)


def test_a_held_frame_that_fails_ends_only_its_connection(run: Run) -> None:
    async def test(group: Group) -> None:
        await pair(group)
        server = group.servers["a"]
        early = await group.connect("a")
        create(early, 50, LATER)
        await until(lambda: any(c.holding for c in server.handshake.connections))
        held = next(c for c in server.handshake.connections if c.holding)
        with patch.dict(server.worker.handlers, {Kind.CREATE: lambda *_: [].pop()}):
            server.tick()
        assert held.transport.is_closing()

    run(test)


def test_a_task_that_fails_ends_the_process(run: Run) -> None:
    async def test(group: Group) -> None:
        async def fails() -> None:
            raise LookupError("gone")

        codes: list[int] = []
        with patch.object(os, "_exit", codes.append):
            task = asyncio.create_task(fails())
            task.add_done_callback(fatal.watch)
            await asyncio.wait((task,))
            await until(lambda: codes)
        assert codes == [fatal.EXIT_FATAL]

    run(test)


def test_the_maximum_of_workers_keeps_out_no_leader_and_no_server(run: Run) -> None:
    async def test(group: Group) -> None:
        with patch.object(handshake, "MAX_WORKERS", 3):
            ids = group.enrol(3)
            await pair(group)
            for worker in ids:
                await group.connect("b", create=False, worker=worker)
            host, _, port = group.infos["b"].address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(json_frame(Kind.HELLO, {"cluster": "c", "worker": WORKER, "name": "w", "app": "default"}))
            assert b"already has 3" in await asyncio.wait_for(reader.read(), 10)
            writer.close()
            async with dial_server("leader")(group.infos["b"], "c") as line:
                assert (await anext(aiter(line.reports()))).epoch == 1
            head, tail = group.servers["a"], group.servers["b"]
            link = head.links.link(tail.member)
            assert link is not None
            link.transport.abort()
            await until(lambda: head.links.link(tail.member) not in (None, link))

    run(test)


def test_a_link_to_a_server_that_has_just_gone_is_closed(run: Run) -> None:
    """Before whoever reads from it is told, uvloop says so in a way of its own, which ended coordinators."""

    async def test(group: Group) -> None:
        await pair(group)
        async with dial_server("leader")(group.infos["b"], "c") as line:
            await anext(aiter(line.reports()))
            group.stop("b")

            async def beat_on() -> None:
                while True:
                    line.beat(1)
                    await asyncio.sleep(0)

            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(beat_on(), 10)

    run(test)


def test_silent_connections_keep_out_no_worker(run: Run) -> None:
    async def test(group: Group) -> None:
        with patch.object(handshake, "MAX_UNKNOWN", 4):
            await pair(group)
            host, _, port = group.infos["b"].address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
            async with dial_server("leader")(group.infos["b"], "c"):
                pass
            await group.connect("b", create=False)
            reader, _ = silent[0]
            assert await asyncio.wait_for(reader.read(), 10)  # told why, and ended
            for _, writer in silent:
                writer.close()

    run(test)


def test_connections_with_a_refused_hello_keep_out_no_worker(run: Run) -> None:
    async def test(group: Group) -> None:
        with patch.object(handshake, "MAX_UNKNOWN", 4):
            await pair(group)
            host, _, port = group.infos["b"].address.rpartition(":")
            strange = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
            for reader, writer in strange:
                writer.write(json_frame(Kind.HELLO, {"cluster": "d", "worker": WORKER, "name": "w", "app": "default"}))
                await asyncio.wait_for(reader.readexactly(HEADER_BYTES), 10)
            strange += [await asyncio.open_connection(host, int(port)) for _ in range(4)]
            assert b"have not said who they are" in await asyncio.wait_for(strange[0][0].read(), 10)
            for _, writer in strange:
                writer.close()

    run(test)


def test_a_connection_that_does_not_read_refusals_still_needs_a_hello(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: one timer was for both, and it stayed for ever."""
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.5)

    async def test(group: Group) -> None:
        server = await group.start("a")
        host, _, port = group.infos["a"].address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await until(lambda: bool(server.handshake.connections))
        (connection,) = server.handshake.connections
        connection.pause_writing()  # what its transport says: it does not read what it is told,
        connection.resume_writing()  # and then it does
        assert b"no hello" in await asyncio.wait_for(reader.read(), 10)
        await until(lambda: not server.handshake.connections)
        writer.close()

    run(test)


def test_an_init_of_an_old_view_is_refused_where_memory_is_limited(run: Run) -> None:
    async def test(group: Group) -> None:
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        worker = await group.connect("a", create=False)
        server.fast.room = 1 << 20
        body = block_head(99, 0, 3, np.empty(0, np.float32))
        _, refusal = await asyncio.wait_for(worker.ask(Header(Kind.INIT, ALL_RANGES, items=1), body), 10)
        assert json_body(refusal)["code"] == "stale-view"

    run(test)


@pytest.mark.parametrize(
    ("cluster", "incarnation", "error"),
    [("d", 1, PermissionError), ("c", 2, PermissionError), ("c", 1, ConnectionResetError)],
    ids=["another cluster", "another incarnation", "full"],
)
def test_only_another_identity_counts_as_death(
    run: Run, cluster: str, incarnation: int, error: type[Exception]
) -> None:
    async def test(group: Group) -> None:
        await group.start("a")
        address = group.infos["a"].address
        hello = Mock(side_effect=FrameError("full"))
        full = patch.dict(group.servers["a"].handshake.newcomer.handlers, {Kind.HELLO: hello})
        with full if error is ConnectionResetError else nullcontext(), pytest.raises(error):
            async with dial_server("leader")(ServerInfo("a", incarnation, address), cluster):
                pass

    run(test)
