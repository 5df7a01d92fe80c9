"""JOIN and its answer: a worker takes part, or asks where others are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from elasticps.wire.frames import LAST, PAUSE, FrameError, Header, Kind


class JoinHeader(NamedTuple):
    """JOIN: a worker starts above `base`; or takes no part for now (`pause`); or only asks for the minimum (None)."""

    base: int | None = None
    pause: bool = False

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        if self.pause:
            return Header(Kind.JOIN, LAST | PAUSE)
        return Header(Kind.JOIN) if self.base is None else Header(Kind.JOIN, LAST, clock=self.base)

    @classmethod
    def of(cls, h: Header) -> JoinHeader:
        """The inverse of `header`."""
        pause = bool(h.flags & PAUSE)
        return cls(h.clock if h.flags & LAST and not pause else None, pause)


class JoinedAnswer(NamedTuple):
    """The answer to a JOIN: an OK with a body. at_homes: the lowest clock, at their home ranges, of the application's
    active workers whose homes the server heads, None if there are none."""

    request: int
    epoch: int
    at_homes: int | None

    def frame(self) -> bytes:
        """The whole frame."""
        header = Header(Kind.OK, 0, 8, self.request, self.epoch)
        return header.pack() + (0 if self.at_homes is None else self.at_homes + 1).to_bytes(8, "little")

    @classmethod
    def of(cls, h: Header, body: bytes) -> JoinedAnswer:
        """The inverse. Raises `FrameError`."""
        if len(body) != 8:
            raise FrameError(f"the answer to a JOIN has a body of {len(body)} bytes")
        at_homes = int.from_bytes(body, "little") - 1
        return cls(h.request, h.epoch, at_homes if at_homes >= 0 else None)


def lowest_clock(answers: Iterable[JoinedAnswer]) -> int:
    """The lowest clock of an application's active workers, as all servers' answers to JOIN say it; 0 if there are none.
    A range may have heard nothing of a worker for long, but its home has heard of each step."""
    return min((answer.at_homes for answer in answers if answer.at_homes is not None), default=0)
