"""Frames by which the head of a group range has other heads close a synchronous round. Pure.

ROUND_CLOSE names an application and a round, and says by which ids the round's workers differ from those of the last
round of that application on the same connection: nothing, as long as nobody joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coordinator.core.view import WORKERS_MAX
from elasticps.wire.frames import Buffer, FrameError, Header, Kind, padded
from replication.progress import MAX_CLOCK, MAX_WORKER

MAX_NAME_BYTES = 1024  # of an application, in UTF-8
MOST_APPS = 16  # of which both ends of a connection know the last round's workers


class RoundClose(NamedTuple):
    """ROUND_CLOSE: close round `clock` of `app`. request: its number, for the answer; epoch: of the view that says who
    heads what; left, joined: how its workers differ from the last round's."""

    request: int
    epoch: int
    app: str
    clock: int
    left: tuple[int, ...]
    joined: tuple[int, ...]

    @classmethod
    def of(cls, header: Header, body: NDArray[np.uint8]) -> RoundClose:
        """From a frame. Raises `FrameError`."""
        at = (header.table + 7) & ~7
        if header.table > MAX_NAME_BYTES or at > len(body) or (len(body) - at) % 8:
            raise FrameError(f"a ROUND_CLOSE with a name of {header.table} bytes has a body of {len(body)} bytes")
        if not 0 < header.clock < MAX_CLOCK:
            raise FrameError(f"a ROUND_CLOSE is of round {header.clock}")
        try:
            app = body[: header.table].tobytes().decode()
        except UnicodeDecodeError:
            raise FrameError("a ROUND_CLOSE has a name that is no text") from None
        workers = body[at:].copy().view(np.int64)
        if header.items > len(workers) or max(header.items, len(workers) - header.items) > WORKERS_MAX:
            raise FrameError(f"a ROUND_CLOSE names {len(workers)} workers, {header.items} of which have left")
        if len(workers) and not 0 < int(workers.min()) <= int(workers.max()) <= MAX_WORKER:
            raise FrameError("a ROUND_CLOSE names a worker that cannot be")
        ids = workers.tolist()
        return cls(
            header.request, header.epoch, app, header.clock, tuple(ids[: header.items]), tuple(ids[header.items :])
        )


def round_close(request: int, epoch: int, app: bytes, clock: int, left: int, body: bytes) -> list[Buffer]:
    """A ROUND_CLOSE frame. app: the application's name in UTF-8; left: how many of the body's workers have left; body:
    of `round_body`."""
    header = Header(Kind.ROUND_CLOSE, 0, len(body), request, epoch, clock, table=len(app), items=left)
    return [header.pack(), body]


def round_body(app: bytes, left: Iterable[int], joined: Iterable[int]) -> bytes:
    """The body of a ROUND_CLOSE: the application's name, padded to 8 bytes, then workers as int64."""
    return padded(app) + np.array([*left, *joined], np.int64).tobytes()


class RoundClosedHeader(NamedTuple):
    """ROUND_CLOSED: the round is closed, and that is committed, in all ranges that the sender heads."""

    request: int

    def header(self) -> Header:
        """The 64 bytes' fields; there is no body."""
        return Header(Kind.ROUND_CLOSED, request=self.request)

    @classmethod
    def of(cls, h: Header) -> RoundClosedHeader:
        """The inverse of `header`."""
        return cls(h.request)


class LastWorkers:
    """The workers of each application's last round on one connection, as both its ends know them: of the last few
    applications."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, ...]] = {}

    def of(self, app: str) -> tuple[int, ...]:
        """The workers of the last round; none if there was no round, or it is forgotten."""
        return self._of.get(app, ())

    def note(self, app: str, workers: tuple[int, ...]) -> None:
        """Notes the workers of a round, sorted."""
        self._of.pop(app, None)
        self._of[app] = workers
        if len(self._of) > MOST_APPS:
            del self._of[next(iter(self._of))]

    def follow(self, close: RoundClose) -> tuple[int, ...]:
        """The workers of a round that is to close, sorted. Raises `FrameError` if they cannot be those."""
        last = self.of(close.app)
        workers = last
        if close.left or close.joined:
            gone = set(close.left)
            left = [worker for worker in last if worker not in gone]
            workers = tuple(sorted({*left, *close.joined}))
            if len(left) != len(last) - len(close.left) or len(workers) != len(left) + len(close.joined):
                raise FrameError(f"a ROUND_CLOSE of {close.app!r} does not go on from the last one")
        if not 0 < len(workers) <= WORKERS_MAX:
            raise FrameError(f"a ROUND_CLOSE of {close.app!r} has {len(workers)} workers, 1 to {WORKERS_MAX} can be")
        self.note(close.app, workers)
        return workers
