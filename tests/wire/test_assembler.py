"""The same frames come out however the network cuts a stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from elasticps.wire.frames import FrameError, Header, Kind
from elasticps.wire.pool import LARGEST_BYTES
from elasticps.wire.stream import STAGING_BYTES, Assembler

LIMIT = 1 << 20


def frame(size: int, request: int) -> bytes:
    body = np.random.default_rng(request).integers(0, 256, size, np.uint8).tobytes()
    return Header(Kind.ROWS, 0, size, request).pack() + body


def feed(assembler: Assembler, data: bytes, cuts: Sequence[int]) -> None:
    at = turn = 0
    while at < len(data):
        buffer = assembler.buffer
        assert len(buffer), "the assembler offers no room"
        n = min(len(buffer), cuts[turn % len(cuts)], len(data) - at)
        buffer[:n] = data[at : at + n]
        assembler.received(n)
        at, turn = at + n, turn + 1


sizes = st.lists(
    st.one_of(st.integers(0, 40), st.integers(8000, 8300), st.sampled_from([STAGING_BYTES // 8 - 8, 20_000])),
    max_size=6,
).map(lambda eighths: [8 * n for n in eighths])


@settings(deadline=None)
@given(sizes, st.lists(st.integers(1, 200_000), min_size=1, max_size=5), st.booleans())
def test_frames_survive_any_cutting(lengths: list[int], cuts: list[int], diverted: bool) -> None:
    frames = [frame(size, number) for number, size in enumerate(lengths)]
    got: list[bytes] = []
    targets: dict[int, list[NDArray[np.uint8]]] = {}

    def sink(header: Header) -> list[memoryview] | None:
        if header.request % 2:
            return None
        third = header.body // 3
        pieces = [np.empty(n, np.uint8) for n in (third, 0, header.body - third)]
        targets[header.request] = pieces
        return [p.data for p in pieces]

    def on_frame(header: Header, body: NDArray[np.uint8]) -> None:
        pieces = targets.get(header.request, [body])
        got.append(header.pack() + b"".join(p.tobytes() for p in pieces))

    assembler = Assembler(on_frame, LIMIT, sink if diverted else None)
    if min(cuts) < 64:
        frames = frames[:2]  # byte by byte is slow
    feed(assembler, b"".join(frames), cuts)
    assert got == frames
    assert not assembler.mid_frame


def test_memory_of_large_bodies_is_used_again_up_to_a_limit() -> None:
    addresses: list[int] = []
    assembler = Assembler(lambda header, body: addresses.append(body.ctypes.data), 2 * LARGEST_BYTES)
    feed(assembler, frame(STAGING_BYTES + 8, 0) + frame(STAGING_BYTES, 1) + frame(LARGEST_BYTES + 8, 2), [1 << 20])
    assert addresses[0] == addresses[1] != addresses[2]


def test_small_bodies_are_aligned_for_arrays() -> None:
    addresses: list[int] = []
    assembler = Assembler(lambda header, body: addresses.append(body.ctypes.data), LIMIT)
    feed(assembler, b"".join(frame(8 * n, n) for n in range(1, 60)), [1000])
    assert addresses
    assert all(a % 8 == 0 for a in addresses)


def test_a_stream_cut_inside_a_frame_is_noticed() -> None:
    assembler = Assembler(lambda header, body: None, LIMIT)
    feed(assembler, frame(64, 0)[:-1], [1 << 20])
    assert assembler.mid_frame


def test_a_body_over_the_limit_is_refused_before_it_is_allocated() -> None:
    assembler = Assembler(lambda header, body: None, LIMIT)
    with pytest.raises(FrameError, match="over the limit"):
        feed(assembler, Header(Kind.PUSH, 0, 1 << 50).pack(), [64])
