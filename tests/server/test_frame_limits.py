"""Frames at the size limits are accepted all the way or refused at the edge."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from elasticps.client.core.routing import Routes, plan_push
from elasticps.kernels.hashing import table_salt
from elasticps.model.optimizers import Accumulate
from elasticps.model.spec import TableSpec
from elasticps.server.core.operations import Contribution, RowBlocks, positions_of
from elasticps.server.core.replica_codec import ReplicaCodec
from elasticps.wire.frames import (
    HEADER_BYTES,
    MAX_BLOCKS,
    MAX_BODY_BYTES,
    MAX_CONTROL_BYTES,
    MAX_LINK_BODY_BYTES,
    MAX_RANGES,
    PACKED,
    ROUND,
    Block,
    Header,
    Kind,
    block_head,
    json_body,
    json_frame,
)
from elasticps.wire.headers import PushHeader
from elasticps.wire.packing import pack
from elasticps.wire.refusals import MAX_WHY, RefusedRows
from replication.messages import Forward, Operation, OperationKind
from replication.progress import MAX_PARTS
from replication.refusals import Refusal
from tests.server.conftest import TABLE, WORKER, Group, Run, Worker

LARGE, LARGE_DIM = 9, 1 << 16
NO_VALUES = np.empty(0, np.float32)


def in_order(table: int, count: int, routes: Routes) -> np.ndarray:
    keys = np.arange(count, dtype=np.int64)
    return keys[plan_push(keys, table_salt(table), routes).order]


def zeros(table: int, dim: int, keys: np.ndarray) -> bytes:
    return block_head(table, len(keys), dim, NO_VALUES) + keys.tobytes() + bytes(-(-4 * dim * len(keys) // 8) * 8)


def a_push_of_exactly(limit: int, routes: Routes) -> bytes:
    """Two blocks: as many large rows as fit, and small rows (12 bytes of gradient beside the key) for the rest."""
    head = len(block_head(TABLE, 0, 3, NO_VALUES))
    rows = (limit - 4 * head) // (8 + 4 * LARGE_DIM)
    body = zeros(LARGE, LARGE_DIM, in_order(LARGE, rows, routes))
    left = limit - len(body) - head
    small = next(n for n in range(left // 20, 0, -1) if (left - 20 * n - 12 * n % 8) % head == 0)
    body += zeros(TABLE, 3, in_order(TABLE, small, routes))
    while len(body) < limit:  # an empty block takes what is left
        body += zeros(TABLE, 3, np.empty(0, np.int64))
    return body


@pytest.mark.parametrize("flags", [0, ROUND, PACKED], ids=["plain", "round", "packed"])
def test_a_push_of_exactly_the_limit_is_replicated(run: Run, flags: int) -> None:
    async def test(group: Group) -> None:
        for name in ("a", "b"):
            await group.start(name)
        group.adopt(group.make_view(lambda r: ["a", "b"]))
        assert group.view is not None
        worker = await group.connect("a")
        await create_large(worker, group)
        body = a_push_of_exactly(MAX_BODY_BYTES, Routes(group.view))
        assert len(body) == MAX_BODY_BYTES
        header = PushHeader(0, 1, 1, 0, count(body)).header(0)
        header = header._replace(flags=header.flags | flags)
        answer, document = await asyncio.wait_for(worker.ask(header, pack([body]) if flags & PACKED else body), 60)
        assert answer.kind == Kind.OK, json_body(document)
        assert group.servers["b"].replica.seq.min() > 0
        answer, _ = await asyncio.wait_for(worker.push(group.view, "a", 2, [1, 2, 3], 1.0), 60)
        assert answer.kind == Kind.OK

    run(test)


async def create_large(worker: Worker, group: Group) -> None:
    spec = TableSpec("large", LARGE_DIM, Accumulate()).to_json()
    body = json_frame(Kind.CREATE, {"id": LARGE, "spec": spec})[HEADER_BYTES:]
    answer, document = await asyncio.wait_for(worker.ask(Header(Kind.CREATE, epoch=1), body), 60)
    assert answer.kind == Kind.OK, json_body(document)


def count(body: bytes) -> int:
    """The blocks of a push body."""
    blocks, at = 0, 0
    while at < len(body):
        _, rows, dim = np.frombuffer(body, "<u4", 3, at).tolist()
        at = (at + 24 + 8 * rows + 4 * rows * dim + 7) & ~7
        blocks += 1
    return blocks


def test_no_forward_of_a_push_is_over_the_limit_of_links() -> None:
    ranges = np.arange(MAX_RANGES, dtype=np.int64)
    positions = positions_of(ranges, MAX_RANGES)
    blocks = [Block(TABLE, np.empty(0, np.int64), np.empty((0, 3), np.float32), NO_VALUES)]
    contents = [RowBlocks(blocks, ranges, positions), Contribution("a" * 63, (1 << 46) - 1, blocks, ranges, positions)]
    rows = {(1 << 32) - 1 - number: np.zeros(1, np.int64) for number in range(MAX_BLOCKS)}
    refusal = Refusal("x" * MAX_WHY, (1 << 46) - 1, RefusedRows(rows, MAX_RANGES))
    for content, refused in ((content, refused) for content in contents for refused in (None, refusal)):
        operation = Operation(OperationKind.PUSH, WORKER, 1 << 62, content, 0, refused)
        frame = b"".join(
            bytes(part) for part in ReplicaCodec({}, MAX_RANGES).encode(Forward(1, ranges, ranges, operation))
        )
        added = len(frame) - HEADER_BYTES - len(zeros(TABLE, 3, np.empty(0, np.int64)))
        assert MAX_BODY_BYTES + added <= MAX_LINK_BODY_BYTES


def test_a_control_frame_over_its_limit_ends_the_connection(run: Run) -> None:
    async def test(group: Group) -> None:
        await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        worker = await group.connect("a")
        document = {"id": 77, "spec": TableSpec("t", 1, Accumulate()).to_json() + " " * MAX_CONTROL_BYTES}
        worker.ask(Header(Kind.CREATE, epoch=1), json_frame(Kind.CREATE, document)[HEADER_BYTES:])
        with pytest.raises(asyncio.IncompleteReadError):
            await asyncio.wait_for(worker.task, 10)
        assert 77 not in group.servers["a"].store.tables

    run(test)


@pytest.mark.parametrize(("part", "taken"), [(MAX_PARTS - 1, True), (MAX_PARTS, False)])
def test_a_step_has_a_maximum_of_parts(run: Run, part: int, taken: bool) -> None:
    async def test(group: Group) -> None:
        await group.start("a")
        group.adopt(group.make_view(lambda r: ["a"]))
        worker = await group.connect("a")
        header = PushHeader(0, 1, 1, 0, 0, part, last=False).header(0)
        answer = worker.ask(header)
        if taken:
            assert (await asyncio.wait_for(answer, 10))[0].kind == Kind.OK
        else:
            with pytest.raises(asyncio.IncompleteReadError):
                await asyncio.wait_for(worker.task, 10)
        row = group.servers["a"].replica.clocks.read(WORKER)
        assert set(row.tolist()) == {part + 1 if taken else 0}

    run(test)
