"""A leader's connections to the servers, on which servers report and views are sent.

They use the data port, so that the leader watches the very loop and port that workers depend on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.core.capacities import RowCount
from coordinator.core.clocks import MOST_SECONDS, UNKNOWN, ClusterTime
from coordinator.core.health import Dial, Memory, Report, ServerLink, Tenure
from coordinator.core.view import ServerInfo, View
from elasticps.security.channel import proved, renew_at
from elasticps.security.identity import NotAuthorised, Role
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_CONTROL_BYTES,
    MAX_RANGES,
    FrameError,
    Header,
    Kind,
    difference_frame,
    json_body,
    json_frame,
    read_view,
    row_counts,
    unpack_header,
    view_frame,
    whole,
)
from elasticps.wire.headers import GetViewHeader, UnchangedHeader
from replication.chain import Member
from replication.effects import CaughtUp

if TYPE_CHECKING:
    from elasticps.security.credentials import Credentials

HELLO_TIMEOUT_S = 2.0
_ANOTHER = (
    "cluster",
    "incarnation",
)  # codes of another server at this address; no other refusal means death
_MOST = (1 << 63) - 1  # of whatever is counted
MAX_WAITING_BYTES = 4 << 20  # views that a server which reads nothing is not sent any more


def dial_server(leader: str, credentials: Credentials | None = None) -> Dial:
    """Returns how the leader of that name connects to servers; with TLS if it has credentials."""

    @asynccontextmanager
    async def dial(server: ServerInfo, cluster: str) -> AsyncIterator[ServerLink]:
        host, _, port = server.address.rpartition(":")
        context = None if credentials is None else credentials.client_context()
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
        try:
            validity = _Validity() if credentials is None else _check_peer(writer, credentials, server.name)
            hello = {"cluster": cluster, "leader": leader, "to": [server.name, server.incarnation]}
            writer.write(json_frame(Kind.HELLO, hello))
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                header, body = await _read(reader)
            if header.kind != Kind.WELCOME:
                document = json_body(body)
                error = PermissionError if document.get("code") in _ANOTHER else ConnectionResetError
                raise error(str(document.get("message")))
            yield _Line(reader, writer, validity)
        except (TimeoutError, asyncio.IncompleteReadError, FrameError) as error:
            raise ConnectionResetError(str(error) or type(error).__name__) from None
        finally:
            writer.transport.abort()

    return dial


@dataclass(frozen=True)
class _Validity:
    """How long the certificates of a connection are valid: until a time, or until ours is replaced."""

    credentials: Credentials | None = None
    generation: int = 0
    renew_s: float = 0.0

    @property
    def stale(self) -> bool:
        if self.credentials is None:
            return False
        self.credentials.refresh()
        return self.credentials.generation != self.generation or time.time() > self.renew_s


def _check_peer(writer: asyncio.StreamWriter, credentials: Credentials, name: str) -> _Validity:
    """Checks the certificate of the server. PermissionError if it is not the server of that name."""
    try:
        peer, until_s = proved(writer.get_extra_info("ssl_object"))
        peer.require(credentials.cluster, Role.SERVER, name)
    except NotAuthorised as error:
        raise PermissionError(str(error)) from None
    return _Validity(credentials, credentials.generation, renew_at(min(until_s, credentials.until_s)))


class _Line:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, validity: _Validity) -> None:
        self._reader = reader
        self._writer = writer
        self._validity = validity

    async def reports(self) -> AsyncIterator[Report | View]:
        last: Report | None = None
        while True:
            try:
                header, body = await _read(self._reader)
                if header.kind in (Kind.REPORT, Kind.UNCHANGED):
                    last = _report(header, json_body(body)) if header.kind == Kind.REPORT else _unchanged(header, last)
                    yield last
                    if self._validity.stale:
                        raise ConnectionResetError("certificates are renewed")
                elif header.kind == Kind.VIEW and (view := read_view(header, np.frombuffer(body, np.uint8), None)):
                    yield view
            except (asyncio.IncompleteReadError, FrameError) as error:
                raise ConnectionResetError(str(error)) from None

    def beat(
        self, term: int, epoch: int = 0, allowances: Sequence[RowCount] = (), cluster_time: ClusterTime = UNKNOWN
    ) -> None:
        header, body = GetViewHeader(epoch, term, *cluster_time).header(), b""
        if allowances:
            body = json_frame(Kind.GET_VIEW, {"allowances": allowances})[HEADER_BYTES:]
        self._write(header._replace(body=len(body)).pack() + body)

    def send_view(self, view: View, difference: bytes | None = None) -> None:
        self._write(view_frame(view) if difference is None else difference_frame(view.epoch, difference))

    def ask_view(self) -> None:
        self._write(GetViewHeader(0).header().pack())

    def _write(self, frame: bytes) -> None:
        try:
            if self._writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
                self._writer.write(frame)
        except RuntimeError as error:  # uvloop's, of a connection that has ended and whose reader was not told yet
            raise ConnectionResetError(str(error)) from None


async def _read(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    header = unpack_header(await reader.readexactly(HEADER_BYTES), limit=MAX_CONTROL_BYTES)
    return header, await reader.readexactly(header.body)


def _report(header: Header, document: dict[str, Any]) -> Report:
    """Decodes and checks a report. FrameError for one that a planner could not use: it must not end the leader."""
    try:
        levels = tuple(
            CaughtUp(whole(r, _MOST), whole(fill, _MOST), _member(*member)) for r, fill, *member in document["levels"]
        )
        suspects = {_member(name, number): float(seconds) for name, number, seconds in document["suspects"]}
        stalled = frozenset(_member(name, number) for name, number in document["stalled"])
        nbytes, requests = whole(document["bytes"], _MOST), whole(document["requests"], _MOST)
        used, mark, full = (whole(each, _MOST, -_MOST) for each in document["memory"])
        term, connected, silent_s = document["leader"]
        tenure = Tenure(whole(term, _MOST), bool(connected), float(silent_s))
        memory, alone = Memory(used, mark, full), whole(document["alone"], _MOST)
        spent = tuple((whole(r, _MOST), whole(fill, _MOST)) for r, fill in document["spent"])
        headed, counts = whole(document.get("headed", 0), MAX_RANGES), row_counts(document.get("counts", []))
        seconds = document.get("seconds", 0)  # an older server does not tell
        if not 0 <= seconds <= MOST_SECONDS:
            raise ValueError(f"a time of {seconds!s:.40} s")
        return Report(
            header.epoch, levels, suspects, stalled, nbytes, requests, memory, tenure, alone, spent, headed, counts,
            float(seconds),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a report that is none: {error}") from None


def _unchanged(header: Header, last: Report | None) -> Report:
    """The last report, as of now. FrameError if there was none, or for an impossible time."""
    now = UnchangedHeader.of(header)
    if last is None or now.term > _MOST or now.time_ms > 1000 * MOST_SECONDS:
        raise FrameError("a server that has not reported yet says that nothing has changed, or an impossible time")
    tenure = Tenure(now.term, now.connected, now.silent_ms / 1000)
    return replace(last, epoch=now.epoch, tenure=tenure, seconds=now.time_ms / 1000)


def _member(name: object, incarnation: object) -> Member:
    if not isinstance(name, str):
        raise ValueError(f"no name: {name!r:.100}")
    return Member(name, whole(incarnation, _MOST))
