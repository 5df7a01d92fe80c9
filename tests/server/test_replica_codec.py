"""Messages between replicas survive encoding and decoding, and malformed ones raise FrameError."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticps.model.optimizers import Accumulate, Custom
from elasticps.model.sharding import ShardSpec
from elasticps.model.spec import MAX_JSON, TableSpec
from elasticps.server.core.barrier_state import MAX_REMEMBERED, BarrierGroup, RangeRounds, RoundStep
from elasticps.server.core.data_shards import Claim, Doing, RangeShards, ShardMark, ShardSet, Used
from elasticps.server.core.operations import (
    AuditMark,
    ChunkContent,
    Contribution,
    CreatedTable,
    CreatedTables,
    CutMark,
    RestoredKeys,
    RestoredRows,
    RestoredState,
    RowBlocks,
    TableRows,
    positions_of,
)
from elasticps.server.core.replica_codec import ReplicaCodec
from elasticps.store import Store
from elasticps.wire.frames import HEADER_BYTES, Block, FrameError, Header, Kind, json_frame, unpack_header
from elasticps.wire.refusals import MAX_WHY, RefusedRows, error_of, why
from replication.messages import Ack, ChunkAck, Forward, Message, Operation, OperationKind, Resync, SnapshotChunk
from replication.refusals import Refusal, RefusedStep

P = 16
SPEC = TableSpec("a", 3, Accumulate()).to_json()


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def through_the_wire(message: Message, store: Store) -> Message:
    codec = ReplicaCodec(store.tables, P)
    frame = b"".join(bytes(part) for part in codec.encode(message))
    header = unpack_header(frame)
    assert header.body == len(frame) - HEADER_BYTES
    return codec.decode(header, np.frombuffer(frame[HEADER_BYTES:], np.uint8))


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and np.array_equal(a, b)
    if isinstance(a, Operation):
        assert isinstance(b, Operation)
        mine, other = (a.kind, a.worker, a.after, a.refusal), (b.kind, b.worker, b.after, b.refusal)
        return mine == other and same(a.payload, b.payload)
    if isinstance(a, RowBlocks):
        assert isinstance(b, RowBlocks)
        return same(a.blocks, b.blocks) and same(a.ranges, b.ranges) and a.mark == b.mark
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def a_store() -> Store:
    store = Store(P)
    store.create(TableSpec("a", 3, Accumulate()), 1)
    store.create(TableSpec("b", 1, Accumulate()), 2)
    return store


def a_push(store: Store, ranges: np.ndarray, count: int = 200) -> Operation:
    """Rows of both tables for the keys below `count` that lie in `ranges`, in their order."""
    positions = positions_of(ranges, P)
    blocks = []
    for number, table in store.tables.items():
        at = []
        for r in ranges.tolist():
            bounds = np.zeros(P, np.int64)
            bounds[r] = 1 << 62
            at += table.select(np.arange(count, dtype=np.int64), bounds).tolist()
        keys = numbers(*at)
        grads = np.outer(keys, np.ones(table.spec.dim)).astype(np.float32)
        blocks.append(Block(number, keys, grads, np.empty(0, np.float32)))
    return Operation(OperationKind.PUSH, 5, 7 << 16, RowBlocks(blocks, ranges, positions), 1000)


SOME = numbers(3, 5, 4, 9)
A_SET = ShardSet(1 << 16 | 3, ShardSpec(100, 7, 2, None), 5, 2, {1: Used(4, 9)}, {6: {0: Doing(8, Used(0, 0))}})
SHARDS: RangeShards = {"a": {"train": A_SET}}
A_TAKE = Claim("a", "train", ShardSpec(100, 7, 2, 5), 6, 11, 4, (1, 2), (3,), ())
A_ROUND = RoundStep("a", 3, (5, 6), total=7)
THE_CUT = CutMark(3, 1, "s0", 2, "file:///x")
SOME_ROWS = RestoredRows(1, numbers(5, -6), np.arange(32, dtype=np.uint8).reshape(2, 16))
WAITING = RestoredKeys(1, numbers(5, -6, 7), numbers(1 << 20, 2, 3), np.empty((0, 0), np.uint8))
A_SKETCH = RestoredKeys(1, numbers(), numbers(), np.arange(60, dtype=np.uint8).reshape(5, 12))
NO_ROWS = RestoredRows(1, numbers(), np.empty((0, 16), np.uint8))
THE_STATE = RestoredState(
    7, (5, 6), (3 << 16, 4 << 16), {"a": 9},
    [{"app": "a", "decided": 9, "workers": [5], "last": [[5, 9]]}],
    [{"app": "a", "name": "train", "spec": [100, 7, 2, None], "upcoming": 5, "done": 2, "returned": [[1, 4, 9]],
      "doing": [[6, 0, 8, 0, 0]]}],
)  # fmt: skip
A_GROUP = BarrierGroup({5: 3}, 4, (5, 6), {5: 4, 2: 1}, 9, bounded=True)
OTHER_SPEC = TableSpec("b", 1, Accumulate()).to_json()
STAMPS, NOTES = np.array([7, 3], np.uint16), np.array([[5, 4], [6, 5]], np.int64)
ONE = numbers(1)
ROWS = RefusedRows({1: np.arange(90), (1 << 32) - 1: np.arange(-50, 0)}, P).part(ONE)
WHY = why({"code": "memory", "message": "no room", "server": "s\N{SNOWMAN}", "bytes": 5})
A_REFUSED_PUSH = Operation(
    OperationKind.PUSH, 5, 7 << 16, RowBlocks([], ONE, positions_of(ONE, P)), 10, Refusal(WHY, 3, ROWS)
)  # fmt: skip
A_REFUSED_SHARE = Operation(
    OperationKind.PUSH, 5, 7 << 16, Contribution("ads", 7, [], ONE, positions_of(ONE, P)), 10, Refusal(WHY)
)  # fmt: skip
A_BLOCK = Block(1, numbers(4, 9), np.ones((2, 3), np.float32), np.empty(0, np.float32))


@pytest.mark.parametrize(
    "message",
    [
        Ack(4, numbers(1, 2, 15), numbers(10, 20, 1 << 40)),
        Resync(4, numbers(1, 2), numbers(-1, 20), numbers(0, 19)),
        ChunkAck(4, 3, 2, 7, True, 55),
        Forward(
            4, numbers(1), numbers(9),
            Operation(
                OperationKind.CREATE, -1, 0, CreatedTables((CreatedTable(3, SPEC), CreatedTable(4, SPEC, "ads"))), 10
            ),
        ),
        Forward(
            4, numbers(1), numbers(9),
            Operation(OperationKind.CREATE, -1, 0, CreatedTables((CreatedTable(3, SPEC),)), 10),
        ),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.AUDIT, -1, 0, AuditMark(1 << 61), 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.CUT, -1, 0, THE_CUT, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.RESTORE, -1, 0, SOME_ROWS, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.RESTORE, -1, 0, NO_ROWS, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.RESTORE, -1, 0, WAITING, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.RESTORE, -1, 0, A_SKETCH, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.RESTORED, -1, 0, THE_STATE, 10)),
        Forward(
            4, numbers(1), numbers(9), Operation(OperationKind.RESTORED, -1, 0, THE_STATE._replace(time=1 << 31), 10)
        ),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.BARRIER_CLOSE, -1, 0, A_ROUND, 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.BARRIER_LEAVE, -1, 0, RoundStep("a", 0, (5,)), 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.CLAIM_SHARDS, -1, 0, A_TAKE, 10)),
        Forward(4, numbers(1), numbers(9), A_REFUSED_PUSH),
        Forward(4, numbers(1), numbers(9), A_REFUSED_SHARE),
        SnapshotChunk(
            4, 3, 2, 0, 1 << 61, False, 44, numbers(5), numbers(1 << 16),
            ChunkContent([], RangeRounds({}, {}, []), {}),
            [RefusedStep(5, 1, WHY), RefusedStep(5, 2, WHY, ROWS), RefusedStep(6, 2, WHY, ROWS)],
        ),
        SnapshotChunk(
            4, 3, 2, 1, 1 << 61, False, 44, numbers(5, 6), numbers(1 << 16, 1 << 17),
            ChunkContent(
                [
                    TableRows(1, SPEC, numbers(1, 2), np.arange(32, dtype=np.uint8).reshape(2, 16), STAMPS, NOTES, 3),
                    TableRows(2, OTHER_SPEC, numbers(), np.empty((0, 8), np.uint8), STAMPS[:0]),
                ],
                RangeRounds({"a": 4}, {"a": A_GROUP}, [("a", 5, 6, [A_BLOCK])]),
                SHARDS, 7, 2,
            ),
        ),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_messages_survive_the_wire(message: Message) -> None:
    assert same(through_the_wire(message, a_store()), message)


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_any_part_of_a_push_arrives_with_the_keys_of_its_ranges(data: st.DataObject) -> None:
    store = a_store()
    ranges = numbers(*data.draw(st.permutations(range(P)).map(lambda p: p[:6])))
    operation = a_push(store, ranges)
    chosen = [r for r in ranges.tolist() if data.draw(st.booleans())] or [int(ranges[0])]
    part = numbers(*chosen)
    sent = Forward(4, part, np.arange(len(part), dtype=np.int64), operation)
    heard = through_the_wire(sent, store)
    assert isinstance(heard, Forward)
    content = heard.operation.payload
    assert isinstance(content, RowBlocks)
    contribution = Contribution("ads", 7, content.blocks, part, positions_of(part, P), ShardMark(1 << 16 | 2, 0))
    again = through_the_wire(
        Forward(4, part, sent.seqs, Operation(OperationKind.PUSH, 5, 7 << 16, contribution, 10)), store
    )
    assert isinstance(again, Forward)
    assert isinstance(again.operation.payload, Contribution)
    assert (again.operation.payload.app, again.operation.payload.clock) == ("ads", 7)
    assert again.operation.payload.mark == contribution.mark
    assert same(again.operation.payload.blocks, content.blocks)
    expected = a_push(store, part).payload
    assert isinstance(expected, RowBlocks)
    assert same([b for b in content.blocks if len(b.keys)], [b for b in expected.blocks if len(b.keys)])


def test_a_restored_range_names_all_workers_that_there_have_been() -> None:
    many = tuple(range(100_000, 100_000 + MAX_REMEMBERED))
    group = {"app": "a", "decided": 123_456, "workers": [5], "last": [[worker, 123_456] for worker in many]}
    state = THE_STATE._replace(workers=many, progress=(9 << 16,) * len(many), groups=[group])
    sent = Forward(4, ONE, numbers(9), Operation(OperationKind.RESTORED, -1, 0, state, 10))
    heard = through_the_wire(sent, Store(P))
    assert isinstance(heard, Forward)
    assert heard.operation.payload == state


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_damaged_messages_raise_frame_errors_only(data: st.DataObject) -> None:
    store = a_store()
    tables = [TableRows(1, SPEC, numbers(1), np.zeros((1, 8), np.uint8), STAMPS[:1])]
    rows = ChunkContent(
        tables, RangeRounds({"a": 4}, {"a": BarrierGroup({5: 3}, 4, (5,))}, [("a", 5, 6, [A_BLOCK])]), SHARDS
    )
    messages: list[Message] = [
        Ack(4, numbers(1, 2), numbers(10, 20)),
        Resync(4, numbers(1, 2), numbers(-1, 20), numbers(0, 19)),
        Forward(4, SOME, np.arange(4, dtype=np.int64), a_push(store, SOME, 20)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.AUDIT, -1, 0, AuditMark(3), 10)),
        Forward(4, numbers(1), numbers(9), Operation(OperationKind.CLAIM_SHARDS, -1, 0, A_TAKE, 10)),
        SnapshotChunk(4, 3, 2, 1, 9, False, 4, numbers(5), numbers(1), rows),
        SnapshotChunk(4, 3, 2, 0, 9, False, 4, numbers(5), numbers(1), rows, [RefusedStep(5, 1, WHY, ROWS)]),
        Forward(4, numbers(1), numbers(9), A_REFUSED_PUSH),
        Forward(4, numbers(1), numbers(9), A_REFUSED_SHARE),
    ]
    codec = ReplicaCodec(store.tables, P)
    frame = bytearray(b"".join(bytes(p) for p in codec.encode(data.draw(st.sampled_from(messages)))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        header = unpack_header(bytes(frame))
        if 16 <= header.kind <= 20:
            codec.decode(header, np.frombuffer(bytes(frame[HEADER_BYTES:]), np.uint8))
    except FrameError:
        pass


@pytest.mark.parametrize("field", ["clock", "epoch"])
def test_impossible_log_positions_are_refused(field: str) -> None:
    codec = ReplicaCodec({}, P)
    for message in (ChunkAck(4, 3, 2, 7, True, 55), Ack(4, numbers(1), numbers(10))):
        frame = b"".join(bytes(part) for part in codec.encode(message))
        header = unpack_header(frame)._replace(**{field: (1 << 63) + 1})
        with pytest.raises(FrameError):
            codec.decode(header, np.frombuffer(frame[HEADER_BYTES:], np.uint8))


@pytest.mark.parametrize(
    "spec", [(0, 7, 2, 5), (100, 0, 2, 5), (100, 7.5, 2, None), ("x", 7, 2, 5), (100, 7, 2, "s"), (1,)]
)
def test_an_impossible_take_of_shards_is_refused(spec: tuple[object, ...]) -> None:
    take = A_TAKE._replace(spec=spec)  # type: ignore[arg-type]
    with pytest.raises(FrameError, match="CLAIM_SHARDS cannot be read"):
        through_the_wire(
            Forward(4, numbers(1), numbers(9), Operation(OperationKind.CLAIM_SHARDS, -1, 0, take, 10)), a_store()
        )


@pytest.mark.parametrize(
    "operation",
    [
        Operation(OperationKind.AUDIT, -1, 0, AuditMark(1), 10, Refusal(WHY)),
        Operation(OperationKind.PUSH, 5, 7 << 16, RowBlocks([], ONE, positions_of(ONE, P)), 10, Refusal("no JSON")),
        Operation(OperationKind.PUSH, 5, 7 << 16, RowBlocks([], ONE, positions_of(ONE, P)), 10, Refusal('{"code": 5}')),
        Operation(OperationKind.PUSH, 5, 7 << 16, RowBlocks([], ONE, positions_of(ONE, P)), 10, Refusal(WHY, -1)),
        Operation(OperationKind.PUSH, 5, 7 << 16, RowBlocks([], ONE, positions_of(ONE, P)), 10, Refusal(WHY, 1 << 70)),
    ],
)
def test_impossible_refusals_are_rejected(operation: Operation) -> None:
    with pytest.raises(FrameError):
        through_the_wire(Forward(4, ONE, numbers(9), operation), a_store())


def test_reasons_for_refusals_are_short_enough_to_be_replicated() -> None:
    written = why({"code": "memory", "message": '"' * 2000, "table": "\x00" * 2000})
    assert len(written) <= MAX_WHY
    assert error_of(written)["code"] == "memory"


@given(st.text(st.characters(exclude_categories=()), max_size=5000))
@example("t\ud800")
def test_refusals_with_arbitrary_text_can_be_encoded(words: str) -> None:
    """Half a surrogate pair in a table's name ended the servers that it was pushed to: telling is a part of what must
    not fail."""
    document = {"code": "not-finite", "message": f"table {words!r}", "table": words}
    found = error_of(why(document))
    assert found["code"] == "not-finite"
    assert found == document or len(words) > 300


def test_the_longest_spec_fits_between_replicas() -> None:
    """Each of its letters takes two there at most."""
    least = len(TableSpec("a", 1, Custom("n")).to_json())
    spec = TableSpec("a", 1, Custom("n" + '"' * ((MAX_JSON - least) // 2)))
    assert MAX_JSON - 1 <= len(spec.to_json()) <= MAX_JSON
    message = Forward(
        4,
        ONE,
        numbers(9),
        Operation(OperationKind.CREATE, -1, 0, CreatedTables((CreatedTable(3, spec.to_json()),)), 10),
    )
    assert same(through_the_wire(message, a_store()), message)


ROUND = {"id": 1, "app": "a", "workers": [1]}
AUDIT = {"id": 1, "part": 0, "parts": 1}
STATE = {"cut": 3, "workers": [1], "progress": [5], "closed": {}, "groups": [], "shards": []}
A_SHARD = {"app": "a", "name": "n", "spec": [8, 1, 1, None], "upcoming": 1, "done": 0, "returned": [], "doing": []}
A_CUT = {"number": 3, "since": 1, "writer": "s0", "incarnation": 2, "url": "file:///x"}


@pytest.mark.parametrize(
    ("kind", "document"),
    [
        (OperationKind.BARRIER_CLOSE, ROUND | {"id": 1 << 70, "total": 1}),
        (OperationKind.BARRIER_CLOSE, ROUND | {"workers": [1 << 70], "total": 1}),
        (OperationKind.BARRIER_CLOSE, ROUND),
        (OperationKind.BARRIER_CLOSE, ROUND | {"workers": [1, 2], "total": 1}),
        (OperationKind.BARRIER_CLOSE, ROUND | {"total": (1 << 16) + 1}),
        (OperationKind.BARRIER_DECISION, ROUND | {"id": -1}),
        (OperationKind.BARRIER_JOIN, ROUND | {"workers": [True]}),
        (OperationKind.BARRIER_JOIN, ROUND | {"app": "\ud800"}),
        (OperationKind.BARRIER_LEAVE, ROUND | {"workers": []}),
        (OperationKind.AUDIT, AUDIT | {"id": 1 << 70}),
        (OperationKind.AUDIT, AUDIT | {"parts": 0}),
        (OperationKind.CUT, A_CUT | {"number": 0}),
        (OperationKind.CUT, A_CUT | {"number": 1 << 32}),
        (OperationKind.CUT, A_CUT | {"since": 3}),
        (OperationKind.CUT, A_CUT | {"writer": 7}),
        (OperationKind.CUT, A_CUT | {"url": "x" * 5000}),
        (OperationKind.RESTORED, STATE | {"progress": []}),
        (OperationKind.RESTORED, STATE | {"workers": [2, 1], "progress": [1, 1]}),
        (OperationKind.RESTORED, STATE | {"workers": [1 << 70]}),
        (OperationKind.RESTORED, STATE | {"closed": {"a": 1 << 70}}),
        (OperationKind.RESTORED, STATE | {"groups": [{"app": "a"}]}),
        (OperationKind.RESTORED, STATE | {"shards": [A_SHARD | {"doing": [[1, 1, 1 << 70, 0, 0]]}]}),
        (OperationKind.RESTORED, STATE | {"shards": [A_SHARD | {"spec": [0, 0, 0, None]}]}),
        (OperationKind.CREATE, {"id": 1 << 32, "spec": SPEC}),
        (OperationKind.CREATE, {"id": 1, "spec": "{}"}),
        (OperationKind.CREATE, {"id": 1, "spec": "[" * 20_000}),
        (OperationKind.CLAIM_SHARDS, {"id": 1, "take": ["a", "n", [8, 1, 1, None], 5, 1 << 70, 1, [], [], []]}),
        (OperationKind.CLAIM_SHARDS, {"id": 1, "take": ["a", "n", [8, 1, 1, None], 5, 0, 1, [], [1 << 70], []]}),
    ],
)
def test_numbers_and_texts_that_nothing_here_could_hold_are_refused(kind: int, document: dict[str, object]) -> None:
    ranges = numbers(0).astype("<i4").tobytes() + bytes(4) + numbers(1).tobytes()
    body = ranges + json_frame(Kind.FORWARD, document)[HEADER_BYTES:]
    header = Header(Kind.FORWARD, 0, len(body), part=kind, table=1)
    with pytest.raises(FrameError):
        ReplicaCodec(a_store().tables, P).decode(header, np.frombuffer(body, np.uint8))


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    ranges = numbers(0).astype("<i4").tobytes() + bytes(4) + numbers(1).tobytes()
    body = ranges + b"[" * 100_000
    header = Header(Kind.FORWARD, 0, len(body), part=OperationKind.AUDIT, table=1)
    with pytest.raises(FrameError):
        ReplicaCodec(a_store().tables, P).decode(header, np.frombuffer(body, np.uint8))
