"""Peers that do not read, and peers that go while nobody reads from them."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from elasticps.optimizers import SGD
from elasticps.server.fast.layout import H_ENABLED
from elasticps.server.server import Server
from elasticps.spec import TableSpec
from elasticps.wire.frames import HEADER_BYTES, LAST, Header, Kind, json_frame
from tests.server.conftest import WORKER, Group, Run, until

WIDE, DIM, KEYS = 9, 128, 1000
ANSWER_BYTES = KEYS * DIM * 4
ASKED = 100


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


def pulls(count: int) -> bytes:
    keys = np.arange(KEYS, dtype=np.int64).tobytes()
    return b"".join(
        Header(Kind.PULL, body=len(keys), request=10 + i, epoch=1, table=WIDE, items=KEYS, worker=WORKER).pack() + keys
        for i in range(count)
    )


def waiting_bytes(server: Server) -> int:
    return sum(connection.waiting_bytes for connection in server.handshake.connections)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_worker_that_reads_nothing_costs_a_bounded_amount(run: Run, compiled: bool) -> None:
    async def story(group: Group) -> None:
        server = await group.start("a")
        server.fast.h[H_ENABLED] = compiled
        group.adopt(group.make_view(lambda r: ["a"]))
        sock = await greet(group, "a")
        loop, asked = asyncio.get_running_loop(), pulls(ASKED)
        sending = loop.create_task(loop.sock_sendall(sock, asked))
        await until(lambda: waiting_bytes(server) > 0)
        other = await group.connect("a")  # somebody else is served meanwhile, and long enough to show what waits
        for _ in range(50):
            header, _ = await asyncio.wait_for(other.ask(Header(Kind.JOIN)), 10)
            assert header.kind == Kind.OK
            assert waiting_bytes(server) < 10 * ANSWER_BYTES
        received = 0
        while received < ASKED * (HEADER_BYTES + ANSWER_BYTES):  # and gets all of it once it reads
            received += len(await asyncio.wait_for(loop.sock_recv(sock, 1 << 20), 10))
        await asyncio.wait_for(sending, 10)
        sock.close()

    run(story)


def test_a_peer_that_goes_while_nothing_is_read_from_it_is_noticed(run: Run) -> None:
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
