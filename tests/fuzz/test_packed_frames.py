"""Packed frames: a server expands no more of them than it can handle."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from random import Random

import numpy as np
import pytest

from elasticps.wire.frames import (
    HEADER_BYTES,
    LAST,
    PACKED,
    SHORT,
    Header,
    Kind,
    block_head,
    json_frame,
    unpack_header,
)
from elasticps.wire.headers import PushHeader
from elasticps.wire.packing import KEEP, KNOWN, LIST_KEYS, pack, says
from replication.progress import before_part
from tests.fuzz.core import APPS, CLUSTER, DIM, HOSTILE, OWN, TABLE, Core, Wire, watched

WORKER = HOSTILE[0]
MANY = 5
ROWS = 1 << 15
NO_VALUES = np.empty(0, np.float32)


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def core(request: pytest.FixtureRequest) -> Iterator[Core]:
    with watched():
        yield Core(Random(1), {}, compiled=request.param)


def connect(core: Core) -> Wire:
    wire = Wire(core, reads=True, keeps=True)
    who = {"cluster": CLUSTER, "worker": WORKER, "name": f"w{WORKER}", "app": APPS[WORKER]}
    wire.feed(json_frame(Kind.HELLO, who) + Header(Kind.JOIN, LAST).pack(), 1 << 20)
    core.settle()
    wire.written.clear()
    return wire


def answers(wire: Wire) -> list[tuple[int, int]]:
    """(kind, request) of what was answered, in order."""
    found, at = [], 0
    while at < len(wire.written):
        header = unpack_header(wire.written, at)
        if header.request:
            found.append((int(header.kind), header.request))
        at += HEADER_BYTES + header.body
    return found


def push(core: Core, step: int, flags: int, epochs_later: int = 0, rows: int = ROWS) -> bytes:
    """Zeros for a key of the server's own ranges, again and again. PACKED: in fewer bytes."""
    ranges = core.server.store.tables[TABLE].ranges_of(np.arange(8))
    mine = np.full(rows, np.flatnonzero(ranges < OWN)[0])
    body = struct.pack("<Q4i", OWN, *range(OWN)) + block_head(TABLE, rows, DIM, NO_VALUES)
    body += mine.tobytes() + bytes(4 * DIM * rows)
    if flags & PACKED:
        body = pack([body])
    epoch = core.server.serving.epoch + epochs_later
    header = PushHeader(step, epoch, step, before_part(step, 0), 1, all_ranges=False).header(len(body))
    return header._replace(flags=header.flags | flags).pack() + body


def pull(core: Core, request: int, keys: int, output: int, sent: bytes = b"") -> bytes:
    epoch = core.server.serving.epoch
    header = Header(Kind.PULL, SHORT, 8 + len(sent), request, epoch, 0, WORKER, table=TABLE, items=keys)
    return header.pack() + output.to_bytes(8, "little") + sent


def held_bytes(wire: Wire) -> int:
    return sum(len(body) for _, body in wire.connection._held)


def test_frames_after_a_held_frame_stay_packed(core: Core) -> None:
    wire = connect(core)
    frames = push(core, 1, 0, epochs_later=1, rows=1) + b"".join(
        push(core, 2 + i, PACKED, epochs_later=1) for i in range(MANY)
    )
    assert len(frames) < 64 << 10  # they come in one piece
    wire.feed(frames, 1 << 20)
    core.settle()
    assert wire.connection.holding
    assert held_bytes(wire) < len(frames)
    core.server.adopt(core.next_view(alone=True))
    core.server.held.release()
    core.settle()
    assert answers(wire) == [(Kind.OK, 1 + i) for i in range(MANY + 1)]
    core.honest.work()


def test_frames_after_a_push_that_waits_for_admission_stay_packed(core: Core) -> None:
    wire, parked = connect(core), object()
    wire.connection.wait_for(parked)
    wire.reading = True  # it came in one piece with that push
    wire.feed(push(core, 1, PACKED), 1 << 20)
    core.settle()
    assert answers(wire) == []
    wire.connection.admitted(parked)
    core.settle()
    assert answers(wire) == [(Kind.OK, 1)]
    core.honest.work()


def test_other_connections_are_served_between_unpacked_pushes(core: Core) -> None:
    wire = connect(core)
    others_have_their_turn(core, wire, b"".join(push(core, 1 + i, PACKED, rows=1 << 16) for i in range(3)))


def test_other_connections_are_served_between_unpacked_pulls(core: Core) -> None:
    wire, keys = connect(core), np.full(LIST_KEYS, 3, np.int64)
    wire.feed(pull(core, 1, len(keys), says(KEEP), keys.tobytes()), 1 << 20)
    core.settle()
    wire.written.clear()
    others_have_their_turn(core, wire, b"".join(pull(core, 2 + i, len(keys), says(KNOWN)) for i in range(3)))


def others_have_their_turn(core: Core, wire: Wire, frames: bytes) -> None:
    turns = []

    def turn() -> None:
        turns.append(len({request for _, request in answers(wire)}))
        if turns[-1] < 3:
            core.clock.call_soon(turn)

    core.clock.call_soon(turn)
    wire.feed(frames, 1 << 20)
    core.settle()
    assert set(turns) >= {1, 2, 3}
    core.honest.work()
