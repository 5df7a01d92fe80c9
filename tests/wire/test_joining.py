"""The answer to a JOIN, and the lowest clock that all servers' answers say."""

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
    assert JoinedAnswer.of(header, GOLDEN[HEADER_BYTES:]) == (7, 5, 43)
    assert JoinedAnswer.of(header, bytes(8)).at_homes is None
    with pytest.raises(FrameError, match="has a body of 0 bytes"):
        JoinedAnswer.of(header, b"")


def test_the_lowest_clock_is_that_of_the_slowest_at_its_home() -> None:
    def lowest(*answers: int | None) -> int:
        return lowest_clock(JoinedAnswer(1, 1, answer) for answer in answers)

    assert lowest() == 0
    assert lowest(None, None) == 0, "nobody is active"
    assert lowest(7, None, 9) == 7, "a home knows each worker's clock"
