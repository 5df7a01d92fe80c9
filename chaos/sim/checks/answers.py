"""The promise of connections: each answer goes once, to the connection that asked. Reads the bytes that travel."""

from __future__ import annotations

import struct
from collections.abc import Hashable

from chaos.sim.checks.violation import Violation
from elasticps.wire.frames import HEADER_BYTES, LAST, MAGIC, Kind

_START = struct.Struct("<IxBHQQ")  # magic, kind, flags, bytes of the body, request
_LATER = (Kind.ROUND_CLOSE, Kind.SUBSCRIBE, Kind.READ_RANGE)
_FIRST_OF_REPLICAS, _FIRST_LATER, _FIRST_ANSWER = 16, 48, 64


def _asks(kind: int) -> bool:
    return kind < _FIRST_OF_REPLICAS or _FIRST_LATER <= kind < _FIRST_ANSWER or kind in _LATER


class _Stream:
    """One direction of a connection, and its position in a frame."""

    __slots__ = ("head", "skip")

    def __init__(self) -> None:
        self.head = bytearray()
        self.skip = 0


class Answers:
    """Follows all bytes that servers and their peers send."""

    def __init__(self) -> None:
        self._streams: dict[Hashable, _Stream] = {}  # by sender
        self._requests: dict[Hashable, set[int]] = {}  # unanswered requests by the peer that asked
        self._partly: dict[Hashable, set[int]] = {}  # refused, maybe only a part: one more answer may follow

    def sent(self, source: Hashable, target: Hashable, data: bytes) -> None:
        """Takes bytes that were sent."""
        stream = self._streams.get(source)
        if stream is None:
            stream = self._streams[source] = _Stream()
        at, end = 0, len(data)
        while at < end:
            if stream.skip:
                step = min(stream.skip, end - at)
                stream.skip -= step
                at += step
            elif not stream.head and end - at >= HEADER_BYTES:  # mostly headers are sent as a whole
                stream.skip = self._frame(source, target, data, at)
                at += HEADER_BYTES
            else:
                take = HEADER_BYTES - len(stream.head)
                stream.head += data[at : at + take]
                at += take
                if len(stream.head) == HEADER_BYTES:
                    stream.skip = self._frame(source, target, stream.head, 0)
                    stream.head.clear()

    def _frame(self, source: Hashable, target: Hashable, data: bytes | bytearray, at: int) -> int:
        """Reads the header of a frame; returns how many bytes follow it."""
        magic, kind, flags, body, request = _START.unpack_from(data, at)
        if magic != MAGIC:
            raise Violation("frames", f"{source} sends {target} what is no frame")
        if request and _asks(kind):
            self._requests.setdefault(source, set()).add(request)
        elif request and kind >= _FIRST_ANSWER:
            open_requests, partly = self._requests.get(target, set()), self._partly.setdefault(target, set())
            if request in partly and kind != Kind.ERROR:
                partly.discard(request)
            elif request not in open_requests:
                text = f"{source} answers {target} request {request} ({Kind(kind).name}), which it has not asked there"
                raise Violation("answers", text)
            elif kind == Kind.ERROR:
                partly.add(request)
            if kind != Kind.ROWS or flags & LAST:
                open_requests.discard(request)
        return int(body)
