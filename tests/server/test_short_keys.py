"""Frames whose keys a worker has made shorter: a server writes out what the worker had, or ends the connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.client.short_keys import LEAST_KEYS, MOST_KEYS, KeyLists, Short, ShortKeys, differences
from elasticps.server.fast import layout as at
from elasticps.server.fast import short_keys
from elasticps.wire.clocks import encode_record
from elasticps.wire.frames import (
    ALL_RANGES,
    HEADER_BYTES,
    MAX_BODY_BYTES,
    PACKED,
    RECORD,
    SHORT,
    TABLES,
    FrameError,
    Header,
    Kind,
    block_head,
    table_block,
    unpack_header,
)
from elasticps.wire.packing import DELTA, KEEP, KNOWN, LIST_KEYS, pack, says, unpack
from replication.step_records import record_of
from tests.server.conftest import RANGES

Keys = NDArray[np.int64]
write_out: Any = short_keys.write_out
FRONT = 192  # bytes in front of the frame
NEXT_FRAME = b"bytes of the next frame." * 4
NO_VALUES = np.empty(0, np.float32)
RECORD_BYTES = encode_record(record_of(7, 5, np.arange(RANGES) % 3 == 0))


class Receiver:
    """A connection's memory at a server."""

    def __init__(self, size: int = 1 << 16) -> None:
        self.blocks = np.zeros((2 * at.BLOCKS, at.BLOCK), np.int64)
        self.lists = np.zeros(LIST_KEYS, np.int64)
        self.chunk = np.zeros(size, np.uint8)
        self.h, self.conn = np.zeros(at.H_FIELDS, np.int64), np.zeros(at.CONNECTION, np.int64)
        self.h[at.H_BLOCKS], self.h[at.H_RANGES] = self.blocks.ctypes.data, RANGES
        self.conn[at.C_ADDRESS], self.conn[at.C_BYTES] = self.chunk.ctypes.data, size
        self.conn[at.C_LIMIT], self.conn[at.C_LISTS] = MAX_BODY_BYTES, self.lists.ctypes.data

    def write_out(self, frame: bytes) -> int:
        """Expands a frame and the bytes after it; the reason why it stopped."""
        self.conn[at.C_START], self.conn[at.C_END] = FRONT, FRONT + len(frame) + len(NEXT_FRAME)
        self.chunk[FRONT : self.conn[at.C_END]] = np.frombuffer(frame + NEXT_FRAME, np.uint8)
        self.chunk[:FRONT] = 7
        return int(write_out(self.h, self.conn, self.chunk.ctypes.data + FRONT))

    @property
    def content(self) -> bytes:
        assert (self.chunk[:FRONT] == 7).all()
        return self.chunk[FRONT : self.conn[at.C_END]].tobytes()


def pull_of(keys: Keys) -> bytes:
    return Header(Kind.PULL, 0, 8 * len(keys), 5, 6, 7, 8, table=9, items=len(keys)).pack() + keys.tobytes()


def pull_tables_of(blocks: Sequence[tuple[int, Keys]]) -> bytes:
    body = b"".join(table_block(table, len(keys)) + keys.tobytes() for table, keys in blocks)
    return Header(Kind.PULL, TABLES, len(body), 5, 6, 7, 8, items=len(blocks)).pack() + body


def push_of(blocks: Sequence[tuple[int, Keys, int, int]], ranges: int, record: bytes = b"") -> bytes:
    """Blocks of (table, keys, dim, step values), and the record of their step."""
    body = (
        b"" if ranges < 0 else ranges.to_bytes(8, "little") + np.arange(ranges + ranges % 2, dtype=np.int32).tobytes()
    )
    for table, keys, dim, values in blocks:
        grads = np.arange(len(keys) * dim + len(keys) * dim % 2, dtype=np.float32)
        body += (
            block_head(table, len(keys), dim, np.arange(values, dtype=np.float32)) + keys.tobytes() + grads.tobytes()
        )
    body, flags = body + record, ALL_RANGES * (ranges < 0) | RECORD * bool(record)
    header = Header(Kind.PUSH, flags, len(body), 5, 6, 7, 8, 1, 2, 3, len(blocks))
    return header.pack() + body


