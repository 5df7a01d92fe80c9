"""An error of rank 0 as bytes: the other ranks raise the same, with all that it says."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np

from elasticps import errors
from elasticps.errors import Error, GroupLost, Refusing


def encode_error(error: BaseException) -> bytes:
    """JSON, a zero byte, and the keys of refused rows that the JSON counts. What is no error of ours ends the group."""
    if not isinstance(error, Error):
        error = GroupLost(f"rank 0 of the group failed: {error!r}")
    more = list(error.__reduce__()[1][1:])  # what its constructor takes behind the text
    refused = error.refused if isinstance(error, Refusing) else {}
    document = {"kind": type(error).__name__, "text": str(error), "more": more}
    document["refused"] = [[name, len(keys)] for name, keys in refused.items()]
    try:
        written = json.dumps(document)
    except TypeError:  # it carries what only this process knows
        written = json.dumps(document | {"more": []})
    return b"\0".join([written.encode(), b"".join(keys.tobytes() for keys in refused.values())])


def decode_error(body: bytes) -> Error:
    """The inverse; or the next kind above it that takes a text alone, by a name of `elasticps.errors`."""
    written, _, keys = body.partition(b"\0")
    document = json.loads(written)
    error = _made(document["kind"], document["text"], document["more"])
    if isinstance(error, Refusing) and document["refused"]:
        every = np.frombuffer(keys, np.int64)
        ends = np.cumsum([count for _, count in document["refused"]])
        names = [name for name, _ in document["refused"]]
        error.refused = dict(zip(names, np.split(every, ends[:-1]), strict=True))
    return error


def _made(kind: str, text: str, more: list[object]) -> Error:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, Error):
        for each, values in ((found, more), *((each, []) for each in found.__mro__)):
            with suppress(TypeError):
                made = each(text, *values)
                if isinstance(made, Error):
                    return made
    return GroupLost(text)
