"""Pieces of a range survive encoding and splitting; damaged ones are refused."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticps.kernels.hashing import group_range
from elasticps.model.optimizers import Accumulate
from elasticps.model.sharding import ShardSpec
from elasticps.model.spec import TableSpec
from elasticps.server.core.barrier_state import BarrierGroup, RangeRounds, Rounds
from elasticps.server.core.data_shards import Claim, Doing, ShardLedger, ShardSet, Used
from elasticps.server.core.operations import ChunkContent, TableRows
from elasticps.server.core.replica_codec import ReplicaCodec
from elasticps.server.core.snapshot import decode_content, encode_content, pack, size_of
from elasticps.server.roles import snapshots
from elasticps.server.roles.snapshots import MOST_BYTES
from elasticps.store import Store
from elasticps.wire.frames import HEADER_BYTES, Block, FrameError, unpack_header
from replication.messages import SnapshotChunk
from tests.server.conftest import RANGES, Group, Run, until

P = 16
APPS = ("ads", "b", "café")
ids = st.integers(1, (1 << 32) - 1)
clocks = st.integers(0, 1 << 46)
names = st.sampled_from(["train", "täglich", "x" * 200])
groups = st.builds(
    BarrierGroup,
    st.dictionaries(ids, clocks, max_size=5),
    clocks,
    st.lists(ids, max_size=4, unique=True).map(tuple),
    st.dictionaries(ids, clocks, max_size=3),
    clocks,
)
used = st.builds(Used, ids, clocks)
specs = st.builds(ShardSpec, st.integers(1, 9999), st.just(7), st.just(2), st.none() | st.integers(0, (1 << 64) - 1))
sets = st.builds(
    ShardSet,
    st.integers(1, (1 << 32) - 1),
    specs,
    st.integers(0, 1 << 32),
    st.integers(0, 1 << 32),
    st.dictionaries(st.integers(0, 1 << 32), used, max_size=4),
    st.dictionaries(
        ids,
        st.dictionaries(st.integers(0, 1 << 32), st.builds(Doing, clocks, used), min_size=1, max_size=3),
        max_size=4,
    ),
)


def a_block(number: int, rows: int) -> Block:
    keys = np.arange(rows, dtype=np.int64) + 100 * number
    grads = np.arange(3 * rows, dtype=np.float32).reshape(rows, 3)
    return Block(number, keys, grads, np.full(number % 3, 0.5, np.float32))


shares = st.lists(
    st.tuples(
        st.sampled_from(APPS),
        clocks,
        ids,
        st.lists(st.builds(a_block, st.integers(1, 3), st.integers(1, 9)), max_size=3),
    ),
    max_size=4,
)
rounds = st.builds(
    RangeRounds, st.dictionaries(st.sampled_from(APPS), clocks), st.dictionaries(st.sampled_from(APPS), groups), shares,
    st.booleans(),
)  # fmt: skip
shards = st.dictionaries(st.sampled_from(APPS), st.dictionaries(names, sets, min_size=1, max_size=2), max_size=2)


NAMED = TableSpec("né", 2, Accumulate()).to_json()


@st.composite
def tables(draw: st.DrawFn) -> list[TableRows]:
    found = []
    for number in range(draw(st.integers(0, 3))):
        rows, stride = draw(st.integers(0, 20)), draw(st.sampled_from([8, 16, 24]))
        values = np.arange(rows * stride, dtype=np.uint8).reshape(rows, stride)
        stamps, notes = np.arange(rows, dtype=np.uint16), np.arange(2 * draw(st.integers(0, 3))).reshape(-1, 2)
        found.append(TableRows(number, NAMED, np.arange(rows, dtype=np.int64), values, stamps, notes, number))
    return found


contents = st.builds(
    ChunkContent, tables(), rounds, shards, st.integers(0, (1 << 32) - 1), st.integers(0, 9),
    st.integers(0, (1 << 32) - 1),
)  # fmt: skip


def through_the_wire(content: ChunkContent) -> ChunkContent:
    none = np.empty(0, np.int64)
    codec = ReplicaCodec({}, P)
    piece = SnapshotChunk(4, 3, 2, 1, 9, False, 4, none, none, content)
    frame = b"".join(bytes(part) for part in codec.encode(piece))
    message = codec.decode(unpack_header(frame), np.frombuffer(frame[HEADER_BYTES:], np.uint8))
    assert isinstance(message, SnapshotChunk)
    assert isinstance(message.payload, ChunkContent)
    return message.payload


def plain(content: ChunkContent) -> tuple[Any, ...]:
    """The same as values that can be compared; also the order of dicts counts, replicas go through them."""
    rows = [(t.table, t.spec, _rows(t), t.notes.tolist(), t.floor) for t in content.tables]
    shares = [(a, c, w, [_plain(b) for b in blocks]) for a, c, w, blocks in content.rounds.retained]
    of_groups = {
        app: (list(h.members.items()), h.decided, h.workers, list(h.last.items()), h.roster)
        for app, h in content.rounds.groups.items()
    }
    of_sets = {
        (app, name): (s.id, s.spec, s.upcoming, s.done, list(s.returned.items()), _doing(s))
        for app, named in content.shards.items()
        for name, s in named.items()
    }
    return rows, content.rounds.closed, of_groups, shares, content.rounds.more, of_sets, content.cut, content.base


def _plain(block: Block) -> tuple[Any, ...]:
    return block.table, block.keys.tolist(), block.grads.tolist(), block.step_values.tolist()


def _doing(one: ShardSet) -> list[tuple[int, list[tuple[int, int, Used]]]]:
    return [(w, [(s, d.clock, d.before) for s, d in mine.items()]) for w, mine in one.doing.items()]


@given(contents)
def test_a_snapshot_piece_survives_encoding_and_decoding(content: ChunkContent) -> None:
    assert plain(through_the_wire(content)) == plain(content)


@given(contents, st.integers(0, 600))
@settings(max_examples=200)
def test_a_snapshot_cut_into_several_pieces_gives_the_same_state(content: ChunkContent, most_bytes: int) -> None:
    content = content._replace(rounds=content.rounds._replace(more=False))
    parts = [through_the_wire(part) for part in pack(content, most_bytes)]
    assert all(part.rounds.more for part in parts[1:])
    largest = 600 + 80  # a table with a spec, or the longest name with an entry of each kind
    assert all(len(b"".join(map(bytes, encode_content(part)))) <= 2 * most_bytes + largest for part in parts)
    at_once, in_parts = (Rounds(P), ShardLedger(P)), (Rounds(P), ShardLedger(P))
    for (of_rounds, of_shards), pieces in ((at_once, [content]), (in_parts, parts)):
        for piece in pieces:
            piece = through_the_wire(piece)  # so that none is changed by who loads it
            of_rounds.load(5, piece.rounds)
            of_shards.load(piece.shards, piece.rounds.more)
    rows = [
        [row for part in pieces for t in part.tables if t.table == number for row in (*_rows(t), *t.notes.tolist())]
        for pieces in ([content], parts)
        for number in range(3)
    ]
    assert [sorted(map(str, of)) for of in rows[:3]] == [sorted(map(str, of)) for of in rows[3:]]
    assert {(part.cut, part.base) for part in parts} == {(content.cut, content.base)}
    empty = ChunkContent([], RangeRounds({}, {}, []), {})
    states = [
        plain(empty._replace(rounds=RangeRounds({}, r.groups, []), shards=s._sets)) for r, s in (at_once, in_parts)
    ]
    assert states[0] == states[1]
    for app in APPS:
        assert at_once[0].closed(app).tolist() == in_parts[0].closed(app).tolist()
    assert _shares(at_once[0]) == _shares(in_parts[0])


def _rows(table: TableRows) -> list[tuple[int, list[int], int]]:
    return list(zip(table.keys.tolist(), table.rows.tolist(), table.stamps.tolist(), strict=True))


def _shares(found: Rounds) -> dict[Any, list[Any]]:
    """Every row that is kept, by round, worker, table and step values, in order."""
    rows: dict[Any, list[Any]] = {}
    for key, shares in found._retained.items():
        for share in shares:
            for block in share.blocks:
                of = (*key, share.worker, block.table, *block.step_values.tolist())
                rows.setdefault(of, []).extend(zip(block.keys.tolist(), block.grads.tolist(), strict=True))
    return rows


@given(contents, st.data())
@settings(max_examples=150)
def test_damaged_snapshot_pieces_raise_frame_errors_only(content: ChunkContent, data: st.DataObject) -> None:
    body = bytearray(b"".join(map(bytes, encode_content(content))))
    body = body[: data.draw(st.integers(0, len(body)))]
    for _ in range(data.draw(st.integers(0, 3)) if body else 0):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + 8] = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x01", b"\x80", b"\xff\xff\xff\x7f"]))
    body += bytes(-len(body) % 8)
    with suppress(FrameError):
        decode_content(len(content.tables), np.frombuffer(bytes(body), np.uint8), 0)


@given(st.binary(max_size=300), st.integers(0, 3))
def test_random_bytes_are_refused_or_decoded(body: bytes, count: int) -> None:
    body += bytes(-len(body) % 8)
    try:
        found = decode_content(count, np.frombuffer(body, np.uint8), 0)
    except FrameError:
        return
    assert plain(through_the_wire(found)) == plain(found)


def test_a_home_range_full_of_state_reaches_its_joiner_while_workers_go_on(run: Run) -> None:
    """14,000 workers hold shards, 5,000 are members, and what 12 have pushed is kept."""

    async def test(group: Group) -> None:
        a, b = await group.start("a"), await group.start("b")
        group.adopt(group.make_view(lambda r: ["a"]))
        await group.connect("a")
        where = group_range("default", RANGES)
        fill_up(a.executor.rounds, a.executor.shards, a.store)
        state = RangeRounds({}, a.executor.rounds.groups, []), a.executor.shards.dump(where)
        assert size_of(ChunkContent([], *state)) > 2 * MOST_BYTES
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        worker = await group.connect("a", create=False)
        assert group.view is not None
        clock = 0
        while not b.replica.filled.all():
            clock += 1
            await asyncio.wait_for(worker.push(group.view, "a", clock, list(range(50)), 1.0), 30)
        await until(lambda: (a.replica.seq == b.replica.seq).all())
        for r in range(RANGES):
            assert a.executor.rounds.words(r) == b.executor.rounds.words(r)
            assert a.executor.shards.words(r) == b.executor.shards.words(r)
            assert retained_shares(a.executor.rounds, a.store, r) == retained_shares(b.executor.rounds, b.store, r)
        assert a.executor.rounds.groups == b.executor.rounds.groups
        assert list(a.executor.rounds.groups["default"].members) == list(b.executor.rounds.groups["default"].members)

    run(test)


def fill_up(of_rounds: Rounds, of_shards: ShardLedger, store: Store) -> None:
    spec = ShardSpec(100_000_000, 64, 1, None)
    for worker in range(1, 14_001):
        of_shards.take(Claim("default", "train", spec, 1_000_000 + worker, 0, 4, (), (), ()))
    of_rounds.enter("default", 3, range(1, 5_001))
    store.create(TableSpec("wide", 512, Accumulate()), 9)
    keys = np.arange(300, dtype=np.int64)
    everywhere = np.arange(RANGES)
    for worker in range(12):
        grads = np.full((300, 512), worker, np.float32)
        of_rounds.keep("default", 7, worker, everywhere, [Block(9, keys, grads, np.empty(0, np.float32))])


def retained_shares(of_rounds: Rounds, store: Store, r: int) -> set[tuple[int, int, float]]:
    width = (1 << 62) // RANGES
    shares = of_rounds.dump(r, r * width, (r + 1) * width, store.tables).retained
    return {
        (worker, key, float(row[0]))
        for _, _, worker, blocks in shares
        for block in blocks
        for key, row in zip(block.keys.tolist(), block.grads, strict=True)
    }


def test_no_chunk_is_much_larger_than_the_limit(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(group: Group) -> None:
        a, b = await group.start("a"), await group.start("b")
        group.adopt(group.make_view(lambda r: ["a"]))
        await group.connect("a")
        fill_up(a.executor.rounds, a.executor.shards, a.store)
        sizes: list[int] = []
        cut = a.replica.piece

        def piece(r: int, serial: int, upto: int, last: bool, content: Any) -> Any:
            sizes.append(sum(map(len, encode_content(content))))
            return cut(r, serial, upto, last, content)

        monkeypatch.setattr(a.replica, "piece", piece)
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        await until(lambda: b.replica.filled.all(), 60)
        assert max(sizes) <= MOST_BYTES + (64 << 10)
        assert len(sizes) > RANGES

    run(test)


def test_names_of_many_tables_do_not_make_pieces_small(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose rows were deleted is in each piece: that alone is over the limit, and shorter intervals have no less."""
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 1 << 10)
    monkeypatch.setattr(snapshots, "MOST_BYTES", 1 << 10)

    async def test(group: Group) -> None:
        a, b = await group.start("a"), await group.start("b")
        group.adopt(group.make_view(lambda r: ["a"]))
        await group.connect("a")
        for number in range(10, 30):
            a.store.create(TableSpec(f"t{number}", 4, Accumulate()), number)
            for r in range(a.store.ranges):
                a.store.tables[number].deletions.forget(r, 1)
        a.store.tables[10].put(np.arange(500), np.ones((500, 4), np.float32))
        pieces: list[int] = []
        cut = a.replica.piece

        def piece(r: int, serial: int, upto: int, last: bool, content: Any) -> Any:
            pieces.append(r)
            return cut(r, serial, upto, last, content)

        monkeypatch.setattr(a.replica, "piece", piece)
        group.adopt(group.make_view(lambda r: ["a"], lambda r: "b"))
        await until(lambda: b.replica.filled.all(), 60)
        assert len(pieces) < 100 * RANGES
        assert b.store.tables[10].rows == 500

    run(test)
