"""The send queue of a connection, on servers, at workers and in the simulator: bytes that the socket has not taken."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from elasticps.wire.frames import Buffer

BUFFERS_PER_CALL = 512  # IOV_MAX is 1024 on Linux


class Sends(Protocol):
    """A non-blocking socket's sending side."""

    def sendmsg(self, buffers: Sequence[memoryview], /) -> int: ...


class SendQueue:
    """Buffers in order, sent from where they lie: they must not change until they have left."""

    def __init__(self) -> None:
        self._queue: deque[memoryview] = deque()
        self.nbytes = 0
        self.sent = 0  # bytes, ever

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, buffers: Iterable[Buffer]) -> None:
        """Empty buffers are left out: a socket would take none of their bytes for ever."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if len(view):
                self._queue.append(view)
                self.nbytes += len(view)

    def clear(self) -> None:
        """Drops everything."""
        self._queue.clear()
        self.nbytes = 0

    def send(self, socket: Sends, buffers: Iterable[Buffer] = ()) -> bool:
        """Adds buffers, gives the socket what it takes; True if nothing is left. OSError if the connection is broken.

        A socket that takes a part only has no room left, so it is not tried again.
        """
        self.add(buffers)
        queue = self._queue
        while queue:
            whole = len(queue) <= BUFFERS_PER_CALL
            batch = list(queue) if whole else list(itertools.islice(queue, BUFFERS_PER_CALL))
            try:
                sent = socket.sendmsg(batch)
            except (BlockingIOError, InterruptedError):
                return False
            self.nbytes -= sent
            self.sent += sent
            if whole and not self.nbytes:  # as mostly: nothing is left to be looked at
                queue.clear()
                return True
            for view in batch:
                if sent < len(view):
                    queue[0] = view[sent:]
                    return False
                sent -= len(view)
                queue.popleft()
        return True
