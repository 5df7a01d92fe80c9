"""What a head takes from a worker and logs, every follower can read: else the links between them would end over it, and
the next ones too, as what is logged is sent again."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from coordinator.core.view import Roster, WorkerInfo
from elasticps.model.sharding import MAX_SHARDS
from elasticps.server.core.replica_codec import MAX_TABLE
from elasticps.server.roles import replica_links
from elasticps.wire.clocks import ReadAfter
from elasticps.wire.frames import (
    ALL_RANGES,
    HEADER_BYTES,
    LAST,
    MAX_CONTROL_BYTES,
    RECORD,
    REPEAT,
    REPLACE,
    ROUND,
    FrameError,
    Header,
    Kind,
    block_head,
    json_frame,
    padded,
    unpack_header,
)
from elasticps.wire.headers import NEVER
from replication.messages import OperationKind
from replication.progress import MAX_CLOCK, MAX_PARTS, MAX_WORKER
from tests.server.conftest import DIM, RANGES, SPEC, TABLE, WORKER, Group, Run, until
from tests.server.test_malformed_requests import pair
from tests.server.wires import Wires

Frame = tuple[Header, bytes]
_JOINED = 3  # its newest step when it joined

# Whole numbers at the ends of what may be said, and what JSON has besides.
_ENDS = (0, 1, 2, _JOINED, WORKER, MAX_SHARDS, MAX_TABLE, MAX_WORKER, MAX_CLOCK)
_WHOLE = st.sampled_from([end + by for end in _ENDS for by in (-1, 0, 1)])
_LIKELY = st.sampled_from([1, WORKER])
_ODD = st.booleans() | st.none() | st.just(1 << 64) | st.floats() | st.text(max_size=2)
_NUMBER = st.one_of(*[_LIKELY] * 8, _WHOLE, _ODD)
_NUMBERS = st.one_of(
    st.lists(_LIKELY, unique=True), st.lists(_WHOLE, unique=True, max_size=3), st.lists(_NUMBER, max_size=3), _NUMBER
)  # fmt: skip
_NAMES = st.text(st.characters(exclude_categories=()), max_size=5) | st.just("t" * 201) | _NUMBER


def document(kind: Kind, content: dict[str, Any], **fields: int) -> Frame:
    return Header(kind, **fields), json_frame(kind, content)[HEADER_BYTES:]


def create(number: object, **changes: object) -> Frame:
    spec = json.dumps(json.loads(SPEC.to_json()) | changes, separators=(",", ":"))
    return document(Kind.CREATE, {"id": number, "spec": spec})


def drop(number: int, kind: int = OperationKind.DROP, clock: int = 0) -> Frame:
    return Header(Kind.ERASE, LAST | ALL_RANGES, clock=clock, part=kind, table=number), b""


def block(table: int, rows: int, dim: int = DIM) -> bytes:
    """Of one row at most: more have an order."""
    head = block_head(table, rows, dim, np.empty(0, np.float32))
    return head + np.arange(rows).tobytes() + padded(np.ones(rows * dim, np.float32).tobytes())


def push(
    clock: int, lag: int = 0, table: int = TABLE, flags: int = LAST, first: int = 0, part: int = 0, rows: int = 0,
    bound: int = 0, wait_ms: int = 0, steps: int = 1, record: bytes = b"",
) -> Frame:  # fmt: skip
    header = Header(
        Kind.PUSH, flags | ALL_RANGES | RECORD * bool(record), clock=clock, worker=steps, first=first, part=part,
        table=lag, items=1, bound=bound, wait_ms=wait_ms,
    )  # fmt: skip
    return header, block(table, rows) + record


def record(committed: int, bits: int) -> bytes:
    return (committed & (1 << 64) - 1).to_bytes(8, "little") + bits.to_bytes(8, "little")


def read_after(ranges: list[int], progress: int) -> Frame:
    named = np.array(ranges, np.int64)
    frame = ReadAfter(named, np.full(len(ranges), progress)).frame()
    return unpack_header(frame), frame[HEADER_BYTES:]


def init(flags: int, table: int, rows: int) -> Frame:
    return Header(Kind.INIT, flags | ALL_RANGES, items=1), block(table, rows)


def delete(number: int, table: int, rows: int) -> Frame:
    return drop(table, OperationKind.DELETE, number)[0]._replace(items=1), block(table, rows, 0)


def claim(committed: int = 0, **changes: object) -> Frame:
    content = {"name": "n", "samples": 8, "size": 1, "epochs": 1, "seed": None, "want": 1, "done": [], "back": []}
    return document(Kind.CLAIM_SHARDS, content | changes, clock=committed)


_U32, _U16 = _WHOLE.filter(lambda n: 0 <= n < 1 << 32), st.sampled_from([0, 1, 2, MAX_PARTS - 1, MAX_PARTS])
_CLOCK = st.sampled_from([_JOINED + 1, _JOINED + 1, 0, 1, MAX_CLOCK - 1, MAX_CLOCK])
_FRAMES = st.one_of(
    st.builds(create, _NUMBER),
    st.builds(create, st.just(9), name=_NAMES),
    st.builds(create, st.just(9), shape=_NUMBERS),
    st.builds(drop, st.just(TABLE) | _U32, st.sampled_from(OperationKind), _CLOCK),
    st.builds(drop, st.just(TABLE), st.sampled_from([OperationKind.CLEAR, OperationKind.DROP]), st.just(1)),
    st.builds(
        push, _CLOCK, _U32, st.sampled_from([TABLE, 99]), st.sampled_from([LAST, 0, LAST | ROUND, LAST | REPEAT]),
        _U16, _U16, st.integers(0, 1), _U32, _U32, st.sampled_from([1, 2, _JOINED + 1, NEVER - 1, NEVER]),
    ),
    st.builds(
        push, st.sampled_from([_JOINED + 1, _JOINED + 2, _JOINED + 4]), rows=st.integers(0, 1),
        flags=st.sampled_from([LAST] * 6 + [0]), steps=st.sampled_from([1, 2, NEVER, NEVER]),
        record=st.builds(record, st.sampled_from([0, _JOINED, _JOINED + 4, -1]), st.sampled_from([0, 9, 1 << RANGES])),
    ),
    st.builds(read_after, st.lists(_LIKELY | _U32, max_size=3), st.sampled_from([0, _JOINED << 16, 1 << 62, -1])),
    st.builds(push, st.just(_JOINED + 1), rows=st.just(1), flags=st.sampled_from([LAST, LAST | ROUND])),
    st.builds(init, st.sampled_from([0, REPLACE]), st.sampled_from([TABLE, 99]), st.integers(0, 1)),
    st.builds(delete, _CLOCK, st.sampled_from([TABLE, 99]), st.integers(0, 1)),
    st.builds(claim, _CLOCK, name=_NAMES),
    st.builds(claim, samples=_NUMBER, size=_NUMBER, epochs=_NUMBER, seed=_NUMBER, want=_NUMBER),
    st.builds(claim, done=_NUMBERS, back=_NUMBERS),
    st.sampled_from([Kind.BARRIER_JOIN, Kind.BARRIER_LEAVE, Kind.BARRIER_ARRIVE]).map(lambda kind: (Header(kind), b"")),
)  # fmt: skip
_WIDE = create(9, optimizer={"kind": "adam"}, shape=[1] * 524_190)  # longer with all that adam is
assert MAX_CONTROL_BYTES - 64 < len(_WIDE[1]) <= MAX_CONTROL_BYTES


@pytest.mark.parametrize("compiled", [False, True])
@example([_WIDE])
@example([drop(0)])
@example([push(_JOINED + 1, lag=_JOINED + 2, table=99)])
@example([push(_JOINED + 1, lag=_JOINED + 2)])
@example([push(_JOINED + 1, lag=_JOINED + 1, table=99)])
@example([claim(done=[False])])
@example([push(_JOINED + 1, steps=NEVER, record=record(_JOINED, 9)), push(_JOINED + 2, record=record(_JOINED, 9))])
@given(st.lists(_FRAMES, max_size=8))
def test_no_frame_of_a_worker_ends_a_link_between_servers(compiled: bool, frames: list[Frame]) -> None:
    wires = Wires(1, compiled)
    head, tail = (wires.start(name, [WORKER]) for name in ("s0", "s1"))
    wires.adopt(lambda r: ["s0", "s1"])
    wires.link("s0", "s1")
    wires.settle()
    links = head.links.link(tail.member), tail.links.link(head.member)
    assert None not in links
    there, _ = wires.connect("s0", WORKER, _JOINED)
    with patch.object(os, "_exit") as ended:
        for number, (header, body) in enumerate([create(TABLE), *frames], 2):
            if there.closed:
                there, _ = wires.connect("s0", WORKER, _JOINED)
            frame = header._replace(request=number, epoch=head.serving.epoch, body=len(body))
            if header.kind != Kind.PUSH:
                frame = frame._replace(worker=WORKER)
            there.write(frame.pack() + body)
            wires.settle()
    ended.assert_not_called()
    assert (head.links.link(tail.member), tail.links.link(head.member)) == links
    assert (head.replica.acked == head.replica.seq).all()
    clocks, tables = zip(*(found[3:5] for found in wires.state().values()), strict=True)
    one, other = ({worker: row for worker, row in rows.items() if any(row)} for rows in clocks)
    assert one == other
    assert tables[0] == tables[1]
    assert head.replica.records.of(WORKER) == tail.replica.records.of(WORKER)


def test_a_worker_gives_its_id_as_a_number(run: Run) -> None:
    """With `true` for 1 it was let in, and its first word about a round could be read by no follower."""

    async def test(group: Group) -> None:
        group.roster = Roster(1, (WorkerInfo(1, "w", 1, "default"),), "c")
        await pair(group)
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(group.connect("a", create=False, worker=True), 10)
        assert group.workers[-1].refused.startswith("a whole number")

    run(test)


def test_the_reason_for_ending_a_link_is_logged_at_its_cause(run: Run) -> None:
    """What is wrong with it is mostly wrong there."""

    async def test(group: Group) -> None:
        await pair(group)
        a, b = group.servers["a"], group.servers["b"]
        link, wrong = a.links.link(b.member), b.links.link(a.member)
        assert link is not None
        with patch.object(replica_links, "log", Mock()) as log:
            link.reject(FrameError("cannot be"))
            await until(lambda: b.links.link(a.member) not in (None, wrong))
        ((_, logged),) = log.warning.call_args_list
        assert logged == {"peer": a.member, "reason": "cannot be"}
        assert (a.links._rejections, b.links._rejections) == ({b.member: 1}, {a.member: 1})

    run(test)
