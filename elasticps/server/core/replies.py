"""Who waits for an answer of the replica, and how the answer is told. Pure."""

from __future__ import annotations

from typing import Any

from elasticps.server.core.asker import Asker
from elasticps.wire.frames import Kind, clocks_frame, json_frame, partly_frame
from elasticps.wire.headers import OkHeader
from elasticps.wire.refusals import encode_refused, refused_frame
from replication.effects import ClocksReply, Reply, Status


class RequestTicket:
    """A frame of a worker."""

    __slots__ = ("connection", "request")

    def __init__(self, connection: Asker, request: int) -> None:
        self.connection = connection
        self.request = request

    def reply(self, reply: Reply) -> None:
        """Answers the frame."""
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
        elif reply.moved.shape[0]:
            if reply.refused:
                self.connection.send(refused_frame(self.request, reply.epoch, reply.refused, last=False))
            self.connection.send(partly_frame(self.request, reply.epoch, reply.committed, reply.moved))
            self.connection.tell_view()
        elif reply.refused:
            self.connection.send(refused_frame(self.request, reply.epoch, reply.refused, last=True))
        else:
            self.connection.send(OkHeader(self.request, reply.epoch).header().pack())

    def clocks(self, reply: ClocksReply) -> None:
        """Answers the question."""
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
            return
        refused = encode_refused(reply.refused)
        frame = clocks_frame(self.request, reply.epoch, reply.ranges, reply.applied, reply.committed, refused)
        self.connection.send(frame)

    def hold(self) -> None:
        self.connection.wait_for(self)

    def release(self) -> None:
        self.connection.admitted(self)

    def _refuse(self, status: Status, epoch: int) -> None:
        if status is Status.STALE_VIEW:
            self.connection.tell_view()
        code, text = _REFUSALS[status]
        self._tell({"code": code, "message": text, "epoch": epoch}, epoch)

    def _tell(self, document: dict[str, Any], epoch: int) -> None:
        self.connection.send(json_frame(Kind.ERROR, document, request=self.request, epoch=epoch))


_REFUSALS = {
    Status.STALE_VIEW: ("stale-view", "the ranges headed here have changed since the frame's epoch"),
    Status.GAP: ("gap", "an earlier part of the worker's steps is missing here"),
    Status.FENCED: ("unlisted", "the worker is not in the roster now: it left, or its registration ran out"),
}
