"""Answers pulls of other processes from a reader's rows, in the frames of the data plane.

A connection says HELLO, as often as it likes, and gets a WELCOME that names the tables and says how old the rows are.
Each connection has a thread: what it does is to copy rows, without the interpreter's lock.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np

from elasticps.errors import Error
from elasticps.readers.peers import PeerStream, identity_of
from elasticps.readers.reader import Reader
from elasticps.readers.relay import Relay, RelayFeed
from elasticps.readers.rows import GatheredTable
from elasticps.security.credentials import Credentials
from elasticps.security.identity import NotAuthorised, Role
from elasticps.system.cpu_contention import CpuContention
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    TABLES,
    FrameError,
    Header,
    Kind,
    json_body,
    json_frame,
    padded_size,
    read_tables,
)
from elasticps.wire.headers import RowsHeader
from elasticps.wire.pool import Bytes, Pool
from elasticps.wire.stream import Assembler

log = logging.getLogger(__name__)

MOST_CONNECTIONS = 256
SILENT_S = 300.0  # a connection on which nothing comes for so long is closed
RETAINED_BYTES = 32 << 20  # memory of answers that is kept for the next ones


def welcome_of(reader: Reader, name: str, incarnation: int) -> dict[str, Any]:
    """What a reader's process says of itself: the tables, and how old they are."""
    as_of, age_s = reader.as_of, reader.age
    with reader.lock:
        tables = [[table.number, table.spec.to_json()] for table in reader.table_rows.values()]
    steps = {str(worker): step for worker, step in as_of.steps.items()}
    shown = {"time_s": as_of.time_s, "epoch": as_of.epoch, "steps": steps, "held": as_of.held}
    me = {
        "server": "relay",
        "incarnation": incarnation,
        "ranges": reader.ranges,
        "oldest_us": reader.oldest_us,
        "every_ms": round(1e3 * reader.spec.every),
        "identity": reader.identity,
        "app": reader.spec.application,
        "dtype": reader.spec.dtype,
        "share": str(reader.spec.share),
    }
    return me | {"reader": name, "cluster": reader.cluster, "tables": tables, "as_of": shown, "age_s": min(age_s, 1e9)}


class PullServer:
    """Listens at host:port (0: any free port) and answers until it is closed. address: where."""

    def __init__(
        self, reader: Reader, host: str, port: int, credentials: Credentials | None = None, name: str = "reader"
    ) -> None:
        self._reader = reader
        self._relay = Relay(reader)  # feeds readers that follow this one
        self._credentials = credentials
        self._memory = Pool(RETAINED_BYTES, RETAINED_BYTES)  # of answers
        self._name = name
        self._incarnation = time.time_ns() // 1000  # of the relay: its journal begins
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=128)
        self._contention = CpuContention()
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()  # of the connections
        bound = self._listener.getsockname()
        self.address = f"[{bound[0]}]:{bound[1]}" if family == socket.AF_INET6 else f"{bound[0]}:{bound[1]}"
        threading.Thread(target=self._accept, name="elasticps-pulls", daemon=True).start()

    def close(self) -> None:
        """Ends it, and all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> PullServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            with self._lock:
                if len(self._connections) >= MOST_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            raw.settimeout(SILENT_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._secured(raw) as connection:
                stream = PeerStream(connection, SILENT_S, self._contention)
                feed = RelayFeed(self._relay, stream.send)
                answers = _Answers(self._reader, self._welcome, stream, self._memory, feed)
                assembler = Assembler(answers.frame, MAX_BODY_BYTES)
                try:
                    while n := stream.recv_into(assembler.buffer):
                        assembler.received(n)
                except FrameError as error:
                    with suppress(OSError):
                        stream.send([json_frame(Kind.ERROR, {"code": "malformed", "message": str(error)})])
                    raise
                finally:
                    feed.close()
                    stream.close()
        except (OSError, FrameError, NotAuthorised) as error:
            log.info("a connection that pulls has ended: %s", error)
        finally:
            with self._lock:
                self._connections.discard(raw)
            raw.close()

    def _welcome(self) -> dict[str, Any]:
        return welcome_of(self._reader, self._name, self._incarnation)

    def _secured(self, raw: socket.socket) -> socket.socket:
        """The connection, with TLS where there is. NotAuthorised for who may not read."""
        if self._credentials is None:
            return raw
        secured = self._credentials.server_context().wrap_socket(raw, server_side=True)
        identity = identity_of(secured)
        app, cluster = self._reader.spec.application, self._reader.cluster
        allowed = any(identity.covers(role, identity.name, app) for role in (Role.READER, Role.WORKER, Role.OPERATOR))
        if identity.cluster != cluster or not allowed:
            raise NotAuthorised(f"{identity} may not read tables of application {app!r} of {cluster!r}")
        return secured


class _Answers:
    """Answers the frames of one connection."""

    def __init__(
        self, reader: Reader, welcome: Callable[[], dict[str, Any]], stream: PeerStream, memory: Pool,
        feed: RelayFeed,
    ) -> None:  # fmt: skip
        self._reader = reader
        self._welcome = welcome  # what it says of itself
        self._stream = stream
        self._memory = memory
        self._feed = feed  # for a reader that follows this one

    def frame(self, header: Header, body: Bytes) -> None:
        """Answers a frame. FrameError for one that nobody sends to a reader."""
        if header.kind == Kind.HELLO:
            json_body(body.data)
            self._stream.send([json_frame(Kind.WELCOME, self._welcome(), request=header.request)])
        elif header.kind == Kind.PULL and header.flags == TABLES:
            self._pull(header, body)
        else:
            self._feed.frame(header, body)

    def _pull(self, header: Header, body: Bytes) -> None:
        try:
            parts = read_tables(header.items, body)
            frame = self._reader.pull_numbered(parts, MAX_BODY_BYTES, partial(self._gather, header.request))
        except Error as error:
            code = {"UnknownTable": "unknown-table", "OtherShare": "other-share"}.get(type(error).__name__, "input")
            document = {"code": code, "message": str(error), "share": getattr(error, "share", 0)}
            self._stream.send([json_frame(Kind.ERROR, document, request=header.request)])
            return
        self._stream.send([frame.data])  # without the reader's lock: the other end may be slow

    def _gather(self, request: int, tables: Sequence[GatheredTable]) -> Bytes:
        """The frame with rows of tables, gathered where they leave from; under the reader's lock, the memory's too."""
        count = sum(len(keys) for _, keys in tables)
        size = sum(4 * table.spec.dim * len(keys) for table, keys in tables)
        header = RowsHeader(request, 0, 0, count, True).header(padded_size(size))
        frame = self._memory.take(HEADER_BYTES + header.body)
        frame.data[:HEADER_BYTES] = header.pack()
        at = HEADER_BYTES
        for table, keys in tables:
            end = at + 4 * table.spec.dim * len(keys)
            table.gather(keys, frame[at:end].view(np.float32).reshape(len(keys), table.spec.dim))
            at = end
        frame[at:] = 0
        return frame
