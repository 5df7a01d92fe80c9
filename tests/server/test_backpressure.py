"""Peers that do not read, and peers that leave while reading is paused."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import SGD
from elasticps.model.spec import TableSpec
from elasticps.server.fast.layout import H_ENABLED, H_PULLS
from elasticps.server.network.connection import LINK_HIGH_BYTES
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, LAST, Header, Kind, block_head, json_frame
from elasticps.wire.headers import PushHeader
from replication.chain import Member
from replication.progress import before_part
from tests.server.conftest import RANGES, WORKER, Answer, Group, Run, Worker, until

WIDE, DIM, KEYS = 9, 128, 1000
ANSWER_BYTES = KEYS * DIM * 4
PULLS = 100


async def greet(group: Group, name: str) -> socket.socket:
    """A worker's connection that opens a table and reads nothing but that it is open."""
    host, _, port = group.infos[name].address.rpartition(":")
    sock = socket.create_connection((host, int(port)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    hello = {"cluster": "c", "worker": WORKER, "name": "w", "app": "default"}
    spec = TableSpec("wide", DIM, SGD(lr=0.1)).to_json()
    body = json_frame(Kind.CREATE, {"id": WIDE, "spec": spec})[HEADER_BYTES:]
    frames = json_frame(Kind.HELLO, hello) + Header(Kind.JOIN, LAST, request=1).pack()
    frames += Header(Kind.CREATE, body=len(body), request=2, epoch=1).pack() + body
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_sendall(sock, frames)
    await until(lambda: WIDE in group.servers[name].store.tables)
    return sock


def pulls(count: int, keys: int = KEYS) -> bytes:
    body = np.arange(keys, dtype=np.int64).tobytes()
    return b"".join(
        Header(Kind.PULL, body=len(body), request=10 + i, epoch=1, table=WIDE, items=keys, worker=WORKER).pack() + body
        for i in range(count)
    )


def waiting_bytes(server: Server) -> int:
    return sum(connection.waiting_bytes for connection in server.handshake.connections)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_worker_that_reads_nothing_takes_bounded_memory(run: Run, compiled: bool) -> None:
    async def story(group: Group) -> None:
        (second,) = group.enrol(1)
        server = await group.start("a")
        server.fast.h[H_ENABLED] = compiled
        group.adopt(group.make_view(lambda r: ["a"]))
        sock = await greet(group, "a")
        loop, frames = asyncio.get_running_loop(), pulls(PULLS)
        sending = loop.create_task(loop.sock_sendall(sock, frames))
        await until(lambda: waiting_bytes(server) > 0)
        other = await group.connect(
            "a", worker=second
        )  # somebody else is served meanwhile, and long enough to show what waits
        for _ in range(50):
            header, _ = await asyncio.wait_for(other.ask(Header(Kind.JOIN)), 10)
            assert header.kind == Kind.OK
            assert waiting_bytes(server) < 10 * ANSWER_BYTES
        received = 0
        while received < PULLS * (HEADER_BYTES + ANSWER_BYTES):  # and gets all of it once it reads
            received += len(await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10))
        await asyncio.wait_for(sending, 10)
        sock.close()

    run(story)


def test_a_peer_that_leaves_while_reading_is_paused_is_noticed(run: Run) -> None:
    async def story(group: Group) -> None:
        server = await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        sock = await greet(group, "a")
        await asyncio.get_running_loop().sock_sendall(sock, pulls(8))
        await until(lambda: waiting_bytes(server) > 0)
        assert len(server.handshake.connections) == 1
        sock.shutdown(socket.SHUT_WR)

        def gone() -> bool:
            server.tick()
            return not server.handshake.connections

        await until(gone)
        sock.close()

    run(story)


async def closing(group: Group, goes: bool) -> tuple[Server, socket.socket]:
    """A connection that a server closes once its peer has read what is queued, which is too little for a pause."""
    server = await group.start("a")
    group.adopt(group.make_view(lambda r: ["a"]))
    sock = await greet(group, "a")
    loop, frames = asyncio.get_running_loop(), pulls(1, keys=20)
    while not waiting_bytes(server):
        counted = server.fast.counter(H_PULLS)
        await loop.sock_sendall(sock, frames)
        await until(lambda: server.fast.counter(H_PULLS) > counted)  # noqa: B023
    (connection,) = server.handshake.connections
    assert connection.transport.is_reading()
    if goes:
        sock.shutdown(socket.SHUT_WR)
    else:
        await loop.sock_sendall(sock, b"x" * HEADER_BYTES)
    await until(connection.transport.is_closing)
    assert server.handshake.connections
    return server, sock


@pytest.mark.parametrize("goes", [True, False])
def test_a_connection_closes_even_if_its_peer_does_not_read(
    run: Run, monkeypatch: pytest.MonkeyPatch, goes: bool
) -> None:
    async def story(group: Group) -> None:
        server, sock = await closing(group, goes)
        if not goes:
            monkeypatch.setattr("elasticps.server.network.connection.STALLED_TIMEOUT_S", 0.01)
        server.tick()
        await until(lambda: not server.handshake.connections)
        sock.close()

    run(story)


PUSHED_BYTES = KEYS * (DIM * 4 + 8)
PUSHES = 60


def push(group: Group, worker: Worker, clock: int) -> Answer:
    """A step that updates every row; all ranges have one head."""
    assert group.view is not None
    keys = np.arange(KEYS, dtype=np.int64)
    plan = plan_push(keys, table_salt(WIDE), Routes(group.view))
    body = block_head(WIDE, KEYS, DIM, np.array([1.0], np.float32)) + keys[plan.order].tobytes()
    body += np.full((KEYS, DIM), clock, np.float32).tobytes()
    header = PushHeader(0, group.view.epoch, clock, before_part(clock, 0), 1).header(0)
    return worker.ask(header, body)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("chain", ["a", "ac"])
def test_bytes_waiting_for_a_slow_joiner_are_bounded(run: Run, chain: str, compiled: bool) -> None:
    """Nothing of it is in a log, so the link itself is what holds pushes back: here, and by what it does not vouch for
    at the heads. The joiner is filled meanwhile."""

    async def story(group: Group) -> None:
        for name in (*chain, "b"):
            server = await group.start(name, log_budget_bytes=4 * PUSHED_BYTES)
            server.fast.h[H_ENABLED] = compiled
        head, tail, joiner = (group.servers[name] for name in (chain[0], chain[-1], "b"))
        group.adopt(group.make_view(lambda r: list(chain)))
        (await greet(group, "a")).close()
        worker = await group.connect("a")
        await push(group, worker, 1)
        placed: list[tuple[Any, ...]] = []  # the joiner is not known to have a piece before all is pushed
        tail.peer.handlers[Kind.CHUNK_ACK] = lambda link, header, body: placed.append((link, header, body.copy()))
        group.adopt(group.make_view(lambda r: list(chain), lambda r: "b"))
        await until(lambda: len(placed) == RANGES)
        link = joiner.links.link(Member(chain[-1], 1))
        assert link is not None
        link.transport.pause_reading()
        answers = [push(group, worker, clock) for clock in range(2, PUSHES)]
        await until(lambda: head.replica.parked and tail.replica.congested)
        for _ in range(1000):  # turns of the loop that all servers share
            await asyncio.sleep(0)
            assert tail.links.backlog(joiner.member) < LINK_HIGH_BYTES + 12 * PUSHED_BYTES
        assert not all(answer.done() for answer in answers)
        link.transport.resume_reading()
        tail.peer.handlers[Kind.CHUNK_ACK] = tail.links.receive
        for call in placed:
            tail.links.receive(*call)
        for answer in answers:
            header, _ = await asyncio.wait_for(answer, 30)
            assert header.kind == Kind.OK
        await until(lambda: len(tail.replica.levels()) == RANGES)
        tables = [server.store.tables[WIDE] for server in (head, joiner)]
        assert [tables[0].digest_range(r) for r in range(RANGES)] == [tables[1].digest_range(r) for r in range(RANGES)]

    run(story)
