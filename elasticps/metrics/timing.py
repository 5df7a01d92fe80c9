"""How long requests take at a server, measured on one frame in SAMPLE so that the others pay for nothing but a count.

Two times are told apart: how long the loop is busy with a frame (handling), and how long its worker waits for the
answer, from the frame's arrival to the hand-over of the answer's last byte to the socket: with replicas a push waits
for the tail's acknowledgement, and a pull may wait for other workers.
"""

from __future__ import annotations

import struct
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.server.fast.layout import (
    H_FORWARDS,
    H_PULLS,
    H_PUSHES,
    H_RECEIVED_FORWARD,
    H_RECEIVED_PULL,
    H_RECEIVED_PUSH,
    H_WAITED_COUNT,
)
from elasticps.server.fast.path import FastPath
from elasticps.server.network.connection import Connection
from elasticps.server.server import Server
from elasticps.wire.frames import LAST, Buffer, Header, Kind

SAMPLE = 16  # one frame in so many is timed
MAX_WAITED_FOR = 64  # timed requests of one connection that have no answer yet
TIMED = {Kind.PUSH: "push", Kind.PULL: "pull", Kind.FORWARD: "forward"}
COMPILED = {"push": H_PUSHES, "pull": H_PULLS, "forward": H_FORWARDS}
RECEIVED = {"push": H_RECEIVED_PUSH, "pull": H_RECEIVED_PULL, "forward": H_RECEIVED_FORWARD}
BUCKETS_S = (
    *(50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)

Body = NDArray[np.uint8]
Handler = Callable[[Connection, Header, Body], None]

_LAYOUT = struct.Struct("<5xBH8xQ")  # kind, flags and request number of a packed header


class Histogram:
    """Counts in buckets, as Prometheus wants them; `total` is the sum of the seconds."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Notes one duration."""
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, how many are not above it), up to "+Inf"."""
        found, sum_ = [], 0
        for bound, count in zip((*map(str, BUCKETS_S), "+Inf"), self.counts, strict=True):
            sum_ += count
            found.append((bound, float(sum_)))
        return found


class Meter:
    """What is measured over all lives of a server process, by kind of frame ("push", "pull", "forward").

    Bytes are counted of every frame; the histograms hold the sampled ones, one in `sample`, a power of two.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, sample: int = SAMPLE) -> None:
        self.clock = clock
        self._sample = sample
        self._buffers = 0
        self._received: dict[str, list[Callable[[], int]]] = {kind: [] for kind in TIMED.values()}
        self.handling = {kind: Histogram() for kind in TIMED.values()}
        self.waiting = {kind: Histogram() for kind in ("push", "pull")}

    @property
    def received_bytes(self) -> dict[str, int]:
        """Bytes of the bodies received, by kind."""
        return {kind: sum(count() for count in counts) for kind, counts in self._received.items()}

    @property
    def busy_s(self) -> float:
        """Estimates how long the loop has been busy with frames, from the sampled ones."""
        return self._sample * sum(histogram.total for histogram in self.handling.values())

    def counts_by_time(self) -> tuple[Sequence[float], dict[str, Sequence[int]]]:
        """Bounds in seconds; by kind, how many sampled requests took a time between them until their answer."""
        return BUCKETS_S, {kind: histogram.counts for kind, histogram in self.waiting.items()}

    def watch(self, path: FastPath, handle: Callable[[], None]) -> None:
        """What has been received: its usual frames are handled in compiled code. Of one in SAMPLE the time is told, in
        equal parts, for each of them; pushes are sampled there."""
        began = self.clock()
        path.stamp(int(began * 1e9), self._sample)
        self._buffers += 1
        if self._buffers % self._sample:
            handle()
        else:
            self._time(path, handle, began)
        if path.counter(H_WAITED_COUNT):
            for nanoseconds in path.waited():
                self.waiting["push"].add(nanoseconds / 1e9)

    def _time(self, path: FastPath, handle: Callable[[], None], began: float) -> None:
        before = [path.counter(field) for field in COMPILED.values()]
        handle()
        took = self.clock() - began
        handled = [path.counter(field) - n for field, n in zip(COMPILED.values(), before, strict=True)]
        for kind, count in zip(COMPILED, handled, strict=True):
            for _ in range(count):
                self.handling[kind].add(took / sum(handled))
            if kind == "pull" and count:
                self.waiting[kind].add(took)

    def counts(self, kind: str, count: Callable[[], int]) -> None:
        """Adds bytes of a kind that are counted elsewhere: `count()` is asked for them at each scrape."""
        self._received[kind].append(count)

    def timed(self, kind: str, handler: Handler) -> Handler:
        """Returns the handler, measured."""
        frames, nbytes, clock = 0, 0, self.clock  # in cells: nothing is counted faster
        self._received[kind].append(lambda: nbytes)
        note = self.handling[kind].add
        awaited = kind in self.waiting

        def handle(connection: Connection, header: Header, body: Body) -> None:
            nonlocal frames, nbytes
            frames += 1
            nbytes += len(body)
            if frames % self._sample:
                handler(connection, header, body)
                return
            began = clock()
            if awaited and isinstance(connection, TimedConnection):
                connection.wait_from(header.request, kind, began)
            try:
                handler(connection, header, body)
            finally:
                note(clock() - began)

        return handle


class TimedServer(Server):
    """A server whose requests are measured by `meter`."""

    def __init__(self, meter: Meter, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._meter = meter
        self.fast.observer = meter
        self.admin.measured = meter
        for name, field in RECEIVED.items():
            meter.counts(name, partial(self.fast.counter, field))
        for kind, name in TIMED.items():
            for role in (self.worker, self.peer):
                if kind in role.handlers:
                    role.handlers[kind] = meter.timed(name, role.handlers[kind])

    def connection(self) -> Connection:
        """A protocol object that notes when timed requests are answered."""
        return TimedConnection(
            self._meter, self.handshake.newcomer, self.notifier, self._loop, self._busy_poll, self.fast
        )


class TimedConnection(Connection):
    """A connection that looks at answers only while timed requests wait for one."""

    def __init__(self, meter: Meter, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._meter = meter
        self._since: dict[int, tuple[str, float]] = {}  # request number -> kind, when it came

    def wait_from(self, request: int, kind: str, began: float) -> None:
        """Times the answer to this request."""
        if len(self._since) < MAX_WAITED_FOR:
            self._since[request] = kind, began

    def send(self, frame: Buffer) -> None:
        super().send(frame)
        if self._since:
            self._answered(frame)

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        super().send_all(buffers)
        if self._since:
            self._answered(buffers[0])

    def stream(self, chunks: Iterator[list[Buffer]]) -> None:
        super().stream(self._watched(chunks) if self._since else chunks)

    def _watched(self, chunks: Iterator[list[Buffer]]) -> Iterator[list[Buffer]]:
        for chunk in chunks:
            yield chunk
            if chunk:  # an empty one: what comes next must not be shown yet
                self._answered(chunk[0])

    def _answered(self, frame: Buffer) -> None:
        kind, flags, request = _LAYOUT.unpack_from(frame)
        if kind == Kind.ROWS and not flags & LAST:
            return
        since = self._since.pop(request, None)
        if since is not None:
            name, began = since
            self._meter.waiting[name].add(self._meter.clock() - began)
