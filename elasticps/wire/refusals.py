"""What was refused, as JSON: with a FORWARD, in the first chunk of a snapshot, and with CLOCKS. Pure.

Why something was refused is the document of the ERROR that the worker gets, as text: whoever reads one here has seen
that it is one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from elasticps.wire.frames import MAX_CONTROL_BYTES, MAX_LINK_BODY_BYTES, FrameError, text, whole
from replication.messages import MAX_WORKER
from replication.progress import MAX_CLOCK
from replication.refusals import Refusal, RefusedStep

MAX_WHY = 4096
_SHORT = 512  # letters, that need six each at most

Bytes = NDArray[np.uint8]


def why(document: dict[str, Any]) -> str:
    """An ERROR's document as text; less of it where it would be too long. In ASCII: `told` reads all that it gives,
    whatever a peer's words in it are."""
    written = json.dumps(document)
    if len(written) > MAX_WHY:
        written = json.dumps({"code": document["code"], "message": document["message"][:_SHORT]})
    return written


def told(written: str) -> dict[str, Any]:
    """The document. `FrameError` if it is none."""
    try:
        document = json.loads(text(written, MAX_WHY))
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what was refused cannot be read: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(document.get(key), str) for key in ("code", "message")):
        raise FrameError("what was refused has no code and no message")
    return document


def encode_refusal(refusal: Refusal) -> bytes:
    """With a FORWARD, before all else of an operation."""
    return _section(refusal)


def decode_refusal(body: Bytes, at: int) -> tuple[Refusal, int]:
    """The inverse, and where it ends."""
    (said, clock), at = _read_section(body, at, MAX_CONTROL_BYTES, 2)
    told(said)
    return Refusal(said, whole(clock, MAX_CLOCK - 1)), at


def encode_steps(steps: Sequence[RefusedStep]) -> bytes:
    """In the first chunk of a snapshot."""
    return _section(steps)


def decode_steps(body: Bytes, at: int) -> tuple[list[RefusedStep], int]:
    """The inverse, and where it ends."""
    said, at = _read_section(body, at, MAX_LINK_BODY_BYTES)
    steps = []
    for one in said:
        worker, clock, written = _several(one, 3)
        told(written)
        steps.append(RefusedStep(whole(worker, MAX_WORKER, 1), whole(clock, MAX_CLOCK - 1, 1), written))
    return steps, at


def encode_told(steps: Sequence[tuple[int, str]]) -> bytes:
    """(clock, why) of one worker's, with CLOCKS."""
    return _section(steps) if steps else b""


def decode_told(body: Bytes) -> list[tuple[int, dict[str, Any]]]:
    """The inverse, the documents read."""
    if not len(body):
        return []
    said, end = _read_section(body, 0, MAX_LINK_BODY_BYTES)
    if end != len(body):
        raise FrameError(f"a CLOCKS frame has {len(body) - end} bytes left over")
    pairs = [_several(one, 2) for one in said]
    return [(whole(clock, MAX_CLOCK - 1, 1), told(written)) for clock, written in pairs]


def _section(values: Sequence[object]) -> bytes:
    written = json.dumps(values, separators=(",", ":")).encode()
    written += b" " * (-len(written) % 8)
    return len(written).to_bytes(8, "little") + written


def _read_section(body: Bytes, at: int, limit: int, count: int = -1) -> tuple[list[Any], int]:
    size = int.from_bytes(body[at : at + 8].tobytes(), "little")
    end = at + 8 + size
    if size & 7 or size > limit or end > len(body):
        raise FrameError(f"what was refused, {size} bytes at {at}, does not fit in a body of {len(body)} bytes")
    try:
        said = json.loads(body[at + 8 : end].tobytes())
    except (ValueError, RecursionError) as error:
        raise FrameError(f"what was refused is not JSON: {error}") from None
    return _several(said, count), end


def _several(said: object, count: int) -> list[Any]:
    if not isinstance(said, list) or (count >= 0 and len(said) != count):
        raise FrameError("what was refused is no list of what it should be")
    return said
