"""Answers to pushes by their outcome."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from elasticps.server.core.error_replies import ErrorReplies
from elasticps.server.core.requests import RequestTicket
from elasticps.wire.frames import HEADER_BYTES, REFUSED, Buffer, Kind, json_frame, unpack_header
from elasticps.wire.refusals import RefusedRows, decode_refused, why
from replication.effects import Reply, Status
from replication.refusals import Refused


class Connection:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.errors = ErrorReplies()
        self.sent: list[bytes] = []

    def send(self, frame: Buffer) -> None:
        self.sent.append(bytes(frame))

    def tell_view(self) -> None:
        self.sent.append(json_frame(Kind.VIEW, {}))


def test_a_refused_push_whose_range_moves_gets_both_answers() -> None:
    connection = Connection()
    ticket = RequestTicket(cast(Any, connection), Kind.PUSH, 5)
    two = np.arange(2)
    document, rows = {"code": "shape", "message": "it has dim 3"}, RefusedRows({4: np.arange(3)}, 8)
    ticket.reply(Reply(ticket, Status.COMMITTED, 2, two, two + 2, [Refused(1, why(document), rows)]))
    headers = [unpack_header(frame) for frame in connection.sent]
    assert [(h.kind, h.request) for h in headers] == [(Kind.ERROR, 5), (Kind.PARTLY, 5), (Kind.VIEW, 0)]
    assert headers[0].flags == REFUSED, "another answer follows"
    assert decode_refused(np.frombuffer(connection.sent[0][HEADER_BYTES:], np.uint8), 8) == [(1, document, rows)]