def sent(buffers: Sequence[object]) -> bytes:
    return b"".join(bytes(buffer) for buffer in buffers)  # type: ignore[call-overload]


lists = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5000), max_size=60).map(
    lambda found: np.array(sorted(found), np.int64)
)
shorts = st.builds(Short, st.booleans(), st.booleans())


@settings(max_examples=60)
@given(st.lists(lists, min_size=1, max_size=4), shorts, st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_shortened_pulls_are_expanded_to_the_originals(known: list[Keys], short: Short, numbers: list[int]) -> None:
    worker, server = ShortKeys(), Receiver()
    for number in numbers:
        frame = pull_of(known[number % len(known)])
        shorter = sent(worker.pull(memoryview(frame), short))
        assert len(shorter) <= len(frame) + 8
        if unpack_header(shorter).flags & SHORT:
            assert server.write_out(shorter) == at.DONE
            assert server.content == frame + NEXT_FRAME
        else:
            assert shorter == frame


blocks = st.lists(st.tuples(st.integers(1, 3), lists, st.integers(0, 5), st.integers(0, 3)), max_size=5)


@settings(max_examples=60)
@given(
    st.lists(blocks, min_size=1, max_size=4), shorts, st.lists(st.integers(0, 3), max_size=8), st.integers(-1, 3),
    st.sampled_from([b"", RECORD_BYTES]),
)  # fmt: skip
@example([[(1, np.arange(9), 1, 0), (1, np.arange(9), 2, 0), (2, np.arange(20), 1, 1)]], Short(True, True), [0, 0], 1,
         RECORD_BYTES)  # fmt: skip
def test_shortened_pushes_are_expanded_to_the_originals(
    known: list[list[tuple[int, Keys, int, int]]], short: Short, numbers: list[int], ranges: int, record: bytes
) -> None:
    """Tables 1 and 2 ask for it, table 3 does not."""
    worker, server = ShortKeys(), Receiver()
    for number in numbers:
        frame = push_of(known[number % len(known)], ranges, record)
        without = memoryview(frame)[: len(frame) - len(record)]
        shorter = sent(worker.push(without, {1: short, 2: short}, [record] if record else []))
        assert len(shorter) <= len(frame)
        if unpack_header(shorter).flags & SHORT:
            assert server.write_out(shorter) == at.DONE
            assert server.content == frame + NEXT_FRAME
        else:
            assert shorter == frame


@settings(max_examples=60)
@given(st.lists(blocks, min_size=1, max_size=4), shorts, st.lists(st.integers(0, 3), max_size=8))
def test_shortened_pulls_of_several_tables_are_expanded_to_the_originals(
    known: list[list[tuple[int, Keys, int, int]]], short: Short, numbers: list[int]
) -> None:
    """Tables 1 and 2 ask for it, table 3 does not."""
    worker, server = ShortKeys(), Receiver()
    for number in numbers:
        frame = pull_tables_of([(table, keys) for table, keys, _, _ in known[number % len(known)]])
        shorter = sent(worker.pull_tables(memoryview(frame), {1: short, 2: short}))
        assert len(shorter) <= len(frame)
        if unpack_header(shorter).flags & SHORT:
            assert server.write_out(shorter) == at.DONE
            assert server.content == frame + NEXT_FRAME
        else:
            assert shorter == frame


def test_a_push_leaves_out_the_keys_of_the_pull_before_it() -> None:
    worker, server, short = ShortKeys(), Receiver(), Short(once=True, deltas=False)
    keys = np.arange(100, 1000, 3)
    assert server.write_out(sent(worker.pull(memoryview(pull_of(keys)), short))) == at.DONE
    frame = push_of([(1, keys, 4, 1)], -1)
    shorter = sent(worker.push(memoryview(frame), {1: short}))
    assert len(shorter) == len(frame) - 8 * len(keys)
    assert short.keys == (16 * len(keys), 8 * len(keys))
    assert server.write_out(shorter) == at.DONE
    assert server.content == frame + NEXT_FRAME
    worker.connected()
    assert len(sent(worker.push(memoryview(frame), {1: short}))) == len(frame)


def packed_push(dim: int, rows: NDArray[np.float32]) -> bytes:
    body = block_head(1, len(rows), dim, NO_VALUES) + np.arange(len(rows)).tobytes() + rows.tobytes()
    header = Header(Kind.PUSH, ALL_RANGES, len(body), items=1)
    return header.pack() + body


def test_bodies_are_compressed_if_that_pays_and_expanded_again() -> None:
    worker, short = ShortKeys(), Short(once=True, zstd=True)
    zeros = np.zeros((50, 4), np.float32)
    noise = np.frombuffer(np.random.default_rng(1).bytes(50 * 160), np.float32).reshape(50, 40)
    frame = packed_push(4, zeros)
    for _ in range(2):
        shorter = sent(worker.push(memoryview(frame), {1: short}))
        assert len(shorter) < 0.4 * len(frame)
        outer = unpack_header(shorter)
        assert outer.flags & PACKED
        whole, _ = unpack(outer, shorter[HEADER_BYTES:], MAX_BODY_BYTES)
        assert unpack_header(whole).flags & SHORT  # the keys, before that
    server = Receiver()
    assert short.bodies.sent < 0.4 * short.bodies.whole
    frame = packed_push(40, noise)
    short = Short(zstd=True)
    tried = []
    for _ in range(20):
        before = short.bodies.whole
        assert sent(worker.push(memoryview(frame), {1: short})) == frame
        tried.append(short.bodies.whole > before)
    assert np.flatnonzero(tried).tolist() == [0, 3, 8, 17]  # 2, 4, 8 pushes between
    assert short.bodies.sent == short.bodies.whole
    frame = packed_push(4, zeros)
    short.skip = 0
    assert unpack_header(sent(worker.push(memoryview(frame), {1: short}))).flags & PACKED
    assert server.write_out(frame) == at.DONE


@pytest.mark.parametrize(
    "body",
    [
        b"",
        bytes(8),
        bytes(16),
        pack([bytes(64)])[:-8],
        (72).to_bytes(8, "little") + pack([bytes(64)])[8:],
        (1 << 40).to_bytes(8, "little") + pack([bytes(64)])[8:],
        pack([bytes(60)]),
        pack([bytes(1 << 12)]),
        (64).to_bytes(8, "little") + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)),
        pack([np.random.default_rng(1).bytes(64)])[:40] + b"\xff" * 32,
        (64).to_bytes(8, "little") + b"\x28\xb5\x2f\xfd\xc0\x88" + (64).to_bytes(8, "little") + bytes(32),  # 128 MiB
    ],
)
def test_a_damaged_compressed_body_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="packed body"):
        unpack(Header(Kind.PUSH, PACKED, len(body)), body, 1 << 11)


