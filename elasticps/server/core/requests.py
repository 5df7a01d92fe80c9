"""A request and its answer: the connection that it came on, the ticket that the replica answers, and refusals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from elasticps.server.core.error_replies import ErrorReplies
from elasticps.wire.clocks import ClocksFrame
from elasticps.wire.frames import Buffer, Header, partly_frame
from elasticps.wire.headers import OkHeader
from elasticps.wire.refusals import encode_refused
from replication.chain import Member
from replication.effects import ClocksReply, Reply, Status

Body = NDArray[np.uint8]


class Asker(Protocol):
    """The connection of a request, as far as decisions about the request go.

    member: the server that has said hello, None of others; base: the clock that this worker starts above, -1 until it
    has joined; notified_epoch: of the newest view that the peer has; holding: whether frames wait here for a view or a
    roster.
    """

    member: Member | None
    worker: int
    worker_name: str
    app: str
    base: int
    notified_epoch: int
    holding: bool

    @property
    def errors(self) -> ErrorReplies:
        """Makes and counts the server's ERROR frames."""

    def send(self, frame: Buffer) -> None:
        """Queues a small frame."""

    def send_all(self, buffers: Sequence[Buffer]) -> None:
        """Queues a frame in several buffers, which do not change any more."""

    def stream(self, chunks: Iterator[list[Buffer]]) -> None:
        """Sends an answer of several chunks, each made when there is room for it."""

    def go_on(self) -> None:
        """Tries again to send answers that had to wait."""

    def fail(self, error: Exception) -> None:
        """Ends this connection because of an error on this side."""

    def tell_view(self) -> None:
        """Sends the view, once per connection and epoch."""

    def wait_for(self, ticket: object) -> None:
        """Reads nothing more until this request, and every other that waits, has been admitted."""

    def admitted(self, ticket: object) -> None:
        """Resumes reading, if no other request waits for admission."""

    def hold(self, header: Header, body: Body) -> None:
        """Holds this frame, and all that follow, until `release`."""

    def release(self) -> None:
        """Handles the frames held, in order; stops if one of them is held again."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are queued and have not left yet."""


class RequestError(Exception):
    """A request that this server will not do: a code for programs, a sentence for people."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.document: dict[str, Any] = {"code": code, "message": message} | more


def waited_too_long(message: str, workers: list[str]) -> RequestError:
    """A wait for these workers, by name, has timed out. The code and the key are the protocol's."""
    error = RequestError("behind", message)
    error.document["behind"] = workers
    return error


class RequestTicket:
    """A worker's request that waits for the replica's answer."""

    __slots__ = ("connection", "kind", "request")

    def __init__(self, connection: Asker, kind: int, request: int) -> None:
        self.connection = connection
        self.kind = kind  # of the request's frame
        self.request = request

    def reply(self, reply: Reply) -> None:
        """Answers the frame."""
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
        elif reply.moved.shape[0]:
            if reply.refused:
                self._send_refused_rows(reply, last=False)
            self.connection.send(partly_frame(self.request, reply.epoch, reply.committed, reply.moved))
            self.connection.tell_view()
        elif reply.refused:
            self._send_refused_rows(reply, last=True)
        else:
            self.connection.send(OkHeader(self.request, reply.epoch).header().pack())

    def clocks(self, reply: ClocksReply) -> None:
        """Answers the question."""
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
            return
        refused = np.frombuffer(encode_refused(reply.refused), np.uint8)
        clocks = ClocksFrame(reply.ranges, reply.applied, reply.committed, reply.records, refused)
        self.connection.send(clocks.frame(self.request, reply.epoch))

    def hold(self) -> None:
        self.connection.wait_for(self)

    def release(self) -> None:
        self.connection.admitted(self)

    def _refuse(self, status: Status, epoch: int) -> None:
        if status is Status.STALE_VIEW:
            self.connection.tell_view()
        code, text = _REFUSALS[status]
        document = {"code": code, "message": text, "epoch": epoch}
        self.connection.send(self.connection.errors.for_request(self.kind, self.request, document, epoch))

    def _send_refused_rows(self, reply: Reply, *, last: bool) -> None:
        self.connection.send(self.connection.errors.for_rows(self.request, reply.epoch, reply.refused, last=last))


_REFUSALS = {
    Status.STALE_VIEW: ("stale-view", "the ranges headed here have changed since the frame's epoch"),
    Status.GAP: ("gap", "an earlier part of the worker's steps is missing here"),
    Status.FENCED: ("unlisted", "the worker is not in the roster now: it left, or its registration ran out"),
}
