"""Headers by kind: each comes back as it was, and lies in the 64 bytes where docs/internals/protocol.md says."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.wire import activity, delay, headers, joining, reducing, replica_headers
from elasticps.wire.activity import UseHeader, WatchHeader
from elasticps.wire.delay import AskClockHeader, ReleasedHeader
from elasticps.wire.frames import MAGIC, VERSION, FrameError, Header, Kind, unpack_header
from elasticps.wire.headers import (
    NEVER,
    BarrierArriveHeader,
    BarrierJoinHeader,
    BarrierLeaveHeader,
    ClaimShardsHeader,
    EraseHeader,
    GetClocksHeader,
    GetViewHeader,
    HeldHeader,
    HoldHeader,
    InitHeader,
    KeysHeader,
    ListKeysHeader,
    OkHeader,
    PoliciesHeader,
    PullHeader,
    PushHeader,
    ReleaseHeader,
    RowsHeader,
    ShardRef,
    UnchangedHeader,
)
from elasticps.wire.joining import JoinHeader
from elasticps.wire.reducing import ReducedHeader, ReduceHeader, function_body, read_function
from elasticps.wire.replica_headers import ChunkAckHeader, ForwardHeader, RangesHeader, SnapshotChunkHeader
from replication.progress import MAX_CLOCK

# kind, flags, body, request, epoch, clock, worker, first, part, table, items, bound, wait_ms
GOLDEN: list[tuple[Any, int, tuple[int, ...]]] = [
    (PushHeader(7, 5, 9, (8 << 16) + 1, 2, 3), 64, (4, 3, 64, 7, 5, 9, 1, 1, 3, 0, 2, 0, 0)),
    (PushHeader(7, 5, 9, 2 << 16, 2), 64, (4, 3, 64, 7, 5, 9, 7, 0, 0, 0, 2, 0, 0)),
    (PushHeader(7, 5, 9, 0, 2, record=True), 64, (4, 3 | 32768, 64, 7, 5, 9, (1 << 32) - 1, 0, 0, 0, 2, 0, 0)),
    (
        PushHeader(7, 5, 9, 6 << 16, 2, 0, False, False, True, True, 6, ShardRef(1 << 16, 0)),
        64, (4, 4 | 16, 64, 7, 5, 9, 3, 0, 0, 3, 2, 1, 1 << 16),
    ),
    (InitHeader(5, 11, 2, True, False, 7), 64, (3, 3, 64, 7, 5, 0, 11, 0, 0, 0, 2, 0, 0)),
    (InitHeader(5, 11, 2, True, True, 7), 64, (3, 67, 64, 7, 5, 0, 11, 0, 0, 0, 2, 0, 0)),
    (InitHeader(5, 11, 2, False), 72, (3, 1, 72, 0, 5, 0, 11, 0, 0, 0, 2, 0, 0)),
    (PullHeader(7, 5, 9, 11, 3, 4), -1, (5, 0, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 0)),
    (PullHeader(7, 5, 9, 11, 3, 4, 250, True), -1, (5, 8, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 250)),
    (PullHeader(7, 5, 9, 11, 3, 4, slots=True), -1, (5, 128, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 0)),
    (PullHeader(7, 5, 9, 11, 3, 4, coded=True), -1, (5, 256, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 0)),
    (PullHeader(7, 5, 9, 11, 3, 4, digests=True), -1, (5, 2048, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 0)),
    (PullHeader(7, 5, 9, 11, 0, 0, blocks=2), 64, (5, 4096, 64, 7, 5, 9, 11, 0, 0, 0, 2, 0, 0)),
    (AskClockHeader(9), -1, (79, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0)),
    (ReleasedHeader(7, 5, 9), -1, (93, 0, 0, 7, 5, 9, 0, 0, 0, 0, 0, 0, 0)),
    (WatchHeader(), -1, (78, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    (UseHeader(11), -1, (33, 0, 64, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0)),
    (JoinHeader(), -1, (6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    (JoinHeader(41), -1, (6, 1, 0, 0, 0, 41, 0, 0, 0, 0, 0, 0, 0)),
    (JoinHeader(0), -1, (6, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    (JoinHeader(pause=True), -1, (6, 33, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)),
    (EraseHeader(5, 11, 9, 11, 0, 2, True, 7), 64, (15, 3, 64, 7, 5, 9, 11, 0, 11, 0, 2, 0, 0)),
    (EraseHeader(5, 11, 9, 11, 0, 2, False), 72, (15, 1, 72, 0, 5, 9, 11, 0, 11, 0, 2, 0, 0)),
    (EraseHeader(5, 11, 0, 13, 3), 0, (15, 3, 0, 0, 5, 0, 11, 0, 13, 3, 0, 0, 0)),
    (PoliciesHeader(Kind.SWEEP, 3), 64, (50, 1, 64, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0)),
    (PullHeader(7, 5, 9, 11, 3, 4, usage=True), -1, (5, 16384, 32, 7, 5, 9, 11, 0, 0, 3, 4, 0, 0)),
    (ListKeysHeader(3, 4, 1 << 60, 9, 7, 5), -1, (14, 0, 0, 7, 5, 1 << 60, 4, 0, 0, 3, 9, 0, 0)),
    (KeysHeader(7, 5, 4, 1 << 60, 9, 90), -1, (74, 0, 72, 7, 5, 1 << 60, 4, 0, 0, 0, 9, 90, 0)),
    (ReduceHeader(3, 4, 7, 5), 40, (48, 0, 40, 7, 5, 0, 4, 0, 0, 3, 0, 0, 0)),
    (ReducedHeader(7, 5, 4, 90, 9), -1, (77, 0, 72, 7, 5, 90, 4, 0, 0, 0, 9, 0, 0)),
    (GetClocksHeader(11, 7, 5), -1, (7, 0, 0, 7, 5, 0, 11, 0, 0, 0, 0, 0, 0)),
    (GetViewHeader(5), -1, (8, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0, 0)),
    (GetViewHeader(0, 9, 1_000, 2_000), -1, (8, 0, 0, 0, 0, 9, 0, 0, 0, 1_000, 2_000, 0, 0)),
    (UnchangedHeader(5, 9, True, 40, 7_003), -1, (92, 1, 0, 0, 5, 9, 0, 0, 3, 7, 0, 0, 40)),
    (BarrierJoinHeader(11, 4), -1, (9, 0, 0, 0, 0, 0, 11, 0, 0, 4, 0, 0, 0)),
    (BarrierArriveHeader(11, 9, 1500), -1, (10, 0, 0, 0, 0, 9, 11, 0, 0, 0, 0, 0, 1500)),
    (BarrierLeaveHeader(11), -1, (13, 0, 0, 0, 0, 0, 11, 0, 0, 0, 0, 0, 0)),
    (ClaimShardsHeader(9), 104, (12, 0, 104, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0)),
    (HoldHeader(4, 5000), -1, (75, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 5000)),
    (HoldHeader(4, 5000, 9), -1, (75, 0, 0, 0, 0, 9, 0, 0, 0, 4, 0, 0, 5000)),
    (HeldHeader(4, 11, 9), -1, (32, 1, 0, 0, 0, 9, 11, 0, 0, 4, 0, 0, 0)),
    (HeldHeader(4, 11, 9, True), -1, (32, 0, 0, 0, 0, 9, 11, 0, 0, 4, 0, 0, 0)),
    (HeldHeader(4, 11, 9, digest=(1 << 64) - 1, epoch=5), -1, (32, 1, 0, (1 << 64) - 1, 5, 9, 11, 0, 0, 4, 0, 0, 0)),
    (HeldHeader(4, 11, 9, False, True), -1, (32, 33, 0, 0, 0, 9, 11, 0, 0, 4, 0, 0, 0)),
    (ReleaseHeader(4), -1, (76, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0)),
    (OkHeader(7, 5), -1, (65, 0, 0, 7, 5, 0, 0, 0, 0, 0, 0, 0, 0)),
    (RowsHeader(7, 5, 1000, 24, True), 96, (66, 1, 96, 7, 5, 1000, 0, 0, 0, 0, 24, 0, 0)),
    (ForwardHeader(5, 0, 11, 9 << 16, 3, 2), 96, (16, 0, 96, 0, 5, 9 << 16, 11, 0, 0, 3, 2, 0, 0)),
    (
        ForwardHeader(5, 2, 11, 9 << 16, 3, 2, True, ShardRef(1 << 16, 8)),
        96, (16, 16, 96, 0, 5, 9 << 16, 11, 0, 2, 3, 2, 9, 1 << 16),
    ),
    (ForwardHeader(5, 0, 11, 9 << 16, 3, record=True), 96, (16, 32768, 96, 0, 5, 9 << 16, 11, 0, 0, 3, 0, 0, 0)),
    (ForwardHeader(5, 0, 11, 9 << 16, 3, refused=True), 96, (16, 8192, 96, 0, 5, 9 << 16, 11, 0, 0, 3, 0, 0, 0)),
    (RangesHeader(Kind.ACK, 5, 3), 40, (17, 0, 40, 0, 5, 0, 0, 0, 0, 3, 0, 0, 0)),
    (RangesHeader(Kind.RESYNC, 5, 3), 64, (18, 0, 64, 0, 5, 0, 0, 0, 0, 3, 0, 0, 0)),
    (SnapshotChunkHeader(5, 3, 4, 2, True, 99, 6, 1), 128, (19, 1, 128, 4, 5, 99, 3, 0, 0, 6, 1, 2, 0)),
    (SnapshotChunkHeader(5, 3, 4, 2, True, 99, 6, 1, 8), 128, (19, 1, 128, 4, 5, 99, 3, 0, 0, 6, 1, 2, 8)),
    (
        SnapshotChunkHeader(5, 3, 4, 0, False, 99, 6, 1, 8, True),
        128, (19, 8192, 128, 4, 5, 99, 3, 0, 0, 6, 1, 0, 8),
    ),
    (
        SnapshotChunkHeader(5, 3, 4, 0, False, 99, 6, 1, records=True),
        128, (19, 32768, 128, 4, 5, 99, 3, 0, 0, 6, 1, 0, 0),
    ),
    (ChunkAckHeader(5, 3, 4, 2, False, 99), -1, (20, 0, 0, 4, 5, 99, 3, 0, 0, 0, 0, 2, 0)),
]  # fmt: skip


def packed(one: Any, body_bytes: int) -> Header:
    found: Header = one.header() if body_bytes < 0 else one.header(body_bytes)
    return found


@pytest.mark.parametrize(("one", "body_bytes", "numbers"), GOLDEN, ids=lambda v: type(v).__name__)
def test_each_field_has_its_place(one: Any, body_bytes: int, numbers: tuple[int, ...]) -> None:
    header = packed(one, body_bytes)
    assert header.pack() == struct.pack("<IBBHQQQQIHHIIII", MAGIC, VERSION, *numbers)
    assert type(one).of(unpack_header(header.pack())) == one


def test_the_protocol_version_is_4() -> None:
    assert VERSION == 4
    assert JoinHeader().header().pack()[:6].hex() == "455053310406"


u16, u32, u62 = st.integers(0, (1 << 16) - 1), st.integers(0, (1 << 32) - 1), st.integers(0, 1 << 62)
shards = st.none() | st.builds(ShardRef, u32, st.integers(0, (1 << 32) - 2))
lags = st.none() | st.integers(1, (1 << 32) - 1)


clocks = st.integers(1, MAX_CLOCK - 1)


@given(u62, u62, clocks, st.integers(1, NEVER - 1), u32, u16, u16, st.tuples(*[st.booleans()] * 5), lags, shards)
def test_any_push_header_survives_encoding_and_decoding(
    request_: int, epoch: int, clock: int, ago: int, blocks: int, parts: int, part: int,
    flags: tuple[bool, bool, bool, bool, bool], lag: int | None, shard: ShardRef | None,
) -> None:  # fmt: skip
    committed, prev = None if lag is None else clock - lag, (max(clock - ago, 0) << 16) + parts
    push = PushHeader(request_, epoch, clock, prev, blocks, part, *flags[:4], committed, shard, flags[4])
    assert PushHeader.of(unpack_header(push.header(8).pack())) == push


@given(st.integers(NEVER + 1, MAX_CLOCK - 1), st.integers(0, 1 << 20), u16)
def test_progress_of_too_many_steps_ago_reads_as_none(clock: int, more: int, parts: int) -> None:
    prev = (max(clock - NEVER - more, 0) << 16) + parts
    push = PushHeader(7, 5, clock, prev, 2)
    assert PushHeader.of(unpack_header(push.header(8).pack())) == push._replace(prev=0)


pulls = st.tuples(u62, u62, u62, u32, u32, st.integers(0, 1 << 20), u32, st.booleans())


@given(pulls)
def test_any_pull_header_survives_encoding_and_decoding(fields: tuple[Any, ...]) -> None:
    pull = PullHeader(*fields)
    assert PullHeader.of(unpack_header(pull.header().pack())) == pull


@given(u62, u62, u62, u32, st.integers(0, 4096), st.integers(0, 1 << 20), st.booleans())
def test_any_header_of_a_pull_of_several_tables_survives_encoding(
    request_: int, epoch: int, clock: int, worker: int, blocks: int, words: int, coded: bool
) -> None:
    pull = PullHeader(request_, epoch, clock, worker, 0, 0, coded=coded, blocks=blocks)
    assert PullHeader.of(unpack_header(pull.header(8 * words).pack())) == pull


def test_a_pull_whose_keys_are_not_its_body_is_refused() -> None:
    header = PullHeader(7, 5, 9, 11, 3, 4).header()
    with pytest.raises(FrameError, match="4 keys has a body of 24 bytes"):
        PullHeader.of(header._replace(body=24))


def test_every_class_of_headers_is_tested_here() -> None:
    kinds = {**vars(headers), **vars(replica_headers), **vars(reducing), **vars(activity)}
    kinds |= {**vars(joining), **vars(delay)}
    known = {name for name in kinds if name.endswith("Header") and name != "Header"}
    assert known == {type(one).__name__ for one, _, _ in GOLDEN}


@given(
    st.text(st.characters(codec="utf-8"), max_size=200),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=9),
)
def test_a_functions_name_and_constants_survive_encoding(name: str, constants: list[float]) -> None:
    body = function_body(name, constants)
    assert len(body) % 8 == 0
    assert read_function(body) == (name, tuple(constants))


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"{}", b'{"name":"l2"}', b'{"name":7,"constants":[]}', b'{"name":"l2","constants":{}}',
        b'{"name":"l2","constants":[true]}', b'{"name":"l2","constants":["1"]}', b'{"name":"l2","constants":[NaN]}',
        b'{"name":"l2","constants":[Infinity]}', b'{"name":"l2","constants":[1e999]}',
        b'{"name":"l2","constants":[' + b"9" * 400 + b"]}", b'{"name":"l2","constants":[' + b"1," * 256 + b"1]}",
        b'{"name":"' + b"x" * 201 + b'","constants":[]}', b'{"name":"\\ud800","constants":[]}',
    ],
)  # fmt: skip
def test_a_body_without_a_function_name_is_refused(body: bytes) -> None:
    with pytest.raises(FrameError):
        read_function(body)
