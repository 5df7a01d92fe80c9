"""REPORT_CLOCK has the golden bytes, and refuses clocks that cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from elasticps.wire.delay import ReleasedHeader, ReportClock
from elasticps.wire.frames import FrameError, unpack_header
from replication.progress import MAX_CLOCK

GOLDEN = bytes.fromhex(
    "45505331" "04" "33" "0000" "1000000000000000"  # magic "EPS1", version 4, REPORT_CLOCK, no flags; 16 bytes
    "0700000000000000" "0500000000000000" "2900000000000000"  # request, epoch; committed up to step 41
    "0b000000" "0000" "0000" "00000000" "00000000" "00000000" "dc050000"  # of worker 11, which waits 1.5 s
    "2700000000000000" "2800000000000000"  # 39 is released, 40 is needed
)  # fmt: skip


def test_a_report_has_the_golden_bytes() -> None:
    report = ReportClock(11, 5, 41, 39, 40, 1500, 7)
    assert report.header().pack() + report.body == GOLDEN
    assert ReportClock.of(unpack_header(GOLDEN), np.frombuffer(GOLDEN[64:], np.uint8)) == report


@pytest.mark.parametrize("clocks", [(MAX_CLOCK, 0, 0), (0, MAX_CLOCK, 0), (0, 0, MAX_CLOCK), (0, -1, 0), (0, 0, -1)])
def test_clocks_that_cannot_be_are_refused(clocks: tuple[int, int, int]) -> None:
    report = ReportClock(11, 5, *clocks)
    with pytest.raises(FrameError, match="a REPORT_CLOCK has the clocks"):
        ReportClock.of(report.header(), np.frombuffer(report.body, np.uint8))
    with pytest.raises(FrameError, match="has a body of 8 bytes"):
        ReportClock.of(report.header(), np.frombuffer(report.body[:8], np.uint8))
    if clocks[0]:
        with pytest.raises(FrameError, match="a RELEASED has clock"):
            ReleasedHeader.of(ReleasedHeader(7, 5, clocks[0]).header())
