"""JOIN and its answer: a worker takes part, or asks where others are. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from elasticps.wire.frames import LAST, PAUSE, FrameError, Header, Kind

MOST_HOMES = 8  # of active workers, that a worker which joins asks for


class JoinHeader(NamedTuple):
    """JOIN: a worker starts above `base`; or takes no part for now (`pause`); or only asks for the minimum (None), and
    for so many homes of other active workers."""

    base: int | None = None
    pause: bool = False
    homes: int = 0

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        if self.pause:
            return Header(Kind.JOIN, LAST | PAUSE)
        if self.base is None:
            return Header(Kind.JOIN, items=self.homes)
        return Header(Kind.JOIN, LAST, clock=self.base)

    @classmethod
    def of(cls, h: Header) -> JoinHeader:
        """The inverse of `header`."""
        pause = bool(h.flags & PAUSE)
        return cls(h.clock if h.flags & LAST and not pause else None, pause, 0 if h.flags else h.items)


class JoinedAnswer(NamedTuple):
    """The answer to a JOIN: an OK with a body. at_homes: the lowest clock, at their home ranges, of the application's
    active workers whose homes the server heads, None if there are none; homes: those of some of its active workers,
    wherever they are, as many as were asked for if there are."""

    request: int
    epoch: int
    at_homes: int | None
    homes: tuple[int, ...] = ()

    def frame(self) -> bytes:
        """The whole frame."""
        body = np.array([0 if self.at_homes is None else self.at_homes + 1, *self.homes], "<i8").tobytes()
        return Header(Kind.OK, 0, len(body), self.request, self.epoch, items=len(self.homes)).pack() + body

    @classmethod
    def of(cls, h: Header, body: bytes, ranges: int) -> JoinedAnswer:
        """The inverse, in a cluster of so many ranges. Raises `FrameError`."""
        if len(body) != 8 * (1 + h.items) or h.items > MOST_HOMES:
            raise FrameError(f"the answer to a JOIN, with {h.items} homes, has a body of {len(body)} bytes")
        at_homes, *homes = np.frombuffer(body, "<i8").tolist()
        if not all(0 <= home < ranges for home in homes):
            raise FrameError(f"the answer to a JOIN names homes outside 0..{ranges - 1}")
        return cls(h.request, h.epoch, at_homes - 1 if at_homes > 0 else None, tuple(homes))


def lowest_clock(answers: Iterable[JoinedAnswer]) -> int:
    """The lowest clock of an application's active workers, as answers to JOIN say it; 0 if there are none. A range may
    have heard nothing of a worker for long, but its home has heard of each step."""
    return min((answer.at_homes for answer in answers if answer.at_homes is not None), default=0)