def test_keys_are_sent_as_differences_if_that_is_shorter() -> None:
    found = differences(np.arange(10_000, 20_000, 100))
    assert found is not None
    assert found.coded == 3 + 2 * 99
    assert differences(np.array([0, 2**62, -(2**62), 5, 6])) is None
    assert differences(np.random.default_rng(1).integers(-(2**62), 2**62, 100)) is None


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, MOST_KEYS)), max_size=60))
def test_a_remembered_key_list_has_not_been_overwritten(steps: list[tuple[int, int]]) -> None:
    """A twin that remembers who wrote each key last."""
    lists, memory = KeyLists(), np.full(LIST_KEYS, -1)
    sizes: dict[int, int] = {}
    for name, n in steps:
        digest = bytes([name])
        place = lists.find(digest)
        if place is None:
            place, sizes[name] = lists.keep(digest, n), n
            assert place + n <= LIST_KEYS
            memory[place : place + n] = name
        assert (memory[place : place + sizes[name]] == name).all()


def test_a_frame_without_room_requests_memory_and_stays_unchanged() -> None:
    worker, short, keys = ShortKeys(), Short(once=False, deltas=True), np.arange(1000)
    frame = push_of([(1, keys, 1, 0)], -1)
    shorter = sent(worker.push(memoryview(frame), {1: short}))
    server = Receiver(FRONT + len(frame) + len(NEXT_FRAME) - 8)
    assert server.write_out(shorter) == at.WIDER
    assert server.h[at.H_INFO] == len(frame) + len(NEXT_FRAME)
    assert server.content == shorter + NEXT_FRAME
    server.conn[at.C_LISTS] = 0
    assert server.write_out(shorter) == at.LISTS
    assert server.content == shorter + NEXT_FRAME


