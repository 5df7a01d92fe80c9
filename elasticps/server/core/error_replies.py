"""Makes and counts ERROR frames: the one place where a server refuses a request, some rows or a connection. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from elasticps.wire.frames import Kind, json_frame
from elasticps.wire.refusals import error_of, refused_frame
from replication.refusals import Refused

CONNECTION = "connection"  # the kind of an ERROR that answers no request: the connection ends with it


class ErrorReplies:
    """Makes ERROR frames, each for one refused frame.

    counts  (kind, code) -> how many were made. kind: of the refused frame, in small letters, or CONNECTION; code: of
            the error. Two that any change of the view causes are there from the start: their graphs begin at 0.
    """

    def __init__(self) -> None:
        self.counts = Counter({("push", "stale-view"): 0, ("pull", "stale-view"): 0})

    @property
    def total(self) -> int:
        """How many ERROR frames were made."""
        return self.counts.total()

    def for_request(self, kind: int, request: int, document: dict[str, Any], epoch: int) -> bytes:
        """The answer to a request that is refused. kind: of the request's frame; document: with a code and a message;
        epoch: of the view that this server follows."""
        self.counts[Kind(kind).name.lower(), document["code"]] += 1
        return json_frame(Kind.ERROR, document, request=request, epoch=epoch)

    def for_rows(self, request: int, epoch: int, refused: Sequence[Refused], *, last: bool) -> bytes:
        """The answer to a push that counts, without these rows; counted under the code of the first reason. last: it is
        the whole answer."""
        self.counts["push", error_of(refused[0].why)["code"]] += 1
        return refused_frame(request, epoch, refused, last=last)

    def for_connection(self, code: str, message: str) -> bytes:
        """The last frame on a connection whose peer is rejected."""
        self.counts[CONNECTION, code] += 1
        return json_frame(Kind.ERROR, {"code": code, "message": message})
