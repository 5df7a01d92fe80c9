"""A connection's bytes, both ways: received ones become frames, and those to send wait until the socket takes them.

Neither makes a copy that is not needed. Small frames are cut out of one staging buffer, many per system call. The body
of a frame that does not fit there is received straight into its destination: a fresh buffer, or wherever `sink` wants
it (a pull lands in the caller's array). Buffers to send are sent from where they lie. Knows no socket.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from elasticps.wire.frames import HEADER_BYTES, Buffer, Header, unpack_header
from elasticps.wire.pool import LARGEST_BYTES, Bytes, Pool

STAGING_BYTES = 64 << 10
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


class Assembler:
    """Cuts a stream into frames: fill the front of `buffer`, where the next bytes go, then tell `received(n)`.

    `on_frame(header, body)` is called for each frame in order; `body`, uint8, is valid during the call only.

    `sink(header)` may name the destinations of a body, uint8 memoryviews that add up to its length; `on_frame` is
    then called with an empty body once they are full.

    `usual(staging, start, end)` may take whole frames out of what has been received; it says where the first one stands
    that it has left.
    """

    def __init__(
        self,
        on_frame: Callable[[Header, Bytes], None],
        limit: int,
        sink: Callable[[Header], Sequence[memoryview] | None] | None = None,
        usual: Callable[[Bytes, int, int], int] | None = None,
    ) -> None:
        self._on_frame = on_frame
        self._sink = sink
        self._usual = usual
        self.limit = limit
        self._staging = np.empty(STAGING_BYTES, np.uint8)
        self._view = self._staging.data
        self.buffer: memoryview = self._view  # never empty
        self._start = self._end = 0
        self._header: Header | None = None  # of the frame whose body is being received outside the staging buffer
        self._body = _EMPTY
        self._pool = Pool(LARGEST_BYTES)
        self._targets: list[memoryview] = []  # what is still to fill, last one first

    def received(self, n: int) -> None:
        """`n` bytes were written at the front of `buffer`. Raises `FrameError` on a malformed stream."""
        if self._targets:
            self._fill(n)
        else:
            self._staged(n)
        self.buffer = self._targets[-1] if self._targets else self._view[self._end :]

    def _staged(self, n: int) -> None:
        """Cuts frames out of the staging buffer, which has `n` more bytes."""
        self._end += n
        while self._end - self._start >= HEADER_BYTES:
            if self._usual is not None:
                self._start = self._usual(self._staging, self._start, self._end)
                if self._end - self._start < HEADER_BYTES:
                    break
            header = unpack_header(self._view, self._start, self.limit)
            body_at = self._start + HEADER_BYTES
            have = min(self._end - body_at, header.body)
            targets = self._sink(header) if self._sink is not None else None
            if targets is not None:
                self._start = body_at + have
                if have == header.body:  # all of it is here: the usual small answer
                    for target in targets:
                        target[:] = self._view[body_at : body_at + len(target)]
                        body_at += len(target)
                    self._on_frame(header, _EMPTY)
                    continue
                self._divert(header, targets, body_at, have)
                if self._targets:
                    break
            elif have == header.body:
                self._start = body_at + have
                self._on_frame(header, self._staging[body_at : body_at + have])
            elif HEADER_BYTES + header.body > STAGING_BYTES:
                self._body = self._pool.take(header.body)
                self._start = body_at + have
                self._divert(header, [self._body.data], body_at, have)
                break
            else:
                break
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and STAGING_BYTES - self._end < STAGING_BYTES // 4:
            left = self._end - self._start
            self._staging[:left] = self._staging[self._start : self._end].copy()
            self._start, self._end = 0, left

    def _fill(self, n: int) -> None:
        target = self._targets.pop()
        if n < len(target):
            self._targets.append(target[n:])
        elif not self._targets:
            self._finish()

    @property
    def mid_frame(self) -> bool:
        """Whether the stream would be cut inside a frame if it ended now."""
        return bool(self._targets) or self._end > self._start

    def _finish(self) -> None:
        header, body = self._header, self._body
        assert header is not None
        self._header, self._body = None, _EMPTY
        self._on_frame(header, body)

    def _divert(self, header: Header, targets: Sequence[memoryview], at: int, have: int) -> None:
        """Moves the `have` staged bytes of a body into its targets; what is then left is received there directly."""
        self._header = header
        left = [t for t in reversed(targets) if len(t)]
        while have and left:
            target = left.pop()
            n = min(have, len(target))
            target[:n] = self._view[at : at + n]
            at, have = at + n, have - n
            if n < len(target):
                left.append(target[n:])
        self._targets = left
        if not left:
            self._finish()


_EMPTY: Bytes = np.empty(0, np.uint8)
