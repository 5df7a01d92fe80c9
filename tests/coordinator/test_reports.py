"""Reports of servers are validated: a compromised server ends no coordinator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.core.health import Detector
from coordinator.core.view import ServerInfo, View
from elasticps.monitor import _report
from elasticps.wire.frames import FrameError, Header, Kind

A = ServerInfo("a", 1, "h:1")
REPORT: dict[str, Any] = {
    "levels": [[0, 1, "b", 1]], "suspects": [["b", 1, 0.5]], "alone": 0, "spent": [[0, 1]], "stalled": [["b", 1]],
    "bytes": 100, "memory": [1, 2, 3], "leader": [4, True, 0.1], "requests": 7,
}  # fmt: skip
HUGE = 10**400


def detected(document: dict[str, Any]) -> None:
    """A coordinator hears a report, and looks what it means for its view."""
    view = View("c", 1, 2, 1, (A,), np.zeros((2, 1), np.int32), np.full(2, -1, np.int32), np.ones(2, np.int64), "test")
    detector = Detector()
    detector.watch({A.member: True}, 0.0)
    detector.heard(A.member, _report(Header(Kind.REPORT, epoch=1), document), 0.0)
    detector.health(view)


def test_a_valid_report_is_accepted() -> None:
    detected(REPORT)
    detected(REPORT | {"seconds": 1e9})
    assert _report(Header(Kind.REPORT, epoch=1), REPORT).seconds == 0, "an older server's, which does not tell its time"


@pytest.mark.parametrize(
    "wrong",
    [
        *({"levels": [level]} for level in (["x", 1, "b", 1], [0.5, 1, "b", 1], [0, "x", "b", 1], [0, 1, 5, 1],
                                            [0, 1, "b", "x"], [None, 1, "b", 1], [HUGE, 1, "b", 1], [[], 1, "b", 1])),
        *({"spent": [spent]} for spent in (["1", 1], [0, float("inf")], [-1, 1])),
        *({"suspects": [suspect]} for suspect in ([5, 1, 0.5], ["b", "x", 0.5], [[], 1, 0.5], ["b", 1, HUGE])),
        *({"stalled": [stalled]} for stalled in (["b", float("inf")], [5, 1])),
        *({key: value} for key in ("bytes", "requests", "alone") for value in (HUGE, -1, float("inf"), None, "1")),
        *({"memory": memory} for memory in ([HUGE, 1, 1], [1, float("inf"), 1], [1, 1])),
        *({"seconds": seconds} for seconds in (HUGE, -1, float("inf"), float("nan"), None, "1", 1 << 32)),
        *({"leader": leader} for leader in ([HUGE, True, 0.1], [float("inf"), True, 0.1], [1, True, HUGE])),
    ],
)  # fmt: skip
def test_an_impossible_report_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="a report that is none"):
        detected(REPORT | wrong)
