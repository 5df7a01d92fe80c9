"""One worker's connection to one server: a non-blocking socket, frames in, buffers out."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.view import ServerInfo
from elasticps.client.runtime import Runtime, Stream
from elasticps.wire.assembler import Assembler
from elasticps.wire.frames import MAX_BODY_BYTES, Buffer, Header
from replication.chain import Member

MAX_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux
RECEIVE_CALLS_PER_TURN = 64


class Link:
    """Bytes to and from one server. `send` may be called by any thread, `receive` by one at a time.

    `ready` turns true when the server has welcomed us; before that only `hello` frames may be sent. `sinking` is the
    request whose answer is just being received into memory that `sink` gave, 0 for none.
    """

    def __init__(
        self,
        runtime: Runtime,
        server: ServerInfo,
        on_frame: Callable[[Link, Header, NDArray[np.uint8]], None],
        sink: Callable[[Header], Sequence[memoryview] | None],
    ) -> None:
        self._runtime = runtime
        self.server = server
        self.member = Member(server.name, server.incarnation)
        self.ready = False
        self.sinking = 0
        self.socket: Stream | None = None
        self._on_frame = on_frame
        self._sink = sink
        self._assembler: Assembler | None = None
        self._queue: deque[memoryview] = deque()
        self._lock = runtime.lock()
        self._attempts = 0

    def connect(self, hello: bytes) -> None:
        """Begins to open the TCP connection; `hello` leaves, or an OSError comes, when the socket turns writable.

        Blocks for as long as it takes to resolve a host's name. OSError if that, or the connection, fails at once.
        """
        host, _, port = self.server.address.rpartition(":")
        self._attempts += 1
        sock = self._runtime.connect(host.strip("[]"), int(port), self._attempts - 1)
        with self._lock:
            self._assembler = Assembler(self._frame, MAX_BODY_BYTES, self._target)
            self._queue.clear()
            self._queue.append(memoryview(hello))
            self.sinking = 0
            self.socket = sock

    def close(self) -> None:
        """Drops the connection; what was queued is gone, what was sent may or may not have arrived."""
        self.ready = False
        with self._lock:
            sock, self.socket = self.socket, None
            self._queue.clear()
        if sock is not None:
            sock.close()

    @property
    def unsent(self) -> bool:
        """Whether buffers wait for room in the socket."""
        return bool(self._queue)

    def send(self, buffers: Iterable[Buffer]) -> bool:
        """Sends now what the socket takes and queues the rest; True if all of it left. OSError if the link is down.

        The buffers must not change until they have left.
        """
        with self._lock:
            if self.socket is None:
                raise ConnectionResetError(f"not connected to server {self.server.name}")
            self._queue.extend(v for b in buffers if len(v := memoryview(b).cast("B")))
            return self._flush(self.socket)

    def flush(self) -> bool:
        """Sends more of the queue; True if nothing is left. OSError if the link is down."""
        with self._lock:
            return self.socket is None or self._flush(self.socket)

    def _flush(self, sock: Stream) -> bool:
        queue = self._queue
        while queue:
            batch = list(itertools.islice(queue, MAX_BUFFERS_PER_CALL))
            try:
                sent = sock.sendmsg(batch)
            except BlockingIOError:
                return False
            for view in batch:
                if sent < len(view):
                    break
                sent -= len(view)
                queue.popleft()
            if sent:
                queue[0] = queue[0][sent:]
                return False
        return True

    def receive(self) -> None:
        """Takes what the socket has, up to a limit. OSError if the peer closed or broke the connection."""
        assembler, sock = self._assembler, self.socket
        if assembler is None or sock is None:
            return
        for _ in range(RECEIVE_CALLS_PER_TURN):
            buffer = assembler.buffer()
            try:
                n = sock.recv_into(buffer)
            except BlockingIOError:
                return
            except OSError:
                if self.socket is not sock:  # closed on this side, by what the last frame said
                    return
                raise
            if self.socket is not sock:
                return
            if n == 0:
                raise ConnectionResetError(f"server {self.server.name} closed the connection")
            assembler.received(n)
            if n < len(buffer):
                return

    def _target(self, header: Header) -> Sequence[memoryview] | None:
        targets = self._sink(header)
        if targets is not None:
            self.sinking = header.request
        return targets

    def _frame(self, header: Header, body: NDArray[np.uint8]) -> None:
        self.sinking = 0
        self._on_frame(self, header, body)
