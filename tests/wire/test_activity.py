"""Activity of workers survives encoding, and impossible values are refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticps.wire.activity import Activity, UseHeader, WatchHeader
from elasticps.wire.frames import HEADER_BYTES, FrameError, Kind, unpack_header

counts = st.integers(0, (1 << 63) - 1)
pairs = st.tuples(counts, counts).map(lambda pair: (max(pair), min(pair)))


@given(pairs, counts, counts, pairs, counts)
def test_an_activity_survives_encoding_and_decoding(
    steps: tuple[int, int], sent: int, received: int, rows: tuple[int, int], shards: int
) -> None:
    use = Activity(*steps, sent, received, *rows, shards)
    assert Activity.of(use.body()) == use
    assert struct.unpack("<8q", use.body()) == (*use, 0)


def test_activity_headers_survive_encoding_and_decoding() -> None:
    header = unpack_header(UseHeader(11).header().pack())
    assert (header.kind, header.body, UseHeader.of(header)) == (Kind.USE, 64, UseHeader(11))
    packed = WatchHeader().header().pack()
    assert (len(packed), WatchHeader.of(unpack_header(packed))) == (HEADER_BYTES, WatchHeader())


@pytest.mark.parametrize(
    "body",
    [b"", bytes(56), bytes(72), Activity(-1, 0, 0, 0, 0, 0, 0).body(), Activity(1, 2, 0, 0, 0, 0, 0).body(),
     Activity(1, 1, 0, 0, 3, 4, 0).body()],
)  # fmt: skip
def test_counts_that_contradict_each_other_are_refused(body: bytes) -> None:
    with pytest.raises(FrameError, match="worker"):
        Activity.of(body)
