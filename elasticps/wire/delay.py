"""Frames of bounded delay: workers report committed clocks to the head of their application's group range, and learn
which clock it has released. Pure.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.frames import FrameError, Header, Kind
from replication.progress import MAX_CLOCK

_BODY = struct.Struct("<2q")


class ReportClock(NamedTuple):
    """REPORT_CLOCK: all steps of `worker` up to `clock` are committed, and servers have said so at most at `epoch`.
    released: the highest clock that this worker knows to be released. With a request number it is answered, once
    `floor` is released; with the floor 0, once the head has counted this worker. wait_ms: how long that may take, 0 for
    as long as usual."""

    worker: int
    epoch: int
    clock: int
    released: int
    floor: int = 0
    wait_ms: int = 0
    request: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields, before the body."""
        return Header(
            Kind.REPORT_CLOCK, 0, _BODY.size, self.request, self.epoch, self.clock, self.worker, wait_ms=self.wait_ms
        )

    @property
    def body(self) -> bytes:
        """The frame's body."""
        return _BODY.pack(self.released, self.floor)

    @classmethod
    def of(cls, h: Header, body: NDArray[np.uint8]) -> ReportClock:
        """The inverse. Raises `FrameError`."""
        if len(body) != _BODY.size:
            raise FrameError(f"a REPORT_CLOCK has a body of {len(body)} bytes")
        released, floor = _BODY.unpack(body.data)
        if not (0 <= h.clock < MAX_CLOCK and 0 <= released < MAX_CLOCK and 0 <= floor < MAX_CLOCK):
            raise FrameError(f"a REPORT_CLOCK has the clocks {h.clock}, {released} and {floor}, over {MAX_CLOCK - 1}")
        return cls(h.worker, h.epoch, h.clock, released, floor, h.wait_ms, h.request)


class ReleasedHeader(NamedTuple):
    """RELEASED: every active worker of the application has committed its steps up to `clock`, which pulls see that are
    made under a view of at least `epoch`."""

    request: int
    epoch: int
    clock: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.RELEASED, 0, 0, self.request, self.epoch, self.clock)

    @classmethod
    def of(cls, h: Header) -> ReleasedHeader:
        """The inverse of `header`. Raises `FrameError`."""
        if not 0 <= h.clock < MAX_CLOCK:
            raise FrameError(f"a RELEASED has clock {h.clock}, over {MAX_CLOCK - 1}")
        return cls(h.request, h.epoch, h.clock)


class AskClockHeader(NamedTuple):
    """ASK_CLOCK: report your committed clock, once, as soon as it is at least `clock`."""

    clock: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.ASK_CLOCK, clock=self.clock)

    @classmethod
    def of(cls, h: Header) -> AskClockHeader:
        """The inverse of `header`."""
        return cls(h.clock)
