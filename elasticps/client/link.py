"""One worker's connection to one server: a non-blocking socket, frames in, buffers out."""

from __future__ import annotations

import itertools
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from coordinator.view import ServerInfo
from elasticps.wire.assembler import Assembler
from elasticps.wire.frames import MAX_BODY_BYTES, Buffer, Header

CONNECT_TIMEOUT_S = 1.0
MAX_BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux
RECEIVE_CALLS_PER_TURN = 64


class Link:
    """Bytes to and from one server. `send` may be called by any thread, `receive` by one at a time.

    `ready` turns true when the server has welcomed us; before that only `hello` frames may be sent.
    """

    def __init__(
        self,
        server: ServerInfo,
        on_frame: Callable[[Link, Header, NDArray[np.uint8]], None],
        sink: Callable[[Header], Sequence[memoryview] | None],
    ) -> None:
        self.server = server
        self.ready = False
        self.socket: socket.socket | None = None
        self._on_frame = on_frame
        self._sink = sink
        self._assembler: Assembler | None = None
        self._queue: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Opens the TCP connection; OSError if that fails within CONNECT_TIMEOUT_S."""
        host, _, port = self.server.address.rpartition(":")
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setblocking(False)
        self._assembler = Assembler(lambda header, body: self._on_frame(self, header, body), MAX_BODY_BYTES, self._sink)
        self._queue.clear()
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

    def _flush(self, sock: socket.socket) -> bool:
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
            if n == 0:
                raise ConnectionResetError(f"server {self.server.name} closed the connection")
            assembler.received(n)
            if n < len(buffer):
                return
