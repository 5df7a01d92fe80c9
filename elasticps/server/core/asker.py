"""The connection that a request came on, as far as decisions about the request are concerned. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.frames import Buffer, Header

Body = NDArray[np.uint8]


class Asker(Protocol):
    """base: the clock that this worker starts above, -1 until it has joined; told_epoch: of the newest view sent here;
    holding: frames wait here for a view or a roster."""

    worker: int
    worker_name: str
    app: str
    base: int
    told_epoch: int
    holding: bool

    def send(self, frame: Buffer) -> None:
        """Queues a small frame."""

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Queues a frame in several buffers, which do not change any more."""

    def stream(self, chunks: Iterator[list[Buffer]]) -> None:
        """Sends an answer of several chunks, each made when there is room for it."""

    def go_on(self) -> None:
        """Asks the answers that had to wait whether they still have to."""

    def fail(self, error: Exception) -> None:
        """Ends this connection because of an exception that is none of the peer's doing."""

    def tell_view(self) -> None:
        """Sends the view, once per connection and epoch."""

    def wait_for(self, ticket: object) -> None:
        """Reads nothing more until this request, and every other that waits, has been admitted."""

    def admitted(self, ticket: object) -> None:
        """It has been."""

    def hold(self, header: Header, body: Body) -> None:
        """Keeps this frame, and all that follow, until `release`."""

    def release(self) -> None:
        """Handles the frames held, in order; stops if one of them is held again."""

    @property
    def waiting_bytes(self) -> int:
        """What has been sent and has not left yet."""
