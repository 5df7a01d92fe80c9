"""Servers that speak the wire and do what a test says, and a coordination store without etcd."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from coordinator.core.view import ServerInfo, View, WorkerInfo
from elasticps.client.core.join import PastRun
from elasticps.client.registrations import Registration, TableToRegister
from elasticps.client.runtime import Runtime
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import (
    BLOCK_BYTES,
    HEADER_BYTES,
    LAST,
    TABLES,
    Header,
    Kind,
    bytes_frame,
    json_frame,
    unpack_header,
)
from elasticps.wire.joining import JoinedAnswer

DIM = 4


class FakeServer:
    """Answers every request at once, except of kinds in `silent`. All rows have the value `value`."""

    def __init__(self, name: str, incarnation: int = 1) -> None:
        self.name = name
        self.incarnation = incarnation
        self.value = 0.0
        self.row = DIM  # floats of a row
        self.view: View | None = None
        self.silent: set[Kind] = set()
        self.greeting = b""  # what follows each WELCOME
        self.frames: list[Header] = []
        self.half = threading.Event()  # set: a pull is answered by half of its rows, the rest when `go` is set
        self.go = threading.Event()
        self.applied = self.committed = 0  # the worker's progress in all ranges headed here
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._accepting = self._start(self._accept)

    @property
    def info(self) -> ServerInfo:
        return ServerInfo(self.name, self.incarnation, self.address)

    def got(self, *kinds: Kind) -> list[Header]:
        """The requests of some kinds so far."""
        return [h for h in list(self.frames) if h.kind in kinds]

    def kill(self) -> None:
        """Ends at once; its address refuses connections."""
        if self._listener.fileno() >= 0:
            address = self._listener.getsockname()
            self._end(self._listener)
            self._accepting.join()  # who has come just now is known
            weakref.finalize(self, _residual(address).close)
        for sock in self._connections:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()

    def hang_up(self) -> None:
        """Ends every connection there is."""
        for sock in list(self._connections):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def tell(self, view: View) -> None:
        """Sends a view to everybody connected."""
        self.view = view
        self.say(bytes_frame(Kind.VIEW, view.encode(), epoch=view.epoch))

    def say(self, frame: bytes) -> None:
        """Sends a frame to everybody connected."""
        for sock in list(self._connections):
            with contextlib.suppress(OSError):
                sock.sendall(frame)

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, daemon=True)
        thread.start()
        return thread

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self._connections.append(sock)
                self._start(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                header = unpack_header(_exactly(sock, HEADER_BYTES))
                _exactly(sock, header.body)
                self.frames.append(header)
                if header.kind == Kind.PULL and header.flags & TABLES:
                    header = header._replace(items=(header.body - BLOCK_BYTES * header.items) // 8)
                if header.kind not in self.silent:
                    for data in self._answers(header):
                        sock.sendall(data)

    def _answers(self, header: Header) -> Iterator[bytes]:
        kind, request, epoch = header.kind, header.request, 0 if self.view is None else self.view.epoch
        if kind == Kind.HELLO:
            welcome = {"server": self.name, "incarnation": self.incarnation, "cluster": "fake"}
            yield json_frame(Kind.WELCOME, welcome)
            yield self.greeting
        elif kind in (Kind.HELD, Kind.USE, Kind.READ_AFTER):
            return
        elif kind == Kind.JOIN:
            yield JoinedAnswer(request, epoch, None).frame()
        elif kind == Kind.GET_CLOCKS:
            assert self.view is not None
            ranges = np.flatnonzero(self.view.heads == self.view.index(self.name))
            applied, committed = (np.full(len(ranges), x, np.int64) for x in (self.applied, self.committed))
            yield ClocksFrame(ranges, applied, committed).frame(request, epoch)
        elif kind == Kind.GET_VIEW:
            if self.view is not None and self.view.epoch > header.epoch:
                yield bytes_frame(Kind.VIEW, self.view.encode(), epoch=epoch)
        elif kind == Kind.PULL:
            yield from self._rows(header)
        else:
            yield Header(Kind.OK, request=request, epoch=epoch).pack()

    def _rows(self, header: Header) -> Iterator[bytes]:
        if header.epoch < (0 if self.view is None else self.view.since.max()):
            assert self.view is not None
            yield bytes_frame(Kind.VIEW, self.view.encode(), epoch=self.view.epoch)
            stale = {"code": "stale-view", "message": "old", "epoch": self.view.epoch}
            yield json_frame(Kind.ERROR, stale, request=header.request)
            return
        size = header.items * self.row * 4
        body = np.full(header.items * self.row, self.value, np.float32).tobytes() + bytes(-size % 8)
        answer = Header(Kind.ROWS, LAST, len(body), header.request, items=header.items).pack() + body
        middle = len(answer) // 2 if self.half.is_set() else len(answer)
        yield answer[:middle]
        if middle < len(answer):
            self.go.wait(60)
            yield answer[middle:]


def _residual(address: tuple[str, int]) -> socket.socket:
    """Nobody listens there, and nobody will: a server of another test, which answers as this one did, would be taken
    for it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of before may linger
    sock.bind(address)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise OSError("closed")
        data += piece
    return bytes(data)


class FakeRegistry:
    """The coordination store of one test: a view, and tables as they come."""

    cluster = "fake"
    runtime = Runtime()
    credentials = None
    authenticated = False

    def __init__(self, view: View) -> None:
        self.view = view
        self.checked = 0
        self.created = 0  # as in a `Registration`
        self.creator = 0  # the same; 0: whoever asks
        self.waited_for = self.waiting_finds = 0  # tables, until they are created; what waiting finds of that
        self.last: PastRun | None = None

    def trouble(self) -> str:
        return ""

    def open(self, url: str, timeout_s: float, runtime: Runtime) -> FakeRegistry:
        return self

    def first_view(self, timeout_s: float) -> View:
        return self.view

    def register(self, name: str, app: str, on_lost: object, timeout_s: float, cluster: str) -> WorkerInfo:
        return WorkerInfo(7, name, 1, app)

    def past(self, timeout_s: float) -> PastRun | None:
        return self.last

    def keep(self, past: PastRun, timeout_s: float) -> int | None:
        if past.revision != (0 if self.last is None else self.last.revision):
            return None
        self.last = past._replace(revision=past.revision + 1)
        return self.last.revision

    def registered(self) -> int:
        return 1

    def open_tables(
        self, app: str, requests: Sequence[TableToRegister], worker: int, timeout_s: float
    ) -> list[Registration]:
        return [
            Registration(
                1 if new.spec.shape is None else 2,
                new.spec,
                self.creator or worker,
                "w",
                new.ready,
                1,
                created=self.created,
            )
            for new in requests
        ]

    def wait_created(
        self, app: str, tables: Sequence[Registration], patience_s: float, timeout_s: float
    ) -> list[Registration]:
        self.waited_for += len(tables)
        return [replace(table, created=self.waiting_finds) for table in tables]

    def follow_rates(self, app: str, heard: object, timeout_s: float) -> None:
        pass

    def rate_of(self, name: str, table: int) -> None:
        return None

    def mark_created(self, app: str, tables: Sequence[Registration], epoch: int, timeout_s: float) -> None:
        pass

    def mark_ready(self, app: str, tables: Sequence[Registration], timeout_s: float) -> None:
        pass

    def ask_view(self, on_view: Callable[[View | None], None]) -> None:
        self.checked += 1
        threading.Thread(target=on_view, args=(self.view,), daemon=True).start()

    def close(self) -> None:
        pass
