"""REDUCE and REDUCED: the request for a function over all rows of one range of a table, and its answer. Pure."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

from elasticps.wire.frames import Buffer, FrameError, Header, Kind, json_body, padded, text

MAX_NAME = 200
MAX_CONSTANTS = 256
MOST = sys.float_info.max


class ReduceHeader(NamedTuple):
    """REDUCE: asks for the function's result over range `range` of a table."""

    table: int
    range: int
    request: int = 0
    epoch: int = 0

    def header(self, body_bytes: int) -> Header:
        """The 64 bytes' fields, before a body of so many bytes, which names the function."""
        return Header(Kind.REDUCE, 0, body_bytes, self.request, self.epoch, 0, self.range, table=self.table)

    @classmethod
    def of(cls, h: Header) -> ReduceHeader:
        """The inverse of `header`."""
        return cls(h.table, h.worker, h.request, h.epoch)


class ReducedHeader(NamedTuple):
    """REDUCED: the function's result over the `rows` rows of a range: `floats` numbers, none without rows."""

    request: int
    epoch: int
    range: int
    rows: int
    floats: int

    def header(self) -> Header:
        """The 64 bytes' fields; the body is the numbers, float64."""
        size = 8 * self.floats
        return Header(Kind.REDUCED, 0, size, self.request, self.epoch, self.rows, self.range, items=self.floats)

    @classmethod
    def of(cls, h: Header) -> ReducedHeader:
        """The inverse of `header`. Raises `FrameError` if the body is not as long as the numbers are."""
        if h.body != 8 * h.items:
            raise FrameError(f"{h.items} numbers of a range have a body of {h.body} bytes")
        return cls(h.request, h.epoch, h.worker, h.clock, h.items)


def function_body(name: str, constants: Sequence[float]) -> bytes:
    """The body of a REDUCE; constants must be finite."""
    document = {"name": name, "constants": list(constants)}
    body = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    return body + b" " * (len(padded(body)) - len(body))


def read_function(body: Buffer) -> tuple[str, tuple[float, ...]]:
    """The inverse of `function_body`; `FrameError` if it is none."""
    document = json_body(body)
    name, constants = text(document.get("name"), MAX_NAME), document.get("constants")
    if not isinstance(constants, list) or len(constants) > MAX_CONSTANTS:
        raise FrameError(f"a list of at most {MAX_CONSTANTS} constants is expected")
    found = []
    for each in constants:
        if isinstance(each, bool) or not isinstance(each, int | float) or not abs(each) <= MOST:
            raise FrameError(f"a finite number is expected, not {each!s:.40}")
        found.append(float(each))
    return name, tuple(found)
