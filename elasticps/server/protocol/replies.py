"""Who waits for an answer of the replica, and how the answer is told. Pure."""

from __future__ import annotations

from typing import Any

from elasticps.server.protocol.asker import Asker
from elasticps.wire.frames import Kind, clocks_frame, json_frame, partly_frame
from elasticps.wire.headers import OkHeader
from replication.effects import ClocksReply, Reply, Status


class RequestTicket:
    """A frame of a worker. `refusal`: what was wrong with its content, without which it ticks; until that was told. Not
    the error, whose traceback would keep all that it has seen in a cycle with this until the collector comes by."""

    __slots__ = ("connection", "refusal", "request", "waits")

    def __init__(self, connection: Asker, request: int, refusal: dict[str, Any] | None = None) -> None:
        self.connection = connection
        self.request = request
        self.refusal = refusal
        self.waits = False  # it has not ticked, and maybe will not: it may be refused as a whole

    def reply(self, reply: Reply) -> None:
        """Answers the frame."""
        refusal, self.refusal = self.refusal, None
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
        elif reply.moved.shape[0]:
            if refusal is not None:
                self._tell(refusal | {"partly": True}, reply.epoch)
            self.connection.send(partly_frame(self.request, reply.epoch, reply.committed, reply.moved))
            self.connection.tell_view()
        elif refusal is not None:
            self._tell(refusal, reply.epoch)
        else:
            self.connection.send(OkHeader(self.request, reply.epoch).header().pack())

    def warn(self, epoch: int) -> None:
        """Tells what is wrong if the frame has ticked, and is not answered: that follows when it is committed. Whoever
        heads its ranges after us knows that it has ticked, and nothing of what was refused."""
        if self.refusal is not None and not self.waits:
            self._tell(self.refusal | {"partly": True}, epoch)
            self.refusal = None

    def clocks(self, reply: ClocksReply) -> None:
        """Answers the question."""
        if reply.status is not Status.COMMITTED:
            self._refuse(reply.status, reply.epoch)
            return
        frame = clocks_frame(self.request, reply.epoch, reply.ranges, reply.applied, reply.committed)
        self.connection.send(frame)

    def hold(self) -> None:
        self.waits = True
        self.connection.wait_for(self)

    def release(self) -> None:
        self.waits = False
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
