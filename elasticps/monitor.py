"""A leader's lines to the servers: data-plane connections on which servers report, and views go out.

On the data plane, because what is watched then is the very loop and port that workers depend on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from coordinator.health import Dial, Line, Memory, Report
from coordinator.view import ServerInfo, View
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
    unpack_header,
)
from elasticps.wire.views import view_frame
from replication.chain import Member
from replication.effects import CaughtUp

HELLO_TIMEOUT_S = 2.0
MAX_WAITING_BYTES = 4 << 20  # views that a server which reads nothing is not sent any more


def dial_server(cluster: str, leader: str) -> Dial:
    """How the leader of that name connects to the servers of a cluster."""

    @asynccontextmanager
    async def dial(server: ServerInfo) -> AsyncIterator[Line]:
        host, _, port = server.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            hello = {"cluster": cluster, "leader": leader, "to": [server.name, server.incarnation]}
            writer.write(json_frame(Kind.HELLO, hello))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                header, body = await _read(reader)
            if header.kind != Kind.WELCOME:
                raise PermissionError(str(json_body(body).get("message")))
            yield _Line(reader, writer)
        except (TimeoutError, asyncio.IncompleteReadError, FrameError) as error:
            raise ConnectionResetError(str(error) or type(error).__name__) from None
        finally:
            writer.transport.abort()

    return dial


class _Line:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def reports(self) -> AsyncIterator[Report]:
        while True:
            try:
                header, body = await _read(self._reader)
                if header.kind == Kind.REPORT:
                    yield _report(header, json_body(body))
            except (asyncio.IncompleteReadError, FrameError) as error:
                raise ConnectionResetError(str(error)) from None

    def send_view(self, view: View) -> None:
        if self._writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
            self._writer.write(view_frame(view))


async def _read(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    header = unpack_header(await reader.readexactly(HEADER_BYTES), limit=MAX_CONTROL_BYTES)
    return header, await reader.readexactly(header.body)


def _report(header: Header, document: dict[str, Any]) -> Report:
    try:
        levels = tuple(CaughtUp(r, fill, Member(name, number)) for r, fill, name, number in document["levels"])
        suspects = {Member(name, number): float(seconds) for name, number, seconds in document["suspects"]}
        stalled = frozenset(Member(str(name), int(number)) for name, number in document["stalled"])
        nbytes, requests = int(document["bytes"]), int(document["requests"])
        used, mark, full = map(int, document["memory"])
        return Report(header.epoch, levels, suspects, stalled, nbytes, requests, Memory(used, mark, full))
    except (KeyError, TypeError, ValueError) as error:
        raise FrameError(f"a report that is none: {error}") from None
