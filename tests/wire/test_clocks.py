"""Progress of workers and records of sparse steps in frames: golden bytes, and what is refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.wire.clocks import (
    ClocksFrame,
    ReadAfter,
    decode_records,
    encode_record,
    encode_records,
    split_record,
)
from elasticps.wire.frames import HEADER_BYTES, RECORD, REFUSED, FrameError, unpack_header
from replication.step_records import StepRecord, record_bytes, record_of

RANGES = 72  # a record needs two words


def array(body: bytes) -> np.ndarray:
    return np.frombuffer(body, np.uint8)


def ticked(*ranges: int) -> np.ndarray:
    return np.isin(np.arange(RANGES), ranges)


RECORD_5 = record_of(5, 3, ticked(0, 9, 64, 71))
GOLDEN_RECORD = bytes.fromhex(
    "0300000000000000"  # all up to step 3 is committed
    "0102000000000000" "8100000000000000"  # ranges 0, 9; 64, 71
)  # fmt: skip
GOLDEN_READ_AFTER = bytes.fromhex(
    "45505331" "04" "22" "0000"  # magic "EPS1", version 4, READ_AFTER, no flags
    "2800000000000000" "0000000000000000" "0000000000000000" "0000000000000000"  # body, request, epoch, clock
    "00000000" "0000" "0000" "00000000" "03000000" "00000000" "00000000"  # 3 ranges
    "01000000" "09000000" "47000000" "00000000"  # ranges 1, 9, 71, padding
    "0000010000000000" "0200010000000000" "0000050000000000"  # step 1; two parts of step 2; step 5
)  # fmt: skip


def test_a_record_has_the_golden_bytes() -> None:
    assert encode_record(RECORD_5) == GOLDEN_RECORD
    body, record = split_record(array(b"a body  " + GOLDEN_RECORD), 5, RANGES)
    assert (bytes(body), record) == (b"a body  ", RECORD_5)
    assert record.ranges.tolist() == [0, 9, 64, 71]


def test_records_stand_behind_their_number_with_worker_and_clock() -> None:
    golden = struct.pack("<Q", 2) + struct.pack("<QQ", 7, 5) + GOLDEN_RECORD + struct.pack("<QQ", 8, 5) + GOLDEN_RECORD
    pairs = [(7, RECORD_5), (8, RECORD_5)]
    assert encode_records(pairs) == golden
    assert decode_records(array(b"before  " + golden + b"behind  "), 8, RANGES) == (pairs, 8 + len(golden))


def test_a_read_after_frame_has_the_golden_bytes() -> None:
    progress = np.array([1 << 16, (1 << 16) + 2, 5 << 16])
    assert ReadAfter(np.array([1, 9, 71]), progress).frame() == GOLDEN_READ_AFTER
    found = ReadAfter.of(unpack_header(GOLDEN_READ_AFTER), array(GOLDEN_READ_AFTER[HEADER_BYTES:]), RANGES)
    assert (found.ranges.tolist(), found.progress.tolist()) == ([1, 9, 71], progress.tolist())


@pytest.mark.parametrize(
    ("ranges", "cut", "text"),
    [([1, 72], 0, "outside 0..71"), ([-1, 2], 0, "outside 0..71"), ([1, 2], 8, "2 ranges has a body of 16 bytes"),
     (list(range(73)), 0, "73 ranges")],
)  # fmt: skip
def test_a_read_after_frame_that_cannot_be_is_refused(ranges: list[int], cut: int, text: str) -> None:
    frame = ReadAfter(np.array(ranges), np.zeros(len(ranges), np.int64)).frame()
    with pytest.raises(FrameError, match=text):
        ReadAfter.of(unpack_header(frame), array(frame[HEADER_BYTES : len(frame) - cut]), RANGES)


def test_a_read_after_frame_of_an_epoch_that_cannot_be_is_refused() -> None:
    frame = ReadAfter(np.array([1]), np.array([1 << 16]), 1 << 63).frame()
    with pytest.raises(FrameError, match="epoch 9223372036854775808"):
        ReadAfter.of(unpack_header(frame), array(frame[HEADER_BYTES:]), RANGES)


@pytest.mark.parametrize("named", [-1, RANGES])
def test_a_clocks_frame_of_a_range_that_cannot_be_is_refused(named: int) -> None:
    frame = ClocksFrame(np.array([1, named]), *(np.zeros(2, np.int64),) * 2).frame(7, 5)
    with pytest.raises(FrameError, match=r"outside 0\.\.71"):
        ClocksFrame.of(unpack_header(frame), array(frame[HEADER_BYTES:]), RANGES)


numbers = st.integers(0, (1 << 46) - 2)
some_ranges = st.sets(st.integers(0, RANGES - 1))
records = st.builds(
    lambda committed, more, ranges: record_of(min(committed + more, (1 << 46) - 1), committed, ticked(*ranges)),
    numbers, st.integers(1, 1 << 20), some_ranges,
)  # fmt: skip


@given(some_ranges, numbers, st.lists(st.tuples(st.integers(1, (1 << 32) - 1), records), max_size=3), st.binary())
def test_any_clocks_frame_survives_encoding_and_decoding(
    ranges: set[int], clock: int, pairs: list[tuple[int, StepRecord]], refused: bytes
) -> None:
    order = np.array(sorted(ranges), np.int64)
    refused = refused[: len(refused) & ~7]
    frame = ClocksFrame(order, order + (clock << 16), order, pairs, array(refused)).frame(7, 5)
    header = unpack_header(frame)
    assert (bool(header.flags & RECORD), bool(header.flags & REFUSED)) == (bool(pairs), bool(refused))
    found = ClocksFrame.of(header, array(frame[HEADER_BYTES:]), RANGES)
    assert found.ranges.tolist() == order.tolist()
    assert found.applied.tolist() == (order + (clock << 16)).tolist()
    assert found.committed.tolist() == order.tolist()
    assert (list(found.records), bytes(found.refused)) == (pairs, refused)


@pytest.mark.parametrize(
    ("record", "text"),
    [
        (StepRecord(5, 5, bytes(16)), "says that all up to step 5 is committed"),
        (StepRecord(5, 3, bytes(9) + b"\x01" + bytes(6)), "names range 72 of 72"),
        (StepRecord(1 << 46, 3, bytes(16)), "a record of step"),
    ],
)
def test_a_record_that_cannot_be_is_refused(record: StepRecord, text: str) -> None:
    with pytest.raises(FrameError, match=text):
        split_record(array(encode_record(record)), record.clock, RANGES)
    with pytest.raises(FrameError, match=text):
        decode_records(array(encode_records([(7, record)])), 0, RANGES)


def test_records_cut_short_are_refused() -> None:
    with pytest.raises(FrameError, match=f"a record of {record_bytes(RANGES)} bytes is at its end"):
        split_record(array(bytes(16)), 5, RANGES)
    body = encode_records([(7, RECORD_5)])
    for count in (2, 1 << 20, 1 << 63):
        with pytest.raises(FrameError, match="do not fit"):
            decode_records(array(struct.pack("<Q", count) + body[8:]), 0, RANGES)
    with pytest.raises(FrameError, match="is of worker 0"):
        decode_records(array(encode_records([(0, RECORD_5)])), 0, RANGES)


@given(st.binary(max_size=200), st.integers(0, 80), st.sampled_from([0, RECORD, REFUSED, RECORD | REFUSED]))
def test_any_body_of_clocks_is_decoded_or_refused(body: bytes, items: int, flags: int) -> None:
    frame = ClocksFrame(*(np.empty(0, np.int64),) * 3).frame(7, 5)
    header = unpack_header(frame)._replace(items=items, flags=flags, body=len(body))
    try:
        found = ClocksFrame.of(header, array(body), RANGES)
    except FrameError:
        return
    assert len(found.ranges) == len(found.applied) == len(found.committed) == items
