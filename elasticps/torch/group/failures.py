"""An error of rank 0 as bytes: the other ranks raise the same, with all that it says."""

from __future__ import annotations

import json
from contextlib import suppress

import numpy as np

from elasticps import errors
from elasticps.errors import Error, GroupLost, Refused


def encode_error(error: BaseException) -> bytes:
    """JSON, a zero byte, and the keys of refused rows that the JSON counts. What is no error of ours ends the group."""
    if not isinstance(error, Error):
        error = GroupLost(f"rank 0 of the group failed: {error!r}")
    every = [error, *error.others] if isinstance(error, Refused) else [error]
    documents, keys = list[dict[str, object]](), list[bytes]()
    for each in every:
        refused = each.refused if isinstance(each, Refused) else {}
        more: list[object] = list(each.__reduce__()[1][1:])  # what its constructor takes behind the text
        try:
            json.dumps(more)
        except TypeError:  # it carries what only this process knows
            more = []
        counts = [[name, len(some)] for name, some in refused.items()]
        documents.append({"kind": type(each).__name__, "text": str(each), "more": more, "refused": counts})
        keys += [some.tobytes() for some in refused.values()]
    return b"\0".join([json.dumps(documents).encode(), b"".join(keys)])


def decode_error(body: bytes) -> Error:
    """The inverse; or the next kind above it that takes a text alone, by a name of `elasticps.errors`."""
    written, _, keys = body.partition(b"\0")
    every, at, made = np.frombuffer(keys, np.int64), 0, list[Error]()
    for document in json.loads(written):
        error = _made(document["kind"], document["text"], document["more"])
        made.append(error)
        found = {}
        for name, count in document["refused"]:
            found[name] = every[at : at + count]
            at += count
        if isinstance(error, Refused) and found:
            error.refused = found
    first, *others = made
    if isinstance(first, Refused) and others:
        first.others = others
    return first


def _made(kind: str, text: str, more: list[object]) -> Error:
    found = getattr(errors, kind, None)
    if isinstance(found, type) and issubclass(found, Error):
        for each, values in ((found, more), *((each, []) for each in found.__mro__)):
            with suppress(TypeError):
                made = each(text, *values)
                if isinstance(made, Error):
                    return made
    return GroupLost(text)
