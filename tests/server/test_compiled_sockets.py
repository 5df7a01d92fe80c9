"""Sockets that compiled code reads and writes, and the parts left to Python."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import select
import socket
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from elasticps.server.fast import layout as at
from elasticps.server.fast import sockets
from elasticps.server.fast.path import FastPath
from elasticps.server.network.pump import Pump, Transport
from elasticps.server.server import Server
from elasticps.wire.frames import HEADER_BYTES, Kind, unpack_header
from tests.server.conftest import DIM, TABLE, Group, Run, until

KEYS = list(range(1, 9))


async def started(group: Group) -> Server:
    """Starts one server that heads every range."""
    server = await group.start("a")
    assert isinstance(server.streams, Pump)
    group.adopt(group.make_view(lambda r: ["a"]))
    return server


def transports(server: Server) -> list[Transport]:
    return [c.transport for c in server.handshake.connections if isinstance(c.transport, Transport)]


def test_new_and_reused_descriptors_reach_their_own_connection(run: Run) -> None:
    """Each of many connections, of which some end and others take their descriptors, gets its own answers."""

    async def test(group: Group) -> None:
        server = await started(group)
        assert group.view is not None
        first = await group.connect("a")
        await first.push(group.view, "a", 1, KEYS, 1.0)
        others = [await asyncio.open_connection("127.0.0.1", port_of(group)) for _ in range(90)]
        for _, writer in others[::2]:
            writer.close()
        await until(lambda: len(server.handshake.connections) == 46)
        others[::2] = [await asyncio.open_connection("127.0.0.1", port_of(group)) for _ in range(45)]
        for reader, writer in others:
            writer.write(b"nonsense" * 16)
            answer = await reader.readexactly(HEADER_BYTES)
            assert unpack_header(answer, 0, 1 << 20).kind == Kind.ERROR
        header, _ = await first.push(group.view, "a", 2, KEYS, 1.0)
        assert header.kind == Kind.OK
        for _, writer in others:
            writer.close()
        await until(lambda: len(server.handshake.connections) == 1)

    run(test)


def test_a_reset_while_reading_is_paused_is_noticed(run: Run) -> None:

    async def test(group: Group) -> None:
        server = await started(group)
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(group))
        await until(lambda: len(server.handshake.connections) == 1)
        transports(server)[0].pause_reading()
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        await until(lambda: not server.handshake.connections)
        del reader

    run(test)


def test_bytes_that_a_full_socket_refuses_leave_later_in_order(run: Run) -> None:
    """A reader that rests: the socket takes a part, Python keeps the rest, and what follows waits behind it."""

    async def test(group: Group) -> None:
        server = await started(group)
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(group), limit=1 << 12)
        await until(lambda: len(server.handshake.connections) == 1)
        transport = transports(server)[0]
        parts = [np.full(1 << 20, i, np.uint8) for i in range(12)]
        transport.writelines([part.data for part in parts[:6]])
        assert transport.get_write_buffer_size() > 0
        for part in parts[6:]:
            transport.write(part.data)
        got = await reader.readexactly(len(parts) << 20)
        assert got == b"".join(part.tobytes() for part in parts)
        await until(lambda: transport.get_write_buffer_size() == 0)
        writer.close()
        await until(lambda: not server.handshake.connections)

    run(test)


def test_without_descriptors_nothing_is_accepted_until_there_are_some(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def test(group: Group) -> None:
        await started(group)
        monkeypatch.setattr("elasticps.server.network.pump.FULL_PAUSE_S", 0.02)
        listener = group.listeners["a"]
        accept, tried = listener._socket.accept, []

        class Full:
            """A listening socket of a process that has no descriptors left."""

            def accept(self) -> Any:
                tried.append(1)
                if len(tried) < 3:
                    raise OSError(errno.EMFILE, "too many open files")
                return accept()

            def __getattr__(self, name: str) -> Any:
                return getattr(real, name)

        real, listener._socket = listener._socket, Full()
        worker = await group.connect("a")
        assert len(tried) >= 3
        assert group.view is not None
        header, _ = await worker.push(group.view, "a", 1, KEYS, 1.0)
        assert header.kind == Kind.OK
        listener._socket = real

    run(test)


def test_a_bug_in_a_handler_ends_only_one_connection(run: Run) -> None:

    async def test(group: Group) -> None:
        server = await started(group)
        assert group.view is not None
        worker = await group.connect("a")
        failed: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failed.append(context))
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(group))
        await until(lambda: len(server.handshake.connections) == 2)
        newest = list(server.handshake.connections)[-1]

        def fail(reason: int) -> None:
            raise ValueError("a mistake")

        newest.unusual = fail  # type: ignore[method-assign]
        writer.write(b"nonsense" * 16)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert isinstance(failed[0]["exception"], ValueError)
        header, _ = await worker.push(group.view, "a", 1, KEYS, 1.0)
        assert header.kind == Kind.OK
        writer.close()

    run(test)


def test_nothing_else_happens_while_a_frame_waits_for_memory(run: Run) -> None:
    """The server notices that it was stopped just then: Python handles the frames that follow, one of other keys first.
    The rows of that one were taken for those of the frame that had waited."""

    async def test(group: Group) -> None:
        server = await started(group)
        assert group.view is not None
        worker = await group.connect("a")
        path, before = server.fast, server.fast.before
        waiting: list[int] = []

        def stopped() -> None:
            before()
            waiting.append(int(path.h[at.H_MAKING]))
            if waiting[-2:] == [0, 1]:
                path.h[at.H_CAREFUL] = 1

        path.before = stopped
        random, expected = np.random.default_rng(0), np.zeros(4000)
        for clock in range(1, 13):
            keys = random.permutation(4000)[:1000]
            expected[keys] += 1.0
            header, _ = await worker.push(group.view, "a", clock, sorted(keys.tolist()), 1.0)
            assert header.kind == Kind.OK
            path.h[at.H_CAREFUL] = 0
        rows = np.zeros((4000, DIM), np.float32)
        table = server.store.live[TABLE]
        table.gather(np.arange(4000), rows)
        assert rows.tolist() == np.repeat(expected, DIM).reshape(4000, DIM).tolist()
        assert set(waiting) == {0}

    run(test)


def port_of(group: Group) -> int:
    return int(group.infos["a"].address.rpartition(":")[2])


def test_polling_leaves_message_addresses_empty() -> None:
    """The kernel refuses a message whose header names an address, and then all of it would go through Python."""
    path = FastPath(4, 1 << 20)
    with select.epoll() as waits:
        path.use_epoll(waits.fileno(), sockets.MESSAGE_BYTES, sockets.EVENT_BYTES * sockets.EVENTS)
        sockets.warm()
        assert path.turn() == at.IDLE
    address = (ctypes.c_uint8 * 16).from_address(int(path.h[at.H_MESSAGE]))
    assert bytes(address) == bytes(16)
