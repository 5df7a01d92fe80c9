"""Messages of workers, servers and leaders, recorded from stories of the simulator."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any
from unittest.mock import patch

from chaos.sim import network
from chaos.sim.run import run
from elasticps.model.spec import TableSpec
from elasticps.wire.frames import HEADER_BYTES, FrameError, Kind, unpack_header

STORIES = (273, 45)  # servers come and go; shards, bounded delay, synchronous rounds
RANGES = 8  # of these stories
RETAINED = 400  # frames of a kind and role
MOST_BYTES = 8192
WORKER, PEER, ROUNDS, LEADER = ROLES = ("worker", "peer", "rounds", "leader")

Corpus = dict[str, dict[int, list[bytes]]]
"""Frames by who sends them, and by kind."""


def record() -> tuple[Corpus, dict[int, TableSpec]]:
    """The frames, and the tables that they speak of."""
    streams: dict[Any, bytearray] = {}
    plain = network._Pipe.send

    def send(pipe: Any, data: bytes) -> None:
        streams.setdefault(pipe, bytearray()).extend(data)
        plain(pipe, data)

    with patch.object(network._Pipe, "send", send):
        for seed in STORIES:
            result = run(seed)
            assert result.ok, result
    corpus: Corpus = {role: defaultdict(list) for role in ROLES}
    tables: dict[int, TableSpec] = {}
    for pipe, stream in streams.items():
        answering = streams.get(pipe.target._out, b"")
        role = _role(stream) or (PEER if _role(answering) == PEER else "")
        for frame in _cut(stream) if role else ():
            kind = frame[5]
            if len(frame) <= MOST_BYTES and len(corpus[role][kind]) < RETAINED:
                corpus[role][kind].append(frame)
            if kind == Kind.CREATE:
                document = json.loads(frame[HEADER_BYTES:])
                tables[document["id"]] = TableSpec.from_json(document["spec"])
    return {role: dict(kinds) for role, kinds in corpus.items()}, tables


def _role(stream: bytes | bytearray) -> str:
    """Who sent this, by its first frame; "" if it only answers."""
    for frame in _cut(stream):
        if frame[5] != Kind.HELLO:
            return ""
        document = json.loads(frame[HEADER_BYTES:])
        return next(role for role in ROLES if role in document)
    return ""


def _cut(stream: bytes | bytearray) -> list[bytes]:
    """The whole frames at the front."""
    frames, at = [], 0
    while at + HEADER_BYTES <= len(stream):
        try:
            end = at + HEADER_BYTES + unpack_header(stream, at, 1 << 40).body
        except FrameError:
            break
        if end > len(stream):
            break
        frames.append(bytes(stream[at:end]))
        at = end
    return frames
