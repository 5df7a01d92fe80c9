"""Golden vectors: bytes that any other implementation of docs/internals/protocol.md must produce and accept."""

from __future__ import annotations

import contextlib
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.wire.frames import (
    ALL_RANGES,
    LAST,
    FrameError,
    Header,
    Kind,
    VersionError,
    block_head,
    bytes_frame,
    json_body,
    json_frame,
    read_push,
    read_tables,
    table_block,
    unpack_header,
)

GOLDEN_HEADER = bytes.fromhex(
    "45505331" "04" "04" "0300"  # magic "EPS1", version 4, PUSH, flags LAST | ALL_RANGES
    "3800000000000000" "0700000000000000" "0500000000000000" "0900000000000000"  # body, request, epoch, clock
    "03000000" "0100" "0200" "00000000" "01000000" "00000000" "00000000"  # prev: step 6 and a part; … wait
)  # fmt: skip
GOLDEN_BLOCK = bytes.fromhex(
    "03000000" "01000000" "02000000" "0100" "0000" "0000000000000000"  # table 3, 1 row, dim 2, 1 step value
    "0000003f00000000"  # 0.5, padding
    "ffffffffffffffff"  # key -1
    "0000803f00000040"  # 1.0, 2.0
)  # fmt: skip


def test_a_push_frame_has_the_golden_bytes() -> None:
    header = Header(Kind.PUSH, LAST | ALL_RANGES, 56, 7, 5, 9, 3, 1, 2, 0, 1)
    assert header.pack() == GOLDEN_HEADER
    assert unpack_header(GOLDEN_HEADER) == header
    head = block_head(3, 1, 2, np.array([0.5], np.float32))
    assert head + np.array([-1], "<i8").tobytes() + np.array([1, 2], "<f4").tobytes() == GOLDEN_BLOCK
    body = GOLDEN_BLOCK + b"\0" * (56 - len(GOLDEN_BLOCK))
    ranges, blocks = read_push(bool(header.flags & ALL_RANGES), header.items, np.frombuffer(GOLDEN_BLOCK, np.uint8))
    assert ranges is None
    assert len(body) == 56
    (block,) = blocks
    assert (block.table, block.keys.tolist(), block.grads.tolist(), block.step_values.tolist()) == (
        3,
        [-1],
        [[1, 2]],
        [0.5],
    )


def test_named_ranges_stand_before_the_blocks() -> None:
    body = (3).to_bytes(8, "little") + np.array([4, 5, 250], "<i4").tobytes() + b"\0" * 4 + GOLDEN_BLOCK
    ranges, blocks = read_push(False, 1, np.frombuffer(body, np.uint8))
    assert ranges is not None
    assert ranges.tolist() == [4, 5, 250]
    assert len(blocks) == 1


def test_control_frames_are_padded_json() -> None:
    frame = json_frame(Kind.HELLO, {"worker": 1}, request=3)
    header = unpack_header(frame)
    assert (header.kind, header.request, header.body % 8, len(frame)) == (Kind.HELLO, 3, 0, 64 + header.body)
    assert json_body(frame[64:]) == {"worker": 1}


def test_opaque_frames_carry_the_length_of_their_content() -> None:
    frame = bytes_frame(Kind.VIEW, b"12345", epoch=4)
    header = unpack_header(frame)
    assert frame[64 : 64 + header.items] == b"12345"
    assert header.body == 8
    assert header.epoch == 4


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({0: b"HTTP"}, FrameError, "not an elasticps frame"),
        ({4: b"\x09"}, VersionError, "version 9"),
        ({5: b"\x3f"}, FrameError, "unknown frame kind 63"),
        ({8: struct.pack("<Q", 1 << 40)}, FrameError, "over the limit"),
        ({8: struct.pack("<Q", 12)}, FrameError, "multiple of 8"),
    ],
)
def test_a_header_that_cannot_be_accepted_is_refused_with_the_reason(
    change: dict[int, bytes], error: type[Exception], text: str
) -> None:
    data = bytearray(GOLDEN_HEADER)
    for at, value in change.items():
        data[at : at + len(value)] = value
    with pytest.raises(error, match=text):
        unpack_header(data)


@pytest.mark.parametrize("cut", range(0, len(GOLDEN_BLOCK), 8))
def test_a_push_cut_short_is_refused(cut: int) -> None:
    with pytest.raises(FrameError):
        read_push(True, 1, np.frombuffer(GOLDEN_BLOCK[:cut], np.uint8))


def test_left_over_bytes_are_refused() -> None:
    with pytest.raises(FrameError, match="left over"):
        read_push(True, 1, np.frombuffer(GOLDEN_BLOCK + b"\0" * 8, np.uint8))


@given(st.binary(max_size=400), st.integers(0, 5), st.integers(0, 3))
def test_any_body_is_decoded_or_refused(body: bytes, count: int, flags: int) -> None:
    body = body[: len(body) & ~7]
    try:
        _, blocks = read_push(bool(flags & ALL_RANGES), count, np.frombuffer(body, np.uint8))
    except FrameError:
        return
    assert len(blocks) == count


@given(st.binary(max_size=64))
def test_json_bodies_are_objects_or_refused(body: bytes) -> None:
    with contextlib.suppress(FrameError):
        assert isinstance(json_body(body), dict)


GOLDEN_TABLES = bytes.fromhex(
    "03000000" "02000000" "00000000" "0000" "0000" "0000000000000000"  # table 3, 2 keys
    "ffffffffffffffff" "0500000000000000"
    "04000000" "00000000" "00000000" "0000" "0000" "0000000000000000"  # table 4, none
)  # fmt: skip


def test_a_pull_of_several_tables_has_only_keys() -> None:
    keys = np.array([-1, 5])
    assert table_block(3, 2) + keys.tobytes() + table_block(4, 0) == GOLDEN_TABLES
    body = np.frombuffer(GOLDEN_TABLES, np.uint8)
    assert [(table, found.tolist()) for table, found in read_tables(2, body)] == [(3, [-1, 5]), (4, [])]
    for count, wrong in (
        (1, GOLDEN_TABLES), (3, GOLDEN_TABLES), (1, GOLDEN_BLOCK), (4097, GOLDEN_TABLES), (2, GOLDEN_TABLES[:-8]),
        (1, block_head(3, 0, 0, np.ones(2, np.float32))), (1, block_head(3, 1 << 31, 0, np.empty(0, np.float32))),
    ):  # fmt: skip
        with pytest.raises(FrameError):
            read_tables(count, np.frombuffer(wrong, np.uint8))
