"""The answer to a JOIN, and the lowest clock that servers' answers say."""

from __future__ import annotations

import pytest

from elasticps.wire.frames import HEADER_BYTES, FrameError, unpack_header
from elasticps.wire.joining import JoinedAnswer, lowest_clock

GOLDEN = bytes.fromhex(
    "45505331" "04" "41" "0000" "0800000000000000"  # magic "EPS1", version 4, OK, no flags; 8 bytes
    "0700000000000000" "0500000000000000" "0000000000000000"  # request, epoch
    "00000000" "0000" "0000" "00000000" "00000000" "00000000" "00000000"
    "2c00000000000000"  # at homes it is 43
)  # fmt: skip


def test_the_answer_to_a_join_has_the_golden_bytes() -> None:
    assert JoinedAnswer(7, 5, 43).frame() == GOLDEN
    header = unpack_header(GOLDEN)
    assert JoinedAnswer.of(header, GOLDEN[HEADER_BYTES:], 16) == (7, 5, 43, ())
    assert JoinedAnswer.of(header, bytes(8), 16).at_homes is None
    with pytest.raises(FrameError, match="has a body of 0 bytes"):
        JoinedAnswer.of(header, b"", 16)


def test_the_answer_names_homes_of_the_cluster_and_no_more_than_were_asked_for() -> None:
    answer = JoinedAnswer(7, 5, None, (3, 0, 15))
    header, body = unpack_header(answer.frame()), answer.frame()[HEADER_BYTES:]
    assert JoinedAnswer.of(header, body, 16) == answer
    with pytest.raises(FrameError, match=r"homes outside 0\.\.7"):
        JoinedAnswer.of(header, body, 8)
    with pytest.raises(FrameError, match="with 2 homes, has a body of 32 bytes"):
        JoinedAnswer.of(header._replace(items=2), body, 16)
    with pytest.raises(FrameError, match="with 9 homes"):
        JoinedAnswer.of(header._replace(items=9), bytes(80), 16)


def test_the_lowest_clock_is_that_of_the_slowest_at_its_home() -> None:
    def lowest(*answers: int | None) -> int:
        return lowest_clock(JoinedAnswer(1, 1, answer) for answer in answers)

    assert lowest() == 0
    assert lowest(None, None) == 0, "nobody is active"
    assert lowest(7, None, 9) == 7, "a home knows each worker's clock"