def wrong_pull(declared: int, n: int, body: bytes) -> bytes:
    return Header(Kind.PULL, SHORT, 8 + len(body), items=n).pack() + declared.to_bytes(8, "little") + body


@pytest.mark.parametrize(
    "frame",
    [
        Header(Kind.PULL, SHORT, 0, items=3).pack(),
        wrong_pull(says(KNOWN, LIST_KEYS - 2), 3, b""),
        wrong_pull(says(KEEP, LIST_KEYS - 2), 3, bytes(24)),
        wrong_pull(says(KEEP | KNOWN), 3, bytes(24)),
        wrong_pull(says(KNOWN), 3, bytes(8)),
        wrong_pull(0, 3, bytes(24)),
        wrong_pull(says(8), 3, bytes(24)),
        wrong_pull(says(DELTA, 0, 24), 2, bytes(24)),  # more than 8 bytes a key
        wrong_pull(says(DELTA, 0, 8), 9, b"\1" * 8),  # too few
        wrong_pull(says(DELTA, 0, 8), 4, b"\1" * 8),  # too many
        wrong_pull(says(DELTA, 0, 8), 1, b"\x81" * 8),  # without an end
        wrong_pull(says(DELTA, 0, 16), 2, b"\x81" * 8 + b"\1" * 8),  # 9 bytes
        wrong_pull(says(KNOWN), MAX_BODY_BYTES // 8 + 1, b""),
        Header(Kind.PULL, SHORT | TABLES, 16, items=1).pack() + bytes(16),
        Header(Kind.PULL, SHORT | TABLES, 24, items=0).pack() + bytes(24),
        Header(Kind.PULL, SHORT | TABLES, 24, items=at.BLOCKS + 1).pack() + bytes(24),
        Header(Kind.PUSH, SHORT | ALL_RANGES, 16, items=1).pack() + bytes(16),
        Header(Kind.PUSH, SHORT | ALL_RANGES, 24, items=0).pack() + bytes(24),
        Header(Kind.PUSH, SHORT | ALL_RANGES, 24, items=at.BLOCKS + 1).pack() + bytes(24),
        Header(Kind.PUSH, SHORT, 8, items=0).pack() + (1 << 62).to_bytes(8, "little"),
        Header(Kind.PUSH, SHORT, 8, items=0).pack() + b"\xff" * 8,
        Header(Kind.PUSH, SHORT | ALL_RANGES, 24, items=1).pack() + block_head(1, 2**32 - 1, 2**32 - 1, NO_VALUES),
    ],
)
def test_unreadable_short_frames_are_refused(frame: bytes) -> None:
    assert Receiver().write_out(frame) == at.UNREADABLE


@settings(max_examples=300)
@given(st.data())
def test_damaged_short_frames_are_never_written_out_of_bounds(data: st.DataObject) -> None:
    worker, server = ShortKeys(), Receiver(1 << 13)
    short = Short(once=True, deltas=True)
    frame = push_of([(1, np.arange(3 * LEAST_KEYS), 2, 1), (2, np.arange(7, 900, 30), 1, 0)], 3)
    whole = bytearray(sent(worker.push(memoryview(frame), {1: short, 2: short})))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(48, len(whole) - 1))
        whole[place] = data.draw(st.integers(0, 255))
    server.write_out(bytes(whole))
    assert FRONT <= server.conn[at.C_END] <= len(server.chunk)
    assert (server.chunk[:FRONT] == 7).all()
